"""The checks of tests/browser, through Chromium's DevTools protocol on a pipe: nothing but Python's own library."""

import base64
import contextlib
import fcntl
import json
import os
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import time

CHROMIUM = os.environ.get("CHROMIUM", "chromium")
REDIS_SERVER = os.environ.get("REDIS_SERVER", "redis-server")
PATIENCE_S = 30
SCREENSHOT_BYTES_MAX = 150_000

# Text whose contrast with what is behind it is below 4.5:1, and what reaches over the right edge.
CONTRAST = """(() => {
  const rgb = text => text.match(/[0-9.]+/g).map(Number);
  const light = ([r, g, b]) => [r, g, b].map(c => c / 255).map(c => c <= .04045 ? c / 12.92 : ((c + .055) / 1.055) ** 2.4)
    .reduce((sum, c, i) => sum + c * [.2126, .7152, .0722][i], 0);
  const behind = node => {
    for (; node; node = node.parentElement) {
      const color = rgb(getComputedStyle(node).backgroundColor);
      if (color[3] !== 0) return color;
    }
    return [255, 255, 255];
  };
  const own = node => [...node.childNodes].some(child => child.nodeType === 3 && child.data.trim());
  return [...document.body.querySelectorAll("*:not(script)")].filter(own).map(node => {
    const [a, b] = [light(rgb(getComputedStyle(node).color)), light(behind(node))].sort((a, b) => b - a);
    return [(a + .05) / (b + .05), node.textContent.trim().slice(0, 40)];
  }).filter(([ratio]) => ratio < 4.5);
})()"""
OVERFLOW = """(width => {
  const wide = [...document.body.querySelectorAll("*")].filter(node => node.getBoundingClientRect().right > width + .5);
  if (document.scrollingElement.scrollWidth > width) wide.push(document.scrollingElement);
  return wide.map(node => node.outerHTML.slice(0, 80));
})"""
CONTROLS = """[...document.querySelectorAll("button, select, summary, a[href], input, [tabindex]")]
  .filter(node => node.checkVisibility()).map(node => node.id)"""
ANSWER = """["retry-after", "summary", "body", "countdown"].map(name => document.getElementById(name).textContent)"""
FOCUS = """(() => {
  const style = getComputedStyle(document.activeElement);
  return [document.activeElement.id, document.activeElement !== document.body, style.outlineStyle, parseFloat(style.outlineWidth)];
})()"""


def check(holds, otherwise):
    if not holds:
        sys.exit(f"error: {otherwise}")


