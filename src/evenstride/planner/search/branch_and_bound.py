"""Search for the clusters that no other beats in time and cost: mixes of two kinds, and batches.

Branch and bound. `Bounds` has lower bounds of the time and cost of every choice, for each pair of
kinds, never above the exact values. Choices whose bound is not beaten are evaluated exactly, the
most promising first, until none could improve the result (`SearchResult.gap` is 0) or the time is
up. The gap is then the largest possible improvement by any other choice. Small spaces are always
searched completely.

All values are at the requested probability: one half is the expected case, and a larger one is an
end of the intervals, see `at_most`. A bound of the end follows from bounds of its parts. It
grows with the training time without preemptions, with its mean lengthening by preemptions, and with
the end of that lengthening.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import inf, log, sqrt
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from evenstride.core.fleet import FloatArray, IntArray
from evenstride.core.gradients.noise_scale import Z95
from evenstride.errors import InfeasibleShares
from evenstride.planner.search.selection import ParetoFront, Wishes
from evenstride.planner.search.training_forecast import (
    UNKNOWN_LINKS,
    ClusterChoice,
    Kind,
    TrainingForecast,
    TrainingTask,
    by_place,
    outlook,
    step_error,
    undominated,
)
from evenstride.planner.spot_losses import high_stretches, mean_stretches
from evenstride.planner.workload.step_time import (
    Curve,
    StepEstimate,
    exact_step,
    lateness,
    least_compute_s,
)

Pair = tuple[Kind, Kind]
_Shape = tuple[Curve, Curve, int, int, int | None, int | None, bool]


@dataclass(frozen=True, slots=True, eq=False)
class Cells:
    """Clusters and batches of a pair of kinds."""

    machines: IntArray  # of both kinds, ``(2, n)``; 0 of the second if they are the same
    batch: IntArray  # its index, ``(n,)``

    def __len__(self) -> int:
        return len(self.batch)

    def some(self, which: IntArray) -> Cells:
        return Cells(self.machines[:, which], self.batch[which])


@dataclass(frozen=True, slots=True, eq=False)
class Least:
    """Lower bounds of steps, arrays of ``(n,)``."""

    compute_s: FloatArray  # of a step
    error: FloatArray  # its relative deviation
    useful_s: FloatArray  # of the whole training, with communication, without preemptions


def cells(most_machines: int, batches: int, *, mixed: bool) -> Cells:
    """Return all clusters of one kind, or of two, combined with batches."""
    each = np.arange(1, most_machines + 1)
    one, two = (axis.ravel() for axis in np.meshgrid(each, each, indexing="ij"))
    few = one + two <= most_machines
    counts = np.stack([one[few], two[few]] if mixed else [each, np.zeros_like(each)])
    return Cells(np.tile(counts, (1, batches)), np.repeat(np.arange(batches), counts.shape[1]))


class Bounds:
    """Lower bounds of the time and cost of clusters."""

    def __init__(
        self, task: TrainingTask, batches: Sequence[int], most_workers: int, confidence: float
    ) -> None:
        self.task, self.batches = task, np.array(batches)
        self._z = NormalDist().inv_cdf(confidence)
        epochs = [task.epochs.at(batch) for batch in batches]
        self._steps = np.array(
            [
                one.value * -(-task.samples // b)
                for one, b in zip(epochs, batches, strict=True)
                if one
            ]
        )
        self._beside_s = np.array([one.value * task.beside_s for one in epochs if one])
        ups = [log(one.high / one.value) if one.high < inf else inf for one in epochs if one]
        self._unsure = np.array(ups if self._z else [0.0 for _ in ups])
        self._late = lateness(most_workers)
        sync_s = [task.ring.all_reduce_s(n) if n > 1 else 0.0 for n in range(most_workers + 1)]
        self._sync_s = np.array(sync_s)
        self._least: dict[_Shape, Least] = {}

    def least(self, pair: Pair, some: Cells) -> Least:
        """Return the bounds of all cells of a pair without preemptions and prices; cached.

        ``some`` are all cells of one kind, or all of two: the same ones at each call.
        """
        one, two = pair
        alone = not some.machines[1].any()
        shape = (one.curve, two.curve, one.workers, two.workers)
        known = (*shape, one.most_samples, two.most_samples, alone)
        if known not in self._least:
            most = (one.most_samples or inf, two.most_samples or inf)
            batches, workers = self.batches[some.batch], _workers(pair, some)
            compute_s, error = least_compute_s(
                one.curve, two.curve, workers, batches, most, self._late
            )
            useful_s = self._useful_s(some, compute_s + self._sync_s[workers.sum(axis=0)])
            self._least[known] = Least(compute_s, error, useful_s)
        return self._least[known]

    def of(
        self,
        pair: Pair,
        some: Cells,
        compute_s: FloatArray,
        error: FloatArray,
        *,
        fine: bool = False,
    ) -> tuple[FloatArray, FloatArray]:
        """Return the least time in seconds and the least cost in USD."""
        workers = _workers(pair, some).sum(axis=0)
        sync_s = self._sync_s[workers]
        useful_s = self._useful_s(some, compute_s + sync_s)
        mean, high = self._stretch(pair, some, useful_s, fine=fine)
        per_h = [price(pair, some, end) for end in ("value", "high")]
        if not self._z:
            time_s = useful_s * mean
            return time_s, time_s / 3600.0 * per_h[0]
        with np.errstate(invalid="ignore"):  # choices that do not fit are infinite
            part = self._part(some, error * compute_s, compute_s, sync_s)
        unsure = np.hypot(self._unsure[some.batch], Z95 * part)
        price_error = np.log(per_h[1] / per_h[0])
        time_s = useful_s * self._end(mean, high, unsure)
        usd = useful_s / 3600.0 * per_h[0] * self._end(mean, high, np.hypot(unsure, price_error))
        return time_s, usd

    def _useful_s(self, some: Cells, step_s: FloatArray) -> FloatArray:
        return np.asarray(self._steps[some.batch] * step_s + self._beside_s[some.batch])

    def _part(
        self, some: Cells, error_s: FloatArray, compute_s: FloatArray, sync_s: FloatArray
    ) -> FloatArray:
        """Return a relative deviation of a step whose end is not above the true end."""
        step_s = compute_s + sync_s
        if self.task.links is None:
            links_s = UNKNOWN_LINKS * sync_s  # 0 for a single worker
            whole_s = step_s + self._beside_s[some.batch] / self._steps[some.batch]
            # If links dominate a step, or steps are a small part of the training, slightly more
            # compute makes the end earlier: the deviation falls by more than the time grows.
            grows = self._z * links_s * whole_s <= step_s**2
            error_s = np.where(grows, np.hypot(error_s, links_s), error_s)
        return np.asarray(error_s / step_s)

    def _stretch(
        self, pair: Pair, some: Cells, useful_s: FloatArray, *, fine: bool
    ) -> tuple[FloatArray, FloatArray]:
        """Return lower bounds of the lengthening by preemptions, on average and at the end."""
        one, two = pair
        kinds = pair[:1] if one is two else pair
        saves = self.task.saves.waiting(kind.transience for kind in kinds)
        lost = (saves, one.transience, two.transience, some.machines)
        if not one.spot and not two.spot:
            return np.ones(len(some)), np.ones(len(some))
        mean = mean_stretches(*lost, fine=fine)
        if not self._z:
            return mean, mean
        return mean, np.maximum(high_stretches(*lost, np.maximum(useful_s, 1e-9)), mean)

    def _end(self, mean: FloatArray, high: FloatArray, unsure: FloatArray) -> FloatArray:
        """Return the end of a value that is the mean lengthening times an ``unsure`` factor.

        It is the least over all means between the bound and the end. A larger mean brings them
        together, which matters more only far out.
        """
        part, up = self._z / Z95, np.log(high / mean)
        if part > 1.0:
            up = np.minimum(up, unsure / sqrt(part**2 - 1.0))
        return np.asarray(high * np.exp(part * np.hypot(unsure, up) - up))


def _workers(pair: Pair, some: Cells) -> IntArray:
    return np.asarray(some.machines * np.array([[pair[0].workers], [pair[1].workers]]))


def price(pair: Pair, some: Cells, end: str) -> FloatArray:
    """Return the price per hour of clusters, or an end of its interval."""
    one, two = (getattr(kind.usd_per_h, end) for kind in pair)
    return np.asarray(one * some.machines[0] + two * some.machines[1])


SMALL = 20_000
"""Number of choices up to which the search is complete and considers all kinds."""

_MOST_WORK = 4_000  # milliseconds of exact evaluations, roughly, in larger spaces
_FOR_THE_REST = 1_000  # of these, for results other than the chosen one.
_AT_ONCE = 64  # evaluations between two looks at the remaining choices.
_PENDING = 100_000  # bounds to collect before useless ones are dropped.
_MOST_KEPT = 300_000  # of more, those that could improve least are dropped.
_SEEDS = 60

# Milliseconds, roughly: the search counts its work instead of the time, so that it always ends at
# the same choice, on any machine.
_CLOSE, _STEP, _OUTLOOK, _SPOT = 0.2, 0.6, 0.1, 8.0
_DRIFTS = 5


@dataclass(frozen=True, slots=True)
class Space:
    """The choices to search."""

    kinds: tuple[Kind, ...]
    batches: tuple[int, ...]
    most_machines: int = 32
    mixed: bool = True


@dataclass(frozen=True, slots=True)
class SearchResult:
    """The result of a search."""

    # Evaluated choices that no other beats in time and cost, the fastest first.
    outlooks: tuple[TrainingForecast, ...]
    looked_at: int  # number of choices with bounds.
    judged: int = 0  # number of exact evaluations.
    # Largest fraction by which another choice could be better than the best, by the objective; 0 if
    # this is the best, infinite if it is not known whether another one is within the limits.
    gap: float = 0.0
    # The same for the whole frontier: by how much both time and cost of a choice outside of it
    # could be lower.
    front_gap: float = 0.0


def search(space: Space, task: TrainingTask, wishes: Wishes | None = None) -> SearchResult:
    """Return the best choices of a space.

    Larger spaces leave out kinds that another one beats in everything; all others are searched.

    Cost:
        Vectorised; ``O(pairs * machines^2 * batches)``, plus some seconds of exact evaluations.
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
    """Yield the pairs of kinds of each place; single kinds first, to find good choices early."""
    places = [chosen(kinds) for kinds in by_place(space.kinds).values()]
    for kinds in places:
        yield from zip(kinds, kinds, strict=True)
    for kinds in places if space.mixed and space.most_machines > 1 else ():
        yield from combinations(kinds, 2)


