"""How many epochs training takes at a global batch: laws fitted to measured runs.

A run at the global batch ``B`` reaches its target after ``e`` epochs (`reaching`). All laws are
linear, though some in another variable than ``B``:

- ``GAIN``, as in Scavenger: ``e = e* + theta * gamma``, where ``gamma``, from 0 to 1, is the noise
  of the gradient at ``B`` (`gamma_of`). Its dependence on ``B`` is fitted, too:
  ``gamma = a + c / sqrt(B)``. So epochs are a line in ``1 / sqrt(B)``, also if no ``gamma`` was
  measured; then ``e*`` and ``theta`` remain unknown.
- ``NOISE``, the law of large batches: ``e = e_min * (1 + B / B_noise)``. ``B_noise`` comes from the
  epochs and may differ from the noise scale of the gradients. It is negative if epochs fall as
  batches grow.
- ``POWER``: ``e = e_0 + c * B^q`` with a fitted ``q`` from -1 to 1.5. Both other laws are special
  cases, with ``q`` of -1/2 and 1. Values in between occur: if the learning rate grows as
  ``sqrt(B)``, batches far beyond the noise scale take epochs proportional to ``sqrt(B)``.

The first two can have opposite signs: with ``theta`` above 0 the first says that larger batches
need fewer epochs, the second that they need more. The sign depends on how the learning rate follows
the batch. So no sign is built in, and the measurements decide (`fit_best`).

Source:
    Tyagi and Sharma, "Scavenger", CCGRID 2023, sections on the statistical model, and McCandlish et
    al., arXiv 1812.06162, section 2. The latter's law is for a well-tuned learning rate; it was
    taken from others' code and not verified in the paper. We differ in three ways: we fit relative
    errors, leave the signs open and give intervals. The third law is ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from math import inf, isfinite, log, sqrt
from statistics import mean
from typing import NamedTuple

from evenstride.core.convergence.regression import Line, line
from evenstride.core.gradients.noise_scale import Interval

MEMORY = 10.0
"""Measured steps over which a training loss is averaged; see `smoothed`."""

_SAME = 1e-9  # relative difference that rounding can make
_POWERS = tuple(step / 10 for step in range(-10, 16))
# The added part decides if laws fit almost perfectly, where a factor would compare rounding errors.
_NEARLY_AS_GOOD = 1.1, 0.001  # of left-out errors, as a factor and added; prefers the simpler law


class Law(StrEnum):
    """The law by which epochs follow the batch."""

    GAIN = "gain"
    NOISE = "noise"
    POWER = "power"


@dataclass(frozen=True, slots=True)
class MeasuredTraining:
    """One measured training."""

    batch: int  # global batch ``B`` in samples
    epochs: float  # until the target was reached; may be fractional
    # Normalised gain of its gradients, from 0 to 1; ``None`` if it was not measured.
    gamma: float | None = None


@dataclass(frozen=True, slots=True)
class Convergence:
    """The fitted relation of epochs to batch."""

    law: Law  # the law that was fitted
    epochs_by: Line  # epochs over the law's own variable
    gamma_by: Line | None  # for `Law.GAIN`, ``gamma`` over ``1 / sqrt(B)``, if it was measured
    smallest: int  # smallest measured batch
    largest: int  # largest measured batch
    power: float = 1.0  # ``q``; 0 stands for the logarithm
    left_out: float | None = None  # `left_out_error`; ``None`` with two batches

    def epochs(self, batch: float) -> Interval:
        """Return the epochs that training at a batch takes, with a 95 % interval for one run.

        Beyond the measured batches the interval is that of the line, which widens there. It does
        not cover a law that stops being linear there.
        """
        found = self.epochs_by.next(self._variable(batch))
        return Interval(max(found.value, 0.0), max(found.low, 0.0), found.high)

    def steps(self, batch: int, samples: int) -> Interval:
        found, each = self.epochs(batch), samples / batch
        return Interval(found.value * each, found.low * each, found.high * each)

    @property
    def noise_batch(self) -> float:
        """``B_noise`` from the epochs, in samples; negative if epochs fall with the batch."""
        if self.law is not Law.NOISE or self.epochs_by.slope == 0:
            return inf
        return self.epochs_by.start / self.epochs_by.slope

    def _variable(self, batch: float) -> float:
        return self.gamma_by.at(1 / sqrt(batch)) if self.gamma_by else _raised(batch, self.power)


def gamma_of(noise_batch: float, batch: float, parts: int) -> float:
    """Return the normalised gain, ``gamma / K``, that follows from a noise scale.

    From ``E A = |G|^2 (1 + K n / B)`` and ``E T = |G|^2 (1 + n / B)`` with the noise scale ``n``
    and ``K`` parts. Scavenger's equation 2 is this ratio of means; its code smooths the ratio of
    each step.

    >>> gamma_of(noise_batch=0.0, batch=64, parts=4), gamma_of(inf, batch=64, parts=4)
    (0.25, 1.0)
    """
    if noise_batch == inf:
        return 1.0
    return (batch + parts * noise_batch) / (batch + noise_batch) / parts


def fit(runs: Sequence[MeasuredTraining], law: Law) -> Convergence:
    """Return the fit of a law to some runs; `ValueError` if there are too few."""
    batches = [float(run.batch) for run in runs]
    epochs = [run.epochs for run in runs]
    if law is Law.NOISE:
        return _known(law, runs, line(batches, epochs), None)
    if law is Law.POWER:
        return _by_power(runs, batches, epochs)
    return _by_gain(runs, batches, epochs)


def _by_gain(
    runs: Sequence[MeasuredTraining], batches: Sequence[float], epochs: Sequence[float]
) -> Convergence:
    """Return epochs over ``gamma``, or over ``1 / sqrt(B)`` if it was not measured."""
    noisy = [run for run in runs if run.gamma is not None]
    roots = [1 / sqrt(batch) for batch in batches]
    if len({run.batch for run in noisy}) > 1:
        by_batch = line([1 / sqrt(run.batch) for run in noisy], [run.gamma or 0.0 for run in noisy])
        # Epochs over the law's gamma, not the measured one: errors of gamma would flatten the line.
        gammas = [by_batch.at(root) for root in roots]
        if max(gammas) - min(gammas) > _SAME * max(gammas):
            return _known(Law.GAIN, runs, line(gammas, epochs), by_batch)
    return replace(_known(Law.GAIN, runs, line(roots, epochs), None), power=-0.5)


def _by_power(
    runs: Sequence[MeasuredTraining], batches: Sequence[float], epochs: Sequence[float]
) -> Convergence:
    """Return the power with the least scatter; it costs one degree of freedom."""
    if len(set(batches)) < 3:
        raise ValueError("the power law needs runs at three batches")
    lines = {q: line([_raised(batch, q) for batch in batches], epochs) for q in _POWERS}
    # Of powers that fit equally well, the one nearest to a straight line.
    power = min(lines, key=lambda q: (lines[q].scatter, abs(1 - q)))
    best = lines[power]
    # The search used one degree of freedom. Without this, intervals would be too narrow.
    freedom = max(best.freedom - 1, 0)
    scatter = best.scatter * sqrt(best.freedom / freedom) if freedom else 0.0
    best = replace(best, freedom=freedom, scatter=scatter)
    return replace(_known(Law.POWER, runs, best, None), power=power)


def _raised(batch: float, power: float) -> float:
    # A power of 0 is constant, and the logarithm is the limit of ``(B^q - 1) / q``.
    return batch**power if power else log(batch)


def fit_best(runs: Sequence[MeasuredTraining]) -> Convergence:
    """Return the law that predicts left-out batches best; `ValueError` with only one batch.

    Each batch is left out in turn, with all its runs: O(batches * runs). Among laws that predict
    almost equally well, the simplest is used. The power law is tried with four batches or more.

    With two batches nothing can be left out, and every law fits both. Then the direction decides.
    If epochs fall as the batch grows, it is the gain law, as in Scavenger's partial search: there,
    ``theta`` is above 0. If they rise, that law would need a ``theta`` below 0, and it is the noise
    law. Of Scavenger's own ResNet18, from 384 and 1,024 samples, the gain law misses the batches
    between by at most 3.9 %, the noise law by 8.7 %. Where epochs rise as ``B^0.75`` from 64 to
    1,024 samples, as in `benchmarks/forecast.py`, the noise law misses 192 samples by 15 %, the
    gain law by 117 %.
    """
    if len({run.batch for run in runs}) < 3:
        return fit(runs, _law_of_two(runs))
    found = []
    for law in (Law.NOISE, Law.GAIN, Law.POWER):  # the simplest first
        try:
            found.append(replace(fit(runs, law), left_out=left_out_error(runs, law)))
        # Laws for which the batches are too few are skipped. The noise law needs the fewest.
        except ValueError:
            if law is Law.NOISE:
                raise
    times, more = _NEARLY_AS_GOOD
    # A law with more parameters wins by chance if only the least error counts.
    enough = times * min(one.left_out or 0.0 for one in found) + more
    return next(one for one in found if (one.left_out or 0.0) <= enough)


def _law_of_two(runs: Sequence[MeasuredTraining]) -> Law:
    batches = [run.batch for run in runs]
    small, large = (mean(_epochs_at(runs, end)) for end in (min(batches), max(batches)))
    return Law.GAIN if large < small else Law.NOISE


def _epochs_at(runs: Sequence[MeasuredTraining], batch: int) -> list[float]:
    return [run.epochs for run in runs if run.batch == batch]


def left_out_error(runs: Sequence[MeasuredTraining], law: Law) -> float:
    """Return the mean relative error of epochs at batches that the fit did not include.

    Raises:
        ValueError: there are fewer than three batches, so that nothing can be left out.
    """
    batches = sorted({run.batch for run in runs})
    if len(batches) < 3:
        raise ValueError("every law fits two batches; train at a third one to compare laws")
    errors = []
    for out in batches:
        # All runs of a batch at once: a remaining run of the batch would reveal the answer.
        fitted = fit([run for run in runs if run.batch != out], law)
        errors.append(abs(fitted.epochs(out).value / mean(_epochs_at(runs, out)) - 1.0))
    return mean(errors)


def _known(
    law: Law, runs: Sequence[MeasuredTraining], by: Line, gamma_by: Line | None
) -> Convergence:
    batches = [run.batch for run in runs]
    return Convergence(law, by, gamma_by, min(batches), max(batches))


class Value(NamedTuple):
    """A value of the training metric, and its position in the training."""

    epochs: float  # trained so far
    value: float  # of the metric; infinite if it was NaN


@dataclass(frozen=True, slots=True)
class TimeToTarget:
    """When, or how nearly, a training run reached its target."""

    epochs: float | None  # until the target was reached; ``None`` if it was not
    nearest: Value  # the least value, at its first occurrence
    # Whether already the first value reached the target, so that it may have happened earlier.
    at_first: bool = False


def reaching(values: Sequence[Value], target: float) -> TimeToTarget:
    """Return when values first reached a target from above.

    The metric is assumed to fall linearly between the last value above the target and the first
    one at or below it.

    >>> reaching([Value(1.0, 0.9), Value(2.0, 0.5), Value(3.0, 0.3)], 0.4).epochs
    2.5
    """
    nearest = min(values, key=lambda one: (one.value, one.epochs))
    for place, one in enumerate(values):
        # Not ``>``, because a NaN has not reached the target either.
        if not one.value <= target:
            continue
        # Nothing is known before the first value, so the target may have been reached earlier.
        before = values[place - 1] if place else one
        # Interpolation from infinity is impossible.
        if not isfinite(before.value) or before.value <= target:
            return TimeToTarget(one.epochs, nearest, at_first=not place)
        part = (before.value - target) / (before.value - one.value)
        return TimeToTarget(before.epochs + part * (one.epochs - before.epochs), nearest)
    return TimeToTarget(None, nearest)


def smoothed(values: Sequence[Value], memory: float = MEMORY) -> list[Value]:
    """Return the exponential means of values, and of the epochs at which they occurred.

    The loss of one batch scatters, so the first one below a target may be luck. A mean over
    ``memory`` values scatters ``sqrt(2 * memory - 1)`` times less: 4.4 times with 10, which is
    still short for a run of some hundred measured steps. A mean of the losses alone would lag, by
    more epochs the larger the batch. So the epochs are averaged with the same weights, and both
    match if the loss is almost linear over so many steps. Infinite values are skipped.
    """
    keep, weight, epochs, value = 1.0 - 1.0 / memory, 0.0, 0.0, 0.0
    found = []
    for one in values:
        if one.value == inf:
            continue
        weight = keep * weight + 1.0
        epochs, value = keep * epochs + one.epochs, keep * value + one.value
        # Divided by the sum of the weights, or the first means would be biased towards 0.
        found.append(Value(epochs / weight, value / weight))
    return found
