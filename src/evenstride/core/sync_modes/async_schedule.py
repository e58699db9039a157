"""Which worker trains which samples next, and which may begin, without lockstep.

These are the rules of ``asp`` and ``ssp``. The simulator and the first parameter server both follow
them. They add only the time of each event, and the responses to waiting workers.

*Samples.* If all workers take a step together, the position in the data is one number. If each
takes its own steps, it is not: a worker may still train an early piece when later ones are done,
and may be lost with it. So `WorkQueue` keeps for every worker the samples that it has received and
not trained yet. The samples of a lost worker are assigned again, before any new ones.

*Clocks.* A worker's clock is the number of its updates. With bounded staleness ``s`` a
worker may begin its next update while its clock is at most ``s`` above that of the slowest worker
that takes part. The following holds for any speeds:

- a worker that is making an update is at most ``s`` ahead of the slowest, and one that has made it
  at most ``s + 1``;
- the slowest may always begin, so all workers never wait at the same time;
- during one update, each other worker ends at most ``2 s + 1`` updates: it was at most ``s`` behind
  at the beginning, and is at most ``s + 1`` ahead at the end. So the *staleness* of an update is at
  most ``(W - 1)(2 s + 1)`` with ``W`` workers.

*Staleness* is the number of updates applied between a worker's pull of the weights and its push of
an update, without its own. A version counts the applied updates. So the staleness is the version
just before the push is applied, minus the pulled version. A worker makes one update at a time, so
none of those in between is its own.

Source:
    Ho et al., "More effective distributed ML via a stale synchronous parallel parameter server",
    NIPS 2013. Not verified: only its abstract and reviews were read. Secondary sources say that
    the fastest is at most ``s`` clocks ahead of the slowest, which holds here for workers that
    compute. There, workers may read from caches older than the servers; here, weights come
    from the servers before each update.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

Piece = tuple[range, ...]
"""Positions assigned at once, in stretches: the samples of one update."""

_CELLS = 16  # cells for staleness 0 to 15; larger values share one cell


@dataclass(frozen=True, slots=True)
class WorkQueue:
    """One epoch's positions, each assigned exactly once: those in progress and those trained.

    Each method costs O(W), plus one step for each piece of the worker and each returned stretch. It
    does not depend on the number of samples. `ValueError` for an unknown worker.

    >>> handout, mine = WorkQueue.of(end=10, workers=2).give(0, 4)
    >>> handout, yours = handout.give(1, 3)
    >>> mine, yours
    ((range(0, 4),), (range(4, 7),))
    >>> handout = handout.trained(1).lost(0)
    >>> handout.give(1, 6)[1], handout.position
    ((range(0, 4), range(7, 9)), 3)
    """

    end: int  # positions of the epoch, ``0 .. end - 1``.
    pieces: tuple[tuple[Piece, ...], ...]  # pieces in progress of each worker, oldest first
    begun: int = 0  # positions below this one have been assigned at least once
    # Positions that came back untrained and have not been assigned again: ascending, with gaps.
    returned: Piece = ()

    @classmethod
    def of(cls, end: int, workers: int) -> WorkQueue:
        if end < 0 or workers < 1:
            raise ValueError(
                f"invalid queue of {end} positions for {workers} workers: expected at least 0 "
                "positions and at least 1 worker"
            )
        return cls(end, ((),) * workers)

    @property
    def left(self) -> int:
        return self.end - self.begun + _count(self.returned)

    @property
    def out(self) -> int:
        """Positions assigned and not trained yet."""
        return sum(_count(piece) for pieces in self.pieces for piece in pieces)

    @property
    def position(self) -> int:
        """Number of positions trained; they need not be the first ones."""
        return self.end - self.left - self.out

    @property
    def done(self) -> bool:
        return not self.left and not self.out

    def give(self, worker: int, samples: int) -> tuple[WorkQueue, Piece]:
        """Return the queue after a worker received a piece, and the piece, which may be empty.

        It has at most ``samples`` samples: first returned ones, then new ones.
        """
        hand = self._hand(worker)
        if samples < 0:
            raise ValueError(f"invalid request of {samples} samples by worker {worker}: minimum 0")
        first, rest = _split(self.returned, samples)
        begun = min(self.begun + samples - _count(first), self.end)
        new = (range(self.begun, begun),) if begun > self.begun else ()
        piece = _joined((*first, *new))
        if not piece:
            return self, ()
        given = replace(self, begun=begun, returned=rest)
        return given._with(worker, (*hand, piece)), piece

    def trained(self, worker: int) -> WorkQueue:
        """Return the queue after a worker trained its oldest piece; it must have one."""
        hand = self._hand(worker)
        if not hand:
            raise ValueError(
                f"worker {worker} reports a trained piece, but has none; assign one first, and "
                "book each update once"
            )
        return self._with(worker, hand[1:])

    def lost(self, worker: int) -> WorkQueue:
        """Return the queue after all of a worker's pieces came back; it may get new ones."""
        back = _joined([*self.returned, *(s for piece in self._hand(worker) for s in piece)])
        return replace(self, returned=back)._with(worker, ())

    def _hand(self, worker: int) -> tuple[Piece, ...]:
        if not 0 <= worker < len(self.pieces):
            raise ValueError(
                f"unknown worker {worker}: expected a number from 0 to {len(self.pieces) - 1}"
            )
        return self.pieces[worker]

    def _with(self, worker: int, hand: tuple[Piece, ...]) -> WorkQueue:
        pieces = self.pieces
        return replace(self, pieces=(*pieces[:worker], hand, *pieces[worker + 1 :]))


