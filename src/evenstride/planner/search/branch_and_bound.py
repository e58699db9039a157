"""Look for the clusters that no other beats in time and cost, over mixes of two kinds and batches.

Branch and bound. `lower_bounds` says what every choice takes and costs at least, pair by pair of
kinds. Choices whose bound no judged choice beats are judged exactly, the most promising first,
until none could gain anything (`SearchResult.gap` is 0) or the time is up. The gap then says how
much one of the others could gain at most. Small spaces are always judged to the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import inf

import numpy as np
import numpy.typing as npt

from evenstride.core.fleet import FloatArray, IntArray
from evenstride.errors import InfeasibleShares
from evenstride.planner.search.candidates import Kind, by_place, undominated
from evenstride.planner.search.lower_bounds import Bounds, Cells, Pair, cells, price
from evenstride.planner.search.objective import Wishes
from evenstride.planner.search.pareto import ParetoFront, frontier
from evenstride.planner.search.step_time import StepEstimate, exact_step
from evenstride.planner.search.training_forecast import (
    ClusterChoice,
    TrainingForecast,
    TrainingTask,
    outlook,
    step_error,
)

__all__ = ["SMALL", "SearchResult", "Space", "frontier", "search"]

SMALL = 20_000
"""Choices up to which all that could gain anything are judged, and all kinds are looked at."""

_MOST_WORK = 4_000  # milliseconds of exact looks, roughly, in larger spaces
_FOR_THE_REST = 1_000  # of these for what is shown beside the choice
_AT_ONCE = 64  # looks between two looks at what is left
_PENDING = 100_000  # bounds that are kept without a look at what is worth keeping
_MOST_KEPT = 300_000  # of more, those that could gain least are let go
_SEEDS = 60

# Milliseconds, roughly: what a run of the search may take is counted, so that it always ends at
# the same choice, whatever the machine.
_CLOSE, _STEP, _OUTLOOK, _SPOT = 0.2, 0.6, 0.1, 8.0
_DRIFTS = 5


@dataclass(frozen=True, slots=True)
class Space:
    """What is looked at."""

    kinds: tuple[Kind, ...]
    batches: tuple[int, ...]
    most_machines: int = 32
    mixed: bool = True


@dataclass(frozen=True, slots=True)
class SearchResult:
    """What a search came to."""

    # That no other beats in time and cost, the quickest first, of those that were judged
    outlooks: tuple[TrainingForecast, ...]
    looked_at: int  # choices, by their bounds
    judged: int = 0  # exactly
    # By which part another choice could be better than the best of these, as it is wished, at most;
    # 0 if this is the best, infinite if it is not known whether another one keeps to the limits
    gap: float = 0.0
    # The same for the whole frontier: by how much both time and cost of one that is not in it could
    # be less
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
        yield from combinations(kinds, 2)


def _all(space: Space, grids: dict[bool, Cells]) -> int:
    """Return how many choices there are of all kinds."""
    places = [len(kinds) for kinds in by_place(space.kinds).values()]
    mixes = sum(n * (n - 1) // 2 for n in places) if space.mixed else 0
    return sum(places) * len(grids[False]) + mixes * len(grids[True])


def _count(pairs: Sequence[Pair], grids: dict[bool, Cells]) -> int:
    return sum(len(grids[one is not two]) for one, two in pairs)


# Choices that were not judged yet: their pair of kinds by its number, their cell (machines of both
# and batch) likewise, what they take and cost at least, and whether these bounds are as close as
# they can be without judging the choice.
_OPEN = np.dtype(
    [
        ("pair", np.int64),
        ("cell", np.int64),
        ("time_s", np.float64),
        ("usd", np.float64),
        ("close", np.bool_),
    ]
)
_Open = npt.NDArray[np.void]


def _lower_left(some: _Open) -> IntArray:
    """Return the choices that no other is both quicker and cheaper than, the quickest first."""
    order = np.lexsort((some["usd"], some["time_s"]))
    order = order[np.isfinite(some["time_s"][order])]
    usd = some["usd"][order]
    before = np.concatenate([[inf], np.minimum.accumulate(usd)[:-1]])
    found: IntArray = order[usd < before[: len(order)]]
    return found


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
        self._task, self._batches = task, batches
        self._pairs, self._grids = pairs, grids
        self._bounds = Bounds(task, batches, most, wishes.confidence)
        self._front = ParetoFront.of((), wishes)
        self._open = np.zeros(0, dtype=_OPEN)
        self._let_go = np.zeros(0, dtype=_OPEN)  # for want of room: the best of these
        self._allowed: dict[int, tuple[ParetoFront, FloatArray]] = {}
        # Equal steps, as of one cluster in many places, are reckoned once.
        self._steps: dict[tuple[object, ...], StepEstimate | None] = {}
        self._work, self._judged = 0.0, 0

    def bound(self) -> None:
        """Work out the bounds of all choices, and keep those that may gain something."""
        pending, count = [self._open], 0
        singles = sum(one is two for one, two in self._pairs)
        for number, pair in enumerate(self._pairs):
            grid = self._grids[pair[0] is not pair[1]]
            good = self._promising(pair, grid)
            if len(good):
                pending.append(self._bounded(number, pair, grid, good))
                count += len(pending[-1])
            if number + 1 == singles or count > _PENDING:
                self._keep(pending)
                pending, count = [self._open], 0
        self._keep(pending)

    def _promising(self, pair: Pair, grid: Cells) -> IntArray:
        """Return the cells of a pair that would not be beaten if nothing were lost, as expected."""
        least = self._bounds.least(pair, grid)
        # What a cluster may cost in an hour not to be beaten is the same for many pairs.
        front, allowed = self._allowed.get(id(least), (None, None))
        if allowed is None or front is not self._front:
            allowed = self._front.least_usd(least.useful_s) / (least.useful_s / 3600.0)
            self._allowed[id(least)] = self._front, allowed
        return np.flatnonzero(price(pair, grid, "value") < allowed)

    def _bounded(self, number: int, pair: Pair, grid: Cells, which: IntArray) -> _Open:
        """Return those of some cells of a pair that may gain something by their whole bounds."""
        least = self._bounds.least(pair, grid)
        time_s, usd = self._bounds.of(
            pair, grid.some(which), least.compute_s[which], least.error[which]
        )
        good = np.flatnonzero(~self._front.beaten(time_s, usd))
        found = np.zeros(len(good), dtype=_OPEN)
        found["pair"] = number
        found["cell"] = which[good]
        found["time_s"] = time_s[good]
        found["usd"] = usd[good]
        return found

    def _keep(self, pending: Sequence[_Open]) -> None:
        """Judge the best of what is pending, and keep what may gain something still."""
        self._open = np.concatenate(pending)
        seeds = _lower_left(self._open)
        if len(seeds) > _SEEDS:
            seeds = seeds[np.linspace(0, len(seeds) - 1, _SEEDS).round().astype(np.int64)]
        for _ in range(2):
            self._look(seeds)
        self._drop_beaten()
        if len(self._open) > _MOST_KEPT:
            self._let_some_go()

    def _drop_beaten(self) -> None:
        self._open = self._open[self._front.gains(self._open["time_s"], self._open["usd"]) > 0.0]

    def _let_some_go(self) -> None:
        """Keep those that could gain most; of the others the best bounds still count in the gap."""
        time_s, usd = self._open["time_s"], self._open["usd"]
        order = self._front.order(time_s, usd, self._front.gains(time_s, usd))
        aimed = self._front.order(time_s, usd, self._front.aimed_gains(time_s, usd))
        first = np.unique(np.concatenate([order[: _MOST_KEPT // 4], aimed[: _MOST_KEPT // 4]]))
        gone = np.concatenate([self._let_go, np.delete(self._open, first)])
        self._let_go = gone[_lower_left(gone)]
        self._open = self._open[first]

    def settle(self, most_work: float) -> None:
        """Judge what may be better than the best, and then what may belong to the frontier."""
        self._until(lambda front: front.aimed_gains, most_work - min(_FOR_THE_REST, most_work))
        self._until(lambda front: front.gains, most_work)

    def _until(
        self,
        gains_of: Callable[[ParetoFront], Callable[[FloatArray, FloatArray], FloatArray]],
        most_work: float,
    ) -> None:
        while self._work <= most_work:
            self._drop_beaten()
            time_s, usd = self._open["time_s"], self._open["usd"]
            order = self._front.order(time_s, usd, gains_of(self._front)(time_s, usd))[:_AT_ONCE]
            if not len(order):
                return
            self._look(order)

    def _look(self, which: IntArray) -> None:
        """Bound some choices better, and judge those that this was done to already."""
        close = self._open["close"][which]
        for index in which[~close].tolist():
            self._look_closely(index)
        exact = which[close]
        some = self._open[exact]
        exact = exact[self._front.gains(some["time_s"], some["usd"]) > 0.0]
        judged = (self._exactly(index) for index in exact.tolist())
        self._front = self._front.with_more(one for one in judged if one is not None)
        # They were judged, and cannot gain anything more.
        self._open["time_s"][exact] = inf
        self._open["usd"][exact] = inf

    def _look_closely(self, index: int) -> None:
        """Bound a choice by its exact step."""
        self._work += _CLOSE
        choice, pair, some = self._choice(index)
        step = self._step(choice)
        time_s = usd = np.array([inf])
        if step is not None:
            compute_s = np.array([step.compute_s])
            error = np.array([step_error(choice.kinds, step)])
            time_s, usd = self._bounds.of(pair, some, compute_s, error, fine=True)
        self._open["close"][index] = True
        self._open["time_s"][index] = max(time_s[0], self._open["time_s"][index])
        self._open["usd"][index] = max(usd[0], self._open["usd"][index])

    def _exactly(self, index: int) -> TrainingForecast | None:
        """Return what a choice comes to; ``None`` if it does not fit, or may never end."""
        choice, _, _ = self._choice(index)
        waits = any(kind.transience and kind.transience.waits_s for kind in choice.kinds)
        self._judged += 1
        self._work += _SPOT * (_DRIFTS if waits else 1) if choice.spot else _OUTLOOK
        step = self._step(choice)
        return None if step is None else outlook(choice, self._task, step)

    def _step(self, choice: ClusterChoice) -> StepEstimate | None:
        fleet = [kind.machines(n) for kind, n in zip(choice.kinds, choice.counts, strict=True)]
        key = (choice.batch, *((one.curve, one.count, one.most_samples) for one in fleet))
        if key not in self._steps:
            self._work += _STEP
            try:
                self._steps[key] = exact_step(fleet, choice.batch, self._task.ring)
            except InfeasibleShares:
                self._steps[key] = None
        return self._steps[key]

    def _choice(self, index: int) -> tuple[ClusterChoice, Pair, Cells]:
        one = self._open[index]
        pair = self._pairs[int(one["pair"])]
        some = self._grids[pair[0] is not pair[1]].some(one["cell"].reshape(1))
        first, second = some.machines[:, 0].tolist()
        batch = self._batches[int(some.batch[0])]
        if second:
            return ClusterChoice(pair, (first, second), batch), pair, some
        return ClusterChoice(pair[:1], (first,), batch), pair, some

    def found(self) -> SearchResult:
        """Return what was found so far."""
        self._drop_beaten()
        left = np.concatenate([self._let_go, self._open])
        return SearchResult(
            self._front.outlooks,
            _count(self._pairs, self._grids),
            self._judged,
            float(self._front.aimed_gains(left["time_s"], left["usd"]).max(initial=0.0)),
            float(self._front.gains(left["time_s"], left["usd"]).max(initial=0.0)),
        )
