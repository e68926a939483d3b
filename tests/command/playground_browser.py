"""playground_browser.py - drives the playground in headless Chromium, beside the command.

    playground_browser.py CHROMIUM PAGE COMMAND ROOT    prints "ok TEST" or "FAIL TEST: why" for each test

COMMAND is the command without sanitizers, ROOT the folder of chunkflow.h. The script works in the folder in which it is
started.
"""

import json
import subprocess
import sys
import time

from report_browser import Browser, Checks

# Settings: for each, the distribution of its list, and the options that differ from the page's defaults.
SETTINGS = [
    ("chat", {}), ("chat", {"chunk-size": "4K", "k": "1"}), ("chat", {"chunk-size": "16K", "stages": "8"}),
    ("chat", {"schedule": "paper", "k": "2"}), ("chat", {"schedule": "1f1b", "limit": "6"}),
    ("chat", {"schedule": "zero-bubble"}), ("chat", {"schedule": "interleaved", "virtual": "2"}),
    ("chat", {"split-backward": "1", "virtual": "2"}), ("chat", {"schedule": "gpipe", "stages": "2"}),
    ("chat", {"limit": "none", "k": "16"}), ("chat", {"ranks": "4"}), ("chat", {"stages": "1", "chunk-size": "32K"}),
    ("service", {}), ("service", {"chunk-size": "6000", "stages": "3"}), ("service", {"ranks": "3", "k": "1"}),
    ("service", {"model": "qwen2.5-7b", "gpu": "h100-80g", "tp": "4"}),
    ("chat", {"model": "llama-3-8b", "gpu": "a100-80g", "tp": "8", "schedule": "paper"}),
    ("chat", {"model": "qwen2.5-7b", "gpu": "h200", "tp": "2", "split-backward": "1", "chunk-size": "16K"}),
    ("grpo", {}), ("grpo", {"stages": "6", "chunk-size": "2K", "limit": "9"}),
]


class Page:
    def __init__(self, browser, command):
        self.browser, self.command = browser, command

    def answers(self):
        return self.browser.run("chunkflow.seen.answers")

    def wait(self, what, seconds=60):
        deadline = time.time() + seconds
        while time.time() < deadline:
            if self.browser.run(what):
                return True
            time.sleep(0.02)
        raise RuntimeError("not within %d s: %s; the page says: %s" % (seconds, what, self.problem()))

    def problem(self):
        return self.browser.run("[...document.querySelectorAll('.problem')].map(p => p.textContent).join('')")

    def settle(self, script):
        """Runs a script that changes a setting. Returns the answer: its arguments, list, output and seconds."""
        before = self.answers()
        self.browser.run(script)
        self.wait("chunkflow.seen.answers > %d" % before)
        return self.browser.run("chunkflow.seen.answer")

    def set(self, drawn, options):
        """Opens the page by a link with these settings, like somebody who got the link."""
        words = "&".join("%s=%s" % pair for pair in {"draw": drawn, "n": "48", "seed": "2", **options}.items())
        return self.settle("history.replaceState(null, '', '#'); location.hash = '%s'; 1" % words)

    def native(self, *arguments):
        done = subprocess.run([self.command, *arguments], capture_output=True, text=True)
        return done.stdout

    def figures(self):
        return self.browser.run("[...document.querySelectorAll('#figures data')].map(d => Number(d.value))")


