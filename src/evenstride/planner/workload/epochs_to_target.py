"""The number of epochs that training takes at a batch, from the available data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import exp, hypot, inf, log, sqrt
from statistics import mean, stdev
from typing import Protocol

from evenstride.core.convergence.batch_laws import (
    Convergence,
    Law,
    MeasuredTraining,
    fit_best,
)
from evenstride.core.convergence.regression import t975
from evenstride.core.gradients.noise_scale import Z95, Interval
from evenstride.errors import ConfigError
from evenstride.planner.workload.workload_profile import Noise, WorkloadProfile

_ASSUMED = 1.25  # assumed deviation of one run from a law that fits all runs exactly
# Relative deviation between runs, even if a few happen to agree; assumed.
_LEAST_SCATTER = 0.05
_MANY = 10**6  # degrees of freedom of assumed values
_LAWS = {
    Law.GAIN: "Scavenger's law (gain)",
    Law.NOISE: "the law of large batches (noise)",
    Law.POWER: "a power of the batch",
}


class Epochs(Protocol):
    """Epochs by batch; ``why`` is one sentence on their source."""

    @property
    def why(self) -> str: ...

    def at(self, batch: int) -> Interval | None:
        """Return the epochs at a batch with a 95 % interval; ``None`` if not known."""
        ...


@dataclass(frozen=True, slots=True)
class MeasuredEpochs:
    """From runs that reached the target, at two batches or more."""

    convergence: Convergence  # fitted to them
    batches: int  # number of batches

    @property
    def why(self) -> str:
        why = f"the epochs follow {self._law}, fitted to runs at {self.batches} batches"
        why += self._evidence
        if self._scatter_known:
            return why
        return f"{why}; with so few runs, the plan assumes that they vary by 25 %"

    @property
    def _evidence(self) -> str:
        """What the law was chosen by."""
        error = self.convergence.left_out
        if error is not None:
            return f"; it predicts each batch from the others with a mean error of {error:.1%}"
        fall = self.convergence.law is Law.GAIN
        because = f", because they {'fall' if fall else 'do not fall'} as the batch grows"
        ends = [self.convergence.epochs(batch).value for batch in self._range]
        if self._scatter_known or max(ends) > _ASSUMED * min(ends):
            return because
        return f"{because} (weak evidence: the difference is less than that of single runs)"

    @property
    def _range(self) -> tuple[int, int]:
        return self.convergence.smallest, self.convergence.largest

    @property
    def _law(self) -> str:
        """The law by name, with Scavenger's two constants if the noise of the runs was measured."""
        name, line = _LAWS[self.convergence.law], self.convergence.epochs_by
        if self.convergence.gamma_by is None:
            return name
        return f"{name}, e = {line.start:.3g} {line.slope:+.3g} gamma"

    @property
    def _scatter_known(self) -> bool:
        return self.convergence.epochs_by.freedom > 0

    def at(self, batch: int) -> Interval | None:
        """Return the epochs at a batch within the trained range; ``None`` elsewhere."""
        if not self._range[0] <= batch <= self._range[1]:
            return None
        found = self.convergence.epochs(batch)
        if not self._scatter_known:
            return _assumed(found.value)
        by = replace(self.convergence.epochs_by, scatter=_LEAST_SCATTER, freedom=_MANY)
        least = replace(self.convergence, epochs_by=by).epochs(batch)
        return Interval(found.value, min(found.low, least.low), max(found.high, least.high))


