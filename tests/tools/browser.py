# SPDX-License-Identifier: Apache-2.0
"""A headless Chromium that opens pages and reports errors in them.

The tool talks to it through two pipes, in JSON messages that end with a zero byte, so it needs no
port and no package. See https://chromedevtools.github.io/devtools-protocol.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import functools
import http.server
import json
import os
import select
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LIMIT_S = 120.0

DESKTOP = (1280, 900)
PHONE = (390, 844)

#: events that report an error in a page
_TROUBLE = ("Runtime.exceptionThrown", "Log.entryAdded", "Network.loadingFailed")


class BrowserError(Exception):
    """The browser has ended, or does not answer."""


def unavailable() -> str:
    """Return why there is no browser; "" if there is one."""
    return (
        "" if shutil.which("chromium") else "there is no chromium; run tests/support/setup.sh long"
    )


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """Serve a folder while the context lasts. Yield its address."""

    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            del format, args

    handler = functools.partial(Handler, directory=str(folder))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@dataclass
class Shown:
    """The result of opening a page."""

    #: errors of scripts, and failed requests
    troubles: list[str]
    #: pixels by which it is wider than the window
    excess: int
    #: addresses of other sites that were requested
    foreign: list[str]


class Browser:
    """A window of the browser. Not thread-safe."""

    def __init__(self, reading: int, writing: int) -> None:
        self._reading, self._writing = reading, writing
        self._rest = b""
        self._number = 0
        self._session = ""
        self._events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        found = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = found["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def _message(self) -> dict[str, Any]:
        end = time.monotonic() + LIMIT_S
        while b"\0" not in self._rest:
            left = end - time.monotonic()
            if left <= 0 or not select.select([self._reading], [], [], left)[0]:
                raise BrowserError(f"chromium has not answered for {LIMIT_S:.0f} s")
            more = os.read(self._reading, 1 << 20)
            if not more:
                raise BrowserError("chromium has ended")
            self._rest += more
        text, _, self._rest = self._rest.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        return message

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Call a method and return the answer. Keep events that arrive meanwhile."""
        self._number += 1
        question: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session:
            question["sessionId"] = self._session
        os.write(self._writing, json.dumps(question).encode() + b"\0")
        while (message := self._message()).get("id") != self._number:
            self._events.append(message)
        if "error" in message:
            raise BrowserError(f"{method}: {message['error']['message']}")
        result: dict[str, Any] = message["result"]
        return result

    def evaluate(self, expression: str) -> Any:
        """Return the value of an expression in the page. If it is a promise, wait for it."""
        found = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        return found["result"].get("value")

    def show(self, address: str, size: tuple[int, int] = DESKTOP, *, dark: bool = False) -> Shown:
        """Open a page, and wait until it is loaded."""
        width, height = size
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        # A blank page in between, because navigation between anchors of a page would load nothing.
        for url in ("about:blank", address):
            self._events.clear()
            self.call("Page.navigate", url=url)
            while not any(one.get("method") == "Page.loadEventFired" for one in self._events):
                self._events.append(self._message())
        excess = self.evaluate(
            "document.documentElement.scrollWidth - document.documentElement.clientWidth"
        )
        return Shown(self._troubles(), int(excess), self._foreign(address))

    def _troubles(self) -> list[str]:
        found = []
        for event in self._events:
            method, params = event.get("method"), event.get("params", {})
            if method == "Log.entryAdded" and params["entry"]["level"] != "error":
                continue
            # A navigation cancels requests of the page before it.
            if method in _TROUBLE and not params.get("canceled"):
                found.append(json.dumps(params)[:400])
        return found

    def _foreign(self, address: str) -> list[str]:
        origin = "/".join(address.split("/")[:3])
        asked = [
            event["params"]["request"]["url"]
            for event in self._events
            if event.get("method") == "Network.requestWillBeSent"
        ]
        return [url for url in asked if not url.startswith((origin, "data:", "blob:", "about:"))]

    def picture(self, path: Path, *, whole: bool = False) -> None:
        """Save a screenshot as PNG."""
        found = self.call("Page.captureScreenshot", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(found["data"]))


def _pipe() -> tuple[int, int]:
    """Return a pipe with high descriptor numbers, because 3 and 4 are for the browser."""
    low = os.pipe()
    reading, writing = (fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 10) for fd in low)
    for fd in low:
        os.close(fd)
    return reading, writing


@contextmanager
def browser() -> Iterator[Browser]:
    """Start a Chromium that ends with the context."""
    to_it, from_us = _pipe()
    to_us, from_it = _pipe()
    with tempfile.TemporaryDirectory(
        prefix="ioshape-chromium-", ignore_cleanup_errors=True
    ) as home:
        # Chromium reads from descriptor 3 and writes to 4.
        script = f'exec "$@" 3<&{to_it} 4>&{from_it} {to_it}<&- {from_it}>&-'
        command = [
            *("bash", "-c", script, "chromium"),
            *("chromium", "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
            *("--remote-debugging-pipe", f"--user-data-dir={home}", "--no-first-run"),
        ]
        process = subprocess.Popen(
            command,
            pass_fds=(to_it, from_it),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "HOME": home},
        )
        os.close(to_it)
        os.close(from_it)
        try:
            it = Browser(to_us, from_us)
            yield it
            with contextlib.suppress(BrowserError, OSError):
                it._session = ""  # the browser's own session
                it.call("Browser.close")
        finally:
            os.close(from_us)
            os.close(to_us)
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
