"""Predictors of the workers' speeds: the last speed, a moving average, a linear fit, a network.

`Predictor` is their interface, `predictor_named` returns one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

import numpy as np

from evenstride.core.arrays import FloatArray, IntArray
from evenstride.errors import ConfigError

StateT = TypeVar("StateT")

# Of the linear fit.
_PRIOR_VARIANCE = 10.0  # of each weight, in units of the noise variance of a speed
_BEYOND = 1.5
# A speed counts as at most this many times the previous one, so that it recovers from an outlier.
_MOST_CHANGE = 10.0

# Of the network: the variance of its weights before training, in units of the noise of a logarithm:
# about 0.5 for a noise of 0.1. It keeps the first steps from being fitted exactly.
_NARX_VARIANCE = 25.0
# Workers that teach in one step, in turn: it bounds the cost, and all share what is learned.
_TEACHERS = 16
# A larger error is a spike or a change of speed; it counts as this much.
_LARGEST_ERROR = 0.3
_LARGEST_CORRECTION = 1.0


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


@dataclass(frozen=True, slots=True, eq=False)
class Learned:
    """The weights of a network; ``P`` is their number."""

    weights: FloatArray  # linear, output and hidden ones, ``(P,)``
    cov: FloatArray  # covariance of the weights, ``(P, P)``
    steps: int  # number of training steps


@dataclass(frozen=True, slots=True, eq=False)
class NarxState:
    """The state: the network's weights, and its tapped delay lines of ``d`` steps."""

    learned: Learned  # shared by all workers
    # Logarithms of the last speeds, the newest first, NaN before the first one, ``(W, d)``.
    speeds: FloatArray
    loads: FloatArray  # the loads at these steps minus one half, ``(W, d, 2)``