class Page:
    """A page in a browser of its own. `problems` are errors in the console, failed requests, and such to elsewhere."""

    def __init__(self, scope, origin):
        self.origin, self.number, self.buffer = origin, 0, b""
        self.problems, self.denials, self.noted_denials, self.requests = [], 0, 0, {}
        profile = scope.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True))
        theirs_in, self.out = os.pipe()
        self.inn, theirs_out = os.pipe()
        # The browser reads from 3 and writes to 4, which may be in use here.
        high = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (theirs_in, theirs_out)]
        command = [CHROMIUM, "--headless=new", "--remote-debugging-pipe", f"--user-data-dir={profile}", "--no-first-run",
                   "--disable-gpu", "--disable-dev-shm-usage", "--force-device-scale-factor=1"]
        if os.geteuid() == 0:
            command.append("--no-sandbox")
        browser = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, pass_fds=(3, 4),
                                   preexec_fn=lambda: (os.dup2(high[0], 3), os.dup2(high[1], 4)))
        scope.callback(stop, browser)
        for end in (theirs_in, theirs_out, *high):
            os.close(end)
        self.session = None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.call("Emulation.setScrollbarsHidden", hidden=True)

    def call(self, method, **params):
        self.number += 1
        message = {"id": self.number, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.out, json.dumps(message).encode() + b"\0")
        end = time.monotonic() + PATIENCE_S
        while True:
            answer = self.receive(end - time.monotonic())
            check(answer is not None, f"the browser does not answer {method}")
            if answer.get("id") == self.number:
                check("result" in answer, f"{method}: {answer.get('error')}")
                return answer["result"]

    def receive(self, patience):
        while b"\0" not in self.buffer:
            if not select.select([self.inn], [], [], max(0, patience))[0]:
                return None
            data = os.read(self.inn, 1 << 16)
            check(data, "the browser has ended")
            self.buffer += data
        text, self.buffer = self.buffer.split(b"\0", 1)
        message = json.loads(text)
        self.note(message.get("method"), message.get("params", {}))
        return message

    def note(self, event, params):
        if event == "Runtime.exceptionThrown":
            self.problems.append(params["exceptionDetails"].get("exception", {}).get("description", "an exception"))
        elif event == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.problems.append(f"console.{params['type']}: {params['args']}")
        elif event == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            # The browser notes every refusal as an error: what the visitor has asked for.
            if params["entry"]["source"] == "network" and "status of 429" in params["entry"]["text"]:
                self.noted_denials += 1
            else:
                self.problems.append(params["entry"]["text"])
        elif event == "Network.requestWillBeSent":
            url = self.requests[params["requestId"]] = params["request"]["url"]
            if not url.startswith((self.origin, "data:")):
                self.problems.append(f"a request to {url}")
        elif event == "Network.responseReceived":
            status = params["response"]["status"]
            if status == 429:
                self.denials += 1
            elif status != 200:
                self.problems.append(f"{status} for {params['response']['url']}")
        elif event == "Network.loadingFailed":
            self.problems.append(f"{params['errorText']} for {self.requests.get(params['requestId'])}")

    def see(self, expression):
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        check("exceptionDetails" not in result, f"{expression}: {result.get('exceptionDetails')}")
        return result["result"].get("value")

    def text(self, name):
        return self.see(f"document.getElementById({name!r}).textContent")

    def wait(self, expression, what):
        end = time.monotonic() + PATIENCE_S
        while not self.see(f"!!({expression})"):
            check(time.monotonic() < end, f"not seen within {PATIENCE_S} s: {what}")
            self.receive(0.05)

    def open(self, width, height=900):
        self.call("Page.navigate", url=self.origin)
        self.wait("document.querySelectorAll('#routes li').length > 0", "the routes")
        self.resize(width, height)

    def resize(self, width, height=900):
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600)
        # A phone would zoom out to show all, so the page cannot be asked for the width.
        wide = self.see(f"{OVERFLOW}({width})")
        check(not wide, f"wider than {width} px: {wide}")

    def prefer(self, **features):
        features = [{"name": f"prefers-{name.replace('_', '-')}", "value": value} for name, value in features.items()]
        self.call("Emulation.setEmulatedMedia", features=features)

    def answered(self, act):
        """Does what sends requests, and waits for what comes of it."""
        before = self.see("Number(document.getElementById('answer').dataset.answers ?? 0)")
        act()
        self.wait(f"Number(document.getElementById('answer').dataset.answers ?? 0) > {before}", "an answer")
        return self.text("status")

    def click(self, name):
        x, y = self.see(f"""(() => {{
          const node = document.getElementById({name!r});
          node.scrollIntoView({{ block: "center" }});
          const box = node.getBoundingClientRect();
          return [box.x + box.width / 2, box.y + box.height / 2];
        }})()""")
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def press(self, key, code, text=""):
        for kind in ("keyDown", "keyUp"):
            typed = {"text": text} if text and kind == "keyDown" else {}
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code, **typed)

    def screenshot(self, name):
        self.see("scrollTo(0, 0)")
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=0, y=0)
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        data = self.call("Page.captureScreenshot", format="png", clip=clip, captureBeyondViewport=True)["data"]
        image = base64.b64decode(data)
        image = subprocess.run(["pngquant", "--speed", "1", "-"], input=image, check=True, stdout=subprocess.PIPE).stdout
        check(len(image) < SCREENSHOT_BYTES_MAX, f"{name} has {len(image)} bytes")
        with open(f"docs/dashboard-{name}.png", "wb") as file:
            file.write(image)


