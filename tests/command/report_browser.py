"""report_browser.py - drives headless Chromium over its debugging pipe: what tests/command/report_check.sh tests of
pages.

    report_browser.py check CHROMIUM NAME...           prints "ok TEST" or "FAIL TEST: why" for each test of NAME.html;
                                                       the page "large" has to be fast as well. NAME.json is what the
                                                       command wrote beside the page: report, tune or reproduce
    report_browser.py shots CHROMIUM PAGE DIRECTORY    writes pictures: light, dark, narrow, print

Needs only Python's own library. A page is opened as a file; the browser has its own profile, and each page its own tab.
"""

import base64
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree


class Browser:
    """One headless Chromium with one tab at a time. Messages go in JSON over file descriptors 3 and 4."""

    def __init__(self, program):
        self.profile = tempfile.mkdtemp(prefix="report_browser.")
        to_browser, self.write_end = os.pipe()
        self.read_end, from_browser = os.pipe()

        def set_up():
            high = [os.dup(to_browser), os.dup(from_browser)]
            os.dup2(high[0], 3)
            os.dup2(high[1], 4)
            os.set_inheritable(3, True)
            os.set_inheritable(4, True)

        flags = [
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--no-first-run",
            "--disable-background-networking",
            "--disable-component-update",
            "--disable-sync",
            "--mute-audio",
            "--hide-scrollbars",
            "--remote-debugging-pipe",
            "--window-size=1280,900",
            "--user-data-dir=" + self.profile,
        ]
        self.process = subprocess.Popen(
            [program] + flags + ["about:blank"],
            preexec_fn=set_up,
            close_fds=False,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        self.buffer, self.next_id, self.events, self.session = b"", 0, [], None
        pages = [t for t in self.call("Target.getTargets")["targetInfos"] if t["type"] == "page"]
        self.attach(pages[0]["targetId"])

    def attach(self, target):
        self.target, self.session = target, None
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(domain + ".enable")

    def new_tab(self):
        """Opens a new tab in place of the last one, so that no pointer, focus or size of the last one remains."""
        before, self.session = self.target, None
        self.attach(self.call("Target.createTarget", url="about:blank")["targetId"])
        self.call("Target.closeTarget", targetId=before)

    def receive(self):
        while b"\0" not in self.buffer:
            piece = os.read(self.read_end, 1 << 20)
            if not piece:
                raise RuntimeError("the browser has gone")
            self.buffer += piece
        message, self.buffer = self.buffer.split(b"\0", 1)
        return json.loads(message)

    def call(self, method, **parameters):
        self.next_id += 1
        message = {"id": self.next_id, "method": method, "params": parameters}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.write_end, json.dumps(message).encode() + b"\0")
        while True:
            answer = self.receive()
            if answer.get("id") == self.next_id:
                if "error" in answer:
                    raise RuntimeError(method + ": " + answer["error"]["message"])
                return answer["result"]
            self.events.append(answer)

    def run(self, script):
        """Returns the value of an expression, which may be a promise."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(
                script[:60] + ": " + str(answer["exceptionDetails"].get("exception", {}).get("description"))
            )
        return answer["result"].get("value")

    def open(self, path):
        self.events = []
        self.call("Page.navigate", url="file://" + os.path.abspath(path))
        deadline = time.time() + 300 # for one that hangs
        while time.time() < deadline:
            if self.run("performance.getEntriesByName('chunkflow-drawn').length"):
                return
            time.sleep(0.05)
        raise RuntimeError("the page was not drawn within five minutes: " + str(self.complaints()))

    def settle(self):
        """Waits two frames, after which everything requested has been drawn."""
        self.run("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(1))))")

    def resize(self, width, height):
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.settle()

    def dark(self, on):
        self.call(
            "Emulation.setEmulatedMedia",
            features=[{"name": "prefers-color-scheme", "value": "dark" if on else "light"}],
        )
        self.settle()

    def paper(self, on):
        """Shows the page as on paper, 718 pixels wide, as A4 without its margins."""
        self.call("Emulation.setEmulatedMedia", media="print" if on else "")
        self.settle()

    def mouse(self, kind, x, y, **more):
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)

    def click(self, x, y):
        self.mouse("mouseMoved", x, y)
        self.mouse("mousePressed", x, y, button="left", clickCount=1)
        self.mouse("mouseReleased", x, y, button="left", clickCount=1)
        self.settle()

    def key(self, key, text=""):
        self.call("Input.dispatchKeyEvent", type="keyDown", key=key, **({"text": text} if text else {}))
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key)
        self.settle()

    def complaints(self):
        """Returns errors of the browser, errors and warnings of the page, and requests for anything except the file
        itself. (The browser warns about the pixels that a test reads.)"""
        found = []
        for event in self.events:
            method, p = event.get("method"), event.get("params", {})
            if method == "Runtime.consoleAPICalled" and p["type"] in ("error", "warning", "assert"):
                found.append("console: " + str(p["args"]))
            elif method == "Runtime.exceptionThrown":
                found.append("exception: " + str(p["exceptionDetails"].get("exception", {}).get("description")))
            elif method == "Log.entryAdded" and p["entry"]["level"] == "error":
                found.append("log: " + p["entry"]["text"])
            elif method == "Network.requestWillBeSent" and p.get("type") != "Document":
                found.append("request: " + p["request"]["url"][:80])
        return found

    def close(self):
        try:
            os.close(self.write_end)
            self.process.wait(5)
        except Exception:
            self.process.kill()
            self.process.wait()
        os.close(self.read_end)
        shutil.rmtree(self.profile, ignore_errors=True)


class Checks:
    """Counts what holds and what does not."""

    def __init__(self, name):
        self.name, self.failed = name, 0

    def that(self, what, holds, why=""):
        if holds:
            print("ok report/browser/%s/%s" % (self.name, what))
        else:
            self.failed += 1
            print("FAIL report/browser/%s/%s: %s" % (self.name, what, why))


def cells(browser, table):
    """Returns, for each row of a table, its texts and the exact numbers behind them."""
    return browser.run("""[...document.querySelectorAll('#%s tr')].slice(1).map(row => ({texts: [...row.cells].map(c =>
        c.textContent), values: [...row.querySelectorAll('data')].map(d => d.value)}))""" % table)


def rounds_to(text, value, digits):
    """Returns whether a text shows a number, rounded to at least this many digits."""
    shown = float(text.replace(",", "").split()[0])
    return abs(shown - value) <= abs(value) * 10**-digits


def says_pace(browser, where, ratio):
    """Checks that the largest text says how fast chunks are relative to whole sequences, and that a slowdown is called
    one."""
    number, said = text_of(browser, where + " strong"), text_of(browser, where)
    if ratio >= 1:
        return rounds_to(number, ratio, 2) and " as fast" in said
    if 1 / ratio >= 10:
        return rounds_to(number, 1 / ratio, 2) and " as slow" in said
    shown = float(number.removesuffix(" %"))
    return abs(shown - 100 * (1 / ratio - 1)) <= 0.5000001 and " slower" in said


def check_numbers(browser, checks, data):
    rows = cells(browser, "numbers")
    shared = data.get("context_baseline")  # it is shown first, and is not among the schedules
    if shared:
        first = rows.pop(0)
        checks.that("numbers/context", first["texts"][0] == data["context_words"], first)
        own = [shared["seconds"], 1, shared["bubble_useful"], shared["bytes"]]
        checks.that("numbers/context numbers", [float(v) for v in first["values"]] == own, first)
    wanted = [s["makespan"] for s in data["schedules"]]
    checks.that("numbers/rows", len(rows) == len(wanted), len(rows))
    checks.that("numbers/makespans", [float(r["values"][0]) for r in rows] == wanted, rows)
    digits = [5 if s["measured"] or data["unit"] != "s" else 2 for s in data["schedules"]]  # estimates have three in all
    checks.that(
        "numbers/shown", all(rounds_to(r["texts"][1], w, d) for r, w, d in zip(rows, wanted, digits)), rows
    )
    bubbles = [s["bubble_useful"] for s in data["schedules"]]
    at = 2 if data["baseline"] >= 0 or shared else 1
    stage_time = [s["makespan"] * len(s["idle"]) or 1 for s in data["schedules"]]
    replays = [s["replayed"] / whole for s, whole in zip(data["schedules"], stage_time)]
    got = [[float(v) for v in r["values"][at : at + 2]] for r in rows]
    close = [abs(b - sum(g)) <= 1e-9 and abs(r - g[1]) <= 1e-9 for b, r, g in zip(bubbles, replays, got)]
    checks.that("numbers/idle and replays add up", all(close), got)
    note, names = text_of(browser, "#numbers-note"), [s["name"] for s in data["schedules"]]
    wanted = [name for name in ("paper", "zero-bubble", "best", "best, I + W") if name in names]
    wanted += [name for name in ("recompute", "MFU") if name in text_of(browser, "#numbers tr")]
    checks.that("numbers/note", all(name + ": " in note for name in wanted), (wanted, note))
    if "memory" in data["schedules"][0]:
        most = [s["memory"][s["fullest"]]["total"] for s in data["schedules"]]
        checks.that("numbers/memory", [int(r["values"][-1]) for r in rows] == most, rows)
    checks.that(
        "numbers/words",
        browser.run("document.getElementById('sentence').textContent") == data["sentence"]
        and browser.run("[...document.querySelectorAll('#advice li')].map(l => l.textContent)")
        == [text for text in data["advice"] if text != data.get("do")],
    )


def check_causes(browser, checks, data, index):
    """The table of causes belongs to the schedule, and its last row is the sum of the others."""
    rows = cells(browser, "idle-table")
    idle = data["schedules"][index]["idle"]
    sums = [sum(stage[c] for stage in idle) for c in range(len(data["causes"]))]
    wanted = [s for s in sums if s > 0]
    got = [float(r["values"][0]) for r in rows]
    close = len(got) == len(wanted) + 1 and all(abs(a - b) <= 1e-9 * sum(wanted) for a, b in zip(got, wanted))
    checks.that("idle/%d" % index, close and abs(got[-1] - sum(wanted)) <= 1e-9 * sum(wanted), (got, wanted))


def check_terms(browser, checks, data, index):
    s = data["schedules"][index]
    if "memory" not in s:
        return
    rows = cells(browser, "terms-table")
    totals = [m["total"] for m in s["memory"]]
    sums = [sum(int(r["values"][i]) for r in rows[:-1]) for i in range(len(totals))]
    checks.that("terms", [int(v) for v in rows[-1]["values"]] == totals and sums == totals, (rows, totals))


def check_tables(browser, checks, data):
    """Ranks, and how far a prediction was off."""
    if "ranks" in data:
        wanted = [[r["chunks"], r["tokens"], r["pairs"], r["makespan"], r["bubble_useful"]] for r in data["ranks"]]
        got = [[float(v) for v in r["values"][:5]] for r in cells(browser, "ranks")]
        checks.that("ranks", got == wanted, got)
    if data.get("measured", -1) >= 0:
        wanted = [
            [e["n"], e["measured"], e["predicted"], e["predicted"] / e["measured"] - 1, e["off"]]
            for e in data["errors"]
        ]
        got = [[float(v) for v in r["values"]] for r in cells(browser, "errors")]
        checks.that("errors", got == wanted, got)
        both = browser.run("window.chunkflow.chart.titles.map(t => t.s.from.name).join()")
        checks.that("one-above-the-other", both == "predicted,measured", both)


PLACE = """(stage, i) => { const c = window.chunkflow, s = c.scheduleAt(c.state.schedule), l = c.chart.lanes.find(l =>
    l.s === s && l.stage === stage), box = document.getElementById('gantt').getBoundingClientRect(), scale =
    (c.chart.width - 62) / (c.state.to - c.state.from), at = t => 62 + (t * s.tick - c.state.from) * scale, st =
    s.stages[stage]; return {x: box.left + (at(st.start[i]) + at(st.end[i])) / 2, y: box.top + l.y + l.h * 0.62, w:
    at(st.end[i]) - at(st.start[i]), name: 'FRBIW'[st.letter[i]] + st.chunk[i]}; }"""


def place(browser, stage, i):
    return browser.run("(%s)(%d, %d)" % (PLACE, stage, i))


def state(browser, what):
    return browser.run("window.chunkflow.state." + what)


def into_sight(browser, stage, i):
    """Zooms to a pass until it is about a dozen pixels wide, and returns where it is."""
    browser.run("document.getElementById('gantt').scrollIntoView({block: 'center'})")
    browser.run("""(() => { const c = window.chunkflow, s = c.scheduleAt(c.state.schedule), st = s.stages[%d], from =
        st.start[%d] * s.tick, width = (st.end[%d] - st.start[%d]) * s.tick; c.show(from - 9 * width, from + 11 * width)
        })()""" % (stage, i, i, i))
    browser.settle()
    return place(browser, stage, i)


def check_pixels(browser, checks):
    """Checks that each visible pass has the colour of its kind where the timeline puts it, and idle time its own
    colour."""
    found = browser.run("""(() => { const c = window.chunkflow, canvas =
        document.getElementById('gantt'), g = canvas.getContext('2d'), ratio = canvas.width / canvas.clientWidth,
        style = getComputedStyle(document.documentElement), probe = document.createElement('canvas').getContext('2d'),
        scale = (c.chart.width - 62) / (c.state.to - c.state.from), bad = []; let seen = 0;
        const rgb = name => { probe.fillStyle = style.getPropertyValue(name); probe.fillRect(0, 0, 1, 1);
            return [...probe.getImageData(0, 0, 1, 1).data].join(); };
        for (const lane of c.chart.lanes) { const st = lane.st; for (let i = 0; i < st.n; i++) {
            const at = t => 62 + (t * lane.s.tick - c.state.from) * scale, x0 = at(st.start[i]), x1 = at(st.end[i]);
            if (x1 - x0 < 6 || x0 < 61.9 || x1 > c.chart.width + 0.1 || st.letter[i] === 1) continue;
            const found = [...g.getImageData(Math.round((x1 - 2.5) * ratio), Math.round((lane.y + lane.h / 2 - 4) *
                ratio), 1, 1).data].join();
            seen++; if (found !== rgb('--' + 'FRBIW'[st.letter[i]])) bad.push([lane.stage, i, found]); } }
        return {seen, bad: bad.slice(0, 4), n_bad: bad.length}; })()""")
    checks.that("pixels", found["seen"] > 0 and found["n_bad"] <= found["seen"] // 50, found)


def check_grouped(browser, checks, data):
    """If there are too many passes to name each, a box covers all passes of a sequence. Each stage must have boxes with
    names."""
    n = data["schedules"][state(browser, "schedule")]["n_passes"] / data["n_stages"]
    many = 9 * n > browser.run("chunkflow.chart.width") - 62
    shown = not browser.run("document.getElementById('grouped').hidden")
    checks.that("grouped", shown == (many and data["n_stages"] <= 16 and n < 20000 / data["n_stages"]), (shown, n))
    if not shown:
        return
    names = browser.run("""new Promise(done => { const own = CanvasRenderingContext2D.prototype, draw = own.fillText, found = [];
        own.fillText = function (text, x, y) { if (/^[FRBIW]?[0-9]+(-[0-9]+)?$/.test(text) && this.canvas.id === 'gantt')
            found.push(y); return draw.apply(this, arguments); };
        chunkflow.show(0, 1e300); requestAnimationFrame(() => requestAnimationFrame(() => { own.fillText = draw;
            done(chunkflow.chart.lanes.map(l => found.filter(y => y > l.y && y < l.y + l.h).length)); })); })""")
    checks.that("grouped/names", min(names) >= 4, names)


def check_pointing(browser, checks, data):
    check_grouped(browser, checks, data)
    at = into_sight(browser, 0, 0)
    checks.that("zoom/in-sight", at["w"] > 12, at)
    check_pixels(browser, checks)
    browser.mouse("mouseMoved", at["x"], at["y"])
    browser.settle()
    tip = browser.run("document.getElementById('tip').hidden ? '' : document.getElementById('tip').textContent")
    wanted = all(word in tip for word in (at["name"] + ":", "on stage 0", "the stage holds", " to "))
    checks.that("hover", wanted, tip)
    browser.click(at["x"], at["y"])
    details = browser.run("document.getElementById('details').textContent")
    checks.that("click/details", details == tip, details)
    checks.that("click/marks", state(browser, "chain") is not None and state(browser, "focus") is not None)
    browser.click(at["x"], at["y"])
    checks.that("click/again", state(browser, "chain") is None)
    before = (state(browser, "from"), state(browser, "to"))
    browser.mouse("mouseWheel", at["x"], at["y"], deltaX=0, deltaY=-300, modifiers=2)
    browser.settle()
    after = (state(browser, "from"), state(browser, "to"))
    checks.that("wheel", after[1] - after[0] < 0.9 * (before[1] - before[0]), (before, after))
    browser.mouse("mousePressed", at["x"] + 40, at["y"], button="left", clickCount=1)
    browser.mouse("mouseMoved", at["x"] - 60, at["y"], button="left", buttons=1)
    browser.mouse("mouseReleased", at["x"] - 60, at["y"], button="left", clickCount=1)
    browser.settle()
    moved = (state(browser, "from"), state(browser, "to"))
    checks.that(
        "drag", moved[0] > after[0] and abs((moved[1] - moved[0]) / (after[1] - after[0]) - 1) < 1e-6, (after, moved)
    )


def check_keyboard(browser, checks, data):
    browser.key("0")
    browser.run("document.getElementById('gantt').focus()")
    for key in ("Escape", "ArrowRight"):
        browser.key(key)
    checks.that("keys/first", browser.run("JSON.stringify(window.chunkflow.state.focus)").endswith('"stage":0,"i":0}'))
    browser.key("ArrowRight")
    checks.that("keys/right", state(browser, "focus.i") == 1)
    browser.key("ArrowDown")
    stages = data["n_stages"]
    checks.that("keys/down", state(browser, "focus.stage") == min(1, stages - 1))
    checks.that(
        "keys/details",
        "on stage %d" % min(1, stages - 1) in browser.run("document.getElementById('details').textContent"),
    )
    browser.key("Enter")
    checks.that("keys/enter", state(browser, "chain") is not None)
    browser.key("Escape")
    checks.that("keys/escape", state(browser, "chain") is None and state(browser, "focus") is None)
    whole = state(browser, "to") - state(browser, "from")
    browser.key("+", "+")
    checks.that("keys/zoom", state(browser, "to") - state(browser, "from") < 0.7 * whole)
    left = state(browser, "from")
    browser.key("PageDown")
    checks.that("keys/page", state(browser, "from") > left)
    browser.key("0", "0")
    checks.that("keys/all", state(browser, "from") == 0 and abs(state(browser, "to") - whole) <= 1e-9 * whole)
    browser.key("c", "c")
    checks.that(
        "keys/critical",
        state(browser, "critical") is True and browser.run("document.getElementById('critical').checked"),
    )
    browser.key("c", "c")


NAMES = {"F": "forward", "R": "replay", "B": "backward", "I": "input gradient", "W": "weight gradient"}


def check_legend(browser, checks, data, shown):
    """The legend has exactly what occurs in the schedules that are drawn."""
    schedules = [data["schedules"][i] for i in shown]
    passes = "".join(stage["pass"] for s in schedules for stage in s["stages"])
    wanted = {letter + " " + name for letter, name in NAMES.items() if letter in passes.upper()}
    wanted |= {"idle: " + cause for c, cause in enumerate(data["causes"])
               if any(stage[c] > 0 for s in schedules for stage in s["idle"])}
    if any(chain >= 0 for s in schedules for chain in data["plans"][s["plan"]]["chunks"]["chain"]):
        wanted.add("part of a long sequence, in its hue")
    if set(passes) & set("fr"):
        wanted.add("activations dropped")
    got = set(browser.run("[...document.querySelectorAll('#legend span')].map(s => s.textContent)"))
    checks.that("legend/%d" % shown[0], got == wanted, got ^ wanted)
    plan = data["plans"][0]
    kinds = [("standalone" if chain < 0 else "hybrid" if n > 1 else "dependent")
             for chain, n in zip(plan["chunks"]["chain"], plan["chunks"]["n_slices"]) if n]
    got = browser.run("[...document.querySelectorAll('#chunks-legend span')]"
                      ".map(s => s.textContent.split(':')[0].replaceAll(',', ''))")
    checks.that("legend/chunks", sorted(got) == sorted("%d %s" % (kinds.count(k), k) for k in set(kinds)), (got, len(kinds)))


def check_switch(browser, checks, data):
    """A click on each schedule shows the whole schedule, and explains each kind of box in it."""
    browser.run("document.getElementById('schedules').scrollIntoView({block: 'center'})")
    for index in range(len(data["schedules"])):
        box = browser.run(
            """(() => { const b = document.querySelectorAll('#schedules label')[%d].getBoundingClientRect();
            return {x: b.left + b.width / 2, y: b.top + b.height / 2}; })()""" % index
        )
        browser.click(box["x"], box["y"])
        axis, beside = (state(browser, "from"), state(browser, "to")), state(browser, "beside")
        shown = [data["schedules"][i]["makespan"] for i in (index, beside) if i >= 0]
        checks.that("switch/%d" % index, state(browser, "schedule") == index and axis == (0, max(shown)), (axis, shown))
        check_legend(browser, checks, data, [i for i in (index, beside) if i >= 0])
        check_causes(browser, checks, data, index)
        check_terms(browser, checks, data, index)
        unpacked = browser.run(
            """(() => { const s = window.chunkflow.scheduleAt(%d); return {n: s.stages.reduce((n, st) =>
            n + st.n, 0), end: Math.max(...s.stages.map(st => st.end[st.n - 1])) * s.tick}; })()""" % index
        )
        s = data["schedules"][index]
        checks.that(
            "unpacked/%d" % index,
            unpacked["n"] == s["n_passes"] and abs(unpacked["end"] - s["makespan"]) <= 2 * s["tick"],
            unpacked,
        )
    browser.run(
        """(() => { const b = document.getElementById('beside'); b.value = '0'; b.dispatchEvent(new Event('change'));
        for (const [id, value] of [['colours', 'chain'], ['bubbles', 'cause']]) { const e = document.getElementById(id);
        e.value = value; e.dispatchEvent(new Event('change')); } })()"""
    )
    browser.settle()
    shown = len(data["schedules"]) > 1 and browser.run("window.chunkflow.chart.titles.length")
    checks.that("switch/beside", shown == 2, shown)


def frames(browser):
    """Returns the milliseconds of frames while the chart, zoomed in a little, is panned."""
    return browser.run("""new Promise(done => { const c = window.chunkflow, times = []; let last = 0, n = 0;
        document.getElementById('gantt').scrollIntoView(); c.show(0, c.state.to / 2);
        const frame = now => { if (n > 3) times.push(now - last); last = now; if (++n > 44) { done(times); return; }
        c.pan(n % 2 ? 0.011 : 0.007); requestAnimationFrame(frame); }; requestAnimationFrame(frame); })""")


def waiting():
    """Returns how many times longer than its own work a program takes here because others use the processors; 1 if none
    do."""
    wall, work = time.perf_counter(), time.process_time()
    while time.process_time() - work < 0.25:
        pass
    return max(1.0, (time.perf_counter() - wall) / (time.process_time() - work))


def check_speed(browser, checks, page):
    """Checks the best of three tries, in milliseconds, without the time that other programs on the machine take."""
    drawn, panned = [], []
    for _ in range(3):
        before = waiting()
        browser.open(page)
        mark = browser.run("performance.getEntriesByName('chunkflow-drawn')[0].startTime")
        frame = sorted(frames(browser))[20]
        factor = max(before, waiting())
        drawn.append(mark / factor)
        panned.append(frame / factor)
        if drawn[-1] <= 2000 and panned[-1] <= 50:
            break
    checks.that("drawn-in-2-s", min(drawn) <= 2000, drawn)
    checks.that("frame-of-50-ms", min(panned) <= 50, panned)
    size = os.path.getsize(page)
    checks.that("at-most-12-MB", size <= 12 * 1000 * 1000, size)
    print(
        "# %s: %.1f MB, drawn after %.0f ms, median frame %.1f ms (others took %.1f times as much)"
        % (checks.name, size / 1e6, min(drawn), min(panned), factor - 1)
    )


def check_tried(browser, checks, data):
    """What other options give: a line each."""
    wanted = [[t["makespan"], t["makespan"] / data["schedules"][data["best"]]["makespan"] - 1, t["memory"]]
              for t in data["tried"]]
    rows = cells(browser, "tried")
    checks.that("tried", [[float(v) for v in r["values"]] for r in rows] == wanted, rows)
    checks.that("tried/options", [r["texts"][0] for r in rows] == [t["options"] for t in data["tried"]], rows)


def check_first(browser, checks, data):
    """Checks that the page begins with one number, one bar whose parts add up to all of the time, and one piece of
    advice."""
    best, base = data["best"], data["baseline"]
    gain = text_of(browser, "#gain strong")
    if data.get("measured", -1) >= 0:
        wanted, number = data["schedules"][data["measured"]]["makespan"], gain
    elif best >= 0 and browser.run("!!chunkflow.tuning"): # its own ratio, of all batches, stands at the top
        wanted, number = data["schedules"][best]["makespan"], gain
        tuning = browser.run("{const t = chunkflow.tuning, c = t.candidates.find(c => c.id === t.winner);"
                             " t.baseline.fits && c ? t.baseline.seconds / c.seconds : 0}")
        if tuning:
            checks.that("first/tuned", says_pace(browser, "#tuning-gain", tuning), tuning)
    elif best >= 0 and (base >= 0 or data.get("context_baseline")):
        against = data["context_baseline"]["seconds"] if "context_baseline" in data else data["schedules"][base]["makespan"]
        ratio = against / data["schedules"][best]["makespan"]
        checks.that("first/pace", says_pace(browser, "#gain", ratio), (gain, ratio))
        wanted, number = None, gain
    else:
        wanted, number = None, ""
    if wanted is not None:
        checks.that("first/gain", rounds_to(number, wanted, 2), (number, wanted))
    if number:
        said = text_of(browser, "#gain")
        checks.that("first/estimated", ("estimated" in said) == (data["unit"] == "s"), said)
    parts = browser.run("[...document.querySelectorAll('#whole i')].map(i => parseFloat(i.style.width))")
    checks.that("first/bar", best < 0 or abs(sum(parts) - 100) < 0.01, parts)
    checks.that("first/do", text_of(browser, "#do") == data.get("do", ""), text_of(browser, "#do"))
    top = browser.run("document.getElementById('numbers').getBoundingClientRect().top + scrollY")
    below = "report-page" in browser.run("document.querySelector('.below') ? document.querySelector('.below').id : ''")
    checks.that("first/screen", below or top < 900, top)


def check_colours(browser, checks):
    """No cause of idle time has almost the same colour as a pass, a chain or another cause, in either colour scheme."""
    names = ["F", "R", "B", "I", "W"] + ["chain%d" % i for i in range(8)] + ["cause%d" % i for i in range(10)]
    for dark in False, True:
        browser.dark(dark)
        values = browser.run("""%s.map(n => { const p = document.createElement('canvas').getContext('2d'); p.fillStyle =
            getComputedStyle(document.documentElement).getPropertyValue('--' + n).trim(); p.fillRect(0, 0, 1, 1);
            return [...p.getImageData(0, 0, 1, 1).data].slice(0, 3); })""" % json.dumps(names))
        near = [(a, b) for i, a in enumerate(names) for j, b in enumerate(names) if i < j and b.startswith("cause")
                and sum((x - y) ** 2 for x, y in zip(values[i], values[j])) < 24**2]
        checks.that("colours/%s" % ("dark" if dark else "light"), not near, near)
    browser.dark(False)


def check_finding(browser, checks, data):
    """A chunk's number shows its first pass. The visible part can be saved as SVG."""
    plan = data["plans"][data["schedules"][state(browser, "schedule")]["plan"]]
    chunk = plan["first_chunk"] + len(plan["chunks"]["chain"]) // 2
    browser.run("(() => { const e = document.getElementById('find'); e.value = '%d'; e.dispatchEvent(new Event('change')); })()"
                % chunk)
    browser.settle()
    checks.that("find", text_of(browser, "#details").startswith("F%d: forward of chunk %d " % (chunk, chunk)))
    picture = browser.run("window.chunkflow.chartAsSvg()")
    root = xml.etree.ElementTree.fromstring(picture)
    titles = [t.text for t in root.iter("{http://www.w3.org/2000/svg}title")]
    checks.that("svg", "F%d" % chunk in titles and len(titles) < data["schedules"][0]["n_passes"] * 40, titles[:4])
    for key in ("Escape", "0"):
        browser.key(key, "" if key == "Escape" else key)
    browser.run("window.chunkflow.mark(null); window.chunkflow.focusOn(null); window.chunkflow.show(0, 1e300)")
    browser.settle()


