"""An autoregressive predictor, fitted to each worker while it runs.

The next speed is a weighted sum of the last ones and a constant. Speeds are counted in units
of the worker's first one, so that all workers fit with the same prior; the weights, which start
as those of the last value, are fitted by recursive least squares that forgets slowly.

Source:
    Recursive least squares with exponential forgetting: Ljung, "System Identification", 2nd
    ed., 1999, section 11.2. Forgetting is left out while the covariance is larger than at the
    start, or it would grow without end as long as the speed stays the same (the same, 11.7),
    and a prediction stays within the speeds remembered, widened by half.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from evenstride.core.arrays import FloatArray, IntArray
from evenstride.errors import ConfigError

_PRIOR_VARIANCE = 10.0  # of each weight, in units of the noise variance of a speed
_BEYOND = 1.5
# A speed counts as at most this many times the one before, so that one absurd time is got over.
_MOST_CHANGE = 10.0


@dataclass(frozen=True, slots=True, eq=False)
class Weighted:
    """Past speeds and their weights; ``p`` is the order."""

    unit: FloatArray  # first speed of each worker, 0 before it, ``(W,)``
    past: FloatArray  # latest speeds in that unit, the newest first, ``(W, p)``
    weights: FloatArray  # of the past speeds, and the constant, ``(W, p + 1)``
    cov: FloatArray  # covariance of the weights, ``(W, p + 1, p + 1)``


@dataclass(frozen=True, slots=True)
class Autoregressive:
    """Linear in the last speeds, by recursive least squares."""

    order: int = 4  # how many of the last speeds
    forgetting: float = 0.98  # weight of the past per step, above 0 and at most 1

    def __post_init__(self) -> None:
        if self.order < 1 or not 0 < self.forgetting <= 1:
            raise ConfigError(
                f"predictor ar: order is {self.order} and forgetting {self.forgetting}; order "
                "must be at least 1, forgetting above 0 and at most 1"
            )

    def start(self, workers: int) -> Weighted:
        size = self.order + 1
        weights = np.zeros((workers, size))
        weights[:, 0] = 1.0
        cov = np.broadcast_to(_PRIOR_VARIANCE * np.eye(size), (workers, size, size)).copy()
        return Weighted(np.zeros(workers), np.zeros((workers, self.order)), weights, cov)

    def learn(
        self, state: Weighted, worker: IntArray, speed: FloatArray, loads: FloatArray
    ) -> Weighted:
        """Return the weights corrected by the error of their prediction."""
        del loads
        fresh = state.unit[worker] == 0
        unit, past = state.unit.copy(), state.past.copy()
        unit[worker[fresh]] = speed[fresh]
        # All delays begin at the first speed, so that the fit sees no jump from 0.
        past[worker[fresh]] = 1.0
        before = past[worker, 0]
        newest = np.clip(speed / unit[worker], before / _MOST_CHANGE, before * _MOST_CHANGE)
        # Before the delays move on, since the prediction to correct was made from the former ones.
        fitted = self._fit(state, worker[~fresh], newest[~fresh])
        past[worker] = np.concatenate([newest[:, None], past[worker, :-1]], axis=1)
        return replace(fitted, unit=unit, past=past)

    def _fit(self, state: Weighted, worker: IntArray, newest: FloatArray) -> Weighted:
        x, cov = _features(state.past[worker]), state.cov[worker]
        cov_x = np.einsum("wij,wj->wi", cov, x)
        # No forgetting without news, or the covariance would grow without end at a steady speed.
        forgetting = np.where(
            np.trace(cov, axis1=1, axis2=2) > _PRIOR_VARIANCE * x.shape[1], 1.0, self.forgetting
        )
        gain = cov_x / (forgetting + (x * cov_x).sum(axis=1))[:, None]
        error = newest - (state.weights[worker] * x).sum(axis=1)
        weights, after = state.weights.copy(), state.cov.copy()
        weights[worker] += gain * error[:, None]
        left = cov - gain[:, :, None] * cov_x[:, None, :]
        after[worker] = left / forgetting[:, None, None]
        return replace(state, weights=weights, cov=after)

    def predict(self, state: Weighted, loads: FloatArray) -> FloatArray:
        """Return the weighted sums, within what was seen lately."""
        del loads
        linear = (state.weights * _features(state.past)).sum(axis=1)
        low, high = state.past.min(axis=1) / _BEYOND, state.past.max(axis=1) * _BEYOND
        return np.where(state.unit > 0, np.clip(linear, low, high) * state.unit, np.nan)


def _features(past: FloatArray) -> FloatArray:
    return np.concatenate([past, np.ones((len(past), 1))], axis=1)
