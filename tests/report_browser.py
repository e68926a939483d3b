"""report_browser.py - drives headless Chromium over its debugging pipe: what tests/report_check.sh tests of a report.

    report_browser.py check CHROMIUM PAGE JSON [large]    prints "ok NAME" or "FAIL NAME: why" for each test
    report_browser.py shots CHROMIUM PAGE DIRECTORY       writes pictures: light, dark, narrow, print

Nothing but Python's own library is needed. A page is opened as a file; the browser has a profile of its own.
"""

import base64
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time


class Browser:
    """One headless Chromium with one page, spoken to in JSON over file descriptors 3 and 4."""

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

        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
                 "--disable-background-networking", "--disable-component-update", "--disable-sync", "--mute-audio",
                 "--hide-scrollbars", "--remote-debugging-pipe", "--window-size=1280,900",
                 "--user-data-dir=" + self.profile]
        self.process = subprocess.Popen([program] + flags + ["about:blank"], preexec_fn=set_up, close_fds=False,
                                        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        os.close(to_browser)
        os.close(from_browser)
        self.buffer, self.next_id, self.events, self.session = b"", 0, [], None
        pages = [t for t in self.call("Target.getTargets")["targetInfos"] if t["type"] == "page"]
        self.session = self.call("Target.attachToTarget", targetId=pages[0]["targetId"], flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(domain + ".enable")

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
        """The value of an expression, which may be a promise."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(script[:60] + ": " + str(answer["exceptionDetails"].get("exception", {}).get("description")))
        return answer["result"].get("value")

    def open(self, path):
        self.events = []
        self.call("Page.navigate", url="file://" + os.path.abspath(path))
        deadline = time.time() + 60
        while time.time() < deadline:
            if self.run("performance.getEntriesByName('chunkflow-drawn').length"):
                return
            time.sleep(0.05)
        raise RuntimeError("the page was not drawn within a minute: " + str(self.complaints()))

    def settle(self):
        """Two frames: what was asked to be drawn is drawn."""
        self.run("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(1))))")

    def resize(self, width, height):
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.settle()

    def dark(self, on):
        self.call("Emulation.setEmulatedMedia",
                  features=[{"name": "prefers-color-scheme", "value": "dark" if on else "light"}])
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
        """Errors and warnings of the console, exceptions, and requests for anything but the file itself."""
        found = []
        for event in self.events:
            method, p = event.get("method"), event.get("params", {})
            if method == "Runtime.consoleAPICalled" and p["type"] in ("error", "warning", "assert"):
                found.append("console: " + str(p["args"]))
            elif method == "Runtime.exceptionThrown":
                found.append("exception: " + str(p["exceptionDetails"].get("exception", {}).get("description")))
            elif method == "Log.entryAdded" and p["entry"]["level"] in ("error", "warning"):
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
    else:
        sys.exit(__doc__)