def _count(stretches: Iterable[range]) -> int:
    return sum(len(stretch) for stretch in stretches)


def _split(stretches: Piece, samples: int) -> tuple[Piece, Piece]:
    for place, stretch in enumerate(stretches):
        if len(stretch) > samples:
            first = (*stretches[:place], stretch[:samples]) if samples else stretches[:place]
            return first, (stretch[samples:], *stretches[place + 1 :])
        samples -= len(stretch)
    return stretches, ()


def _joined(stretches: Iterable[range]) -> Piece:
    joined = list[range]()
    for stretch in sorted(stretches, key=lambda stretch: stretch.start):
        if joined and joined[-1].stop == stretch.start:
            joined[-1] = range(joined[-1].start, stretch.stop)
        else:
            joined.append(stretch)
    return tuple(joined)


@dataclass(frozen=True, slots=True)
class Clocks:
    """Number of updates of each worker. `ValueError` for a worker that is unknown or lost.

    >>> clocks = Clocks.of(2, staleness=1).ticked(0)
    >>> clocks.may_begin(0), clocks.ticked(0).may_begin(0), clocks.ticked(0).may_begin(1)
    (True, False, True)
    >>> clocks.ticked(0).lost(1).may_begin(0)
    True
    """

    # Updates by which a worker that begins another may be ahead of the slowest, at least 0;
    # ``None`` for no bound.
    staleness: int | None
    clocks: tuple[int | None, ...]  # per worker; ``None`` for lost workers

    @classmethod
    def of(cls, workers: int, staleness: int | None) -> Clocks:
        if workers < 1 or (staleness is not None and staleness < 0):
            raise ValueError(
                f"invalid clocks of {workers} workers with a staleness of {staleness}: expected at "
                "least 1 worker and a staleness of at least 0; None means no bound"
            )
        return cls(staleness, (0,) * workers)

    @property
    def slowest(self) -> int:
        """The lowest clock of the remaining workers; 0 if no worker remains."""
        return min(self._there, default=0)

    def ahead(self, worker: int) -> int:
        return self._clock(worker) - self.slowest

    def may_begin(self, worker: int) -> bool:
        """Return whether a worker may begin its next update; if not, it asks again later.

        It should pull the weights after permission, not while it waits: they would be older.
        """
        ahead = self.ahead(worker)
        return self.staleness is None or ahead <= self.staleness

    def ticked(self, worker: int) -> Clocks:
        return self._with(worker, self._clock(worker) + 1)

    def lost(self, worker: int) -> Clocks:
        """Return the clocks without a worker; no worker waits for it any more."""
        self._clock(worker)
        return self._with(worker, None)

    def aligned(self) -> Clocks:
        """Return the clocks after a barrier: all remaining workers have that of the fastest.

        Requires that all have arrived and none has an update in progress, as at the end of an
        epoch. Otherwise the others would wait for slower workers again in the next epoch.
        """
        # The fastest rather than the slowest, so that no clock goes back.
        fastest = max(self._there, default=0)
        return replace(self, clocks=tuple(None if c is None else fastest for c in self.clocks))

    @property
    def _there(self) -> list[int]:
        return [clock for clock in self.clocks if clock is not None]

    def _clock(self, worker: int) -> int:
        clock = self.clocks[worker] if 0 <= worker < len(self.clocks) else None
        if clock is None:
            there = ", ".join(str(k) for k, c in enumerate(self.clocks) if c is not None) or "none"
            raise ValueError(
                f"worker {worker} has no clock: it is lost or unknown; available: {there}"
            )
        return clock

    def _with(self, worker: int, clock: int | None) -> Clocks:
        return replace(self, clocks=(*self.clocks[:worker], clock, *self.clocks[worker + 1 :]))


