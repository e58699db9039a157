"""Speeds of workers: parsed from text such as ``1,0.5,0.2``, and placed on cores."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

from evenstride.core.spec import duration_s, numbers, parse_spec
from evenstride.errors import ConfigError

Speeds = tuple[float, ...]
"""Speed of each worker, as a fraction of one core, in rank order."""


@dataclass(frozen=True, slots=True)
class SpeedChange:
    """New speeds from a step or a time on."""

    speeds: Speeds  # of all workers, in rank order
    at_step: int | None = None  # the leader's step after which they apply, or ``None``
    at_s: float | None = None  # seconds after the start of the workers, or ``None``

    def due(self, step: int, elapsed_s: float) -> bool:
        if self.at_step is not None:
            return step >= self.at_step
        return self.at_s is not None and elapsed_s >= self.at_s


def parse_speeds(text: str) -> Speeds:
    speeds: Speeds = numbers(text)
    if not speeds:
        raise ConfigError(
            f"invalid speeds {text!r}: expected one number per worker, such as 1,0.5,0.2"
        )
    for speed in speeds:
        if not 0 < speed <= 1:
            raise ConfigError(
                f"invalid speed {speed:g}: a speed is a fraction of one core, above 0 and at most "
                "1; remove a worker instead of giving it 0"
            )
    return speeds


def parse_change(text: str, workers: int) -> SpeedChange:
    """Return the change in ``text``: ``STEP:SPEEDS`` or ``SECONDSs:SPEEDS``.

    >>> parse_change("100:1,0.5,1", 3)
    SpeedChange(speeds=(1.0, 0.5, 1.0), at_step=100, at_s=None)
    """
    spec = parse_spec(text)
    step = int(spec.name) if spec.name.isdecimal() else None
    at_s = duration_s(spec.name)
    if not spec.argument or (step is None and at_s is None):
        raise ConfigError(
            f"invalid change {text!r}: expected STEP:SPEEDS or SECONDSs:SPEEDS, such as "
            "100:1,0.5,1 or 30s:1,0.5,1"
        )
    speeds = parse_speeds(spec.argument)
    if len(speeds) != workers:
        raise ConfigError(
            f"change {text!r} has {len(speeds)} speeds for {workers} workers; give one per worker"
        )
    return SpeedChange(speeds, step, at_s)


def usable_cpus() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def check_fit(speeds: Speeds, cores: int) -> None:
    if sum(speeds) > cores + 1e-9:
        raise ConfigError(
            f"speeds {','.join(f'{s:g}' for s in speeds)} sum to {sum(speeds):g} cores, but this "
            f"machine has {cores}, so the workers would slow each other down; lower some speeds or "
            "use fewer workers"
        )


def place(speeds: Speeds, cores: int) -> tuple[int, ...] | None:
    """Return a core for each worker, so that the speeds on each core sum to at most 1.

    The largest speed comes first, on the fullest core with enough capacity. ``None`` if a worker
    does not fit; then the scheduler of the kernel decides.

    >>> place((1.0, 0.5, 0.2), 2), place((0.7, 0.7, 0.6), 2)
    ((0, 1, 1), None)
    """
    room, placed = [1.0] * cores, dict[int, int]()
    for worker in sorted(range(len(speeds)), key=lambda w: -speeds[w]):
        fitting = [core for core in range(cores) if speeds[worker] <= room[core] + 1e-9]
        if not fitting:
            return None
        core = min(fitting, key=lambda c: (room[c], c))
        room[core] -= speeds[worker]
        placed[worker] = core
    return tuple(placed[worker] for worker in range(len(speeds)))


def pin(pid: int, core: int | None) -> None:
    """Bind all threads of a process to the n-th usable core, or to all usable cores.

    Processes that it starts inherit the binding.
    """
    if not hasattr(os, "sched_setaffinity"):
        return
    usable = os.sched_getaffinity(0)
    cpus = usable if core is None else {sorted(usable)[core]}
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.sched_setaffinity(int(task.name), cpus)
