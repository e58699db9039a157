"""Clusters that no other beats in time and cost, and what one that was not judged could gain."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import inf
from typing import Self

import numpy as np
import numpy.typing as npt

from evenstride.core.fleet import FloatArray, IntArray
from evenstride.planner.search.objective import Objective, Wishes, at_most
from evenstride.planner.search.training_forecast import TrainingForecast

EQUAL = 1e-8
"""By which figures that are equal may differ, in proportion: rounding of numbers."""
_VERY_MUCH = 1e200


def frontier(
    outlooks: Iterable[TrainingForecast], confidence: float = 0.5
) -> tuple[TrainingForecast, ...]:
    """Return the outlooks that no other beats in time and cost, the quickest first."""
    figures = [(*_figures(one, confidence), one) for one in outlooks]
    kept, least = list[TrainingForecast](), inf
    for time_s, usd, one in sorted(figures, key=lambda figure: figure[:2]):
        if usd < least and time_s < inf:
            kept.append(one)
            least = usd
    return tuple(kept)


def _figures(one: TrainingForecast, confidence: float) -> tuple[float, float]:
    return at_most(one.time_s, confidence), at_most(one.cost_usd, confidence)


@dataclass(frozen=True, slots=True, eq=False)
class ParetoFront:
    """A frontier, and what it leaves to gain."""

    wishes: Wishes  # at whose confidence times and costs are compared
    outlooks: tuple[TrainingForecast, ...]  # that none of them beats, the quickest first
    time_s: FloatArray  # of each, rising
    usd: FloatArray  # falling

    @classmethod
    def of(cls, outlooks: Iterable[TrainingForecast], wishes: Wishes) -> Self:
        """Return the frontier of some outlooks."""
        best = frontier(outlooks, wishes.confidence)
        figures = np.array([_figures(one, wishes.confidence) for one in best]).reshape(-1, 2)
        return cls(wishes, best, figures[:, 0], figures[:, 1])

    def with_more(self, outlooks: Iterable[TrainingForecast]) -> Self:
        """Return the frontier of these and others."""
        return self.of((*self.outlooks, *outlooks), self.wishes)

    def beaten(self, time_s: FloatArray, usd: FloatArray) -> npt.NDArray[np.bool_]:
        """Return which of some points one of these is neither slower nor dearer than."""
        found: npt.NDArray[np.bool_] = usd >= self.least_usd(time_s)
        return found

    def least_usd(self, time_s: FloatArray) -> FloatArray:
        """Return what the cheapest of these costs that is not slower; very much if all are."""
        quicker = np.searchsorted(self.time_s, time_s, side="right")
        found: FloatArray = np.concatenate([[_VERY_MUCH], self.usd])[quicker]
        return found

    def gains(self, time_s: FloatArray, usd: FloatArray) -> FloatArray:
        """Return by how much each of some points beats all of these, in proportion.

        That is the least factor by which its time and cost would both have to be multiplied for one
        of these to be neither slower nor dearer, less 1; 0 or less if one is already.

        Args:
            time_s: of the points, ``(n,)``.
            usd: of the points, ``(n,)``; what is infinite gains nothing.
        """
        finite = np.isfinite(time_s) & np.isfinite(usd)
        if not len(self.time_s):
            return np.where(finite, inf, 0.0)
        # Of these, times rise and costs fall: the larger factor is least where both are equal.
        with np.errstate(invalid="ignore"):
            mine, other = self.time_s / self.usd, time_s / usd
        right = np.minimum(np.searchsorted(mine, other), len(mine) - 1)
        left = np.maximum(right - 1, 0)
        factors = [np.maximum(self.time_s[at] / time_s, self.usd[at] / usd) for at in (left, right)]
        found: FloatArray = np.minimum(*factors) - 1.0
        return np.where(finite & (found > EQUAL), found, 0.0)

    def aimed_gains(self, time_s: FloatArray, usd: FloatArray) -> FloatArray:
        """Return by how much each of some points is better than the best, as it is wished.

        Those beyond the limits gain nothing. Where none of these keeps to them, others that do
        gain without limit.
        """
        wishes, keeps = self.wishes, self._keeps(time_s, usd)
        keeps &= np.isfinite(time_s) & np.isfinite(usd)
        if wishes.aim is Objective.KNEE:
            return np.where(keeps, self.gains(time_s, usd), 0.0)
        of_time = wishes.aim is Objective.TIME
        mine, other = (self.time_s, time_s) if of_time else (self.usd, usd)
        best = mine[self._keeps(self.time_s, self.usd)].min(initial=inf)
        with np.errstate(invalid="ignore"):
            found = best / other - 1.0
        return np.where(keeps & (found > EQUAL), found, 0.0)

    def order(self, time_s: FloatArray, usd: FloatArray, gains: FloatArray) -> IntArray:
        """Return the points that gain something, those that may be best first."""
        aim = {Objective.TIME: time_s, Objective.COST: usd}.get(self.wishes.aim, -gains)
        some = np.flatnonzero(gains > 0.0)
        found: IntArray = some[np.lexsort((usd[some], aim[some], -gains[some]))]
        return found

    def _keeps(self, time_s: FloatArray, usd: FloatArray) -> npt.NDArray[np.bool_]:
        return (time_s <= self.wishes.deadline_s) & (usd <= self.wishes.budget_usd)