@dataclass(frozen=True, slots=True)
class Staleness:
    """Statistics of the staleness of updates, as this module defines it.

    >>> Staleness().counted(0).counted(3).to_dict()["mean"]
    1.5
    """

    count: int = 0  # number of updates
    total: int = 0  # sum of their staleness
    maximum: int = 0  # the largest staleness; 0 without updates
    # Number of updates of staleness 0 to 15, and above: 17 counts.
    histogram: tuple[int, ...] = (0,) * (_CELLS + 1)

    @property
    def mean(self) -> float:
        return self.total / self.count if self.count else 0.0

    def counted(self, staleness: int) -> Staleness:
        """Return the statistics with one more update; `ValueError` for a staleness below 0."""
        if staleness < 0:
            raise ValueError(
                f"invalid staleness {staleness} of an update: expected at least 0; subtract the "
                "pulled version from the one before the push is applied"
            )
        cells = list(self.histogram)
        cells[min(staleness, _CELLS)] += 1
        most = max(self.maximum, staleness)
        return Staleness(self.count + 1, self.total + staleness, most, tuple(cells))

    def merged(self, other: Staleness) -> Staleness:
        return Staleness(
            self.count + other.count,
            self.total + other.total,
            max(self.maximum, other.maximum),
            tuple(a + b for a, b in zip(self.histogram, other.histogram, strict=True)),
        )

    def to_dict(self) -> dict[str, Any]:
        """Return count, mean, maximum and histogram as plain values; the last cell is above 15."""
        return {
            "count": self.count,
            "mean": self.mean,
            "maximum": self.maximum,
            "histogram": list(self.histogram),
        }


def staleness_report(workers: Sequence[Staleness]) -> dict[str, Any]:
    """Return the staleness of all updates, and under ``workers`` that of each worker."""
    together = Staleness()
    for one in workers:
        together = together.merged(one)
    return {**together.to_dict(), "workers": [one.to_dict() for one in workers]}


@dataclass(frozen=True, slots=True)
class AsyncSchedule:
    """The assignment of an epoch, and which workers must wait.

    >>> schedule = AsyncSchedule.of(workers=2, staleness=0).opened(samples=10)
    >>> schedule, piece = schedule.given(0, 4)
    >>> schedule = schedule.made(0)
    >>> piece, schedule.may_begin(0), schedule.returned(1).may_begin(0)
    ((range(0, 4),), False, True)
    """

    queue: WorkQueue  # samples in progress and trained samples
    clocks: Clocks  # number of updates of each worker
    # Workers that keep their clock, but have nothing to train: no worker waits for them
    idle: frozenset[int] = frozenset()

    @classmethod
    def of(cls, workers: int, staleness: int | None) -> AsyncSchedule:
        """Return the schedule before the first epoch; without a staleness, no worker waits."""
        return cls(WorkQueue.of(0, workers), Clocks.of(workers, staleness))

    @property
    def latest_start(self) -> float:
        staleness = self.clocks.staleness
        return math.inf if staleness is None else self._slowest + staleness

    def may_begin(self, worker: int) -> bool:
        """Return whether a worker may begin its next update; a worker without a clock may not."""
        clock = self.clocks.clocks[worker]
        return clock is not None and clock <= self.latest_start

    def ahead(self, worker: int) -> int:
        """Return by how many updates a worker is ahead of the slowest one that is not idle."""
        self.clocks.ahead(worker)
        return int(max((self.clocks.clocks[worker] or 0) - self._slowest, 0))

    def opened(self, samples: int) -> AsyncSchedule:
        """Begin an epoch of ``samples`` samples; no update may be in progress."""
        queue = WorkQueue.of(samples, len(self.clocks.clocks))
        return AsyncSchedule(queue, self.clocks.aligned())

    def given(self, worker: int, samples: int) -> tuple[AsyncSchedule, Piece]:
        """Assign a worker a piece of at most ``samples`` samples, possibly empty.

        A worker that gets nothing and has nothing in progress is idle.
        """
        queue, piece = self.queue.give(worker, samples)
        # Without the idle ones, workers near the bound would wait for an impossible update: no
        # samples are left for it, unless a lost worker's samples come back.
        idle = self.idle - {worker} if queue.pieces[worker] else self.idle | {worker}
        return replace(self, queue=queue, idle=idle), piece

    def made(self, worker: int) -> AsyncSchedule:
        """Book the update of a worker's oldest piece.

        The update of a worker that no longer takes part still counts its samples.
        """
        clocks = self.clocks
        if clocks.clocks[worker] is not None:
            clocks = clocks.ticked(worker)
        return replace(self, queue=self.queue.trained(worker), clocks=clocks)

    def returned(self, worker: int) -> AsyncSchedule:
        """Take back all pieces of a worker, for others to train; the worker is then idle."""
        return replace(self, queue=self.queue.lost(worker), idle=self.idle | {worker})

    def lost(self, worker: int) -> AsyncSchedule:
        """Take back all pieces of a worker, and do not wait for it any more."""
        return replace(self.returned(worker), clocks=self.clocks.lost(worker))

    def counting(self, counted: Sequence[bool]) -> AsyncSchedule:
        """Wait only for these workers from now on, ``(W,)``."""
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
