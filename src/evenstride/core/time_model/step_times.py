"""Step times as functions of the share: the shape of a device, and its speed right now."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from evenstride.core.arrays import FloatArray, IntArray, Shares

# Larger than any share, and a float still counts in ones up to there.
_MOST_SAMPLES = 2.0**53
# More than the rounding of a time, as a part of the longest.
_ROUNDING = 1e-14


@dataclass(frozen=True, slots=True, eq=False)
class TimeModel:
    """``t_k(b) = max(floor_k, fixed_k + per_sample_k * b) / speed_k`` for ``W`` workers.

    The *shape* (floor, fixed, per sample) belongs to model and device and changes slowly; the
    *speed* (1 = as fast as when the shape was learned, higher is faster) changes at any time.
    Launch and network time may not scale with the speed; this first form divides all of it.

    Args:
        fixed_s: seconds that do not depend on the share, shape ``(W,)``, at least 0.
        per_sample_s: seconds per sample, shape ``(W,)``, above 0.
        floor_s: shortest possible time in seconds, shape ``(W,)``.
        speed: current speed, shape ``(W,)``, above 0.
    """

    fixed_s: FloatArray
    per_sample_s: FloatArray
    floor_s: FloatArray
    speed: FloatArray

    @classmethod
    def affine(
        cls, fixed_s: FloatArray | list[float], per_sample_s: FloatArray | list[float]
    ) -> TimeModel:
        """Return the model without floors, at speed 1."""
        fixed = np.asarray(fixed_s, dtype=np.float64)
        per_sample = np.asarray(per_sample_s, dtype=np.float64)
        return cls(fixed, per_sample, np.zeros_like(fixed), np.ones_like(fixed))

    def __len__(self) -> int:
        return len(self.fixed_s)

    def at(self, shares: IntArray) -> FloatArray:
        """Return each worker's step time in seconds, shape ``(W,)``."""
        linear = self.fixed_s + self.per_sample_s * shares
        return np.maximum(self.floor_s, linear) / self.speed

    def capacity(self, deadline_s: float) -> IntArray:
        """Return per worker the largest share whose time is at most ``deadline_s``.

        The closed form may be one sample off after rounding; comparing with `at` itself, where
        rounding could matter, makes it exact, so that the allocation is exact for the very times
        that `at` returns.
        """
        scaled = deadline_s * self.speed
        exact = np.clip((scaled - self.fixed_s) / self.per_sample_s, 0.0, _MOST_SAMPLES)
        share = exact.astype(np.int64)
        rounding = _ROUNDING * scaled.max(initial=0.0) / self.per_sample_s.min(initial=1.0)
        unsure = np.flatnonzero(np.abs(exact - np.rint(exact)) <= rounding)
        share[unsure] = self._of(unsure)._corrected(share[unsure], deadline_s)
        # The closed form knows nothing of floors: before its floor no worker ends even one sample.
        share[self.floor_s / self.speed > deadline_s] = 0
        return share

    def _of(self, workers: IntArray) -> TimeModel:
        return TimeModel(*(getattr(self, name)[workers] for name in self.__slots__))

    def _corrected(self, share: IntArray, deadline_s: float) -> IntArray:
        """Return shares that are right, from ones that are at most one sample off."""
        share = share + (self.at(share + 1) <= deadline_s)
        return share - ((share > 0) & (self.at(share) > deadline_s))

    def makespan_s(self, shares: IntArray | Shares) -> float:
        """Return the time in seconds of the worker that finishes last."""
        return float(self.at(np.asarray(shares, dtype=np.int64)).max())
