"""Networks that predict the workers' speeds: NARX, a simple recurrent network, and an LSTM.

All three have the same inputs and the same training (`SpeedNetwork`), so that a comparison shows
what the architecture does.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import numpy as np

from evenstride.core.arrays import FloatArray, IntArray
from evenstride.errors import ConfigError

# Variance of the weights before training, in units of the noise of a logarithm:
# about 0.5 for a noise of 0.1. It keeps the first steps from being fitted exactly.
_PRIOR_VARIANCE = 25.0
# Workers that teach in one step, in turn: it bounds the cost, and all share what is learned.
_TEACHERS = 16
# Inputs of a recurrent network in one step: a constant, a speed, and two loads.
_IN_STEP = 4
# A larger error is a spike or a change of speed; it counts as this much.
_LARGEST_ERROR = 0.3
_LARGEST_CORRECTION = 1.0


@dataclass(frozen=True, slots=True, eq=False)
class Learned:
    """The weights of a network; ``P`` is their number."""

    weights: FloatArray  # linear, output and hidden ones, ``(P,)``
    cov: FloatArray  # covariance of the weights, ``(P, P)``
    steps: int  # number of training steps


@dataclass(frozen=True, slots=True, eq=False)
class NetworkState:
    """The state: the network's weights, and its tapped delay lines of ``d`` steps."""

    learned: Learned  # shared by all workers
    # Logarithms of the last speeds, the newest first, NaN before the first one, ``(W, d)``.
    speeds: FloatArray
    loads: FloatArray  # the loads at these steps minus one half, ``(W, d, 2)``


@dataclass(frozen=True, slots=True, eq=False)
class SpeedNetwork(ABC):
    """A small network over past speeds and past and current loads of the machines.

    It predicts the speed of the next step from those of the last ``delays`` steps, and from the
    processor and memory load now and in the same steps. One network serves all workers, so what it
    learns on one applies to the others. Speeds enter as logarithms relative to the mean of those
    remembered, and the output corrects this mean, so they have no unit. An untrained network
    predicts the mean. Its initial weights are the same in every run.

    It is trained online, step by step, by recursive Gauss-Newton (least squares on its
    linear expansion), or beforehand (`knowing`). An unknown load is replaced by the last known
    one, and before the first by one half: then the network has only the speeds.

    Source:
        Training: the extended Kalman filter for the weights of a network, Puskorius and Feldkamp,
        IEEE Trans. Neural Networks 5(2), 1994.
    """

    name: ClassVar[str]

    delays: int  # number of past steps
    hidden: int  # size of the hidden layer
    forgetting: float = 0.999  # weight of the past per step, above 0 and at most 1
    learned: Learned | None = None  # initial weights; ``None`` for an untrained network
    learns: bool = True  # whether training continues

    def __post_init__(self) -> None:
        if self.delays < 1 or self.hidden < 1 or not 0 < self.forgetting <= 1:
            raise ConfigError(
                f"predictor {self.name}: delays is {self.delays}, hidden is {self.hidden} and "
                f"forgetting is {self.forgetting}; delays and hidden must be at least 1, "
                "forgetting above 0 and at most 1"
            )

    def knowing(self, state: NetworkState, *, learns: bool = True) -> Self:
        return replace(self, learned=state.learned, learns=learns)

    def start(self, workers: int) -> NetworkState:
        learned = self._untrained() if self.learned is None else self.learned
        speeds = np.full((workers, self.delays), np.nan)
        return NetworkState(learned, speeds, np.zeros((workers, self.delays, 2)))

    def learn(
        self, state: NetworkState, worker: IntArray, speed: FloatArray, loads: FloatArray
    ) -> NetworkState:
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
        return NetworkState(learned, speeds, past)

    def predict(self, state: NetworkState, loads: FloatArray) -> FloatArray:
        """Return the mean of the last speeds, corrected by the network."""
        x, mean = _network_inputs(state.speeds, _known(loads, state.loads), state.loads)
        # Workers that were never seen stay NaN because of their mean.
        correction = self._output(state.learned.weights, np.nan_to_num(x))
        limited = np.clip(correction, -_LARGEST_CORRECTION, _LARGEST_CORRECTION)
        return np.asarray(np.exp(mean + limited))

    @property
    @abstractmethod
    def _direct(self) -> int:
        """How many of the inputs are connected to the output directly; the first is a constant."""

    @abstractmethod
    def _hidden_weights(self) -> FloatArray:
        """Return the initial weights of the hidden layer."""

    @abstractmethod
    def _active(self, hidden: FloatArray, x: FloatArray) -> FloatArray:
        """Return the hidden layer, ``(n, hidden)``, for its weights and the inputs."""

    @abstractmethod
    def _hidden_slopes(self, hidden: FloatArray, x: FloatArray, output: FloatArray) -> FloatArray:
        """Return the derivatives of the corrections by the weights of the hidden layer."""

    def _untrained(self) -> Learned:
        """Return a network with zero correction: output weights are 0, hidden ones scattered."""
        weights = np.concatenate([np.zeros(self._direct + self.hidden), self._hidden_weights()])
        return Learned(weights, _PRIOR_VARIANCE * np.eye(len(weights)), 0)

    def _parts(self, weights: FloatArray) -> list[FloatArray]:
        return np.split(weights, [self._direct, self._direct + self.hidden])

    def _output(self, weights: FloatArray, x: FloatArray) -> FloatArray:
        """Return the corrections, ``(n,)``."""
        linear, output, hidden = self._parts(weights)
        return np.asarray(x[:, : self._direct] @ linear + self._active(hidden, x) @ output)

    def _slopes(self, weights: FloatArray, x: FloatArray) -> FloatArray:
        """Return the derivatives of the corrections by the weights, ``(n, P)``."""
        _, output, hidden = self._parts(weights)
        by_hidden = self._hidden_slopes(hidden, x, output)
        return np.concatenate([x[:, : self._direct], self._active(hidden, x), by_hidden], axis=1)

    def _corrected(self, learned: Learned, x: FloatArray, target: FloatArray) -> Learned:
        """Correct the weights by one step of some workers, linearised at the current weights."""
        predicted, slopes = self._output(learned.weights, x), self._slopes(learned.weights, x)
        error = np.clip(target - predicted, -_LARGEST_ERROR, _LARGEST_ERROR)
        change, cov = np.zeros_like(learned.weights), learned.cov
        # No forgetting without news, or the covariance would grow without limit at a steady speed.
        if float(np.trace(cov)) < _PRIOR_VARIANCE * len(cov):
            cov = cov / self.forgetting
        for slope, missed in zip(slopes, error, strict=True):
            cov_slope = cov @ slope
            # All slopes are at the same weights, so the order of a step's workers does not matter.
            gain = cov_slope / (1.0 + float(slope @ cov_slope))
            change = change + gain * (missed - float(slope @ change))
            cov = cov - np.outer(gain, cov_slope)
        return Learned(learned.weights + change, cov, learned.steps + 1)


