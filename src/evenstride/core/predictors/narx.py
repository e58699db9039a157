"""NARX: a small network over past speeds and past and current loads of the machines.

A nonlinear autoregressive network with exogenous inputs: the speed of the next step from those
of the last ``delays`` steps, and from the processor and memory load now and in the same steps.
What it feeds back is the measured speed, not its own prediction, so it trains as a feed-forward
network. One network serves all workers, so that what it learns on one holds for the others:
speeds enter as logarithms beside the mean of those remembered, which also is what it corrects,
and so they have no unit. Before it has learned anything it predicts that mean.

It is trained while it runs, step by step, by recursive Gauss-Newton (least squares on its linear
expansion), or beforehand: `Narx.knowing` starts from what another run has learned. A load that
is not known is replaced by the last one that was, and before that by one half for good: then
the network has only the speeds, a nonlinear autoregression.

Source:
    Chen et al., "Semi-Dynamic Load Balancing", SoCC 2020, doi:10.1145/3419111.3421299, predicts
    with NARX on past speeds and past and current CPU and memory use; NARX networks: Lin et al.,
    IEEE Trans. Neural Networks 7(6), 1996. Size, training and the normalisation are ours: the
    paper's were not available to us.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from evenstride.core.arrays import FloatArray, IntArray
from evenstride.errors import ConfigError

# Of the weights before anything is learned, in units of the noise of a logarithm: about 0.5 for
# a noise of 0.1. It keeps the first steps from being fitted exactly.
_PRIOR_VARIANCE = 25.0
# So many workers teach in one step, by turns: it bounds the cost, and all share what is learned.
_TEACHERS = 16
# An error larger than this is a spike or a change of speed: it teaches no more than this.
_LARGEST_ERROR = 0.3
_LARGEST_CORRECTION = 1.0


@dataclass(frozen=True, slots=True, eq=False)
class Learned:
    """What a network knows; ``P`` is the number of its weights."""

    weights: FloatArray  # linear, output and hidden ones, ``(P,)``
    cov: FloatArray  # covariance of the weights, ``(P, P)``
    steps: int  # how often it was taught


@dataclass(frozen=True, slots=True, eq=False)
class NarxState:
    """The state: what the network knows, and its tapped delay lines of ``d`` steps."""

    learned: Learned  # shared by all workers
    # Logarithms of the last speeds, the newest first, nan before one, ``(W, d)``.
    speeds: FloatArray
    loads: FloatArray  # the loads at these steps less one half, ``(W, d, 2)``


@dataclass(frozen=True, slots=True, eq=False)
class Narx:
    """One hidden layer and a direct connection from inputs to output."""

    delays: int = 4  # steps it looks back
    hidden: int = 6  # size of the hidden layer
    forgetting: float = 0.999  # weight of the past per step, above 0 and at most 1
    learned: Learned | None = None  # what to start from; ``None`` for nothing
    learns: bool = True  # whether it goes on learning

    def __post_init__(self) -> None:
        if self.delays < 1 or self.hidden < 1 or not 0 < self.forgetting <= 1:
            raise ConfigError(
                f"predictor narx: delays is {self.delays}, hidden {self.hidden} and forgetting "
                f"{self.forgetting}; the first two must be at least 1, forgetting above 0 and at "
                "most 1"
            )

    def knowing(self, state: NarxState, *, learns: bool = True) -> Narx:
        """Return a predictor that starts from what another run has learned."""
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
            x, mean = _inputs(state.speeds[seen], now[at], state.loads[seen])
            learned = self._corrected(learned, x, log_speed[at] - mean)
        speeds, past = state.speeds.copy(), state.loads.copy()
        speeds[worker] = _moved_on(speeds[worker], log_speed)
        # The first speed fills the whole line, so that no nan ever reaches the network.
        speeds[worker[~known]] = log_speed[~known, None]
        past[worker] = _moved_on(past[worker], now)
        past[worker[~known]] = now[~known, None]
        return NarxState(learned, speeds, past)

    def predict(self, state: NarxState, loads: FloatArray) -> FloatArray:
        """Return the mean of the last speeds, corrected by the network."""
        x, mean = _inputs(state.speeds, _known(loads, state.loads), state.loads)
        # Workers that were never seen stay nan by their mean.
        correction = self._output(state.learned.weights, np.nan_to_num(x))[0]
        limited = np.clip(correction, -_LARGEST_CORRECTION, _LARGEST_CORRECTION)
        return np.asarray(np.exp(mean + limited))

    @property
    def _inputs(self) -> int:
        return 1 + self.delays + 2 * (self.delays + 1)

    def _untrained(self) -> Learned:
        """Return a network that corrects nothing: output weights are 0, hidden ones scattered."""
        size = self._inputs + self.hidden
        # Scattered by a multiplicative hash, because the core draws nothing at random. They must
        # differ: equal hidden cells would learn the same for ever.
        scattered = np.arange(1, self._inputs * self.hidden + 1, dtype=np.uint64)
        scattered = scattered * np.uint64(2654435761) % np.uint64(2**32)
        hidden = 2.0 * (scattered.astype(np.float64) / 2**32) - 1.0
        weights = np.concatenate([np.zeros(size), hidden])
        return Learned(weights, _PRIOR_VARIANCE * np.eye(len(weights)), 0)

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
        """Correct the weights by one step of some workers, linear about the weights there are."""
        predicted, active = self._output(learned.weights, x)
        slopes = self._slopes(learned.weights, x, active)
        error = np.clip(target - predicted, -_LARGEST_ERROR, _LARGEST_ERROR)
        change, cov = np.zeros_like(learned.weights), learned.cov
        # No forgetting without news, or the covariance would grow without end at a steady speed.
        if float(np.trace(cov)) < _PRIOR_VARIANCE * len(cov):
            cov = cov / self.forgetting
        for slope, missed in zip(slopes, error, strict=True):
            cov_slope = cov @ slope
            # All slopes are those of the same weights, so the workers of a step teach in any order.
            gain = cov_slope / (1.0 + float(slope @ cov_slope))
            change = change + gain * (missed - float(slope @ change))
            cov = cov - np.outer(gain, cov_slope)
        return Learned(learned.weights + change, cov, learned.steps + 1)


def _teachers(known: IntArray, steps: int) -> IntArray:
    """Return those whose turn it is to teach, at most `_TEACHERS`."""
    if len(known) <= _TEACHERS:
        return known
    turn = (steps * _TEACHERS + np.arange(_TEACHERS)) % len(known)
    return np.asarray(known[turn])


def _known(loads: FloatArray, past: FloatArray) -> FloatArray:
    """Return the loads less one half, ``(n, 2)``, the last ones where they are not known."""
    # Less one half, so that 0, which stands for a load that was never known, is the middle.
    now = np.clip(loads.T, 0.0, 1.0) - 0.5
    return np.where(np.isnan(now), past[:, 0], now)


def _inputs(speeds: FloatArray, now: FloatArray, past: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Return the network's inputs, ``(n, inputs)``, and the mean log speed, ``(n,)``."""
    count, mean = len(speeds), speeds.mean(axis=1)
    beside = speeds - mean[:, None]
    loads = np.concatenate([now, past.reshape(count, -1)], axis=1)
    return np.concatenate([np.ones((count, 1)), beside, loads], axis=1), mean


def _moved_on(line: FloatArray, newest: FloatArray) -> FloatArray:
    return np.concatenate([newest[:, None], line[:, :-1]], axis=1)