def _all(space: Space, grids: dict[bool, Cells]) -> int:
    places = [len(kinds) for kinds in by_place(space.kinds).values()]
    mixes = sum(n * (n - 1) // 2 for n in places) if space.mixed else 0
    return sum(places) * len(grids[False]) + mixes * len(grids[True])


# Choices that were not evaluated yet: the index of their pair of kinds and that of their cell
# (machines of both and batch), and the bounds of time and cost. ``close`` bounds are as tight as
# possible without an exact evaluation.
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
    """Return the choices that no other is both faster and cheaper than, the fastest first."""
    order = np.lexsort((some["usd"], some["time_s"]))
    order = order[np.isfinite(some["time_s"][order])]
    usd = some["usd"][order]
    before = np.concatenate([[inf], np.minimum.accumulate(usd)[:-1]])
    return np.asarray(order[usd < before[: len(order)]])


class _Hunt:
    """A search in progress."""

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
        self._front = ParetoFront[TrainingForecast].of((), wishes)
        self._open = np.zeros(0, dtype=_OPEN)
        self._let_go = np.zeros(0, dtype=_OPEN)  # the best of the choices dropped for lack of room
        self._allowed: dict[int, tuple[ParetoFront[TrainingForecast], FloatArray]] = {}
        # Equal steps, such as of one cluster in many places, are computed once.
        self._steps: dict[tuple[object, ...], StepEstimate | None] = {}
        self._work, self._judged = 0.0, 0

    def bound(self) -> None:
        """Compute the bounds of all choices, and keep those that may improve the result."""
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
        """Return the cells of a pair that might not be beaten, without preemptions."""
        least = self._bounds.least(pair, grid)
        # The highest useful price per hour of a cluster is the same for many pairs.
        front, allowed = self._allowed.get(id(least), (None, None))
        if allowed is None or front is not self._front:
            allowed = self._front.least_usd(least.useful_s) / (least.useful_s / 3600.0)
            self._allowed[id(least)] = self._front, allowed
        return np.flatnonzero(price(pair, grid, "value") < allowed)

    def _bounded(self, number: int, pair: Pair, grid: Cells, which: IntArray) -> _Open:
        """Return those of some cells of a pair whose full bounds may improve the result."""
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
        """Evaluate the best pending choices, and keep those that may still improve the result."""
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
        """Keep the most promising choices; the best bounds of the others still count in the gap."""
        time_s, usd = self._open["time_s"], self._open["usd"]
        order = self._front.order(time_s, usd, self._front.gains(time_s, usd))
        aimed = self._front.order(time_s, usd, self._front.aimed_gains(time_s, usd))
        first = np.unique(np.concatenate([order[: _MOST_KEPT // 4], aimed[: _MOST_KEPT // 4]]))
        gone = np.concatenate([self._let_go, np.delete(self._open, first)])
        self._let_go = gone[_lower_left(gone)]
        self._open = self._open[first]

    def settle(self, most_work: float) -> None:
        """Evaluate choices that may be better than the best, then those of the frontier."""
        self._until(most_work - min(_FOR_THE_REST, most_work), aimed=True)
        self._until(most_work, aimed=False)

    def _until(self, most_work: float, *, aimed: bool) -> None:
        while self._work <= most_work:
            self._drop_beaten()
            time_s, usd = self._open["time_s"], self._open["usd"]
            gains = (self._front.aimed_gains if aimed else self._front.gains)(time_s, usd)
            order = self._front.order(time_s, usd, gains)[:_AT_ONCE]
            if not len(order):
                return
            self._look(order)

    def _look(self, which: IntArray) -> None:
        """Tighten the bounds of some choices, and evaluate those with tight bounds."""
        close = self._open["close"][which]
        for index in which[~close].tolist():
            self._look_closely(index)
        exact = which[close]
        some = self._open[exact]
        exact = exact[self._front.gains(some["time_s"], some["usd"]) > 0.0]
        judged = (self._exactly(index) for index in exact.tolist())
        self._front = self._front.with_more(one for one in judged if one is not None)
        # They were evaluated, and cannot improve the result any more.
        self._open["time_s"][exact] = inf
        self._open["usd"][exact] = inf

    def _look_closely(self, index: int) -> None:
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
        """Return the forecast of a choice; ``None`` if it does not fit, or may never end."""
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
        self._drop_beaten()
        left = np.concatenate([self._let_go, self._open])
        return SearchResult(
            self._front.outlooks,
            sum(len(self._grids[one is not two]) for one, two in self._pairs),
            self._judged,
            float(self._front.aimed_gains(left["time_s"], left["usd"]).max(initial=0.0)),
            float(self._front.gains(left["time_s"], left["usd"]).max(initial=0.0)),
        )