@dataclass(frozen=True, slots=True, eq=False)
class Narx(SpeedNetwork):
    """NARX: a nonlinear autoregressive network with exogenous inputs.

    One hidden layer, and a direct connection from inputs to output. It feeds back the measured
    speed, not its own prediction, so it trains as a feed-forward network.

    Source:
        Chen et al., "Semi-Dynamic Load Balancing", SoCC 2020, doi:10.1145/3419111.3421299, predicts
        with NARX on past speeds and past and current CPU and memory use; NARX networks: Lin et al.,
        IEEE Trans. Neural Networks 7(6), 1996. Size, training and the normalisation are ours: the
        paper's were not available to us.
    """

    name: ClassVar[str] = "narx"

    delays: int = 4
    hidden: int = 6

    @property
    def _direct(self) -> int:
        return 1 + self.delays + 2 * (self.delays + 1)

    def _hidden_weights(self) -> FloatArray:
        return _scattered(self._direct * self.hidden)

    def _active(self, hidden: FloatArray, x: FloatArray) -> FloatArray:
        return np.asarray(np.tanh(x @ hidden.reshape(self._direct, self.hidden)))

    def _hidden_slopes(self, hidden: FloatArray, x: FloatArray, output: FloatArray) -> FloatArray:
        active = self._active(hidden, x)
        by_hidden = x[:, :, None] * (output * (1.0 - active**2))[:, None, :]
        return np.asarray(by_hidden.reshape(len(x), -1))


@dataclass(frozen=True, slots=True, eq=False)
class RecurrentNetwork(SpeedNetwork):
    """A recurrent network over the last ``delays`` steps, which begins without memory.

    Each step brings one past speed and the loads known before the speed after it. The derivatives
    are by backpropagation through the steps.
    """

    _gates: ClassVar[int]

    @property
    def _direct(self) -> int:
        return 1

    def _hidden_weights(self) -> FloatArray:
        # Half, so that the untrained recurrence neither grows nor saturates.
        return 0.5 * _scattered((_IN_STEP + self.hidden) * self._gates * self.hidden)

    def _matrix(self, hidden: FloatArray) -> FloatArray:
        return hidden.reshape(_IN_STEP + self.hidden, self._gates * self.hidden)


