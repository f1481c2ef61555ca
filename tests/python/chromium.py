"""A headless Chromium and its tabs, over the DevTools protocol on a pipe (file descriptors 3 and 4). Needs nothing but Chromium and Python.

No wait here ends by a clock: a browser that dies ends every wait with an error.
"""

import base64
import json
import os
import shutil
import subprocess
import tempfile

KEYS = {  # name: (code, Windows key code, text)
    "Enter": ("Enter", 13, "\r"), "Tab": ("Tab", 9, ""), "Escape": ("Escape", 27, ""), " ": ("Space", 32, " "),
    "ArrowUp": ("ArrowUp", 38, ""), "ArrowDown": ("ArrowDown", 40, ""), "Home": ("Home", 36, ""), "End": ("End", 35, ""),
}
SHIFT = 8


class Browser:
    def __init__(self, program):
        self.profile = tempfile.mkdtemp(prefix="quern-chromium-")
        to_read, self.to_browser = os.pipe()
        self.from_browser, to_write = os.pipe()
        flags = ["--headless=new", "--remote-debugging-pipe", f"--user-data-dir={self.profile}", "--no-first-run", "--disable-gpu",
                 "--disable-dev-shm-usage", "--disable-background-networking", "--disable-component-update", "--disable-sync", "--no-default-browser-check",
                 "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1", "--force-color-profile=srgb", "--lang=en", "--hide-scrollbars"]
        if os.geteuid() == 0:
            flags.append("--no-sandbox")  # Chromium refuses its sandbox to root

        def descriptors():
            # Both ends are moved out of the way of 3 and 4 first, since they may be those.
            read, write = os.dup2(to_read, 103), os.dup2(to_write, 104)
            os.dup2(read, 3)
            os.dup2(write, 4)

        self.process = subprocess.Popen([program, *flags, "about:blank"], close_fds=False, preexec_fn=descriptors,
                                        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        os.close(to_read)
        os.close(to_write)
        self.buffer = b""
        self.next_id = 0
        self.tabs = {}  # session id: Tab

    def close(self):
        os.close(self.to_browser)
        os.close(self.from_browser)
        self.process.kill()
        self.process.wait()
        shutil.rmtree(self.profile, ignore_errors=True)

    def read_message(self):
        while b"\0" not in self.buffer:
            piece = os.read(self.from_browser, 1 << 20)
            if not piece:
                raise RuntimeError("Chromium has ended")
            self.buffer += piece
        message, self.buffer = self.buffer.split(b"\0", 1)
        return json.loads(message)

    def call(self, method, session=None, **parameters):
        self.next_id += 1
        message = {"id": self.next_id, "method": method, "params": parameters}
        if session:
            message["sessionId"] = session
        os.write(self.to_browser, json.dumps(message).encode() + b"\0")
        while True:
            reply = self.read_message()
            if reply.get("id") == message["id"]:
                if "error" in reply:
                    raise RuntimeError(f"{method}: {reply['error']['message']}")
                return reply["result"]
            if "method" in reply and reply.get("sessionId") in self.tabs:
                self.tabs[reply["sessionId"]].take_event(reply["method"], reply["params"])

    def new_tab(self):
        """In a profile of its own: storage is empty."""
        context = self.call("Target.createBrowserContext")["browserContextId"]
        target = self.call("Target.createTarget", url="about:blank", browserContextId=context)["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        return Tab(self, session, context)


class Tab:
    def __init__(self, browser, session, context):
        self.browser, self.session, self.context = browser, session, context
        self.requests = []  # addresses
        self.complaints = []  # of the console: exceptions, errors, violations
        self.dialog_texts = []
        browser.tabs[session] = self
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")
        self.resize(1100, 800)

    def call(self, method, **parameters):
        return self.browser.call(method, self.session, **parameters)

    def close(self):
        self.browser.tabs.pop(self.session)
        self.browser.call("Target.disposeBrowserContext", browserContextId=self.context)

    def take_event(self, method, event):
        if method == "Network.requestWillBeSent":
            self.requests.append(event["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            details = event["exceptionDetails"]
            self.complaints.append(details.get("exception", {}).get("description") or details["text"])
        elif method == "Runtime.consoleAPICalled" and event["type"] in ("error", "warning", "assert"):
            self.complaints.append(" ".join(str(argument.get("value", argument.get("description"))) for argument in event["args"]))
        elif method == "Log.entryAdded" and event["entry"]["level"] in ("error", "warning"):
            self.complaints.append(event["entry"]["text"])
        elif method == "Page.javascriptDialogOpening":
            self.dialog_texts.append(event["message"])
            self.browser.next_id += 1  # answered at once, without waiting: the page stands still meanwhile
            answer = {"id": self.browser.next_id, "sessionId": self.session, "method": "Page.handleJavaScriptDialog", "params": {"accept": True}}
            os.write(self.browser.to_browser, json.dumps(answer).encode() + b"\0")

    def open(self, url):
        self.call("Page.navigate", url=url)
        self.wait(f"location.href.startsWith({json.dumps(url)}) && document.readyState === 'complete'")

    def js(self, expression):
        """The value of an expression, which may be a promise."""
        result = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True, userGesture=True)
        if "exceptionDetails" in result:
            details = result["exceptionDetails"]
            raise AssertionError(f"{expression}: {details.get('exception', {}).get('description') or details['text']}")
        return result["result"].get("value")

    def wait(self, expression):
        """Until the expression is true."""
        while True:
            try:
                if self.js(expression):
                    return
            except (AssertionError, RuntimeError) as fault:
                if "context" not in str(fault).lower():  # a page on its way to another
                    raise

    def key(self, name, modifiers=0):
        code, number, text = KEYS[name]
        event = {"key": name, "code": code, "windowsVirtualKeyCode": number, "modifiers": modifiers}
        if text:
            event["text"] = text
        self.call("Input.dispatchKeyEvent", type="keyDown" if text else "rawKeyDown", **event)
        self.call("Input.dispatchKeyEvent", type="keyUp", **event)

    def type(self, text):
        self.call("Input.insertText", text=text)

    def click(self, selector):
        self.js(f"document.querySelector({json.dumps(selector)}).scrollIntoView({{block: 'nearest'}})")
        box = self.js(f"(() => {{ const r = document.querySelector({json.dumps(selector)}).getBoundingClientRect();"
                      " return [r.x + r.width / 2, r.y + r.height / 2]; })()")
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=box[0], y=box[1], button="left", clickCount=1)

    def resize(self, width, height, mobile=False, scale=1):
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale, mobile=mobile)

    def prefer(self, scheme):
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def screenshot(self):
        return base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"])
