"""Speeds of workers: as people write them, ``1,0.5,0.2``, and on which cores they find room."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

from evenstride.core.spec import duration_s, numbers, parse_spec
from evenstride.errors import ConfigError

Speeds = tuple[float, ...]
"""Speed of each worker as a part of one full core, in rank order."""


@dataclass(frozen=True, slots=True)
class SpeedChange:
    """New speeds from a moment on."""

    speeds: Speeds  # of all workers, in rank order
    at_step: int | None = None  # the leader's step after which they hold, or ``None``
    at_s: float | None = None  # seconds after the workers were let loose, or ``None``

    def due(self, step: int, elapsed_s: float) -> bool:
        if self.at_step is not None:
            return step >= self.at_step
        return self.at_s is not None and elapsed_s >= self.at_s


def parse_speeds(text: str) -> Speeds:
    speeds: Speeds = numbers(text)
    if not speeds:
        raise ConfigError(
            f"speeds {text!r} are not understood; give one number per worker, such as 1,0.5,0.2"
        )
    for speed in speeds:
        if not 0 < speed <= 1:
            raise ConfigError(
                f"a speed of {speed:g} cannot be: a worker runs on part of one core, so its speed "
                "is above 0 and at most 1; leave a worker out rather than give it 0"
            )
    return speeds


def parse_change(text: str, workers: int) -> SpeedChange:
    """Return the change in ``text``: ``MOMENT:SPEEDS`` with a moment such as ``100`` or ``30s``.

    >>> parse_change("100:1,0.5,1", 3)
    SpeedChange(speeds=(1.0, 0.5, 1.0), at_step=100, at_s=None)
    """
    spec = parse_spec(text)
    step = int(spec.name) if spec.name.isdecimal() else None
    at_s = duration_s(spec.name)
    if not spec.argument or (step is None and at_s is None):
        raise ConfigError(
            f"change {text!r} is not understood; write STEP:SPEEDS or SECONDSs:SPEEDS, such as "
            "100:1,0.5,1 or 30s:1,0.5,1"
        )
    speeds = parse_speeds(spec.argument)
    if len(speeds) != workers:
        raise ConfigError(f"change {text!r} names {len(speeds)} speeds, but there are {workers}")
    return SpeedChange(speeds, step, at_s)


def usable_cpus() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def check_fit(speeds: Speeds, cores: int) -> None:
    if sum(speeds) > cores + 1e-9:
        raise ConfigError(
            f"speeds {','.join(f'{s:g}' for s in speeds)} sum to {sum(speeds):g} cores, but this "
            f"machine has {cores}; the workers would slow each other down. Lower some speeds or "
            "use fewer workers"
        )


def place(speeds: Speeds, cores: int) -> tuple[int, ...] | None:
    """Return a core for each worker so that no core is asked for more than it has.

    Largest speed first, into the fullest core that still has room. ``None`` when that finds no
    place for some worker; the scheduler then does what it can.

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
    """Bind all threads of a process, and what it will start, to the n-th usable core, or to all."""
    if not hasattr(os, "sched_setaffinity"):
        return
    usable = os.sched_getaffinity(0)
    cpus = usable if core is None else {sorted(usable)[core]}
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.sched_setaffinity(int(task.name), cpus)