@dataclass(frozen=True, slots=True, eq=False)
class SimpleRnn(RecurrentNetwork):
    """A simple recurrent network (Elman).

    Source:
        LB-BSP (see `Narx`) compares with such a network; Elman, Cognitive Science 14, 1990. Its
        size is ours.
    """

    name: ClassVar[str] = "rnn"

    _gates: ClassVar[int] = 1

    delays: int = 8
    hidden: int = 6

    def _active(self, hidden: FloatArray, x: FloatArray) -> FloatArray:
        return list(self._states(hidden, x))[-1][1]

    def _states(self, hidden: FloatArray, x: FloatArray) -> Iterator[tuple[FloatArray, FloatArray]]:
        """Yield each step's inputs, with the state before it, and the state after it."""
        weights, state = self._matrix(hidden), np.zeros((len(x), self.hidden))
        for inputs in _sequence(x, self.delays):
            seen = np.concatenate([inputs, state], axis=1)
            state = np.tanh(seen @ weights)
            yield seen, state

    def _hidden_slopes(self, hidden: FloatArray, x: FloatArray, output: FloatArray) -> FloatArray:
        weights, slopes = self._matrix(hidden), np.zeros((len(x), *self._matrix(hidden).shape))
        by_state = np.broadcast_to(output, (len(x), self.hidden))
        for seen, state in reversed(list(self._states(hidden, x))):
            by_sum = by_state * (1.0 - state**2)
            slopes += seen[:, :, None] * by_sum[:, None, :]
            by_state = by_sum @ weights[_IN_STEP:].T
        return slopes.reshape(len(x), -1)


@dataclass(frozen=True, slots=True, eq=False)
class _Cell:
    """One step of an LSTM: what it saw, its gates, and its memory before and after."""

    seen: FloatArray
    take: FloatArray
    keep: FloatArray
    show: FloatArray
    new: FloatArray
    before: FloatArray
    memory: FloatArray

    @property
    def state(self) -> FloatArray:
        return np.asarray(self.show * np.tanh(self.memory))


@dataclass(frozen=True, slots=True, eq=False)
class Lstm(RecurrentNetwork):
    """A long short-term memory.

    Source:
        LB-BSP (see `Narx`) compares with such a network; Hochreiter and Schmidhuber, Neural
        Computation 9(8), 1997, with the forget gate of Gers et al., 2000. Its size is ours.
    """

    name: ClassVar[str] = "lstm"

    _gates: ClassVar[int] = 4

    delays: int = 8
    hidden: int = 4

    def _active(self, hidden: FloatArray, x: FloatArray) -> FloatArray:
        return list(self._cells(hidden, x))[-1].state

    def _cells(self, hidden: FloatArray, x: FloatArray) -> Iterator[_Cell]:
        weights, memory = self._matrix(hidden), np.zeros((len(x), self.hidden))
        state = memory
        for inputs in _sequence(x, self.delays):
            seen = np.concatenate([inputs, state], axis=1)
            *gates, new = np.split(seen @ weights, 4, axis=1)
            take, keep, show = (0.5 + 0.5 * np.tanh(0.5 * gate) for gate in gates)
            before, new = memory, np.tanh(new)
            memory = keep * before + take * new
            cell = _Cell(seen, take, keep, show, new, before, memory)
            state = cell.state
            yield cell

    def _hidden_slopes(self, hidden: FloatArray, x: FloatArray, output: FloatArray) -> FloatArray:
        weights, slopes = self._matrix(hidden), np.zeros((len(x), *self._matrix(hidden).shape))
        by_state = np.broadcast_to(output, (len(x), self.hidden))
        by_memory = np.zeros_like(by_state)
        for cell in reversed(list(self._cells(hidden, x))):
            shown = np.tanh(cell.memory)
            by_memory = by_memory + by_state * cell.show * (1.0 - shown**2)
            by_gates = (
                by_memory * cell.new * cell.take * (1.0 - cell.take),
                by_memory * cell.before * cell.keep * (1.0 - cell.keep),
                by_state * shown * cell.show * (1.0 - cell.show),
                by_memory * cell.take * (1.0 - cell.new**2),
            )
            by_sum = np.concatenate(by_gates, axis=1)
            slopes += cell.seen[:, :, None] * by_sum[:, None, :]
            by_state, by_memory = by_sum @ weights[_IN_STEP:].T, by_memory * cell.keep
        return slopes.reshape(len(x), -1)


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


def _scattered(count: int) -> FloatArray:
    """Return numbers between -1 and 1, all different."""
    # By a multiplicative hash, because the core uses no randomness. They must differ: equal hidden
    # cells would learn the same forever.
    numbers = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(2654435761) % np.uint64(2**32)
    return np.asarray(2.0 * (numbers.astype(np.float64) / 2**32) - 1.0)


def _sequence(x: FloatArray, delays: int) -> FloatArray:
    """Return the network's inputs step by step, the oldest first, ``(delays, n, _IN_STEP)``."""
    speeds, loads = x[:, 1 : 1 + delays], x[:, 1 + delays :].reshape(len(x), delays + 1, 2)
    # The oldest load preceded the oldest speed, which says that already.
    steps = np.concatenate([np.ones_like(speeds)[:, :, None], speeds[:, :, None], loads[:, :-1]], 2)
    return np.asarray(steps.transpose(1, 0, 2)[::-1])
