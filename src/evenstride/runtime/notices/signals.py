"""Signals as notices: SIGTERM of Kubernetes, torchrun and Slurm, and those a user has sent ahead.

Python runs a handler between two bytecodes of the main thread, so a program that stands in a
collective or in a backward pass would learn of its end too late. The C-level handler, however, also
writes the signal's number to a "wake-up" file descriptor, at once and on whatever thread. Here this
is a pipe, and a thread reads it.

What stays as it was: a handler somebody installed before is called as ever, and bytes are passed on
to a wake-up descriptor somebody else has set. A signal that was ignored, as under ``nohup``, stays
ignored and is no notice. Only the default action, the immediate end, is replaced by the notice. A
second SIGTERM has that default action again; but launchers and batch systems both signal the same
processes, so one within `AGAIN_S` of the first is the same one, heard twice.

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
# Bytes in the pipe: a signal's number as the C-level handler wrote it; with this bit as our Python
# handler wrote it, should somebody have taken the wake-up descriptor; or the end.
_BY_PYTHON, _END = 0x80, 0


class Signals:
    """Notices by signals to this process.

    Args:
        graces: which signals, and how long after each the process is killed, in seconds; ``None``
            if that is not known.
        clock: seconds since 1970.
        steady: seconds that never jump, to tell a second signal from the first heard twice.
        end: end this process by the default action of a signal; called on the watcher's thread.
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
        self._handler = self._on_signal  # one object, to be recognised by

    def start(self) -> bool:
        """Install the handlers; return whether there are any.

        Only the main thread can; from another one a warning is all that happens.
        """
        if threading.current_thread() is not threading.main_thread():
            logger.warning(
                "evenstride: signals are not watched: handlers can be installed only in the main "
                "thread; start the run there, or leave signals out of notices"
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
        """Wait for a signal, and return the earliest notice of those that have come.

        Raises:
            Interrupted: as of every source.
        """
        while True:
            news = [self._take(byte) for byte in self._bytes()]
            if any(news):
                notice = earliest(self._notices.values())
                assert notice is not None, "a signal that is news leaves a notice"
                return notice

    def interrupt(self) -> None:
        """Make `poll` raise."""
        if self._pipe is not None:
            os.write(self._pipe[1], bytes([_END]))

    def close(self) -> None:
        """Restore what was there, as far as it is still ours. May be called again."""
        pipe, self._pipe = self._pipe, None
        if pipe is None:
            return
        if threading.current_thread() is not threading.main_thread():
            # The C-level handler goes on writing, so the pipe must stay.
            logger.warning(
                "evenstride: signal handlers can be removed only in the main thread; what they "
                "replaced happens all the same; close the run there"
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
        """Return whether a second signal would end the process if there were only us."""
        alone = signal.getsignal(number) == self._handler
        return number is signal.SIGTERM and alone and self._former[number] is signal.SIG_DFL

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """Run by Python in the main thread, sooner or later."""
        former = self._former.get(signal.Signals(number), signal.SIG_DFL)
        if self._pipe is not None:
            with contextlib.suppress(BlockingIOError):
                os.write(self._pipe[1], bytes([_BY_PYTHON | number]))
        if callable(former):
            former(number, frame)
        elif self._pipe is None and signal.getsignal(number) == self._handler:
            # Closed, but on another thread, where handlers cannot be restored.
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
        """Take note of a byte; return whether there is a new notice."""
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
    """Return which file ``fd`` is, as its number may be another file's later."""
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
            "evenstride: %s is not watched: its handler was not installed by Python and would be "
            "lost; leave it out of notices, or install that handler later",
            number.name,
        )
    return former is not None and former is not signal.SIG_IGN


def _leave_to_parent(signals: Signals | None) -> None:
    """In a child made by ``fork``: its signals are its own, and the pipe is its parent's.

    Otherwise a data loader's worker could not be ended by SIGTERM, and would tell its parent that
    this was meant for the parent.
    """
    if signals is not None:
        signals.close()


def _end_by(number: signal.Signals) -> None:
    """End this process as if it had never handled the signal.

    By the C library, since Python changes handlers only in the main thread, which may stand in a
    call that never returns.
    """
    library = ctypes.CDLL(None)
    library.signal.argtypes, library.signal.restype = (
        [ctypes.c_int, ctypes.c_void_p],
        ctypes.c_void_p,
    )
    library.signal(int(number), None)  # SIG_DFL
    os.kill(os.getpid(), number)
