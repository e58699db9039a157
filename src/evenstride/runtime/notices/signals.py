"""Signals as notices: SIGTERM of Kubernetes, torchrun and Slurm, and signals of the user's choice.

Python runs a handler between two bytecodes of the main thread. So a program in a collective or in a
backward pass would notice the signal too late. But the C-level handler also writes the signal's
number to a "wake-up" file descriptor at once, on any thread. Here this is a pipe, and a thread
reads it.

Existing behaviour is kept: handlers that were installed before are still called, and bytes are
passed on to a wake-up descriptor that was set before. A signal that was ignored, as under
``nohup``, stays ignored and is not a notice. The notice replaces only the default action, which
ends the process. A second SIGTERM has the default action again. But launchers and batch systems
both signal the same processes, so a second one within `AGAIN_S` counts as the first.

Sources: Python's documentation of ``signal.set_wakeup_fd``; Slurm's ``preempt.html`` (SIGCONT and
SIGTERM at once, again with SIGKILL when GraceTime is over); Kubernetes' documentation of pod
termination (SIGTERM, then SIGKILL after ``terminationGracePeriodSeconds``, 30 s by default).
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import select
import signal
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any

from evenstride.runtime.notices.notice import Interrupted, Notice, earliest

logger = logging.getLogger("evenstride")

AGAIN_S = 3.0
# Bytes in the pipe: a signal's number from the C-level handler; the same with this bit from our
# Python handler, in case other code has replaced the wake-up descriptor; or the end.
_BY_PYTHON, _END = 0x80, 0


class Signals:
    """Notices by signals to this process.

    Args:
        graces: the signals, and the time from each to the end of the process, in seconds; ``None``
            if unknown.
        clock: returns Unix time in seconds.
        steady: returns monotonic seconds, to detect repeated signals.
        end: ends this process by a signal's default action; called on the watcher's thread.
    """

    name = "signals"
    on_network = False
    pause_s: float | None = 0.0

    def __init__(
        self,
        graces: Mapping[signal.Signals, float | None],
        *,
        clock: Callable[[], float] = time.time,
        steady: Callable[[], float] = time.monotonic,
        end: Callable[[signal.Signals], None] | None = None,
    ) -> None:
        self._graces, self._clock, self._steady = dict(graces), clock, steady
        self._end = _end_by if end is None else end
        self._heard: dict[signal.Signals, float] = {}
        self._from_c: set[signal.Signals] = set()
        self._notices: dict[signal.Signals, Notice] = {}
        self._former: dict[signal.Signals, Any] = {}
        self._former_fd = -1
        self._former_file: tuple[int, int] | None = None
        self._pipe: tuple[int, int] | None = None
        self._handler = self._on_signal  # one object, so that it can be compared

    def start(self) -> bool:
        """Install the handlers; return whether any were installed.

        Outside the main thread it only warns.
        """
        if threading.current_thread() is not threading.main_thread():
            logger.warning(
                "evenstride: signals are not watched, because handlers can only be installed in "
                "the main thread; start the run there, or remove signals from notices"
            )
            return False
        wanted = {number: signal.getsignal(number) for number in self._graces}
        self._former = {n: former for n, former in wanted.items() if _may_replace(n, former)}
        if not self._former:
            return False
        self._pipe = read, write = os.pipe()
        os.set_blocking(read, False)
        os.set_blocking(write, False)
        self._former_fd = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        self._former_file = _file(self._former_fd)
        for number in self._former:
            signal.signal(number, self._handler)
        itself = weakref.ref(self)
        os.register_at_fork(after_in_child=lambda: _leave_to_parent(itself()))
        return True

    def poll(self) -> Notice:
        """Wait for a signal, and return the earliest notice so far.

        Raises:
            Interrupted: see `NoticeSource.poll`.
        """
        while True:
            news = [self._take(byte) for byte in self._bytes()]
            if any(news):
                notice = earliest(self._notices.values())
                assert notice is not None, "a new signal adds a notice"
                return notice

    def interrupt(self) -> None:
        """Make `poll` raise."""
        if self._pipe is not None:
            os.write(self._pipe[1], bytes([_END]))

    def close(self) -> None:
        """Restore the previous handlers, unless other code has replaced ours. May be repeated."""
        pipe, self._pipe = self._pipe, None
        if pipe is None:
            return
        if threading.current_thread() is not threading.main_thread():
            # The C-level handler continues to write, so the pipe must stay open.
            logger.warning(
                "evenstride: signal handlers can only be removed in the main thread; they stay "
                "installed, but only run the previous handler or action; close the run in the main "
                "thread"
            )
            return
        self._restore(pipe[1])
        for fd in pipe:
            os.close(fd)

    def _restore(self, write: int) -> None:
        for number, former in self._former.items():
            if signal.getsignal(number) == self._handler:
                signal.signal(number, former)
        back = signal.set_wakeup_fd(-1)
        if back == write:
            same = _file(self._former_fd) == self._former_file
            back = self._former_fd if same else -1
        if back != -1:
            with contextlib.suppress(ValueError, OSError):  # closed by its owner meanwhile
                signal.set_wakeup_fd(back, warn_on_full_buffer=False)

    def _is_deadly(self, number: signal.Signals) -> bool:
        """Return whether a second signal would end the process without our handler."""
        alone = signal.getsignal(number) == self._handler
        return number is signal.SIGTERM and alone and self._former[number] is signal.SIG_DFL

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal in Python; runs in the main thread, possibly late."""
        former = self._former.get(signal.Signals(number), signal.SIG_DFL)
        if self._pipe is not None:
            with contextlib.suppress(BlockingIOError):
                os.write(self._pipe[1], bytes([_BY_PYTHON | number]))
        if callable(former):
            former(number, frame)
        elif self._pipe is None and signal.getsignal(number) == self._handler:
            # Closed by another thread, which cannot restore handlers.
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)

    def _bytes(self) -> bytes:
        assert self._pipe is not None, "polled before start, or after close"
        poller = select.poll()
        poller.register(self._pipe[0], select.POLLIN)
        poller.poll()
        data = os.read(self._pipe[0], 4096)
        if _END in data:
            raise Interrupted
        passed_on = bytes(byte for byte in data if not byte & _BY_PYTHON)
        if passed_on and self._former_file is not None:
            with contextlib.suppress(OSError):  # full, or closed by its owner
                if _file(self._former_fd) == self._former_file:
                    os.write(self._former_fd, passed_on)
        return data

    def _take(self, byte: int) -> bool:
        """Process a byte; return whether it adds a notice."""
        number = next((n for n in self._former if n == byte & ~_BY_PYTHON), None)
        if number is None or (byte & _BY_PYTHON and number in self._from_c):
            return False
        if not byte & _BY_PYTHON:
            self._from_c.add(number)
        now_s = self._steady()
        first_s = self._heard.setdefault(number, now_s)
        if number in self._notices:
            if now_s - first_s > AGAIN_S and self._is_deadly(number):
                logger.warning("evenstride: a second SIGTERM ends this process")
                self._end(number)
            return False
        grace_s = self._graces[number]
        leaves_unix_s = None if grace_s is None else self._clock() + grace_s
        reason = f"signal {number.name} to this process"
        self._notices[number] = Notice(number.name, leaves_unix_s, False, False, reason)
        return True


def _file(fd: int) -> tuple[int, int] | None:
    """Return the identity of the file of ``fd``, because the number may be reused."""
    if fd == -1:
        return None
    try:
        status = os.fstat(fd)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _may_replace(number: signal.Signals, former: Any) -> bool:
    if former is None:
        logger.warning(
            "evenstride: %s is not watched, because its handler was not installed by Python and "
            "would be lost; remove the signal from notices, or install that handler later",
            number.name,
        )
    return former is not None and former is not signal.SIG_IGN


def _leave_to_parent(signals: Signals | None) -> None:
    """Remove the handlers in a forked child, whose signals do not concern the parent.

    Otherwise SIGTERM could not end a loader process, and the parent would read it as its own.
    """
    if signals is not None:
        signals.close()


def _end_by(number: signal.Signals) -> None:
    """End this process by the signal's default action.

    This uses the C library: Python can change handlers only in the main thread, which may be in a
    call that never returns.
    """
    library = ctypes.CDLL(None)
    library.signal.argtypes, library.signal.restype = (
        [ctypes.c_int, ctypes.c_void_p],
        ctypes.c_void_p,
    )
    library.signal(int(number), None)  # SIG_DFL
    os.kill(os.getpid(), number)
