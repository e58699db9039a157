"""CPU limits on processes, which are removed at the end whatever happens.

There are three ways, and the best permitted one is used. In control groups of version 1 or 2, the
kernel gives a group a quota of CPU time per period. Without permission for these, signals stop and
continue the processes. A ``sleep`` would not do, because it does not grow with the batch.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from evenstride.errors import LimitError

PERIOD_S = 0.010
"""Period of a limit: a step spans many periods, and kernels still enforce the limit."""

_HANDED_ON = "cgroup.subtree_control"
_FREE = "free"  # the group of processes without a limit
_LEAST_QUOTA_S = 0.001  # kernels refuse a smaller one, some of them without an error
_MOST_OWED_S = 10 * PERIOD_S


class Limits(Protocol):
    """CPU limits of numbered workers."""

    @property
    def kind(self) -> str:
        """How the limits are enforced: ``cgroup v1``, ``cgroup v2`` or ``signals``."""
        ...

    def join(self, worker: int, pid: int) -> None:
        """Put a process, and all processes that it starts, under a worker's limit."""
        ...

    def leave(self, pid: int) -> None:
        """Remove a process that a worker started from that worker's limit."""
        ...

    def set_speed(self, worker: int, speed: float) -> None:
        """Limit a worker to a fraction of one core; 1 removes the limit."""
        ...

    def close(self) -> None:
        """Remove all limits and their groups."""
        ...


def open_limits(workers: int) -> tuple[Limits, str]:
    """Return the best limits that are permitted, and a sentence on why there are no better ones.

    The sentence is empty if control groups work.
    """
    reasons = []
    for files in cgroup_candidates():
        try:
            return CgroupLimits(files, workers), ""
        except LimitError as error:
            reasons.append(str(error))
    why = "; ".join(reasons) or "this system has no CPU control groups"
    return SignalLimits(workers), (
        f"CPU limits use signals instead of control groups, so they are less accurate ({why})"
    )


@dataclass(frozen=True, slots=True)
class CgroupFiles:
    """The files in which one version of control groups keeps the quota of a group."""

    kind: str
    base: Path

    def limit(self, group: Path, speed: float) -> None:
        """Write the quota of a group and check that the kernel accepted it."""
        # Slow workers get longer periods, because the kernel would refuse their quotas.
        period_us = round(max(PERIOD_S, _LEAST_QUOTA_S / speed) * 1e6)
        quota_us = round(speed * period_us)
        if self.kind == "cgroup v1":
            wanted = {
                "cpu.cfs_period_us": f"{period_us}",
                "cpu.cfs_quota_us": "-1" if speed >= 1 else f"{quota_us}",
            }
        else:
            wanted = {"cpu.max": f"{'max' if speed >= 1 else quota_us} {period_us}"}
        for name, text in wanted.items():
            try:
                (group / name).write_text(text)
                taken = (group / name).read_text().strip()
            except OSError as error:
                raise LimitError(
                    f"cannot write {text!r} to {group / name}: {error.strerror}"
                ) from error
            if taken != text:
                raise LimitError(f"{group / name} contains {taken!r} after {text!r} was written")


class CgroupLimits:
    """Limits by control groups below a group of this process.

    Raises `LimitError` if this process may not create groups there, or not limit them.
    """

    def __init__(self, files: CgroupFiles, workers: int) -> None:
        self._files = files
        self._enabled = False  # whether we enabled CPU control in the base (version 2)
        self._top = files.base / f"evenstride-{os.getpid()}-{time.monotonic_ns()}"
        self._groups = [self._top / f"worker-{number}" for number in range(workers)]
        self._free = self._top / _FREE
        try:
            _remove_left_behind(files.base)
            self._top.mkdir()
            if files.kind == "cgroup v2":
                handed_on = (files.base / _HANDED_ON).read_text().split()
                self._enabled = "cpu" not in handed_on
                for parent in (files.base, self._top):
                    (parent / _HANDED_ON).write_text("+cpu")
            self._free.mkdir()
            for group in self._groups:
                group.mkdir()
                files.limit(group, 1.0 - 1e-9)  # fails without permission to limit
                files.limit(group, 1.0)
        except OSError as error:
            self.close()
            raise LimitError(
                f"no permission to create CPU groups in {files.base}: {error}"
            ) from error

    @property
    def kind(self) -> str:
        return self._files.kind

    def join(self, worker: int, pid: int) -> None:
        """Move a process with all its threads to the worker's group."""
        _move(pid, self._groups[worker])

    def leave(self, pid: int) -> None:
        """Move a process with all its threads to a group without a limit."""
        _move(pid, self._free)

    def set_speed(self, worker: int, speed: float) -> None:
        self._files.limit(self._groups[worker], speed)

    def close(self) -> None:
        """Remove the limits, move running processes out, and remove the groups."""
        for group in (*self._groups, self._free, self._top):
            if group.is_dir():
                with contextlib.suppress(LimitError, OSError):
                    self._files.limit(group, 1.0)
                _empty(group, self._files.base)
                _rmdir(group)
        if self._enabled:
            with contextlib.suppress(OSError):  # other groups may need it by now
                (self._files.base / _HANDED_ON).write_text("-cpu")


