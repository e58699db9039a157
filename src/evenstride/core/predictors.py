"""Predictors of the workers' speeds: the last speed, a moving average, a linear fit, networks.

`Predictor` is their interface, `predictor_named` returns one. The networks are in
`evenstride.core.speed_networks`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

import numpy as np

from evenstride.core.arrays import FloatArray, IntArray
from evenstride.core.speed_networks import Lstm, Narx, SimpleRnn
from evenstride.errors import ConfigError

StateT = TypeVar("StateT")

# Of the linear fit.
_PRIOR_VARIANCE = 10.0  # of each weight, in units of the noise variance of a speed
_BEYOND = 1.5
# A speed counts as at most this many times the previous one, so that it recovers from an outlier.
_MOST_CHANGE = 10.0


class Predictor(Protocol[StateT]):
    """Predicts how many samples per second each of ``W`` workers will process in its next step.

    Implementations hold settings only and never mutate. All they learn is in the state, which
    must be picklable. The loads passed to `learn` must have been known at the same moment,
    relative to the step, as those passed to `predict`.
    """

    def start(self, workers: int) -> StateT:
        """Return the initial state."""
        ...

    def learn(
        self, state: StateT, worker: IntArray, speed: FloatArray, loads: FloatArray
    ) -> StateT:
        """Return the state after one step of some workers, ranks ``(n,)``, each at most once.

        ``speed`` is in samples per second, finite and above 0, ``(n,)``. ``loads`` are the
        processor and memory load of their machines as known before the step, from 0 to 1, NaN if
        unknown, ``(2, n)``.
        """
        ...

    def predict(self, state: StateT, loads: FloatArray) -> FloatArray:
        """Return the speed of every worker's next step, NaN for those never seen, ``(W,)``.

        ``loads`` are the latest known ones, ``(2, W)``.
        """
        ...


@dataclass(frozen=True, slots=True)
class Last:
    """The next step is as fast as the last one; the state is its speed, ``(W,)``."""

    def start(self, workers: int) -> FloatArray:
        return np.full(workers, np.nan)

    def learn(
        self, state: FloatArray, worker: IntArray, speed: FloatArray, loads: FloatArray
    ) -> FloatArray:
        del loads
        latest = state.copy()
        latest[worker] = speed
        return latest

    def predict(self, state: FloatArray, loads: FloatArray) -> FloatArray:
        del loads
        return state


@dataclass(frozen=True, slots=True)
class MovingAverage:
    """Exponential moving average of the speeds; the state is the average, ``(W,)``."""

    smoothing: float = 0.3  # weight of the newest speed, above 0 and at most 1

    def __post_init__(self) -> None:
        if not 0 < self.smoothing <= 1:
            raise ConfigError(
                f"predictor ema: smoothing is {self.smoothing}, but must be above 0 and at most 1"
            )

    def start(self, workers: int) -> FloatArray:
        return np.full(workers, np.nan)

    def learn(
        self, state: FloatArray, worker: IntArray, speed: FloatArray, loads: FloatArray
    ) -> FloatArray:
        del loads
        average, before = state.copy(), state[worker]
        # The first speed is the average; NaN would stay NaN.
        known = np.where(np.isnan(before), speed, before)
        average[worker] = known + self.smoothing * (speed - known)
        return average

    def predict(self, state: FloatArray, loads: FloatArray) -> FloatArray:
        del loads
        return state


@dataclass(frozen=True, slots=True, eq=False)
class Weighted:
    """Past speeds and their weights; ``p`` is the order."""

    unit: FloatArray  # first speed of each worker, 0 before it, ``(W,)``
    past: FloatArray  # latest speeds in that unit, the newest first, ``(W, p)``
    weights: FloatArray  # of the past speeds, and the constant, ``(W, p + 1)``
    cov: FloatArray  # covariance of the weights, ``(W, p + 1, p + 1)``


@dataclass(frozen=True, slots=True)
class Autoregressive:
    """Linear in the last speeds and a constant, by recursive least squares with slow forgetting.

    Speeds are in units of the worker's first one, so that all workers fit with the same
    prior. The initial weights predict the last value.

    Source:
        Recursive least squares with exponential forgetting: Ljung, "System Identification", 2nd
        ed., 1999, section 11.2. There is no forgetting while the covariance is larger than at the
        start, or it would grow without limit while the speed stays the same (section 11.7). A
        prediction stays within the remembered speeds, widened by half.
    """

    order: int = 4  # how many of the last speeds
    forgetting: float = 0.98  # weight of the past per step, above 0 and at most 1

    def __post_init__(self) -> None:
        if self.order < 1 or not 0 < self.forgetting <= 1:
            raise ConfigError(
                f"predictor ar: order is {self.order} and forgetting is {self.forgetting}; order "
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
        del loads
        fresh = state.unit[worker] == 0
        unit, past = state.unit.copy(), state.past.copy()
        unit[worker[fresh]] = speed[fresh]
        # All delays start at the first speed, so that the fit sees no jump from 0.
        past[worker[fresh]] = 1.0
        before = past[worker, 0]
        newest = np.clip(speed / unit[worker], before / _MOST_CHANGE, before * _MOST_CHANGE)
        # Before the delays move on, because the prediction to correct used the former ones.
        fitted = self._fit(state, worker[~fresh], newest[~fresh])
        past[worker] = np.concatenate([newest[:, None], past[worker, :-1]], axis=1)
        return replace(fitted, unit=unit, past=past)

    def _fit(self, state: Weighted, worker: IntArray, newest: FloatArray) -> Weighted:
        x, cov = _features(state.past[worker]), state.cov[worker]
        cov_x = np.einsum("wij,wj->wi", cov, x)
        # No forgetting without news, or the covariance would grow without limit at a steady speed.
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
        """Return the weighted sums, limited to the range of recent speeds."""
        del loads
        linear = (state.weights * _features(state.past)).sum(axis=1)
        low, high = state.past.min(axis=1) / _BEYOND, state.past.max(axis=1) * _BEYOND
        return np.where(state.unit > 0, np.clip(linear, low, high) * state.unit, np.nan)


def _features(past: FloatArray) -> FloatArray:
    return np.concatenate([past, np.ones((len(past), 1))], axis=1)


_PREDICTORS: dict[str, type[Any]] = {
    "ar": Autoregressive,
    "ema": MovingAverage,
    "last": Last,
    "lstm": Lstm,
    "narx": Narx,
    "rnn": SimpleRnn,
}
PREDICTOR_NAMES = tuple(_PREDICTORS)
NETWORK_NAMES = ("lstm", "narx", "rnn")
"""Those that use the loads of the machines."""


def predictor_named(name: str) -> Predictor[Any]:
    """Return the predictor of this name with its defaults; `ConfigError` if the name is unknown.

    >>> predictor_named("ema")
    MovingAverage(smoothing=0.3)
    """
    if name not in _PREDICTORS:
        raise ConfigError(
            f"unknown predictor {name!r}; choose one of: {', '.join(PREDICTOR_NAMES)}"
        )
    predictor: Predictor[Any] = _PREDICTORS[name]()
    return predictor
