"""How fast each worker has been at its best, and how fast it is beside that."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from evenstride.core.arrays import FloatArray, IntArray
from evenstride.core.diagnostics.debounce import WHILE_S, WHILE_STEPS, Span, WorkerArrays
from evenstride.core.time_model.curve_estimates import CurveEstimates


@dataclass(frozen=True, slots=True, eq=False)
class PeakSpeeds(WorkerArrays):
    """The best speed that each of ``W`` workers has kept for a while.

    A speed is kept as the time that a share took, so that a curve whose shape becomes better known
    changes nothing about it. The lowest speed of a while counts.
    """

    share: IntArray  # at which the best one was seen, ``(W,)``; 0 if there is none yet
    time_s: FloatArray  # that it took then, ``(W,)``
    fixed_s: FloatArray  # of the curve that was believed then, ``(W,)``
    per_sample_s: FloatArray  # the same, ``(W,)``
    at: IntArray  # the share of the while that goes on, ``(W,)``; 0 if none does
    longest_s: FloatArray  # that it took in this while, ``(W,)``
    steps: FloatArray  # of this while so far, ``(W,)``
    lasted_s: FloatArray  # seconds of it, ``(W,)``

    @classmethod
    def none(cls, workers: int) -> PeakSpeeds:
        zero, no_share = np.zeros(workers), np.zeros(workers, dtype=np.int64)
        return cls(no_share, zero, zero, zero, no_share, zero, zero, zero)

    def after(self, now: CurveEstimates, shares: IntArray, seen: Span) -> PeakSpeeds:
        told = seen.steps > 0
        begins = told & (self.at == 0)
        at = np.where(begins, shares, self.at)
        time_s = now.time_s(at)
        longest_s = np.where(told, np.maximum(self.longest_s, time_s), self.longest_s)
        # What came before the first look of a while may have been at another speed.
        goes_on = told & ~begins
        steps = self.steps + np.where(goes_on, seen.steps, 0.0)
        lasted_s = self.lasted_s + np.where(goes_on, seen.lasted_s, 0.0)
        whole = goes_on & (steps >= WHILE_STEPS) & (lasted_s >= WHILE_S)
        # Below 1 if a part of the while was slower, so that one quick look is no best speed.
        kept = np.divide(time_s, longest_s, out=np.zeros_like(time_s), where=whole)
        kept_at_least = np.where(whole, kept, 1.0)
        better = whole & ~(self.speed(now) * kept <= 1.0)  # so is the first, which is nan
        return PeakSpeeds(
            np.where(better, at, self.share),
            np.where(better, longest_s, self.time_s),
            np.where(better, now.fixed_s / kept_at_least, self.fixed_s),
            np.where(better, now.per_sample_s / kept_at_least, self.per_sample_s),
            np.where(whole, shares, at),
            np.where(whole, now.time_s(shares), longest_s),
            np.where(whole, 0.0, steps),
            np.where(whole, 0.0, lasted_s),
        )

    def speed(self, now: CurveEstimates) -> FloatArray:
        """Return each worker's speed as a part of its best, ``(W,)``; nan if that is not known."""
        unknown = np.full(len(self.share), np.nan)
        return np.asarray(
            np.divide(self.time_s, now.time_s(self.share), out=unknown, where=self.share > 0)
        )

    def speed_at(self, shares: IntArray, now: CurveEstimates) -> FloatArray:
        """Return the same by the curves that were believed then, at some shares, ``(W,)``.

        It differs from `speed` as far as the shape of a curve is believed to be another one now.
        """
        unknown = np.full(len(self.share), np.nan)
        then_s = self.fixed_s + self.per_sample_s * shares
        return np.asarray(np.divide(then_s, now.time_s(shares), out=unknown, where=self.share > 0))