def check_settings(page, checks):
    wrong, shown = [], []
    for drawn, options in SETTINGS:
        answer = page.set(drawn, options)
        with open("lengths.txt", "w", encoding="utf-8") as out:
            out.write(answer["list"])
        report = page.native("report", *answer["args"], "--json", "-", "lengths.txt")
        if report != answer["out"] or not report:
            wrong.append((drawn, options))
        rank = str(json.loads(report)["rank"])  # the slowest one
        page.native("plan", *answer["args"], "--rank", rank, "--summary", "--json", "plan.json", "lengths.txt")
        with open("plan.json", encoding="utf-8") as file:
            plan = json.load(file)
        bytes_of = [s for s in json.loads(report)["schedules"] if not s["unsplit"]][0].get("memory")
        peak = max(m["total"] for m in bytes_of) if bytes_of else max(plan["peak_tokens"]) / plan["virtual_stages"]
        makespan, idle, most = page.figures()[:3]
        if (makespan, most) != (plan["makespan"], peak):
            shown.append((drawn, options, makespan, plan["makespan"], most, peak))
    checks.that("settings/the command's bytes, %d of them" % len(SETTINGS), not wrong, wrong)
    checks.that("settings/plan's makespans and peaks", not shown, shown)


def check_speed(page, checks):
    """Both are timed in turns. The least time of each is the one that other work on the machine disturbed least."""
    answer = page.settle("location.hash = 'draw=chat&n=4096&stages=4'; 1")
    with open("lengths.txt", "w", encoding="utf-8") as out:
        out.write(answer["list"])
    own, native = [], []
    for _ in range(9):
        own.append(page.settle("chunkflow.ask(false)")["seconds"])
        begun = time.perf_counter()
        page.native("report", *answer["args"], "--json", "-", "lengths.txt")
        native.append(time.perf_counter() - begun)
    ratio = min(own) / min(native)
    checks.that("speed/4096 sequences at %.2f times the command's" % ratio, ratio <= 3, (own, native))
    page.settle("location.hash = 'draw=chat&n=256'; 1")
    frame = page.browser.run("""(async () => { const times = []; for (let i = 2; i < 12; i++) {
        const begun = performance.now(), n = chunkflow.seen.answers;
        const range = document.querySelector('#option-stages').previousSibling; range.value = i;
        range.dispatchEvent(new Event('input'));
        while (chunkflow.seen.answers === n) await new Promise(requestAnimationFrame);
        times.push(performance.now() - begun); } return times.sort((a, b) => a - b)[5]; })()""")
    preview = page.browser.run("document.getElementById('preview').textContent")
    checks.that("speed/a frame of 256 sequences takes %.0f ms" % frame, frame < 500 and preview.startswith("preview"), frame)


def type_option(name, value):
    return """(() => { const i = document.getElementById('option-%s'); i.value = %s;
        i.dispatchEvent(new Event('input')); i.dispatchEvent(new Event('change')); })()""" % (name, json.dumps(value))


def type_list(text):
    return """(() => { const i = document.getElementById('list'); i.value = %s;
        i.dispatchEvent(new Event('change')); })()""" % json.dumps(text)


HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\"'&\x01\x1b\t\u2028 \\u003c<b>"


def check_refusals(page, checks):
    """An error is shown beside the setting that caused it, in the command's words, and goes when the setting is
    corrected."""
    page.set("chat", {})
    for what, script, at, words in [
        ("number", type_option("chunk-size", "8KB"), "chunk-size", "wanted a whole number 1 .. "),
        ("library", type_option("schedule", "paper") + ";" + type_option("virtual", "3"), "virtual", "only interleaved"),
        ("list", type_list("12\nx y\n"), "list", "lengths.txt:2:"),
        ("many", type_list("5 99999999\n"), "list", "more than 50000 sequences"),
        ("markup", type_list(HOSTILE + "\n"), "list", "lengths.txt:1:"),
        ("deep", type_list("(1+" * 200000 + "1\n"), "list", ""),
        ("option", type_option("limit", "--model"), "limit", "--limit"),
        ("markup in a number", type_option("k", HOSTILE), "k", "--k: got"),
    ]:
        page.browser.run(script)
        try:
            page.wait("!document.getElementById('%s-problem').hidden" % at, 20)
            said = page.browser.run("document.getElementById('%s-problem').textContent" % at)
            checks.that("refused/" + what, words in said, said[:200])
        except RuntimeError as error:
            checks.that("refused/" + what, False, str(error)[:300])
        page.set("chat", {})
        page.wait("![...document.querySelectorAll('.problem')].some(p => !p.hidden)")


