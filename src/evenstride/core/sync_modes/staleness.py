"""Who may go ahead of whom by how much, and how old the weights were that updates came from.

A worker's *clock* is the number of updates it has made. With bounded staleness ``s`` a worker may
begin its next update while its clock is at most ``s`` above that of the slowest worker that is
still there. From this follow, for any speeds:

- whoever is making an update is at most ``s`` ahead of the slowest, and whoever has made one at
  most ``s + 1``;
- the slowest may always begin, so that never all wait;
- while an update is made, each other worker ends at most ``2 s + 1``: it was at most ``s`` behind
  at the begin, and is at most ``s + 1`` ahead at the end. So the *staleness* of an update is at
  most ``(W - 1)(2 s + 1)`` with ``W`` workers.

The staleness of an update is the number of updates that were applied between this worker's pull of
the weights and its push of the update, without its own: the version of the weights just before
the push is applied, less the version that was pulled, where a version counts the updates applied.
A worker has one update under way at a time, so none of those in between is its own. A worker
alone has staleness 0 in every update.

Source:
    Ho et al., "More effective distributed ML via a stale synchronous parallel parameter server",
    NIPS 2013. Not verified: its abstract and reviews were read, not its text. As others tell it,
    the fastest is at most ``s`` clocks ahead of the slowest, which holds here for workers that
    compute. There workers may read from caches that are older than the servers; here weights come
    from the servers before each update.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

_CELLS = 16  # staleness 0 to 15 each; what is above has one together


@dataclass(frozen=True, slots=True)
class Clocks:
    """How many updates each worker has made.

    Cost:
        O(W) each.

    >>> clocks = Clocks.of(2, staleness=1).ticked(0)
    >>> clocks.may_begin(0), clocks.ticked(0).may_begin(0), clocks.ticked(0).may_begin(1)
    (True, False, True)
    >>> clocks.ticked(0).lost(1).may_begin(0)
    True
    """

    # By how many updates a worker that begins another may be ahead of the slowest, at least 0;
    # ``None`` if nobody waits.
    staleness: int | None
    clocks: tuple[int | None, ...]  # per worker; ``None`` for those that are lost

    @classmethod
    def of(cls, workers: int, staleness: int | None) -> Clocks:
        """Return the clocks of workers that have made no update.

        Raises:
            ValueError: either is too small.
        """
        if workers < 1 or (staleness is not None and staleness < 0):
            raise ValueError(
                f"{workers} workers with a staleness of {staleness}: at least 1 with at least 0; "
                "None is no bound"
            )
        return cls(staleness, (0,) * workers)

    @property
    def slowest(self) -> int:
        """The lowest clock of those who are there; 0 if nobody is."""
        return min(self._there, default=0)

    def ahead(self, worker: int) -> int:
        """Return by how many updates a worker is ahead of the slowest.

        Raises:
            ValueError: there is no such worker, or it is lost.
        """
        return self._clock(worker) - self.slowest

    def may_begin(self, worker: int) -> bool:
        """Return whether a worker may begin its next update; one that may not asks again later.

        It is to pull the weights after it was allowed to, not while it waits: they would be older.

        Raises:
            ValueError: there is no such worker, or it is lost.
        """
        ahead = self.ahead(worker)
        return self.staleness is None or ahead <= self.staleness

    def ticked(self, worker: int) -> Clocks:
        """Return the clocks after a worker made an update.

        Raises:
            ValueError: there is no such worker, or it is lost.
        """
        return self._with(worker, self._clock(worker) + 1)

    def lost(self, worker: int) -> Clocks:
        """Return the clocks without a worker that nobody waits for any more.

        Raises:
            ValueError: there is no such worker, or it is lost already.
        """
        self._clock(worker)
        return self._with(worker, None)

    def aligned(self) -> Clocks:
        """Return the clocks after a barrier: all who are there have that of the fastest.

        To be called when all are there and none has an update under way, as at the end of an
        epoch: otherwise who had done less would have to be waited for in the next one as well.
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
                f"worker {worker} has no clock: there are {there}; it is lost, or was never there"
            )
        return clock

    def _with(self, worker: int, clock: int | None) -> Clocks:
        return replace(self, clocks=(*self.clocks[:worker], clock, *self.clocks[worker + 1 :]))


@dataclass(frozen=True, slots=True)
class Staleness:
    """What was seen of the staleness of updates, as this module defines it.

    >>> Staleness().counted(0).counted(3).to_dict()["mean"]
    1.5
    """

    count: int = 0  # updates
    total: int = 0  # their staleness summed up
    maximum: int = 0  # the largest; 0 if there is none
    # Updates of staleness 0 to 15, and above: 17 counts.
    histogram: tuple[int, ...] = (0,) * (_CELLS + 1)

    @property
    def mean(self) -> float:
        """The mean staleness; 0 if no update was counted."""
        return self.total / self.count if self.count else 0.0

    def counted(self, staleness: int) -> Staleness:
        """Return the statistics with one more update.

        Args:
            staleness: version at the push less version at the pull, at least 0.

        Raises:
            ValueError: it is below 0.
        """
        if staleness < 0:
            raise ValueError(
                f"an update of staleness {staleness}: at least 0; subtract the version pulled from "
                "the one before the push is applied"
            )
        cells = list(self.histogram)
        cells[min(staleness, _CELLS)] += 1
        most = max(self.maximum, staleness)
        return Staleness(self.count + 1, self.total + staleness, most, tuple(cells))

    def merged(self, other: Staleness) -> Staleness:
        """Return the statistics of both together."""
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
    """Return the staleness of all updates, and under ``workers`` of each worker's."""
    together = Staleness()
    for one in workers:
        together = together.merged(one)
    return {**together.to_dict(), "workers": [one.to_dict() for one in workers]}
