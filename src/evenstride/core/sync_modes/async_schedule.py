"""Who trains which samples next, and who may begin, where workers do not keep step.

These are the rules of ``asp`` and ``ssp``. The simulator and the first parameter server both follow
them; they add only the time at which something happens, and the answers to workers that wait.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from evenstride.core.sampling.work_queue import Piece, WorkQueue
from evenstride.core.sync_modes.staleness import Clocks


@dataclass(frozen=True, slots=True)
class AsyncSchedule:
    """The epoch that is being handed out, and for whom workers wait.

    Args:
        queue: which samples are given, and which of them are trained.
        clocks: how many updates each worker has made.
        idle: workers that keep their clock, but have nothing to train: nobody waits for them.

    Cost:
        O(W) each, and as for `WorkQueue`.

    >>> schedule = AsyncSchedule.of(workers=2, staleness=0).opened(samples=10)
    >>> schedule, piece = schedule.given(0, 4)
    >>> schedule = schedule.made(0)
    >>> piece, schedule.may_begin(0), schedule.returned(1).may_begin(0)
    ((range(0, 4),), False, True)
    """

    queue: WorkQueue
    clocks: Clocks
    idle: frozenset[int] = frozenset()

    @classmethod
    def of(cls, workers: int, staleness: int | None) -> AsyncSchedule:
        """Return the schedule before the first epoch.

        Args:
            workers: how many there are, at least 1.
            staleness: the bound for `Clocks`; ``None`` if nobody waits.

        Raises:
            ValueError: either is too small.
        """
        return cls(WorkQueue.of(0, workers), Clocks.of(workers, staleness))

    @property
    def latest_start(self) -> float:
        """The highest clock with which a worker may begin an update."""
        staleness = self.clocks.staleness
        return math.inf if staleness is None else self._slowest + staleness

    def may_begin(self, worker: int) -> bool:
        """Return whether a worker may begin its next update; one that takes no part may not."""
        clock = self.clocks.clocks[worker]
        return clock is not None and clock <= self.latest_start

    def ahead(self, worker: int) -> int:
        """Return by how many updates a worker is ahead of the slowest that is waited for.

        Raises:
            ValueError: there is no such worker, or it is lost.
        """
        self.clocks.ahead(worker)
        return int(max((self.clocks.clocks[worker] or 0) - self._slowest, 0))

    def opened(self, samples: int) -> AsyncSchedule:
        """Begin an epoch of so many samples; none may have an update under way."""
        queue = WorkQueue.of(samples, len(self.clocks.clocks))
        return AsyncSchedule(queue, self.clocks.aligned())

    def given(self, worker: int, samples: int) -> tuple[AsyncSchedule, Piece]:
        """Give a worker a piece of at most so many samples; an empty one is none.

        A worker that gets nothing and has nothing in hand is idle.
        """
        queue, piece = self.queue.give(worker, samples)
        # Without the idle ones, workers near the bound would wait for an update that cannot come:
        # there is nothing left to make it from, unless a lost worker's samples come back.
        idle = self.idle - {worker} if queue.pieces[worker] else self.idle | {worker}
        return replace(self, queue=queue, idle=idle), piece

    def made(self, worker: int) -> AsyncSchedule:
        """Book the update of a worker's oldest piece.

        The update of a worker that takes no part any more still counts its samples.
        """
        clocks = self.clocks
        if clocks.clocks[worker] is not None:
            clocks = clocks.ticked(worker)
        return replace(self, queue=self.queue.trained(worker), clocks=clocks)

    def returned(self, worker: int) -> AsyncSchedule:
        """Take back all that a worker has in hand, for others to train; it is idle then."""
        return replace(self, queue=self.queue.lost(worker), idle=self.idle | {worker})

    def lost(self, worker: int) -> AsyncSchedule:
        """Take back all that a worker has in hand, and wait for it no longer."""
        return replace(self.returned(worker), clocks=self.clocks.lost(worker))

    def counting(self, counted: Sequence[bool]) -> AsyncSchedule:
        """Wait for these workers from now on, and for nobody else.

        Args:
            counted: whether each is waited for, ``(W,)``.
        """
        pairs = list(zip(self.clocks.clocks, counted, strict=True))
        left = replace(self.clocks, clocks=tuple(c if here else None for c, here in pairs))
        # A new worker starts at the slowest clock. From 0, all others would wait until it has made
        # as many updates as they have.
        clocks = tuple((left.slowest if c is None else c) if here else None for c, here in pairs)
        return replace(self, clocks=replace(self.clocks, clocks=clocks), idle=frozenset())

    @property
    def _slowest(self) -> float:
        clocks = enumerate(self.clocks.clocks)
        waited_for = (c for worker, c in clocks if c is not None and worker not in self.idle)
        return min(waited_for, default=math.inf)
