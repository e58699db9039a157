"""CPU limits by stopping and continuing processes, for users without any rights."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time

from evenstride.lab.limits.cgroups import PERIOD_S

_MOST_OWED_S = 10 * PERIOD_S


class _Cycle:
    """How long to run and to rest, from how long a worker really ran and rested so far.

    Threads wake up late. Whatever that takes from a run or adds to it is made up for in the
    next ones, so that the mean speed is right; except after a gap so long that the machine
    itself must have been away.
    """

    def __init__(self, speed: float, now_s: float) -> None:
        self.speed = speed
        self._began_s = self._continued_s = now_s
        self._ran_s = 0.0

    def run_s(self, now_s: float) -> float:
        """Return how long to run from now, to have run the right part at this period's end."""
        due_s = self.speed * (now_s + PERIOD_S - self._began_s) - self._ran_s
        if due_s > _MOST_OWED_S:
            self._began_s, self._ran_s, due_s = now_s, 0.0, self.speed * PERIOD_S
        self._continued_s = now_s
        return max(0.0, due_s)

    def rest_s(self, now_s: float) -> float:
        """Return how long to rest from now, until what was run is the right part."""
        self._ran_s += now_s - self._continued_s
        rest_s = self._began_s + self._ran_s / self.speed - now_s
        if rest_s > _MOST_OWED_S / self.speed:
            rest_s = (1 - self.speed) * PERIOD_S
            self._began_s, self._ran_s = now_s + rest_s, 0.0
        return max(0.0, rest_s)


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
        return "signals"

    def join(self, worker: int, pid: int) -> None:
        """Take note of a process; it must lead a process group of its own."""
        with self._lock:
            self._pids[worker].append(pid)

    def leave(self, pid: int) -> None:
        """Do nothing: a process in a group of its own is not stopped with the worker's."""

    def set_speed(self, worker: int, speed: float) -> None:
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
        cycle = _Cycle(1.0, time.perf_counter())
        while not self._closing.is_set():
            with self._lock:
                speed, idle = self._speeds[worker], not self._pids[worker]
            if idle or speed >= 1:
                if cycle.speed < 1:
                    self._signal(worker, signal.SIGCONT)
                    cycle = _Cycle(1.0, time.perf_counter())
                self._closing.wait(PERIOD_S)
                continue
            if speed != cycle.speed:
                cycle = _Cycle(speed, time.perf_counter())
            self._signal(worker, signal.SIGCONT)
            self._closing.wait(cycle.run_s(time.perf_counter()))
            self._signal(worker, signal.SIGSTOP)
            self._closing.wait(cycle.rest_s(time.perf_counter()))

    def _signal(self, worker: int, number: signal.Signals) -> None:
        with self._lock:
            pids = list(self._pids[worker])
        for pid in pids:
            try:
                os.killpg(pid, number)
            except (ProcessLookupError, PermissionError):
                with self._lock, contextlib.suppress(ValueError):
                    self._pids[worker].remove(pid)
