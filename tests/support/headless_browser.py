"""Drives a headless Chromium through a pipe with the Chrome DevTools protocol.

It records the network requests and the errors of a page, and evaluates expressions in it. It needs no package.
"""

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
TIMEOUT = 60.0
# The browser reads from descriptor 3 and writes to 4. The two given ones are higher, so neither is overwritten.
START = """
import os, sys
os.dup2(int(sys.argv[1]), 3)
os.dup2(int(sys.argv[2]), 4)
os.execv(sys.argv[3], sys.argv[3:])
"""


def find_browser() -> str | None:
    """Returns the path of a browser, or None if there is none on the PATH."""
    return next(filter(None, map(shutil.which, NAMES)), None)


@contextmanager
def browser(profile: Path) -> Iterator["Page"]:
    """Starts a browser with its files in the directory `profile`, yields a page, and closes the browser."""
    program = find_browser()
    assert program is not None
    flags = [
        "--headless=new", "--remote-debugging-pipe", f"--user-data-dir={profile}", "--no-first-run",
        "--disable-gpu", "--disable-dev-shm-usage", "--disable-background-networking", "--hide-scrollbars",
    ]  # fmt: skip
    if os.geteuid() == 0:
        flags.append("--no-sandbox")
    log = profile / "stderr"
    commands, events = os.pipe(), os.pipe()
    high = [fcntl.fcntl(fd, fcntl.F_DUPFD, 5) for fd in (commands[0], events[1])]
    try:
        with log.open("wb") as stderr:
            process = subprocess.Popen(
                [sys.executable, "-IS", "-c", START, *map(str, high), program, *flags],
                pass_fds=high,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=stderr,
            )
    finally:
        for fd in (commands[0], events[1], *high):
            os.close(fd)
    try:
        yield Page(commands[1], events[0], log)
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        os.close(commands[1])
        os.close(events[0])


class Page:
    """One page. `requests`: the addresses requested since `open`. `faults`: the errors since then."""

    def __init__(self, commands: int, events: int, log: Path) -> None:
        self.requests: list[str] = []
        self.faults: list[str] = []
        self._commands, self._events, self._log = commands, events, log
        self._buffer = b""
        self._number = 0
        self._session: str | None = None
        self._idle: set[str] = set()  # page loads without open network requests
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Network", "Runtime", "Log"):
            self.call(f"{domain}.enable")
        self.call("Page.setLifecycleEventsEnabled", enabled=True)

    def open(self, url: str) -> None:
        """Opens `url`, and waits until the network is idle."""
        self.requests.clear()
        self.faults.clear()
        load = self.call("Page.navigate", url=url)
        assert "errorText" not in load, load
        deadline = time.monotonic() + TIMEOUT
        while load["loaderId"] not in self._idle:
            self._note(self._read(deadline))

    def ask(self, expression: str) -> Any:
        """Evaluates an expression in the page. Its value has to be JSON."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def show(self, width: int, height: int, scheme: str = "light", media: str = "") -> None:
        """Sets the size of the window, the colour scheme, and the medium (`print`, or the screen)."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=1, mobile=width < 600,
        )  # fmt: skip
        self.call(
            "Emulation.setEmulatedMedia",
            media=media,
            features=[{"name": "prefers-color-scheme", "value": scheme}],
        )

    def picture(self) -> bytes:
        """Returns a picture of the whole page, as PNG."""
        answer = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        return base64.b64decode(answer["data"])

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Calls a method of the protocol, and returns its result."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + TIMEOUT
        while True:
            answer = self._read(deadline)
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]
            self._note(answer)

    def _read(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._events], [], [], max(deadline - time.monotonic(), 0.0))
            assert ready, f"the browser said nothing for {TIMEOUT:.0f} s: {self._log.read_text()}"
            data = os.read(self._events, 2**20)
            assert data, f"the browser has ended: {self._log.read_text()}"
            self._buffer += data
        message, self._buffer = self._buffer.split(b"\0", 1)
        return json.loads(message)

    def _note(self, event: dict[str, Any]) -> None:
        params = event.get("params", {})
        match event.get("method"):
            case "Network.requestWillBeSent":
                self.requests.append(params["request"]["url"])
            case "Network.loadingFailed":
                self.faults.append(f"not loaded: {params['errorText']} {params.get('blockedReason', '')}")
            case "Runtime.exceptionThrown":
                self.faults.append(f"exception: {params['exceptionDetails']['text']}")
            case "Runtime.consoleAPICalled" if params["type"] in ("error", "warning", "assert"):
                self.faults.append(f"console: {params['args']}")
            case "Log.entryAdded" if params["entry"]["level"] in ("error", "warning"):
                self.faults.append(f"log: {params['entry']['text']}")
            case "Page.lifecycleEvent" if params["name"] == "networkIdle":
                self._idle.add(params["loaderId"])