def _move(pid: int, group: Path) -> None:
    try:
        (group / "cgroup.procs").write_text(f"{pid}\n")
    except OSError as error:
        raise LimitError(f"cannot limit process {pid}: {error.strerror}") from error


def _empty(group: Path, into: Path) -> None:
    with contextlib.suppress(OSError):
        for pid in (group / "cgroup.procs").read_text().split():
            with contextlib.suppress(OSError):
                (into / "cgroup.procs").write_text(f"{pid}\n")


def _rmdir(group: Path) -> None:
    # A group stays busy for a moment after its last process is killed.
    for _ in range(50):
        try:
            group.rmdir()
        except FileNotFoundError:
            return
        except OSError:
            time.sleep(0.02)
        else:
            return


def _remove_left_behind(base: Path) -> None:
    """Remove groups of earlier processes that were killed before they removed them."""
    for top in base.glob("evenstride-*"):
        pid = top.name.split("-")[1]
        if pid.isdigit() and not Path(f"/proc/{pid}").exists():
            for group in (*top.glob("worker-*"), top / _FREE, top):
                _empty(group, base)
                _rmdir(group)


def cgroup_candidates(
    mounts: Path = Path("/proc/self/mounts"), membership: Path = Path("/proc/self/cgroup")
) -> Iterator[CgroupFiles]:
    """Yield the control groups of this process that can limit the CPU, best first."""
    try:
        own = dict(_memberships(membership))
        lines = [line.split() for line in mounts.read_text().splitlines()]
    except OSError:
        return
    for _, place, kind, options, *_ in lines:
        if kind == "cgroup" and "cpu" in options.split(",") and "cpu" in own:
            yield CgroupFiles("cgroup v1", Path(place + own["cpu"]))
    for _, place, kind, *_ in lines:
        if kind == "cgroup2" and "" in own:
            base = Path(place + own[""])
            with contextlib.suppress(OSError):
                if "cpu" in (base / "cgroup.controllers").read_text().split():
                    yield CgroupFiles("cgroup v2", base)


def _memberships(path: Path) -> Iterator[tuple[str, str]]:
    for line in path.read_text().splitlines():
        _, controllers, group = line.split(":", 2)
        for controller in controllers.split(","):
            yield controller, group.rstrip("/")


class _Cycle:
    """Durations of running and resting, from the time for which a worker ran and rested so far.

    Threads wake up late. The following periods compensate for that, so that the mean speed is
    right. After a very long gap there is no compensation, because the machine was suspended.
    """

    def __init__(self, speed: float, now_s: float) -> None:
        self.speed = speed
        self._began_s = self._continued_s = now_s
        self._ran_s = 0.0

    def run_s(self, now_s: float) -> float:
        """Return how long to run from now, so that the speed is right at the end of this period."""
        due_s = self.speed * (now_s + PERIOD_S - self._began_s) - self._ran_s
        if due_s > _MOST_OWED_S:
            self._began_s, self._ran_s, due_s = now_s, 0.0, self.speed * PERIOD_S
        self._continued_s = now_s
        return max(0.0, due_s)

    def rest_s(self, now_s: float) -> float:
        """Return how long to rest from now until the speed is right."""
        self._ran_s += now_s - self._continued_s
        rest_s = self._began_s + self._ran_s / self.speed - now_s
        if rest_s > _MOST_OWED_S / self.speed:
            rest_s = (1 - self.speed) * PERIOD_S
            self._began_s, self._ran_s = now_s + rest_s, 0.0
        return max(0.0, rest_s)


class SignalLimits:
    """Limits by a duty cycle of SIGCONT and SIGSTOP to process groups.

    A stopped worker does not communicate either, so slow workers are slightly slower than their
    speed says. One thread per worker sends the signals, which takes a little processor time.
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
        """Add a process, which must be the leader of a process group."""
        with self._lock:
            self._pids[worker].append(pid)

    def leave(self, pid: int) -> None:
        """Do nothing: a process in another process group is not stopped with the worker."""

    def set_speed(self, worker: int, speed: float) -> None:
        with self._lock:
            self._speeds[worker] = speed

    def close(self) -> None:
        """Continue all processes."""
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