@dataclass(frozen=True, slots=True, eq=False)
class Narx:
    """NARX: a small network over past speeds and past and current loads of the machines.

    A nonlinear autoregressive network with exogenous inputs, one hidden layer and a direct
    connection from inputs to output. It predicts the speed of the next step from those of the last
    ``delays`` steps, and from the processor and memory load now and in the same steps. It feeds
    back the measured speed, not its own prediction, so it trains as a feed-forward network. One
    network serves all workers, so what it learns on one applies to the others. Speeds enter as
    logarithms relative to the mean of those remembered, and the output corrects this mean, so they
    have no unit. An untrained network predicts the mean.

    It is trained online, step by step, by recursive Gauss-Newton (least squares on its
    linear expansion), or beforehand (`knowing`). An unknown load is replaced by the last known
    one, and before the first by one half: then the network has only the speeds.

    Source:
        Chen et al., "Semi-Dynamic Load Balancing", SoCC 2020, doi:10.1145/3419111.3421299, predicts
        with NARX on past speeds and past and current CPU and memory use; NARX networks: Lin et al.,
        IEEE Trans. Neural Networks 7(6), 1996. Size, training and the normalisation are ours: the
        paper's were not available to us.
    """

    delays: int = 4  # number of past steps
    hidden: int = 6  # size of the hidden layer
    forgetting: float = 0.999  # weight of the past per step, above 0 and at most 1
    learned: Learned | None = None  # initial weights; ``None`` for an untrained network
    learns: bool = True  # whether training continues

    def __post_init__(self) -> None:
        if self.delays < 1 or self.hidden < 1 or not 0 < self.forgetting <= 1:
            raise ConfigError(
                f"predictor narx: delays is {self.delays}, hidden is {self.hidden} and forgetting "
                f"is {self.forgetting}; delays and hidden must be at least 1, forgetting above 0 "
                "and at most 1"
            )

    def knowing(self, state: NarxState, *, learns: bool = True) -> Narx:
        return replace(self, learned=state.learned, learns=learns)

    def start(self, workers: int) -> NarxState:
        learned = self._untrained() if self.learned is None else self.learned
        speeds = np.full((workers, self.delays), np.nan)
        return NarxState(learned, speeds, np.zeros((workers, self.delays, 2)))

    def learn(
        self, state: NarxState, worker: IntArray, speed: FloatArray, loads: FloatArray
    ) -> NarxState:
        """Return the network corrected by the error of its prediction, and the delays moved on."""
        log_speed, now = np.log(speed), _known(loads, state.loads[worker])
        known = ~np.isnan(state.speeds[worker, 0])
        learned = state.learned
        if self.learns and known.any():
            at = _teachers(np.flatnonzero(known), learned.steps)
            seen = worker[at]
            x, mean = _network_inputs(state.speeds[seen], now[at], state.loads[seen])
            learned = self._corrected(learned, x, log_speed[at] - mean)
        speeds, past = state.speeds.copy(), state.loads.copy()
        speeds[worker] = _moved_on(speeds[worker], log_speed)
        # The first speed fills the whole line, so that no NaN reaches the network.
        speeds[worker[~known]] = log_speed[~known, None]
        past[worker] = _moved_on(past[worker], now)
        past[worker[~known]] = now[~known, None]
        return NarxState(learned, speeds, past)

    def predict(self, state: NarxState, loads: FloatArray) -> FloatArray:
        """Return the mean of the last speeds, corrected by the network."""
        x, mean = _network_inputs(state.speeds, _known(loads, state.loads), state.loads)
        # Workers that were never seen stay NaN because of their mean.
        correction = self._output(state.learned.weights, np.nan_to_num(x))[0]
        limited = np.clip(correction, -_LARGEST_CORRECTION, _LARGEST_CORRECTION)
        return np.asarray(np.exp(mean + limited))

    @property
    def _inputs(self) -> int:
        return 1 + self.delays + 2 * (self.delays + 1)

    def _untrained(self) -> Learned:
        """Return a network with zero correction: output weights are 0, hidden ones scattered."""
        size = self._inputs + self.hidden
        # Scattered by a multiplicative hash, because the core uses no randomness. They must
        # differ: equal hidden cells would learn the same forever.
        scattered = np.arange(1, self._inputs * self.hidden + 1, dtype=np.uint64)
        scattered = scattered * np.uint64(2654435761) % np.uint64(2**32)
        hidden = 2.0 * (scattered.astype(np.float64) / 2**32) - 1.0
        weights = np.concatenate([np.zeros(size), hidden])
        return Learned(weights, _NARX_VARIANCE * np.eye(len(weights)), 0)

    def _output(self, weights: FloatArray, x: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Return the corrections, ``(n,)``, and the hidden layer, ``(n, hidden)``."""
        linear, output, hidden = np.split(weights, [self._inputs, self._inputs + self.hidden])
        active = np.tanh(x @ hidden.reshape(self._inputs, self.hidden))
        return x @ linear + active @ output, active

    def _slopes(self, weights: FloatArray, x: FloatArray, active: FloatArray) -> FloatArray:
        """Return the derivatives of the corrections by the weights, ``(n, P)``."""
        output = weights[self._inputs : self._inputs + self.hidden]
        by_hidden = x[:, :, None] * (output * (1.0 - active**2))[:, None, :]
        return np.concatenate([x, active, by_hidden.reshape(len(x), -1)], axis=1)

    def _corrected(self, learned: Learned, x: FloatArray, target: FloatArray) -> Learned:
        """Correct the weights by one step of some workers, linearised at the current weights."""
        predicted, active = self._output(learned.weights, x)
        slopes = self._slopes(learned.weights, x, active)
        error = np.clip(target - predicted, -_LARGEST_ERROR, _LARGEST_ERROR)
        change, cov = np.zeros_like(learned.weights), learned.cov
        # No forgetting without news, or the covariance would grow without limit at a steady speed.
        if float(np.trace(cov)) < _NARX_VARIANCE * len(cov):
            cov = cov / self.forgetting
        for slope, missed in zip(slopes, error, strict=True):
            cov_slope = cov @ slope
            # All slopes are at the same weights, so the order of a step's workers does not matter.
            gain = cov_slope / (1.0 + float(slope @ cov_slope))
            change = change + gain * (missed - float(slope @ change))
            cov = cov - np.outer(gain, cov_slope)
        return Learned(learned.weights + change, cov, learned.steps + 1)


def _teachers(known: IntArray, steps: int) -> IntArray:
    """Return the workers that teach in this step, at most `_TEACHERS`."""
    if len(known) <= _TEACHERS:
        return known
    turn = (steps * _TEACHERS + np.arange(_TEACHERS)) % len(known)
    return np.asarray(known[turn])


def _known(loads: FloatArray, past: FloatArray) -> FloatArray:
    """Return the loads minus one half, ``(n, 2)``, the last known ones if unknown."""
    # Minus one half, so that 0, which stands for a load that was never known, is the middle.
    now = np.clip(loads.T, 0.0, 1.0) - 0.5
    return np.where(np.isnan(now), past[:, 0], now)


def _network_inputs(
    speeds: FloatArray, now: FloatArray, past: FloatArray
) -> tuple[FloatArray, FloatArray]:
    """Return the network's inputs, ``(n, inputs)``, and the mean log speed, ``(n,)``."""
    count, mean = len(speeds), speeds.mean(axis=1)
    deviations = speeds - mean[:, None]
    loads = np.concatenate([now, past.reshape(count, -1)], axis=1)
    return np.concatenate([np.ones((count, 1)), deviations, loads], axis=1), mean


def _moved_on(line: FloatArray, newest: FloatArray) -> FloatArray:
    return np.concatenate([newest[:, None], line[:, :-1]], axis=1)


_PREDICTORS: dict[str, type[Any]] = {
    "ar": Autoregressive,
    "ema": MovingAverage,
    "last": Last,
    "narx": Narx,
}
PREDICTOR_NAMES = tuple(_PREDICTORS)


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