def check_report(browser, checks, data):
    """Checks a report: a whole page, or the lower part of a page of tune."""
    check_first(browser, checks, data)
    check_numbers(browser, checks, data)
    check_tables(browser, checks, data)
    check_tried(browser, checks, data)
    checks.that("source", data["source"] in browser.run("document.getElementById('setting').textContent"))
    check_finding(browser, checks, data)
    check_pointing(browser, checks, data)
    check_keyboard(browser, checks, data)
    check_switch(browser, checks, data)


def embedded(browser, part):
    return json.loads(browser.run("document.getElementById('%s').textContent" % part))


def text_of(browser, selector):
    return browser.run("(document.querySelector(%s) || {textContent: ''}).textContent" % json.dumps(selector))


def middle_of(browser, selector):
    """Scrolls an element into view, and returns where it then is."""
    return browser.run(
        """(() => { const e = document.querySelector(%s); e.scrollIntoView({block: 'center', inline: 'center'});
        const b = e.getBoundingClientRect(); return {x: b.left + b.width / 2, y: b.top + b.height / 2}; })()"""
        % json.dumps(selector)
    )


def fastest_of(by_id):
    return min([c["seconds"] for c in by_id.values() if c["status"] == "ok"], default=0)


# What a cell of the map shows, by what is known of its pair. For a pair that was given up, it is the reason; a bound
# below the fastest time is not shown.
SHOWN = {
    "ok": lambda c, fastest: c["seconds"],
    "dominated": lambda c, fastest: c.get("estimate") or (c["bound"] if c["bound"] > fastest else math.inf),
    "infeasible": lambda c, fastest: c["bytes"],
}


