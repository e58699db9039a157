"""CPU limits by stopping and continuing processes, for users without any rights."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time

from evenstride.lab.cgroups import PERIOD_S


class SignalLimits:
    """Limits by a duty cycle of SIGCONT and SIGSTOP to process groups.

    It also freezes what a worker communicates, so slow workers look a little slower still.
    One thread keeps the rhythm; its own share of a core is small but not nothing.
    """

    def __init__(self, workers: int) -> None:
        self._lock = threading.Lock()
        self._speeds = [1.0] * workers
        self._pids: list[list[int]] = [[] for _ in range(workers)]
        self._closing = threading.Event()
        self._threads = [
            threading.Thread(target=self._beat, args=(worker,), daemon=True)
            for worker in range(workers)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def kind(self) -> str:
        """Always ``signals``."""
        return "signals"

    def join(self, worker: int, pid: int) -> None:
        """Take note of a process; it must lead a process group of its own."""
        with self._lock:
            self._pids[worker].append(pid)

    def set_speed(self, worker: int, speed: float) -> None:
        """Change the part of each period in which the worker runs."""
        with self._lock:
            self._speeds[worker] = speed

    def close(self) -> None:
        """Let everything run."""
        self._closing.set()
        for thread in self._threads:
            thread.join()
        for worker in range(len(self._pids)):
            self._signal(worker, signal.SIGCONT)

    def _beat(self, worker: int) -> None:
        # The error of each period is paid back in the next, so the mean speed is right.
        due_s = time.perf_counter()
        while not self._closing.is_set():
            with self._lock:
                speed, idle = self._speeds[worker], not self._pids[worker]
            if idle or speed >= 1:
                self._closing.wait(PERIOD_S)
                due_s = time.perf_counter()
                continue
            self._signal(worker, signal.SIGCONT)
            due_s += speed * PERIOD_S
            self._closing.wait(max(0.0, due_s - time.perf_counter()))
            self._signal(worker, signal.SIGSTOP)
            due_s += (1 - speed) * PERIOD_S
            self._closing.wait(max(0.0, due_s - time.perf_counter()))

    def _signal(self, worker: int, number: signal.Signals) -> None:
        with self._lock:
            pids = list(self._pids[worker])
        for pid in pids:
            try:
                os.killpg(pid, number)
            except (ProcessLookupError, PermissionError):
                with self._lock, contextlib.suppress(ValueError):
                    self._pids[worker].remove(pid)
