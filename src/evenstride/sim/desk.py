"""Who trains which samples next, and who may go on, where virtual workers do not keep step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from evenstride.core.clocks import Clocks
from evenstride.core.handout import Handout, Piece


class Desk:
    """Hands out one epoch after the other, and keeps the clocks of those who are waited for.

    Args:
        workers: there ever are; nobody is there at first.
        staleness: the bound for `Clocks`; ``None`` for none.
    """

    def __init__(self, workers: int, staleness: int | None) -> None:
        self._clocks = Clocks(staleness, (None,) * workers)
        self._handout = Handout.of(0, workers)
        self._waiting: dict[int, None] = {}

    @property
    def done(self) -> bool:
        """Whether all of the epoch is trained."""
        return self._handout.done

    @property
    def waiting(self) -> tuple[int, ...]:
        """Those who wait, in the order in which they began to."""
        return tuple(self._waiting)

    def open(self, samples: int) -> None:
        """Begin an epoch of so many samples, when all have made their updates."""
        self._handout = Handout.of(samples, len(self._clocks.clocks))
        self._clocks = self._clocks.aligned()

    def wait(self, worker: int) -> None:
        """Note that a worker has nothing to do."""
        self._waiting[worker] = None

    def begin(self, share: Callable[[int], int]) -> Iterator[tuple[int, Piece]]:
        """Yield all who wait, may begin, and get something, with what they get.

        Args:
            share: returns that of a worker; 0 for who gets nothing, and is not waited for.
        """
        may = dict[int | None, bool]()  # by clock, as few differ
        for worker in self.waiting:
            if not self._handout.left:
                return
            samples, clock = share(worker), self._clocks.clocks[worker]
            if samples and clock not in may:
                may[clock] = self._clocks.may_begin(worker)
            if samples and may[clock]:
                self._handout, piece = self._handout.give(worker, samples)
                del self._waiting[worker]
                yield worker, piece

    def made(self, worker: int) -> None:
        """Book an update; the worker has nothing to do then."""
        self._handout = self._handout.trained(worker)
        if self._clocks.clocks[worker] is not None:
            self._clocks = self._clocks.ticked(worker)
        self.wait(worker)

    def gone(self, worker: int) -> None:
        """Take back what a worker has in hand."""
        self._handout = self._handout.lost(worker)
        self._waiting.pop(worker, None)

    def count(self, counted: Sequence[bool]) -> None:
        """Wait for these workers from now on, and for nobody else.

        Who is counted anew is as far as the slowest of the others. An update under way of who is
        counted no more is not waited for.

        Args:
            counted: whether each is, ``(W,)``.
        """
        pairs = list(zip(self._clocks.clocks, counted, strict=True))
        left = replace(self._clocks, clocks=tuple(c if here else None for c, here in pairs))
        clocks = tuple((left.slowest if c is None else c) if here else None for c, here in pairs)
        self._clocks = replace(self._clocks, clocks=clocks)