def check_frontier(browser, checks, data, by_id):
    """Checks that rows are slower for less memory, that no exact candidate beats them, and the best known candidate of
    each split."""
    column = "(id, n) => [...document.querySelectorAll(id + ' tr td:nth-child(' + n + ') data')].map(d => Number(d.value))"
    rows, exact = data["frontier"], [by_id[i] for i in data["ranking"] if i in by_id]
    got = browser.run(f"[({column})('#frontier', 1), ({column})('#frontier', 2)]")
    checks.that("frontier", got == [[c[key] for c in rows] for key in ("bytes", "seconds")], (got, len(rows)))
    checks.that("frontier falls", all(a["bytes"] > b["bytes"] and a["seconds"] < b["seconds"]
                                      for a, b in zip(rows, rows[1:], strict=False)), rows)
    for c in exact:
        checks.that("frontier", any(r["bytes"] <= c["bytes"] and r["seconds"] <= c["seconds"] for r in rows), c)
    for r in rows:
        known = by_id[r["id"]] if "id" in r else r
        checks.that("frontier", (known["chunk_size"], known["k"]) == (r["chunk_size"], r["k"]), r)
    found = browser.run("[...document.querySelectorAll('#splits tr')].length - 1")
    checks.that("splits", found == len(data["splits"]), found)
    for split, index in enumerate(data["best_of_splits"]):
        own = [c["seconds"] for c in data["candidates"] if c["split"] == split and c["status"] == "ok"]
        if own:
            checks.that(f"splits/{split}", by_id[index].get("seconds") == min(own), (index, own[:3]))


