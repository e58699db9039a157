"""Look for the clusters that no other beats in time and cost, over mixes of two kinds and batches.

Branch and bound. `lower_bounds` says what every choice takes and costs at least, pair by pair of
kinds. Choices whose bound no judged choice beats are judged exactly, the most promising first,
until none could gain anything (`SearchResult.gap` is 0) or the time is up. The gap then says how
much one of the others could gain at most. Small spaces are always judged to the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations_with_replacement
from math import inf

import numpy as np

from evenstride.core.fleet import FloatArray, IntArray
from evenstride.planner.search.candidates import Kind, by_place, undominated
from evenstride.planner.search.exact_evaluation import ExactEvaluator
from evenstride.planner.search.frontier_queue import FrontierQueue, Rest
from evenstride.planner.search.lower_bounds import Bounds, Cells, Pair, cells, price
from evenstride.planner.search.objective import Wishes
from evenstride.planner.search.pareto import ParetoFront, frontier
from evenstride.planner.search.training_forecast import (
    ClusterChoice,
    TrainingForecast,
    TrainingTask,
)

__all__ = ["SMALL", "SearchResult", "Space", "frontier", "search"]

SMALL = 20_000
"""Choices up to which all that could gain anything are judged, and all kinds are looked at."""

_MOST_WORK = 4_000  # milliseconds of exact looks, roughly, in larger spaces
_FOR_THE_REST = 1_000  # of these for what is shown beside the choice
_AT_ONCE = 64  # looks between two looks at what is left
_PENDING = 100_000  # bounds that are kept without a look at what is worth keeping
_SEEDS = 60
_NONE = np.zeros(0)


@dataclass(frozen=True, slots=True)
class Space:
    """What is looked at."""

    kinds: tuple[Kind, ...]
    batches: tuple[int, ...]
    most_machines: int = 32
    mixed: bool = True


@dataclass(frozen=True, slots=True)
class SearchResult:
    """What a search came to.

    Args:
        outlooks: that no other beats in time and cost, the quickest first, of those that were
            judged.
        looked_at: choices, by their bounds.
        judged: exactly.
        gap: by which part another choice could be better than the best of these, as it is wished,
            at most; 0 if this is the best, infinite if it is not known whether another one keeps
            to the limits.
        front_gap: the same for the whole frontier: by how much both time and cost of one that is
            not in it could be less.
    """

    outlooks: tuple[TrainingForecast, ...]
    looked_at: int
    judged: int = 0
    gap: float = 0.0
    front_gap: float = 0.0


def search(space: Space, task: TrainingTask, wishes: Wishes | None = None) -> SearchResult:
    """Return the best choices of a space.

    Larger spaces leave out kinds that another one beats in everything; all else is looked at.

    Cost:
        Vectorised; ``O(pairs * machines^2 * batches)``, and some seconds of exact looks.
    """
    wishes = wishes or Wishes()
    batches = [batch for batch in space.batches if task.epochs.at(batch) is not None]
    if not batches or not space.kinds:
        return SearchResult((), 0)
    grids = {
        mixed: cells(space.most_machines, len(batches), mixed=mixed) for mixed in (False, True)
    }
    small = _all(space, grids) <= SMALL
    ends = wishes.confidence > 0.5
    pairs = list(_pairs(space, lambda kinds: kinds if small else undominated(kinds, ends=ends)))
    hunt = _Hunt(space, task, wishes, batches, pairs, grids)
    hunt.bound()
    hunt.settle(inf if small else _MOST_WORK)
    return hunt.found()


def _pairs(space: Space, chosen: Callable[[Sequence[Kind]], Sequence[Kind]]) -> Iterator[Pair]:
    """Yield the pairs of kinds of each place; those of one kind first, to see soon what is good."""
    places = [chosen(kinds) for kinds in by_place(space.kinds).values()]
    for kinds in places:
        yield from zip(kinds, kinds, strict=True)
    for kinds in places if space.mixed and space.most_machines > 1 else ():
        yield from (
            pair for pair in combinations_with_replacement(kinds, 2) if pair[0] is not pair[1]
        )


def _all(space: Space, grids: dict[bool, Cells]) -> int:
    """Return how many choices there are of all kinds."""
    places = [len(kinds) for kinds in by_place(space.kinds).values()]
    mixes = sum(n * (n - 1) // 2 for n in places) if space.mixed else 0
    return sum(places) * len(grids[False]) + mixes * len(grids[True])


def _count(pairs: Sequence[Pair], grids: dict[bool, Cells]) -> int:
    return sum(len(grids[one is not two]) for one, two in pairs)


class _Hunt:
    """A search under way."""

    def __init__(
        self,
        space: Space,
        task: TrainingTask,
        wishes: Wishes,
        batches: Sequence[int],
        pairs: Sequence[Pair],
        grids: dict[bool, Cells],
    ) -> None:
        most = space.most_machines * max(kind.workers for kind in space.kinds)
        self._pairs, self._grids, self._batches = pairs, grids, batches
        self._bounds = Bounds(task, batches, most, wishes.confidence)
        self._judge = ExactEvaluator(task, self._bounds)
        self._front = ParetoFront.of((), wishes)
        self._kept, self._rest = FrontierQueue.none(), Rest()
        self._allowed: dict[int, tuple[ParetoFront | None, FloatArray]] = {}

    def bound(self) -> None:
        """Work out the bounds of all choices, and keep those that may gain something."""
        pending, count = [self._kept], 0
        singles = sum(one is two for one, two in self._pairs)
        for number, pair in enumerate(self._pairs):
            grid = self._grids[pair[0] is not pair[1]]
            good = self._promising(pair, grid)
            if len(good):
                pending.append(self._bounded(number, pair, grid, good))
                count += len(pending[-1].pair)
            if number + 1 == singles or count > _PENDING:
                self._keep(pending)
                pending, count = [self._kept], 0
        self._keep(pending)

    def _promising(self, pair: Pair, grid: Cells) -> IntArray:
        """Return the cells of a pair that would not be beaten if nothing were lost, as expected.

        What a cluster may cost in an hour not to be beaten is the same for many pairs.
        """
        least = self._bounds.least(pair, grid)
        front, allowed = self._allowed.get(id(least), (None, _NONE))
        if front is not self._front:
            allowed = self._front.least_usd(least.useful_s) / (least.useful_s / 3600.0)
            self._allowed[id(least)] = self._front, allowed
        return np.flatnonzero(price(pair, grid, "value") < allowed)

    def _bounded(self, number: int, pair: Pair, grid: Cells, which: IntArray) -> FrontierQueue:
        """Return those of some cells of a pair that may gain something by their whole bounds."""
        least = self._bounds.least(pair, grid)
        time_s, usd = self._bounds.of(
            pair, grid.some(which), least.compute_s[which], least.error[which]
        )
        good = np.flatnonzero(~self._front.beaten(time_s, usd))
        return FrontierQueue.of(number, which[good], time_s[good], usd[good])

    def _keep(self, pending: Sequence[FrontierQueue]) -> None:
        """Judge the best of what is pending, and keep what may gain something still."""
        self._kept = FrontierQueue.joined(pending)
        seeds = self._kept.lowest(_SEEDS)
        for _ in range(2):
            self._look(seeds)
        self._drop_beaten()
        self._kept = self._rest.overflow(self._kept, self._front)

    def _drop_beaten(self) -> None:
        gains = self._front.gains(self._kept.time_s, self._kept.usd)
        self._kept = self._kept.some(np.flatnonzero(gains > 0.0))

    def settle(self, most_work: float) -> None:
        """Judge what may be better than the best, and then what may belong to the frontier."""
        self._until(lambda front: front.aimed_gains, most_work - min(_FOR_THE_REST, most_work))
        self._until(lambda front: front.gains, most_work)

    def _until(
        self,
        gains_of: Callable[[ParetoFront], Callable[[FloatArray, FloatArray], FloatArray]],
        most_work: float,
    ) -> None:
        while self._judge.work <= most_work:
            self._drop_beaten()
            time_s, usd = self._kept.time_s, self._kept.usd
            order = self._front.order(time_s, usd, gains_of(self._front)(time_s, usd))[:_AT_ONCE]
            if not len(order):
                return
            self._look(order)

    def _look(self, which: IntArray) -> None:
        """Bound some choices better, and judge those that this was done to already."""
        close = self._kept.close[which]
        for index in which[~close].tolist():
            self._kept.improve(index, *self._judge.closely(*self._choice(index)))
        exact = which[close]
        exact = exact[self._front.gains(self._kept.time_s[exact], self._kept.usd[exact]) > 0.0]
        judged = (self._judge.exactly(self._choice(index)[0]) for index in exact.tolist())
        self._front = self._front.with_more(one for one in judged if one is not None)
        self._kept.done(exact)

    def _choice(self, index: int) -> tuple[ClusterChoice, Pair, Cells]:
        pair = self._pairs[int(self._kept.pair[index])]
        some = self._grids[pair[0] is not pair[1]].some(self._kept.cell[index : index + 1])
        one, two = some.machines[:, 0].tolist()
        batch = self._batches[int(some.batch[0])]
        choice = (
            ClusterChoice(pair, (one, two), batch)
            if two
            else ClusterChoice(pair[:1], (one,), batch)
        )
        return choice, pair, some

    def found(self) -> SearchResult:
        """Return what was found so far."""
        self._drop_beaten()
        time_s, usd = self._rest.with_kept(self._kept)
        return SearchResult(
            self._front.outlooks,
            _count(self._pairs, self._grids),
            self._judge.judged,
            float(self._front.aimed_gains(time_s, usd).max(initial=0.0)),
            float(self._front.gains(time_s, usd).max(initial=0.0)),
        )
