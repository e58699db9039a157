"""What has been so for a while, worker by worker: when it began, and that it ended."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Self

import numpy as np

from evenstride.core.arrays import FloatArray, IntArray, Mask

# Both, because sixty steps of 2 ms are over in no time.
WHILE_STEPS, WHILE_S = 60.0, 5.0
"""A while: so many steps, and no less than so many seconds of them."""


@dataclass(frozen=True, slots=True, eq=False)
class WorkerArrays:
    """Arrays with a place for every worker, in which zero means that nothing is known."""

    def of(self, places: IntArray) -> Self:
        """Return the rows of other workers, given each one's place here; -1 for who is new."""
        known = places >= 0
        rows = {field.name: getattr(self, field.name) for field in fields(self)}
        taken = {name: np.zeros(len(places), dtype=row.dtype) for name, row in rows.items()}
        for name, row in rows.items():
            taken[name][known] = row[places[known]]
        return type(self)(**taken)


@dataclass(frozen=True, slots=True, eq=False)
class Span:
    """Steps that were measured of each worker."""

    steps: FloatArray  # how many, ``(W,)``; 0 for none
    lasted_s: FloatArray  # seconds that they took, waits included, ``(W,)``
    first: IntArray  # the first of them, ``(W,)``; only meaningful where there are some

    @classmethod
    def none(cls, workers: int, first: int = 0) -> Span:
        """Return no steps of any worker."""
        return cls(np.zeros(workers), np.zeros(workers), np.full(workers, first))


@dataclass(frozen=True, slots=True, eq=False)
class DebouncedStates(WorkerArrays):
    """Whether each of ``W`` workers is in an episode: bad for a while, and not good since."""

    open: Mask  # whether it is, bool ``(W,)``
    turning: Mask  # whether it was bad at the last look, or in an episode good, bool ``(W,)``
    steps: FloatArray  # for which it has been that, ``(W,)``
    lasted_s: FloatArray  # seconds that these took, ``(W,)``
    since: IntArray  # first step of the latest bad ones, ``(W,)``

    @classmethod
    def none(cls, workers: int) -> DebouncedStates:
        zero = np.zeros(workers)
        return cls(zero > 0, zero > 0, zero, zero, zero.astype(np.int64))

    def after(
        self, bad: Mask, good: Mask, seen: Span, fresh: Span, unsettled: Mask | None = None
    ) -> tuple[DebouncedStates, Mask]:
        """Return the episodes after one more look, and for whom one began with it.

        Args:
            bad: who is bad now, ``(W,)``.
            good: who is good; between the two, nothing is decided.
            seen: what was measured since the look before; who was not measured stays as it is.
            fresh: of that, what tells of what is now, where that is new.
            unsettled: for whom the while begins again with this look; nobody if left out.
        """
        # Without news of a worker nothing about it changes.
        told = seen.steps > 0
        holds = np.where(self.open, good, bad) & told
        new = holds & ~self.turning & ~self.open
        goes_on = 1.0 if unsettled is None else ~unsettled
        # If it turned with this look, only the part of the look after the turn counts.
        steps = goes_on * (self.steps + np.where(new, fresh.steps, seen.steps))
        lasted_s = goes_on * (self.lasted_s + np.where(new, fresh.lasted_s, seen.lasted_s))
        turned = holds & (steps >= WHILE_STEPS) & (lasted_s >= WHILE_S)
        # An episode that has begun or ended starts the next count at 0.
        counts = holds & ~turned
        after = DebouncedStates(
            self.open ^ turned,
            np.where(told, counts, self.turning),
            np.where(told, np.where(counts, steps, 0.0), self.steps),
            np.where(told, np.where(counts, lasted_s, 0.0), self.lasted_s),
            np.where(new, fresh.first, self.since),
        )
        return after, turned & ~self.open
