"""Which core each limited worker runs on, so that the scheduler does not shuffle them."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from evenstride.lab.limits.speeds import Speeds


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
    """Bind all threads of a process, and what it will start, to the n-th usable core.

    ``None`` stands for all usable cores.
    """
    if not hasattr(os, "sched_setaffinity"):
        return
    usable = os.sched_getaffinity(0)
    cpus = usable if core is None else {sorted(usable)[core]}
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.sched_setaffinity(int(task.name), cpus)