def check_files(page, checks):
    with open("lengths.txt", "w", encoding="utf-8") as out:
        out.write("9000\n" + "700\n" * 20)
    report = page.native("report", "--chunk-size", "2K", "--stages", "3", "--json", "-", "lengths.txt")
    data = json.loads(report)
    open_text = """(async () => { await chunkflow.openFiles([new File([%s], %s)]); return [...document.querySelectorAll(
        '.problem')].map(p => p.textContent).join('') + document.getElementById('opened-text').textContent +
        document.getElementById('preview').textContent; })()"""
    said = page.browser.run(open_text % (json.dumps(report), json.dumps("r.json")))
    checks.that("files/report", "opened: r.json" in said and page.figures()[0] in
                [s["makespan"] for s in data["schedules"]], said)
    for key in ("source", "sentence", "model", "gpu"):
        data[key] = HOSTILE
    data["causes"] = [HOSTILE] * len(data["causes"])
    for s in data["schedules"]:
        s["name"] = HOSTILE
        s["makespan"] *= 1e290
    said = page.browser.run(open_text % (json.dumps(json.dumps(data)), json.dumps(HOSTILE)))
    checks.that("files/hostile report", "opened:" in said, said)
    for name, text in [("cut.json", report[: len(report) // 2]), ("empty.json", '{"format": "chunkflow-report"}'),
                       ("wrong.json", json.dumps({**data, "schedules": [{"unsplit": 3}], "plans": 7})),
                       ("foreign.json", '{"a": [1, 2]}'), ("cut plan.json", '{"format": "chunkflow-plan"'),
                       ("early.json", '{"format": "chunkflow-schedule"}'), ("tune.json", '{"format": "chunkflow-tuning"}')]:
        said = page.browser.run(open_text % (json.dumps(text), json.dumps(name)))
        checks.that("files/" + name, name in said, said)
    page.native("plan", "--chunk-size", "3K", "--stages", "2", "--plan-json", "p.json", "--json", "s.json", "--summary", "lengths.txt")
    with open("p.json", encoding="utf-8") as plan, open("s.json", encoding="utf-8") as schedule:
        texts = plan.read(), schedule.read()
    said = page.browser.run(open_text % (json.dumps(texts[0]), json.dumps("p.json")))
    page.wait("document.getElementById('option-chunk-size').value === '3072'")
    said = page.browser.run(open_text % (json.dumps(texts[1]), json.dumps("s.json")))
    checks.that("files/plan and schedule", "sound" in said and "stage" in said, said[:300])
    said = page.browser.run("""(async () => { const folder = {name: "folder", text: async () => { throw Error("no"); }};
        await chunkflow.openFiles([folder]); return document.getElementById('problem').textContent; })()""")
    checks.that("files/one that cannot be read", said.startswith("folder: "), said)
    checks.that("files/no markup", page.browser.run("document.querySelectorAll('img, b, iframe, main script').length") == 0)


def check_keyboard(page, checks):
    page.set("chat", {})
    page.browser.run("document.getElementById('option-stages').previousSibling.focus()")
    before = page.answers()
    page.browser.call("Input.dispatchKeyEvent", type="keyDown", key="ArrowRight", code="ArrowRight", windowsVirtualKeyCode=39)
    page.browser.call("Input.dispatchKeyEvent", type="keyUp", key="ArrowRight", code="ArrowRight", windowsVirtualKeyCode=39)
    page.wait("chunkflow.seen.answers > %d" % before)
    checks.that("keys/slider", page.browser.run("document.getElementById('option-stages').value") == "5")
    changed = page.browser.run("document.querySelector('#figures small').textContent")
    checks.that("keys/what changed", changed.startswith("was "), changed)
    seen = set()
    for _ in range(60):
        page.browser.call("Input.dispatchKeyEvent", type="keyDown", key="Tab", code="Tab", windowsVirtualKeyCode=9)
        seen.add(page.browser.run("document.activeElement.id || document.activeElement.tagName"))
    wanted = {"option-chunk-size", "option-model", "copy-link", "chunks", "gantt", "save-svg", "SUMMARY"}
    checks.that("keys/tab", wanted <= seen, wanted - seen)


def check_codes(page, checks, compile_c, python):
    """The C and Python programs that the page gives must compute the makespan that it shows."""
    wrong = []
    for options in ({}, {"schedule": "interleaved", "virtual": "3", "ranks": "2"}, {"split-backward": "1", "limit": "5"},
                    {"limit": "6K"},
                    {"model": "qwen2.5-7b", "gpu": "h200", "tp": "4"}):
        page.set("chat", options)
        page.browser.run("document.getElementById('codes').open = true; document.getElementById('code-c').textContent = ''")
        page.browser.run("document.getElementById('codes').dispatchEvent(new Event('toggle'))")
        page.wait("document.getElementById('code-python').textContent && document.getElementById('code-c').textContent")
        c, text = (page.browser.run("document.getElementById('code-%s').textContent" % id) for id in ("c", "python"))
        makespan = page.figures()[0]
        got = [compile_c(c)] + ([] if "model" in options else [python(text)])
        if any(abs(g / makespan - 1) > 1e-12 for g in got):
            wrong.append((options, makespan, got))
        command = page.browser.run("document.getElementById('code-command').textContent").split()
        with open("lengths.txt", "w", encoding="utf-8") as out:
            out.write(page.browser.run("document.getElementById('list').value"))
        page.native(*command[1:], "--json", "again.json")
        with open("again.json", encoding="utf-8") as file:
            again = [s["makespan"] for s in json.load(file)["schedules"]]
        if makespan not in again:
            wrong.append((options, command, makespan, again))
    checks.that("codes", not wrong, wrong)


def check_look(page, checks):
    page.set("chat", {"model": "qwen2.5-7b", "gpu": "h100-80g", "tp": "4"})
    for width in (1280, 390):
        page.browser.resize(width, 900)
        wide = page.browser.run("document.documentElement.scrollWidth")
        checks.that("look/%d" % width, wide <= width, wide)
    svg = page.browser.run("chunkflow.chartAsSvg()")
    checks.that("look/svg", svg.startswith("<svg") and "stage 3" in svg and "1F1B" in svg, svg[:100])


def run_c(root):
    def compile_c(text):
        with open("seen.c", "w", encoding="utf-8") as out:
            out.write(text)
        subprocess.run(["cc", "-O1", "-I", root, "-I", root + "/tools", "seen.c", "-o", "seen", "-lm"], check=True)
        return float(subprocess.run(["./seen"], check=True, capture_output=True, text=True).stdout)
    return compile_c


def run_python(text):
    """Uses the first Python that has the packages that the module needs, as python_check.sh does."""
    for python in (sys.executable, "/usr/bin/python3"):
        if subprocess.run([python, "-c", "import cffi, numpy"], capture_output=True).returncode == 0:
            return float(subprocess.run([python, "-B", "-c", text], check=True, capture_output=True, text=True).stdout)
    raise RuntimeError("there is no Python with cffi and NumPy")


def main(program, path, command, root):
    browser, checks = Browser(program), Checks("playground")
    try:
        browser.resize(1280, 900)
        browser.open(path)
        page = Page(browser, command)
        check_settings(page, checks)
        check_refusals(page, checks)
        check_files(page, checks)
        check_keyboard(page, checks)
        check_codes(page, checks, run_c(root), run_python)
        check_look(page, checks)
        check_speed(page, checks)
        asked = [c for c in browser.complaints() if not c.startswith("request: blob:")]
        checks.that("no request, no complaint", not asked, asked[:3])
    finally:
        browser.close()
    return checks.failed


if __name__ == "__main__":
    sys.exit(1 if main(*sys.argv[1:]) else 0)