def check_map(browser, checks, data, by_id):
    """Checks that every ChunkSize with every K has, in its place, the number of its best candidate, or of the
    winner."""
    wanted, fastest = [], fastest_of(by_id)
    for size in data["chunk_sizes"]:
        for k in data["ks"]:
            own = [c for c in data["candidates"] if c["chunk_size"] == size and c["k"] == k]
            origins = [by_id[c.get("same_as", c["id"])] for c in own]
            for status, pick in SHOWN.items():
                found = [c for c in origins if c["status"] == status]
                if found:
                    least = min((c["id"] != data["winner"], pick(c, fastest)) for c in found)[1]
                    wanted.append((status, least if least < math.inf else None))
                    break
    got = browser.run(
        """[...document.querySelectorAll('#map button')].map(b => [Number(b.dataset.cell), b.className,
        b.querySelector('data') && Number(b.querySelector('data').value), b.closest('tr').rowIndex, b.closest('td').cellIndex])"""
    )
    got.sort()
    rows = len(data["ks"])
    checks.that("map/cells", len(got) == len(wanted) == len(data["chunk_sizes"]) * rows, len(got))
    check_frontier(browser, checks, data, by_id)
    checks.that("map/numbers", [g[2] for g in got] == [w[1] for w in wanted], (got[:3], wanted[:3]))
    checks.that("map/kinds", all(w[0] in g[1].split() for g, w in zip(got, wanted)), got[:3])
    checks.that("map/places", all(g[3:] == [i % rows + 1, i // rows + 1] for i, g in enumerate(got)), got[:3])
    shown = browser.run("[...document.querySelectorAll('#map button.ok data')].map(d => [d.textContent, d.value])")
    scale = {"ms": 1e-3, "s": 1}
    checks.that(
        "map/shown",
        all(rounds_to(str(float(t.split()[0].replace(",", "")) * scale[t.split()[1]]), float(v), 2) for t, v in shown),
        shown[:3],
    )


def cell_with(data, by_id, status):
    """Returns the number of the first cell with such a candidate; None if there is none."""
    for index, cell in enumerate(data["cells"]):
        if by_id[cell["numbers"]]["status"] == status:
            return index
    return None


def check_map_pointing(browser, checks, data, by_id):
    needed = {
        "ok": ["an iteration", "replay", "pipeline ", "at most, on stage"],
        "dominated": ["not timed to the end"],
        "infeasible": ["does not fit: needs", "limit of", "what breaks it: "],
    }
    for status, words in needed.items():
        index = cell_with(data, by_id, status)
        if index is None:
            continue
        cell = data["cells"][index]
        at = middle_of(browser, "#map button[data-cell='%d']" % index)
        browser.mouse("mouseMoved", at["x"], at["y"])
        browser.settle()
        tip = browser.run("document.getElementById('tip').hidden ? '' : document.getElementById('tip').textContent")
        head = "ChunkSize %s, K %s: " % (format(cell["chunk_size"], ","), format(cell["k"], ","))
        checks.that("map/hover/" + status, tip.startswith(head) and all(w in tip for w in words), tip)
        if status == "dominated":
            c, fastest = by_id[cell["numbers"]], fastest_of(by_id)
            said = "about " if "estimate" in c else "at least " if c["bound"] > fastest else "slower, "
            checks.that("map/hover/slower", tip.startswith(head + said), tip)
        if status == "infeasible":
            c = by_id[cell["numbers"]]
            term = "%s, %.2f GiB" % (data["terms"][c["breaks"]], c["memory"][c["breaks"]] / 2**30)
            checks.that("map/hover/term", term in tip and "%.2f GiB on stage" % (c["bytes"] / 2**30) in tip, tip)
            near = data["cells"][cell["nearest"]] if "nearest" in cell else None
            words = near and "ChunkSize %s, K %s," % (format(near["chunk_size"], ","), format(near["k"], ","))
            checks.that("map/hover/nearest", (words or "nothing that was timed fits") in tip, tip)
        browser.click(at["x"], at["y"])
        checks.that("map/click/" + status, text_of(browser, "#map-details") == tip, text_of(browser, "#map-details"))
    browser.mouse("mouseMoved", 1, 1)


def check_map_keys(browser, checks, data):
    rows, columns = len(data["ks"]), len(data["chunk_sizes"])
    right, down = rows * min(1, columns - 1), min(1, rows - 1)
    focused = "Number((document.activeElement.dataset || {}).cell)"
    browser.run("document.querySelector('#map button[data-cell=\"0\"]').focus()")
    browser.settle()
    for key, wanted in (
        ("ArrowRight", right),
        ("ArrowDown", right + down),
        ("End", (columns - 1) * rows + down),
        ("ArrowRight", (columns - 1) * rows + down),
        ("Home", down),
        ("ArrowUp", 0),
    ):
        browser.key(key)
        got = browser.run(focused)
        checks.that("map/keys/" + key, got == wanted, (got, wanted))
    stops = browser.run("document.querySelectorAll('#map button[tabindex=\"0\"]').length")
    checks.that("map/keys/one-stop", stops == 1, stops)
    cell = data["cells"][0]
    details = text_of(browser, "#map-details")
    checks.that("map/keys/details", details.startswith("ChunkSize %s, K %s:" % (format(cell["chunk_size"], ","),
                                                                                format(cell["k"], ","))), details)


def check_opening(browser, checks):
    """Enter on the best goes to its report."""
    browser.run("document.querySelector('#map button.winner').focus()")
    browser.call("Input.dispatchKeyEvent", type="keyDown", key="Enter", code="Enter", text="\r", windowsVirtualKeyCode=13)
    browser.call("Input.dispatchKeyEvent", type="keyUp", key="Enter", code="Enter", windowsVirtualKeyCode=13)
    browser.settle()
    at = browser.run("[document.activeElement.id, document.getElementById('report-page').getBoundingClientRect().top]")
    checks.that("map/opens-report", at[0] == "sentence" and abs(at[1]) < 60, at)


def check_ranking(browser, checks, data, by_id):
    rows = cells(browser, "ranking")
    baseline = data["baseline"]["fits"]
    best = by_id[data["winner"]]
    ids = [int(r["values"][0]) for r in (rows[:-1] if baseline else rows)]
    # the chosen one, which may be a little slower than the fastest, then the others in order of time
    others = [i for i in data["ranking"] if i in ids and i != data["winner"]]
    checks.that("ranking/order", ids == [data["winner"]] + others, (data["winner"], ids))
    places = [r["texts"][0] for r in rows[: len(ids)]]
    checks.that("ranking/places", places == [str(data["ranking"].index(i) + 1) for i in ids], places)
    chosen = browser.run("[...document.querySelectorAll('#ranking tr.chosen')].map(tr => tr.rowIndex)")
    checks.that("ranking/chosen", chosen == [1], chosen)
    wanted = [[c["chunk_size"], c["k"], c["seconds"], c["behind"] / best["seconds"], c["bubble_useful"], c["bytes"]]
              for c in (by_id[i] for i in ids)]
    got = [[float(v) for v in r["values"][1:]] for r in rows[: len(ids)]]
    checks.that("ranking/numbers", got == wanted, (got[:2], wanted[:2]))
    if baseline:
        b = data["baseline"]
        wanted = [b["seconds"], b["seconds"] / best["seconds"] - 1, b["bubble_useful"], b["bytes"]]
        checks.that("ranking/baseline", [float(v) for v in rows[-1]["values"]] == wanted, rows[-1])


def check_tuning(browser, checks, data):
    """Checks a page of tune: the map, the ranking, and below them a report of the winner."""
    by_id = {c["id"]: c for c in data["candidates"]}
    shown = embedded(browser, "tuning")
    checks.that("data/few", len(shown["candidates"]) <= 2 * len(shown["cells"]) + shown["show"])
    for c in shown["candidates"]:
        full = {key: value for key, value in by_id[c["id"]].items() if key != "batches"}
        if c != full:
            checks.that("data/%d" % c["id"], False, (c, full))
    for key in set(data) - {"candidates"}:
        if shown.get(key) != data[key]:
            checks.that("data/" + key, False, shown.get(key))
    checks.that("data", set(shown) - set(data) == {"n_candidates", "show"}, set(shown) ^ set(data))
    checks.that("words", text_of(browser, "#tuning-sentence") == data["sentence"])
    checks.that("tuning/source", data["source"] in text_of(browser, "#tuning-setting"))
    check_map(browser, checks, data, by_id)
    check_map_pointing(browser, checks, data, by_id)
    check_map_keys(browser, checks, data)
    hidden = browser.run("document.getElementById('report-page').hidden")
    checks.that("report-below", hidden == (data["winner"] < 0), hidden)
    if data["winner"] < 0:
        return
    check_opening(browser, checks)
    check_ranking(browser, checks, data, by_id)
    report = embedded(browser, "data")
    tuned = report["schedules"][report["best"]]
    batches = by_id[data["winner"]]["batches"]
    # the times of iterations include the optimizer's step, of some milliseconds; the schedule's makespan does not
    step = min([b - tuned["makespan"] for b in batches if b >= tuned["makespan"]], default=-1)
    checks.that("report/of-the-winner", 0 <= step < 0.05, (tuned["makespan"], batches))
    check_report(browser, checks, report)


def check_sheet(browser, checks, sheet):
    at = "[data-sheet='%s']" % sheet["name"]
    rows = browser.run(
        """[...document.querySelectorAll("%s table tr")].filter(r => r.querySelector('td')).map(r => [...r.cells].map(c =>
        [c.textContent, c.querySelector('data') ? c.querySelector('data').value : null]))""" % at
    )
    wanted = [[row[c["key"]] for c in sheet["columns"]] for row in sheet["rows"]]
    texts = [[cell["text"] for cell in row] for row in wanted]
    values = [[cell.get("value") for cell in row] for row in wanted]
    got = [[None if c[1] is None else float(c[1]) for c in row] for row in rows]
    checks.that("sheet/%s/texts" % sheet["name"], [[c[0] for c in row] for row in rows] == texts, rows[:2])
    checks.that("sheet/%s/numbers" % sheet["name"], got == values, got[:2])
    said = text_of(browser, at)
    checks.that("sheet/%s/words" % sheet["name"], sheet["title"] in said and sheet["assumptions"] in said)
    for note in sheet["notes"]:
        checks.that("sheet/%s/note" % sheet["name"], note["ours"]["text"] in said, said[-300:])
    points = browser.run(
        """[...document.querySelectorAll("%s circle")].map(c => [c.dataset.x, c.dataset.y, c.getAttribute('cx'),
        c.getAttribute('cy'), c.textContent].map((v, i) => i < 4 ? Number(v) : v))""" % at
    )
    wanted = [[x, y] for s in sheet["series"] for x, y in zip(s["x"], s["y"])]
    checks.that("sheet/%s/points" % sheet["name"], [p[:2] for p in points] == wanted, points[:3])
    names = [s["name"] for s in sheet["series"] for _ in s["x"]]
    checks.that("sheet/%s/points-say" % sheet["name"], all(p[4].startswith(n) for p, n in zip(points, names)), points[:3])
    check_places(browser, checks, sheet, at)


def check_places(browser, checks, sheet, at):
    """In each chart, a larger number is drawn higher, in proportion from zero, and equal numbers at the same height."""
    charts = browser.run(
        """[...document.querySelectorAll("%s svg")].map(s => [...s.querySelectorAll('circle')].map(c =>
        [Number(c.dataset.y), Number(c.getAttribute('cy'))]))""" % at
    )
    for points in charts:
        high, low = max(points), min(points)
        per = (low[1] - high[1]) / (high[0] - low[0]) if high[0] > low[0] else 0
        off = max(abs(low[1] - per * (p[0] - low[0]) - p[1]) for p in points)
        checks.that("sheet/%s/heights" % sheet["name"], per > 0 and off < 0.01, (off, points[:3]))


def check_reproduction(browser, checks, data):
    checks.that("data", embedded(browser, "reproduction") == data)
    for sheet in data["sheets"]:
        check_sheet(browser, checks, sheet)
    browser.run("document.querySelector('circle').focus()")
    first = text_of(browser, "circle")
    browser.call("Input.dispatchKeyEvent", type="keyDown", key="Tab", code="Tab", windowsVirtualKeyCode=9)
    browser.settle()
    at = browser.run("[document.activeElement.tagName, document.activeElement.textContent]")
    checks.that("keys/points", at[0] == "circle" and at[1] != first, at)


def check_page(browser, checks, data):
    if data["format"] == "chunkflow-tuning":
        check_tuning(browser, checks, data)
    elif data["format"] == "chunkflow-reproduction":
        check_reproduction(browser, checks, data)
    else:
        checks.that("data", embedded(browser, "data") == data)
        check_colours(browser, checks)
        check_report(browser, checks, data)
    checks.that("no-markup", browser.run("document.querySelectorAll('img, b, iframe, main script').length") == 0)


def check_name(browser, name):
    with open(name + ".json", encoding="utf-8") as file:
        data = json.load(file)
    checks, page = Checks(name), name + ".html"
    browser.resize(1280, 900)
    if name == "large":
        check_speed(browser, checks, page)
    browser.open(page)
    check_page(browser, checks, data)
    browser.resize(718, 1000)
    browser.paper(True)
    cut = browser.run("""[...document.querySelectorAll('.scroll')].filter(e => e.scrollWidth > e.clientWidth + 1)
        .map(e => e.firstChild.id)""")
    checks.that("paper/tables", not cut or name == "hostile_tuned_numbers", cut)  # whose times have fifteen digits
    browser.paper(False)
    browser.dark(True)
    browser.resize(400, 800)
    browser.run("scrollTo(0, 0)")
    wide = browser.run("document.documentElement.scrollWidth")
    checks.that("narrow", wide <= 400, wide)
    tall = browser.run("document.documentElement.scrollHeight")
    most = {"chunkflow-tuning": 4000, "chunkflow-report": 5000}.get(data["format"], math.inf)
    checks.that("narrow/height", tall <= most, tall)
    open_parts = browser.run("document.querySelectorAll('details.more[open]').length")
    checks.that("narrow/folded", open_parts == 0, open_parts)
    browser.run("document.querySelectorAll('details.more').forEach(part => part.open = true);"
                " if (chunkflow.data.sentence !== undefined) document.getElementById('report-page').hidden = false")
    cut = browser.run("""[...document.querySelectorAll(':is(#report-page, #tuning-page) *')].filter(e => e.getBoundingClientRect().right > innerWidth
        && !e.closest('.scroll')).map(e => e.id || e.tagName + ' ' + e.textContent.slice(0, 40))""")
    checks.that("narrow/nothing wider", not cut, cut)
    hidden = browser.run("""[...document.querySelectorAll(':is(#report-page, #tuning-page) .scroll')].filter(e => e.scrollWidth > e.clientWidth + 1
        && !e.querySelector('#terms-table, #map')).map(e => e.firstChild.id)""")
    checks.that("narrow/tables", not hidden, hidden)
    checks.that("quiet", not browser.complaints(), browser.complaints()[:3])
    return checks.failed


def check(program, names):
    browser, failed = Browser(program), 0
    try:
        for name in names:
            browser.new_tab()
            failed += check_name(browser, name)
    finally:
        browser.close()
    return failed


def shots(program, page, directory):
    browser = Browser(program)

    def picture(name):
        height = browser.run("document.documentElement.scrollHeight")
        width = browser.run("innerWidth")
        browser.resize(width, height)
        image = browser.call("Page.captureScreenshot", format="png")
        with open(os.path.join(directory, name + ".png"), "wb") as out:
            out.write(base64.b64decode(image["data"]))

    browser.resize(1280, 900)
    browser.dark(False)
    browser.open(page)
    picture("light")
    browser.dark(True)
    picture("dark")
    browser.dark(False)
    browser.resize(400, 900)
    picture("narrow")
    browser.resize(1280, 900)
    paper = browser.call("Page.printToPDF", printBackground=False)
    with open(os.path.join(directory, "print.pdf"), "wb") as out:
        out.write(base64.b64decode(paper["data"]))
    print("\n".join(browser.complaints()) or "no complaints")
    browser.close()


if __name__ == "__main__":
    if len(sys.argv) == 5 and sys.argv[1] == "shots":
        shots(sys.argv[2], sys.argv[3], sys.argv[4])
    elif len(sys.argv) >= 4 and sys.argv[1] == "check":
        sys.exit(1 if check(sys.argv[2], sys.argv[3:]) else 0)
    else:
        sys.exit(__doc__)
