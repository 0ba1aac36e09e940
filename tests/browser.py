"""A real browser, without a window and without a driver: Chromium over its debugging pipe."""

import base64
import contextlib
import fcntl
import json
import os
import select
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


class Page:
    """One tab. `events` holds what the browser reported: requests, console messages, errors."""

    def __init__(self, to: int, answers: int) -> None:
        self._to, self._answers = to, answers
        self._buffer = b""
        self._calls = 0
        self._session: str | None = None
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, timeout: float = 60, **parameters: Any) -> dict[str, Any]:
        """Call a method of the DevTools protocol and wait for its answer."""
        self._calls += 1
        message: dict[str, Any] = {"id": self._calls, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        limit = time.monotonic() + timeout
        while True:
            found = self._next(limit)
            if found.get("id") == self._calls:
                assert "error" not in found, f"{method}: {found['error']}"
                result: dict[str, Any] = found["result"]
                return result
            self.events.append(found)

    def _next(self, limit: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._answers], [], [], max(0, limit - time.monotonic()))
            assert ready, "the browser does not answer"
            data = os.read(self._answers, 2**20)
            assert data, "the browser has ended"
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\0")
        found: dict[str, Any] = json.loads(line)
        return found

    def open(self, url: str, width: int, dark: bool, height: int = 800) -> None:
        """Show a page in a window of this width, until it is loaded."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.navigate", url=url)
        limit = time.monotonic() + 60
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(self._next(limit))
        self.evaluate("document.readyState")  # and what was reported until now

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def screenshot(self, path: Path, whole: bool = True) -> None:
        picture = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(picture["data"]))

    def requests(self) -> list[str]:
        """The addresses that were asked for."""
        return [
            event["params"]["request"]["url"]
            for event in self.events
            if event.get("method") == "Network.requestWillBeSent"
        ]

    def complaints(self) -> list[str]:
        """What the console holds: errors, warnings, and whatever a script printed."""
        methods = ("Log.entryAdded", "Runtime.consoleAPICalled", "Runtime.exceptionThrown")
        return [json.dumps(event) for event in self.events if event.get("method") in methods]


@contextlib.contextmanager
def browser(profile: Path) -> Iterator[Page]:
    """A tab of a browser of its own, which is gone afterwards. profile: an empty folder."""
    assert CHROMIUM is not None
    pipes = [os.pipe(), os.pipe()]
    # above 9, so that none of them is in the way when they become 3 and 4
    commands, to = (fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 10) for fd in pipes[0])
    answers, back = (fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 10) for fd in pipes[1])
    for fd in (*pipes[0], *pipes[1]):
        os.close(fd)
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe"]
    flags += ["--disable-dev-shm-usage", "--no-first-run", "--disable-extensions"]
    flags += ["--disable-background-networking", f"--user-data-dir={profile}"]
    process = subprocess.Popen(
        ["bash", "-c", f'exec "$0" "$@" 3<&{commands} 4>&{back}', CHROMIUM, *flags],
        pass_fds=(commands, back),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    os.close(commands)
    os.close(back)
    try:
        yield Page(to, answers)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(10)
        os.close(to)
        os.close(answers)