@dataclass(frozen=True, slots=True)
class ByNoise:
    """From the epochs at one batch, and the noise scale of the gradient there.

    ``e(B) = e(B0) (phi + B) / (phi + B0)``: the law of large batches, with a well-tuned learning
    rate at every batch. The interval is that of the noise scale, and of the epochs if they have
    one.
    """

    epochs: float  # at the base
    base: int  # ``B0`` in samples
    noise: Noise  # ``phi``
    # 95 % interval of the epochs at the base; ``None`` if the user gave them
    within: Interval | None = None

    @property
    def why(self) -> str:
        why = (
            f"training takes {self.epochs:g} epochs{_ends(self.within)} at a batch of {self.base}; "
            "at other batches, they follow from the gradient's noise scale of "
            f"{self.noise.scale:.0f} samples by the law of large batches"
        )
        if self.noise.settled is not False:
            return why
        return (
            f"{why}; this noise has not settled in the measured steps, so its interval is wide: "
            "measure more steps"
        )

    def at(self, batch: int) -> Interval | None:
        ends = [self.noise.low, inf if self.noise.high is None else self.noise.high]
        low, high = sorted(self._of(end, batch) for end in ends)
        found = Interval(self._of(self.noise.scale, batch), low, high)
        return found if self.within is None else _wider(found, self.within)

    def _of(self, phi: float, batch: int) -> float:
        return self.epochs if phi == inf else self.epochs * (phi + batch) / (phi + self.base)


@dataclass(frozen=True, slots=True)
class KnownEpochs:
    """Given by the user or measured, for one batch only; those of others are not known."""

    epochs: float  # at the batch
    batch: int  # in samples
    # 95 % interval of the epochs; ``None`` if the user gave them
    within: Interval | None = None

    @property
    def why(self) -> str:
        return (
            f"training takes {self.epochs:g} epochs{_ends(self.within)} at a batch of "
            f"{self.batch}; their number at other batches is unknown"
        )

    def at(self, batch: int) -> Interval | None:
        exactly = Interval(self.epochs, self.epochs, self.epochs)
        return (self.within or exactly) if batch == self.batch else None


def epochs_of_runs(runs: Sequence[MeasuredTraining]) -> MeasuredEpochs:
    """Return the epochs by the law that fits some runs; `ValueError` with only one batch."""
    return MeasuredEpochs(fit_best(runs), len({run.batch for run in runs}))


def epochs_of(profile: WorkloadProfile, epochs: float | None) -> Epochs:
    """Return the epochs of a workload."""
    if epochs is not None:
        if not 0 < epochs < inf:
            raise ConfigError(f"--epochs is {epochs}, but must be above 0, such as 10")
        base = profile.global_batch
        return ByNoise(epochs, base, profile.noise) if profile.noise else KnownEpochs(epochs, base)
    runs = [MeasuredTraining(one.batch, one.epochs, one.gamma) for one in profile.trainings]
    batches = {run.batch for run in runs}
    if not batches:
        raise ConfigError(
            "the number of epochs is unknown, because no run has reached a target; give --epochs, "
            "or profiles of runs that did"
        )
    if len(batches) > 1:
        return epochs_of_runs(runs)
    only, within = runs[0].batch, _next([run.epochs for run in runs])
    if profile.noise:
        return ByNoise(within.value, only, profile.noise, within)
    return KnownEpochs(within.value, only, within)


def _next(epochs: Sequence[float]) -> Interval:
    """Return the epochs of one more run, from those at the same batch."""
    usual, runs = mean(epochs), len(epochs)
    if runs == 1:
        return _assumed(usual)
    scatter = max(t975(runs - 1) * stdev(epochs), Z95 * _LEAST_SCATTER * usual)
    half = scatter * sqrt(1.0 + 1.0 / runs)
    return Interval(usual, max(usual - half, 0.0), usual + half)


def _assumed(epochs: float) -> Interval:
    return Interval(epochs, epochs / _ASSUMED, epochs * _ASSUMED)


def _wider(found: Interval, by: Interval) -> Interval:
    """Return an interval that includes the error of another value: half-widths add as squares."""
    down, up = (hypot(_apart(found, end), _apart(by, end)) for end in ("low", "high"))
    value = found.value
    return Interval(value, value * exp(-down), value * exp(up) if up < inf else inf)


def _apart(one: Interval, end: str) -> float:
    """Return the distance of an end from the value, in the logarithm."""
    at = getattr(one, end)
    return abs(log(at / one.value)) if 0.0 < at < inf else inf


def _ends(within: Interval | None) -> str:
    """Return the interval of measured epochs as text; empty for those from the user."""
    if within is None:
        return ""
    return f" (95 %: {within.low:.3g} to {within.high:.3g})"