def stop(process):
    process.terminate()
    try:
        process.wait(5)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def build():
    """The example's path."""
    command = ["cargo", "build", "--locked", "--example", "dashboard", "--message-format=json-render-diagnostics"]
    lines = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()
    paths = [line["executable"] for line in map(json.loads, lines) if line.get("target", {}).get("name") == "dashboard"]
    return paths[-1]


def serve(scope, example, *arguments):
    command = [example, "--listen", "127.0.0.1:0", *arguments]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    scope.callback(stop, server)
    origin = server.stdout.readline().removeprefix("listening on ").strip()
    check(origin.startswith("http://"), "the example does not start")
    return server, origin


def tabs(page):
    """Every control is reached with Tab, and shows it."""
    page.see("document.activeElement.blur()")
    controls, reached = set(page.see(CONTROLS)), []
    for _ in range(len(controls) + 1):
        page.press("Tab", 9)
        name, inside, style, width = page.see(FOCUS)
        if inside:
            check(style != "none" and width >= 2, f"the focus on {name!r} cannot be seen")
            reached.append(name)
    check(controls <= set(reached), f"Tab does not reach {controls - set(reached)}")


def names(page):
    """Every control and every picture has a name for a screen reader."""
    roles = {"button", "combobox", "image", "img", "meter", "DisclosureTriangle", "table", "region"}
    nodes = page.call("Accessibility.getFullAXTree")["nodes"]
    named = [node for node in nodes if not node.get("ignored") and node["role"]["value"] in roles]
    for node in named:
        check(node.get("name", {}).get("value"), f"a {node['role']['value']} without a name: {node.get('properties')}")
    found = {node["role"]["value"] for node in named}
    check({"button", "combobox", "meter", "region"} <= found and found & {"image", "img"}, f"only {found} are there")


def memory(example, screenshots):
    with contextlib.ExitStack() as scope:
        server, origin = serve(scope, example)
        page = Page(scope, origin)
        page.prefer(color_scheme="light")
        page.open(1280)
        tabs(page)

        # With the keyboard, then with the mouse, until a request is denied.
        page.see("document.getElementById('search').focus()")
        check(page.answered(lambda: page.press("Enter", 13, "\r")) == "200 OK", "Enter on Search is not answered with 200")
        check(page.text("ratelimit") == '"per-key";r=17;t=17', f"RateLimit is {page.text('ratelimit')}")
        check(page.text("ratelimit-policy") == '"per-key";q=20;w=20', f"the policy is {page.text('ratelimit-policy')}")
        check(page.answered(lambda: page.click("report")) == "200 OK", "the first report is not allowed")
        for clicks in range(1, 20):
            status = page.answered(lambda: page.click("search"))
            began = time.monotonic()
            promised, summary, body, countdown = page.see(ANSWER)
            if countdown:
                break
        check(status == "429 Too Many Requests", f"{clicks} searches later the status is {status}")
        check(promised in ("1", "2", "3"), f"Retry-After is {promised}")
        check(f"after {promised} s" in summary, f"the summary is {summary}")
        check("quota-exceeded" in body, f"the body is {body}")
        shown = float(countdown.removeprefix("Passes in ").removesuffix(" s"))
        check(0 < shown <= int(promised), f"the countdown shows {shown} of {promised} s")
        page.wait("document.getElementById('countdown').dataset.state === 'due'", "the end of the countdown")
        check(time.monotonic() - began > shown - 0.5, "the countdown ends before the promised moment")
        check(page.answered(lambda: page.click("again")) == "200 OK", "the promised moment does not pass")

        # A burst is partly refused, and the figures show it: the chart, its name, the table, the buckets.
        status = page.answered(lambda: page.click("burst"))
        check(status.startswith("429") and "20 sent" in page.text("summary"), f"the burst: {status}, {page.text('summary')}")
        page.wait("document.querySelector('#routes .denied[d*=M]')", "a denied request in a chart")
        page.wait("/[1-9]\\d* denied/.test(document.querySelector('#routes svg').getAttribute('aria-label'))", "the chart's name")
        page.wait("document.querySelector('#routes .shadow[d*=M]')", "what the shadow limit would deny in a chart")
        page.see("document.getElementById('key').value = 'alpha'")
        page.answered(lambda: page.click("report"))
        page.wait("/key:[0-9a-f]{8}…/.test(document.getElementById('buckets').textContent)", "the bucket of a key")
        check("alpha" not in page.text("buckets"), "a credential is shown")
        check("ip:127.0.0.1" in page.text("buckets"), f"the buckets are {page.text('buckets')}")
        check("always there" in page.text("store"), f"the store is {page.text('store')}")
        page.click("as-table")
        check("POST /reports/generate" in page.text("table"), "the table has no routes")
        names(page)
        tabs(page)
        page.click("as-table")

        # Wide, on a phone, dark, calm.
        if screenshots:
            for _ in range(4):
                for key in ("beta", "alpha", ""):
                    page.see(f"document.getElementById('key').value = {key!r}")
                    for button in ("user", "search"):
                        page.answered(lambda: page.click(button))
                        time.sleep(0.4)
            for _ in range(2):
                page.answered(lambda: page.click("report"))
            page.see("document.activeElement.blur()")
            page.receive(1)
        backgrounds = []
        for scheme in ("light", "dark"):
            page.prefer(color_scheme=scheme)
            for width in (320, 390, 1280):
                page.resize(width)
            backgrounds.append(page.see("getComputedStyle(document.body).backgroundColor"))
            faint = page.see(CONTRAST)
            check(not faint, f"contrast below 4.5 when {scheme}: {faint}")
            if screenshots:
                page.screenshot(scheme)
        check(backgrounds[0] != backgrounds[1], "light and dark look the same")
        page.prefer(color_scheme="light", reduced_motion="reduce")
        moving = page.see("getComputedStyle(document.querySelector('[role=meter] div')).transitionDuration")
        check(moving == "0s", f"motion is not reduced: {moving}")
        page.resize(390, 844)
        if screenshots:
            page.screenshot("390")
        check(not page.problems, f"problems: {page.problems}")
        check(page.denials > 0 and page.noted_denials <= page.denials, f"{page.noted_denials} errors, {page.denials} denials")

        # Without a server the page says so.
        stop(server)
        page.wait("document.getElementById('pulse').textContent === 'Server away'", "that the server is gone")
        return clicks, promised


