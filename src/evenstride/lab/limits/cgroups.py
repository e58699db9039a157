"""CPU limits by control groups, version 1 or 2."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from evenstride.errors import LimitError

PERIOD_S = 0.010
"""Period of a limit: short, so that a step spans many, and no shorter than kernels keep."""

_HANDED_ON = "cgroup.subtree_control"
_FREE = "free"  # the group of those that no limit is meant for

# Kernels refuse a smaller quota, some of them without a word.
_LEAST_QUOTA_S = 0.001


@dataclass(frozen=True, slots=True)
class CgroupFiles:
    """Where one version of control groups keeps a group's quota."""

    kind: str
    base: Path

    def limit(self, group: Path, speed: float) -> None:
        """Write the quota of a group and check that the kernel took it.

        Raises:
            LimitError: it did not.
        """
        # Slow workers get longer periods rather than quotas that are refused.
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
                raise LimitError(f"{group / name} refused {text!r}: {error.strerror}") from error
            if taken != text:
                raise LimitError(f"{group / name} took {taken!r} instead of {text!r}")


class CgroupLimits:
    """Limits by control groups below a group of our own.

    Args:
        files: the version in use and the group to make ours in.
        workers: number of workers.

    Raises:
        LimitError: this process may not make groups there, or not limit them.
    """

    def __init__(self, files: CgroupFiles, workers: int) -> None:
        self._files = files
        self._enabled = False  # whether we let the base hand on its CPU control (version 2)
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
                files.limit(group, 1.0 - 1e-9)  # proves the right to limit
                files.limit(group, 1.0)
        except OSError as error:
            self.close()
            raise LimitError(f"no right to make CPU groups in {files.base}: {error}") from error

    @property
    def kind(self) -> str:
        return self._files.kind

    def join(self, worker: int, pid: int) -> None:
        """Move a process with all its threads into the worker's group."""
        _move(pid, self._groups[worker])

    def leave(self, pid: int) -> None:
        """Move a process with all its threads into a group without a limit."""
        _move(pid, self._free)

    def set_speed(self, worker: int, speed: float) -> None:
        self._files.limit(self._groups[worker], speed)

    def close(self) -> None:
        """Lift the limits, move out what still runs, remove the groups."""
        for group in (*self._groups, self._free, self._top):
            if group.is_dir():
                with contextlib.suppress(LimitError, OSError):
                    self._files.limit(group, 1.0)
                _empty(group, self._files.base)
                _rmdir(group)
        if self._enabled:
            with contextlib.suppress(OSError):  # somebody else's groups may need it by now
                (self._files.base / _HANDED_ON).write_text("-cpu")


def _move(pid: int, group: Path) -> None:
    try:
        (group / "cgroup.procs").write_text(f"{pid}\n")
    except OSError as error:
        raise LimitError(f"process {pid} could not be limited: {error.strerror}") from error


def _empty(group: Path, into: Path) -> None:
    with contextlib.suppress(OSError):
        for pid in (group / "cgroup.procs").read_text().split():
            with contextlib.suppress(OSError):
                (into / "cgroup.procs").write_text(f"{pid}\n")


def _rmdir(group: Path) -> None:
    # A group stays busy for a moment after its last process was killed.
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
    """Remove groups of ours whose process was killed before it could."""
    for top in base.glob("evenstride-*"):
        pid = top.name.split("-")[1]
        if pid.isdigit() and not Path(f"/proc/{pid}").exists():
            for group in (*top.glob("worker-*"), top / _FREE, top):
                _empty(group, base)
                _rmdir(group)


def cgroup_candidates(
    mounts: Path = Path("/proc/self/mounts"), membership: Path = Path("/proc/self/cgroup")
) -> Iterator[CgroupFiles]:
    """Yield the control groups this process is in that can limit the CPU, best first."""
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
