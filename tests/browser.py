"""A real browser for tests: Chromium, headless, driven through its debugging pipe with the standard library alone.

``scripts/ensure_chromium.sh`` installs Debian's.
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

DESKTOP = (1280, 900)
PHONE = (390, 844)
TIMEOUT_S = 60.0


@dataclass
class Page:
    """One tab. ``complaints`` are errors and warnings of the console, uncaught exceptions, and refused requests."""

    browser: Browser
    session: str
    complaints: list[str] = field(default_factory=list)
    requested: list[str] = field(default_factory=list)
    """URLs that the page asked for, its own among them."""

    def open(self, url: str) -> None:
        """Load a page and wait until it is quiet."""
        self.browser.forget_events()  # the empty page's own load, which may come late
        self.browser.call("Page.navigate", self.session, url=url)
        self.browser.wait_for("Page.loadEventFired", self.session)
        self.browser.drain(0.5)

    def run(self, script: str) -> Any:
        """Value of an expression on the page."""
        found = self.browser.call(
            "Runtime.evaluate", self.session, expression=script, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in found:
            raise AssertionError(found["exceptionDetails"])
        return found["result"].get("value")

    def wait_until(self, script: str, timeout_s: float = TIMEOUT_S) -> None:
        """Raises: AssertionError: the expression stayed false."""
        end_s = time.monotonic() + timeout_s
        while not self.run(script):
            if time.monotonic() > end_s:
                raise AssertionError(f"after {timeout_s:g} s still false: {script}")
            self.browser.drain(0.3)

    def screenshot(self, path: Path) -> None:
        found = self.browser.call("Page.captureScreenshot", self.session, format="png")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(base64.b64decode(found["data"]))

    def overflow_px(self) -> int:
        """How much wider the page is than the window; 0 on a page that fits."""
        return int(self.run("document.documentElement.scrollWidth - document.documentElement.clientWidth"))


class Browser:
    def __init__(self, process: subprocess.Popen[bytes], write: int, read: int) -> None:
        self._process = process
        self._write = write
        self._read = read
        self._buffer = b""
        self._number = 0
        self._answers: dict[int, dict[str, Any]] = {}
        self._events: list[dict[str, Any]] = []
        self._pages: dict[str, Page] = {}

    def new_page(self, size: tuple[int, int], *, dark: bool = False) -> Page:
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = self._pages[session] = Page(self, session)
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable", session)
        width, height = size
        self.call(
            "Emulation.setDeviceMetricsOverride", session,
            width=width, height=height, deviceScaleFactor=1, mobile=width < 600,
        )  # fmt: skip
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", session, features=[scheme])
        return page

    def call(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if session is not None:
            message["sessionId"] = session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        end_s = time.monotonic() + TIMEOUT_S
        while self._number not in self._answers:
            self._receive(end_s)
        answer = self._answers.pop(self._number)
        if "error" in answer:
            raise AssertionError(f"{method}: {answer['error']}")
        return dict(answer["result"])

    def wait_for(self, event: str, session: str) -> None:
        end_s = time.monotonic() + TIMEOUT_S
        while not any(found["method"] == event and found["sessionId"] == session for found in self._events):
            self._receive(end_s)
        self.forget_events()

    def forget_events(self) -> None:
        self._events.clear()

    def drain(self, seconds: float) -> None:
        end_s = time.monotonic() + seconds
        while (left := end_s - time.monotonic()) > 0:
            if select.select([self._read], [], [], left)[0]:
                self._receive(end_s + TIMEOUT_S)

    def _receive(self, end_s: float) -> None:
        if not select.select([self._read], [], [], max(0.0, end_s - time.monotonic()))[0]:
            raise TimeoutError("the browser does not answer")
        data = os.read(self._read, 2**20)
        if not data:
            raise AssertionError(f"the browser ended with exit code {self._process.wait()}")
        *whole, self._buffer = (self._buffer + data).split(b"\0")
        for part in whole:
            message = json.loads(part)
            if "id" in message:
                self._answers[message["id"]] = message
            else:
                self._events.append(message)
                self._note(message)

    def _note(self, event: dict[str, Any]) -> None:
        page, found = self._pages.get(event.get("sessionId", "")), event["params"]
        if page is None:
            return
        match event["method"]:
            case "Runtime.consoleAPICalled" if found["type"] in ("error", "warning", "assert"):
                page.complaints.append(f"{found['type']}: {[argument.get('value') for argument in found['args']]}")
            case "Runtime.exceptionThrown":
                page.complaints.append(f"exception: {found['exceptionDetails'].get('exception', found)}")
            case "Log.entryAdded" if found["entry"]["level"] in ("error", "warning"):
                page.complaints.append(f"{found['entry']['source']}: {found['entry']['text']}")
            case "Network.requestWillBeSent":
                page.requested.append(found["request"]["url"])


@contextmanager
def chromium() -> Iterator[Browser]:
    """A browser with a profile of its own. Raises: FileNotFoundError: no Chromium is installed."""
    program = shutil.which("chromium")
    if program is None:
        raise FileNotFoundError("chromium is not installed; scripts/ensure_chromium.sh installs it")
    to_browser, write = os.pipe()
    read, from_browser = os.pipe()
    flags = [
        "--headless=new", "--remote-debugging-pipe", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
        "--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync",
        "--mute-audio", "--hide-scrollbars",
    ]  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True) as profile:
        # The pipe's ends must be the browser's descriptors 3 and 4.
        command = ["bash", "-c", f'exec "$0" "$@" 3<&{to_browser} 4>&{from_browser}', program, *flags]
        process = subprocess.Popen(
            [*command, f"--user-data-dir={profile}", "about:blank"],
            pass_fds=(to_browser, from_browser), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(to_browser)
        os.close(from_browser)
        try:
            yield Browser(process, write, read)
        finally:
            process.terminate()
            process.wait(timeout=20)
            os.close(write)
            os.close(read)