def ask(page, until):
    """Sends a few requests a second until the page shows something."""
    end = time.monotonic() + PATIENCE_S
    while not until():
        check(time.monotonic() < end, f"Redis is there, and the page says {page.text('store')!r}, {page.text('sources')!r}")
        page.answered(lambda: page.click("user"))
        time.sleep(0.2)


def redis(example):
    """What the page says when Redis goes and comes back."""
    with contextlib.ExitStack() as scope:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        command = [REDIS_SERVER, "--port", port, "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]

        def start():
            server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            scope.callback(stop, server)
            return server

        server = start()
        _, origin = serve(scope, example, "--redis", f"redis://127.0.0.1:{port}")
        page = Page(scope, origin)
        page.open(390, 844)
        # The first checks may come before Redis does.
        ask(page, lambda: page.text("store") == "Redis answers." and "decided by the store" in page.text("sources"))
        stop(server)
        page.see("document.getElementById('key').value = 'beta'")
        check(page.answered(lambda: page.click("burst")).startswith("200"), "a burst without Redis is not allowed")
        page.wait("document.getElementById('store').textContent.includes('did not answer')", "that Redis does not answer")
        check("buckets of this instance" in page.text("sources"), f"decided by {page.text('sources')}")
        page.resize(390, 844)
        start()
        ask(page, lambda: page.text("store") == "Redis answers.")
        check(not page.problems, f"problems: {page.problems}")


def main():
    unknown = set(sys.argv[1:]) - {"--screenshots"}
    check(not unknown, f"unknown argument {unknown}: allowed is --screenshots")
    for program in (CHROMIUM, REDIS_SERVER):
        check(shutil.which(program), f"{program} is not there")
    example = build()
    clicks, promised = memory(example, "--screenshots" in sys.argv)
    redis(example)
    print(f"browser: ok, denied at search {clicks}, passed after {promised} s; Redis gone and back; light, dark, 320 to 1280 px")


if __name__ == "__main__":
    main()
