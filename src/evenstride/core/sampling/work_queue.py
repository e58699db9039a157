"""One epoch's positions, handed out to workers that do not keep step, each exactly once.

Where all workers take a step together, the position in the data is one number (`partition`). Where
each takes its own, it is not: a worker may still train an early piece when later ones are done,
and may be lost with it. So for every worker it is kept what it has been given and has not trained
yet. Whatever a lost worker had is given again, before anything new.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

Piece = tuple[range, ...]
"""Positions given at once, in stretches: what one update trains."""


@dataclass(frozen=True, slots=True)
class WorkQueue:
    """Which positions of an epoch are given, and which of them are trained.

    Cost:
        O(W) each, and as many steps as the worker concerned has pieces, or there are stretches
        that have come back. Nothing depends on the samples.

    >>> handout, mine = WorkQueue.of(end=10, workers=2).give(0, 4)
    >>> handout, yours = handout.give(1, 3)
    >>> mine, yours
    ((range(0, 4),), (range(4, 7),))
    >>> handout = handout.trained(1).lost(0)
    >>> handout.give(1, 6)[1], handout.position
    ((range(0, 4), range(7, 9)), 3)
    """

    end: int  # positions of the epoch, ``0 .. end - 1``.
    pieces: tuple[tuple[Piece, ...], ...]  # what each worker has in hand, oldest first
    begun: int = 0  # positions below this one have been given before, at least once
    # Positions that were given, came back untrained, and have not been given again: ascending, with
    # gaps in between.
    returned: Piece = ()

    @classmethod
    def of(cls, end: int, workers: int) -> WorkQueue:
        """Return the beginning of an epoch.

        Raises:
            ValueError: either is too small.
        """
        if end < 0 or workers < 1:
            raise ValueError(
                f"{end} positions for {workers} workers: at least 0 for at least 1; count the "
                "samples of the epoch and those who train them"
            )
        return cls(end, ((),) * workers)

    @property
    def left(self) -> int:
        """Positions that are to be given yet."""
        return self.end - self.begun + _count(self.returned)

    @property
    def out(self) -> int:
        """Positions given and not trained yet."""
        return sum(_count(piece) for pieces in self.pieces for piece in pieces)

    @property
    def position(self) -> int:
        """Positions trained; not the first ones in general."""
        return self.end - self.left - self.out

    @property
    def done(self) -> bool:
        """Whether all positions are trained."""
        return not self.left and not self.out

    def give(self, worker: int, samples: int) -> tuple[WorkQueue, Piece]:
        """Return the handout after a worker was given a piece, and the piece.

        Returns:
            As many as are left, at most ``samples``: those that came back first, then new ones.
            An empty piece is none: there is nothing to train.

        Raises:
            ValueError: there is no such worker, or ``samples`` is below 0.
        """
        hand = self._hand(worker)
        if samples < 0:
            raise ValueError(f"{samples} samples for worker {worker}: at least 0; ask for a share")
        first, rest = _split(self.returned, samples)
        begun = min(self.begun + samples - _count(first), self.end)
        new = (range(self.begun, begun),) if begun > self.begun else ()
        piece = _joined((*first, *new))
        if not piece:
            return self, ()
        given = replace(self, begun=begun, returned=rest)
        return given._with(worker, (*hand, piece)), piece

    def trained(self, worker: int) -> WorkQueue:
        """Return the handout after a worker's oldest piece was trained.

        Raises:
            ValueError: there is no such worker, or it has no piece.
        """
        hand = self._hand(worker)
        if not hand:
            raise ValueError(
                f"worker {worker} has trained a piece, but has none; give it one first, and book "
                "each update once"
            )
        return self._with(worker, hand[1:])

    def lost(self, worker: int) -> WorkQueue:
        """Return the handout after all of a worker's pieces came back; it may have none.

        It may be given pieces again, if it is started anew.

        Raises:
            ValueError: there is no such worker.
        """
        back = _joined([*self.returned, *(s for piece in self._hand(worker) for s in piece)])
        return replace(self, returned=back)._with(worker, ())

    def _hand(self, worker: int) -> tuple[Piece, ...]:
        if not 0 <= worker < len(self.pieces):
            raise ValueError(
                f"there is no worker {worker}: there are {len(self.pieces)}, counted from 0; name "
                "one of them"
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
    """Return the same positions in as few stretches as there can be, ascending."""
    joined = list[range]()
    for stretch in sorted(stretches, key=lambda stretch: stretch.start):
        if joined and joined[-1].stop == stretch.start:
            joined[-1] = range(joined[-1].start, stretch.stop)
        else:
            joined.append(stretch)
    return tuple(joined)
