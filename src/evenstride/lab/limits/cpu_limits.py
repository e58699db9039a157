"""Real CPU limits on processes, removed whatever happens.

Three ways, the best that is permitted: control groups of version 1 or 2, where the kernel
gives a group a quota of CPU time per short period; and, without any right, stopping and
continuing the processes by signals. Never by ``sleep``: a sleep does not grow with the batch.
"""

from __future__ import annotations

from typing import Protocol

from evenstride.errors import LimitError
from evenstride.lab.limits.cgroups import PERIOD_S, CgroupLimits, cgroup_candidates
from evenstride.lab.limits.duty_cycle import SignalLimits

__all__ = ["PERIOD_S", "Limits", "open_limits"]


class Limits(Protocol):
    """CPU limits of numbered workers."""

    @property
    def kind(self) -> str:
        """How the limits are kept, for people: ``cgroup v1``, ``cgroup v2`` or ``signals``."""
        ...

    def join(self, worker: int, pid: int) -> None:
        """Put a process, and what it will start, under a worker's limit."""
        ...

    def leave(self, pid: int) -> None:
        """Take a process that a worker has started out of that worker's limit."""
        ...

    def set_speed(self, worker: int, speed: float) -> None:
        """Limit a worker to a part of one core; 1 takes the limit away."""
        ...

    def close(self) -> None:
        """Take all limits away and leave nothing behind."""
        ...


def open_limits(workers: int) -> tuple[Limits, str]:
    """Return the best limits there are, and a sentence about what could not be had.

    The sentence is empty when control groups work.
    """
    reasons = []
    for files in cgroup_candidates():
        try:
            return CgroupLimits(files, workers), ""
        except LimitError as error:
            reasons.append(str(error))
    why = "; ".join(reasons) or "this system has no CPU control groups"
    return SignalLimits(workers), (
        f"CPU limits by signals instead of control groups, so they are less even ({why})"
    )
