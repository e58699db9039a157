"""What clusters of two kinds take and cost at least, many at once: never above the exact figures.

All figures are at the probability that is asked for: one half is the expected case, and beyond it
an end of the intervals, see `at_most`. A bound of the end follows from bounds of its parts, since
it grows with the time that training takes without losses, with how much longer losses make it on
average, and with the end of that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, log, sqrt
from statistics import NormalDist

import numpy as np

from evenstride.core.fleet import FloatArray, IntArray
from evenstride.core.gradients.noise_scale import Z95, Interval
from evenstride.planner.search.candidates import Kind
from evenstride.planner.search.step_time import lateness, least_compute_s
from evenstride.planner.search.training_forecast import UNKNOWN_LINKS, TrainingTask
from evenstride.planner.spot.restart_tables import finer_stretches, high_stretches, mean_stretches
from evenstride.planner.workload.step_curve import Curve

Pair = tuple[Kind, Kind]
_Shape = tuple[Curve, Curve, int, int, int | None, int | None, bool]


@dataclass(frozen=True, slots=True, eq=False)
class Cells:
    """Clusters and batches that are looked at of a pair of kinds."""

    machines: IntArray  # of both kinds, ``(2, n)``; none of the second if they are the same
    batch: IntArray  # by its number, ``(n,)``

    def __len__(self) -> int:
        return len(self.batch)

    def some(self, which: IntArray) -> Cells:
        """Return some of them."""
        return Cells(self.machines[:, which], self.batch[which])


@dataclass(frozen=True, slots=True, eq=False)
class Least:
    """What steps take at least, arrays of ``(n,)``."""

    compute_s: FloatArray  # of a step
    error: FloatArray  # its deviation, as a part
    useful_s: FloatArray  # the whole training, communication included, losses not


def cells(most_machines: int, batches: int, *, mixed: bool) -> Cells:
    """Return all clusters of one kind, or of two, crossed with batches."""
    each = np.arange(1, most_machines + 1)
    one, two = (axis.ravel() for axis in np.meshgrid(each, each, indexing="ij"))
    few = one + two <= most_machines
    counts = np.stack([one[few], two[few]] if mixed else [each, np.zeros_like(each)])
    return Cells(np.tile(counts, (1, batches)), np.repeat(np.arange(batches), counts.shape[1]))


class Bounds:
    """What clusters take and cost at least."""

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
        self._unsure = np.array([_up(one) if self._z else 0.0 for one in epochs if one])
        self._late = lateness(most_workers)
        sync_s = [task.ring.all_reduce_s(n) if n > 1 else 0.0 for n in range(most_workers + 1)]
        self._sync_s = np.array(sync_s)
        self._least: dict[_Shape, Least] = {}

    def least(self, pair: Pair, some: Cells) -> Least:
        """Return what is known of all cells of a pair but losses and prices; reckoned once.

        Args:
            pair: of kinds.
            some: all cells of one kind, or all of two: the same ones at each call.
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
        with np.errstate(invalid="ignore"):  # what does not fit is infinite
            part = self._part(some, error * compute_s, compute_s, sync_s)
        unsure = np.hypot(self._unsure[some.batch], Z95 * part)
        dear = np.log(per_h[1] / per_h[0])
        time_s = useful_s * self._end(mean, high, unsure)
        usd = useful_s / 3600.0 * per_h[0] * self._end(mean, high, np.hypot(unsure, dear))
        return time_s, usd

    def _useful_s(self, some: Cells, step_s: FloatArray) -> FloatArray:
        """Return what training takes without losses, from its steps."""
        found: FloatArray = self._steps[some.batch] * step_s + self._beside_s[some.batch]
        return found

    def _part(
        self, some: Cells, error_s: FloatArray, compute_s: FloatArray, sync_s: FloatArray
    ) -> FloatArray:
        """Return the deviation of a step, as a part, so that its end is at least what it is."""
        step_s = compute_s + sync_s
        if self.task.links is None:
            links_s = UNKNOWN_LINKS * sync_s  # none for a single worker
            whole_s = step_s + self._beside_s[some.batch] / self._steps[some.batch]
            # Where links are nearly all of a step, or steps a small part of the training, a little
            # more compute makes the end sooner: the deviation falls by more than the time grows.
            grows = self._z * links_s * whole_s <= step_s**2
            error_s = np.where(grows, np.hypot(error_s, links_s), error_s)
        found: FloatArray = error_s / step_s
        return found

    def _stretch(
        self, pair: Pair, some: Cells, useful_s: FloatArray, *, fine: bool
    ) -> tuple[FloatArray, FloatArray]:
        """Return by what losses make it longer, on average and at the end, at least."""
        one, two = pair
        kinds = pair[:1] if one is two else pair
        saves = self.task.saves.waiting(kind.transience for kind in kinds)
        lost = (saves, one.transience, two.transience, some.machines)
        if not one.spot and not two.spot:
            return np.ones(len(some)), np.ones(len(some))
        mean = (finer_stretches if fine else mean_stretches)(*lost)
        if not self._z:
            return mean, mean
        return mean, np.maximum(high_stretches(*lost, np.maximum(useful_s, 1e-9)), mean)

    def _end(self, mean: FloatArray, high: FloatArray, unsure: FloatArray) -> FloatArray:
        """Return the end of a figure that is the stretch's mean times what is ``unsure``.

        The least over all means between the bound and the end: a larger mean brings them
        together, which counts for more only far out.
        """
        part, up = self._z / Z95, np.log(high / mean)
        if part > 1.0:
            up = np.minimum(up, unsure / sqrt(part**2 - 1.0))
        found: FloatArray = high * np.exp(part * np.hypot(unsure, up) - up)
        return found


def _workers(pair: Pair, some: Cells) -> IntArray:
    found: IntArray = some.machines * np.array([[pair[0].workers], [pair[1].workers]])
    return found


def price(pair: Pair, some: Cells, end: str) -> FloatArray:
    """Return the price per hour of clusters, or an end of its interval."""
    one, two = (getattr(kind.usd_per_h, end) for kind in pair)
    found: FloatArray = one * some.machines[0] + two * some.machines[1]
    return found


def _up(one: Interval) -> float:
    return log(one.high / one.value) if one.high < inf else inf
