"""A headless browser, controlled over two pipes with the Chrome DevTools Protocol."""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
_FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
    *("--no-first-run", "--disable-extensions", "--disable-background-networking", "--mute-audio"),
    *("--disable-breakpad", "--disable-crash-reporter"),
    *("--hide-scrollbars", "--force-device-scale-factor=1", "--remote-debugging-pipe"),
)
# The browser reads commands from descriptor 3 and answers on 4.
_ENTER = """
import fcntl, os, sys
commands, answers = (fcntl.fcntl(int(n), fcntl.F_DUPFD, 10) for n in sys.argv[1:3])
os.dup2(commands, 3), os.dup2(answers, 4)
os.execv(sys.argv[3], sys.argv[3:])
"""
DEADLINE_S = 60.0


class NoBrowser(Exception):
    """No browser is installed, or it does not start on this machine."""


class Browser:
    """One browser page. `events` holds its requests, log entries and errors.

    Args:
        folder: Folder of the browser profile.

    Raises:
        NoBrowser: No browser is installed, or it does not start.
    """

    def __init__(self, folder: Path) -> None:
        found = next((path for name in _NAMES if (path := shutil.which(name))), None)
        if found is None:
            raise NoBrowser(f"none of {', '.join(_NAMES)} is installed")
        self.events: list[dict[str, Any]] = []
        self._number, self._rest, self._session = 0, b"", ""
        flags = (*_FLAGS, f"--user-data-dir={folder}", "about:blank")
        commands, self._commands = os.pipe()
        self._answers, answers = os.pipe()
        self._process = subprocess.Popen(
            [sys.executable, "-c", _ENTER, str(commands), str(answers), found, *flags],
            pass_fds=(commands, answers),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(commands)
        os.close(answers)
        try:
            self._attach()
        except (EOFError, BrokenPipeError):
            self.close()
            raise NoBrowser(f"{found} does not start on this machine") from None

    def _attach(self) -> None:
        targets = self.call("Target.getTargets")["targetInfos"]
        page = next(one["targetId"] for one in targets if one["type"] == "page")
        attached = self.call("Target.attachToTarget", targetId=page, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **values: Any) -> dict[str, Any]:
        """Send a command of the protocol and return its result."""
        self._number += 1
        request: dict[str, Any] = {"id": self._number, "method": method, "params": values}
        if self._session:
            request["sessionId"] = self._session
        os.write(self._commands, json.dumps(request).encode() + b"\0")
        while True:
            message = self._message()
            if message.get("id") == self._number:
                assert "error" not in message, (method, message)
                return dict(message["result"])
            self.events.append(message)

    def open(self, address: str) -> None:
        """Open a page and wait until it is loaded.

        A change of the machine's network interfaces interrupts all loads of a browser, also from
        loopback. Other tests add and remove interfaces, so an interrupted page is opened again.
        """
        interrupted = True
        while interrupted:
            self.events.clear()
            self.call("Page.navigate", url=address)
            while not self.of_kind("Page.loadEventFired"):
                self.events.append(self._message())
            entries = self.of_kind("Log.entryAdded")
            interrupted = any("net::ERR_NETWORK_CHANGED" in one["entry"]["text"] for one in entries)

    def run(self, script: str) -> Any:
        """Return the value of an expression in the page."""
        outcome = self.call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in outcome, outcome
        return outcome["result"].get("value")

    def press(self, key: str) -> None:
        """Press and release a key."""
        codes = {"Tab": 9, "ArrowRight": 39, "Escape": 27}
        text = {"text": key} if len(key) == 1 else {}
        for kind in ("keyDown", "keyUp"):
            held = {"key": key, "windowsVirtualKeyCode": codes.get(key, 0)}
            self.call("Input.dispatchKeyEvent", type=kind, **held, **text)

    def resize(self, width: int, height: int) -> None:
        """Set the size of the page in pixels."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **size)

    def prefer(self, scheme: str) -> None:
        """Emulate a reader who prefers a colour scheme, ``"light"`` or ``"dark"``."""
        wanted = {"name": "prefers-color-scheme", "value": scheme}
        self.call("Emulation.setEmulatedMedia", features=[wanted])

    def of_kind(self, *methods: str) -> list[dict[str, Any]]:
        """Return the events of some kinds since the page was opened."""
        return [one["params"] for one in self.events if one.get("method") in methods]

    def _message(self) -> dict[str, Any]:
        until_s = time.monotonic() + DEADLINE_S
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._answers], [], [], until_s - time.monotonic())
            assert ready, f"the browser sent no message for {DEADLINE_S:g} s"
            data = os.read(self._answers, 1 << 16)
            if not data:
                raise EOFError
            self._rest += data
        text, _, self._rest = self._rest.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        return message

    def close(self) -> None:
        """End the browser and all of its processes."""
        self._session = ""
        with suppress(AssertionError, EOFError, BrokenPipeError):
            self.call("Browser.close")
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(10.0)
        os.close(self._commands)
        os.close(self._answers)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(DEADLINE_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
