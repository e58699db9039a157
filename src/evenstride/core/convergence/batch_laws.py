"""How many epochs training takes at a global batch: laws, fitted to runs that were measured.

A run at the global batch ``B`` reaches its target after ``e`` epochs (`reaching`). All laws are
lines, of other things than ``B`` itself perhaps:

- ``GAIN``, as Scavenger has it: ``e = e* + theta * gamma``, where ``gamma`` is how noisy the
  gradient is at ``B``, from 0 to 1 (`gamma_of`). Its own change with ``B`` is fitted, too:
  ``gamma = a + c / sqrt(B)``.
- ``NOISE``, the law of large batches: ``e = e_min * (1 + B / B_noise)``. ``B_noise`` is what the
  epochs say, which need not be the noise scale that gradients say; where epochs fall as batches
  grow, it is below 0.
- ``POWER``: ``e = e_0 + c * B^q`` with ``q`` from -1 to 1.5, fitted, too. Both others are cases of
  it, with ``q`` of -1/2 and 1. What lies between them is real: with a learning rate that grows as
  ``sqrt(B)``, batches far beyond the noise scale take as many epochs as ``sqrt(B)``.

The first two have been seen to point opposite ways: with ``theta`` above 0 the first says that
larger batches need fewer epochs, the second that they need more. Which is so depends on how the
learning rate follows the batch, so neither sign is built in, and what is measured decides.

Source:
    Tyagi and Sharma, "Scavenger", CCGRID 2023, sections on the statistical model, and McCandlish et
    al., arXiv 1812.06162, section 2. The latter's law is for a well-tuned learning rate; not
    verified in print, known from the code of others. We differ in fitting relative errors, in
    letting signs be what they are, and in giving intervals. The third law is ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from math import inf, isfinite, log, sqrt
from typing import NamedTuple

from evenstride.core.convergence.regression import Line, line
from evenstride.core.gradients.noise_scale import Interval

MEMORY = 10.0
"""Measured steps over which a training loss is averaged; see `smoothed`."""

_POWERS = tuple(step / 10 for step in range(-10, 16))
# The added part decides where laws fit next to perfectly, and a factor would compare rounding.
_NEARLY_AS_GOOD = 1.1, 0.001  # of left-out errors, as a factor and added: the simpler law is taken


class Law(StrEnum):
    """By which law epochs follow the batch."""

    GAIN = "gain"
    NOISE = "noise"
    POWER = "power"


@dataclass(frozen=True, slots=True)
class MeasuredTraining:
    """One measured training."""

    batch: int  # global batch ``B`` in samples
    epochs: float  # until the target was reached; a part of one counts as that
    # Normalised gain of its gradients, from 0 to 1; ``None`` if it was not measured.
    gamma: float | None = None


@dataclass(frozen=True, slots=True)
class Convergence:
    """What is known of epochs by batch."""

    law: Law  # that it follows
    epochs_by: Line  # epochs over the law's own variable
    gamma_by: Line | None  # of `Law.GAIN`, ``gamma`` over ``1 / sqrt(B)``
    smallest: int  # batch that was measured
    largest: int  # batch that was measured
    power: float = 1.0  # ``q``; 0 stands for the logarithm

    def epochs(self, batch: float) -> Interval:
        """Return the epochs that a training at a batch takes, with a 95 % interval for one run.

        Beyond what was measured the interval is the line's own, which widens there. A law that is
        no longer a line there is not seen.
        """
        found = self.epochs_by.next(self._variable(batch))
        return Interval(max(found.value, 0.0), max(found.low, 0.0), found.high)

    def steps(self, batch: int, samples: int) -> Interval:
        found, each = self.epochs(batch), samples / batch
        return Interval(found.value * each, found.low * each, found.high * each)

    @property
    def noise_batch(self) -> float:
        """``B_noise`` as the epochs tell it, in samples; below 0 where they fall."""
        if self.law is not Law.NOISE or self.epochs_by.slope == 0:
            return inf
        return self.epochs_by.start / self.epochs_by.slope

    def _variable(self, batch: float) -> float:
        return self.gamma_by.at(1 / sqrt(batch)) if self.gamma_by else _raised(batch, self.power)


def gamma_of(noise_batch: float, batch: float, parts: int) -> float:
    """Return the normalised gain, ``gamma / K``, that a noise scale means at a batch of parts.

    From ``E A = |G|^2 (1 + K n / B)`` and ``E T = |G|^2 (1 + n / B)`` with the noise scale ``n``
    and ``K`` parts; Scavenger's equation 2 is such a ratio of means; its code smooths the ratio of
    each step.

    >>> gamma_of(noise_batch=0.0, batch=64, parts=4), gamma_of(inf, batch=64, parts=4)
    (0.25, 1.0)
    """
    if noise_batch == inf:
        return 1.0
    return (batch + parts * noise_batch) / (batch + noise_batch) / parts


def fit(runs: Sequence[MeasuredTraining], law: Law) -> Convergence:
    """Return what some trainings tell under a law; `ValueError` if there are too few."""
    batches = [float(run.batch) for run in runs]
    epochs = [run.epochs for run in runs]
    if law is Law.NOISE:
        return _known(law, runs, line(batches, epochs), None)
    if law is Law.POWER:
        return _by_power(runs, batches, epochs)
    noisy = [run for run in runs if run.gamma is not None]
    if len({run.batch for run in noisy}) < 2:
        raise ValueError("the gain law needs trainings at two batches with their gradients' noise")
    by_batch = line([1 / sqrt(run.batch) for run in noisy], [run.gamma or 0.0 for run in noisy])
    # Epochs over the law's gamma, not the measured one: errors of gamma would flatten the line.
    return _known(law, runs, line([by_batch.at(1 / sqrt(b)) for b in batches], epochs), by_batch)


def _by_power(
    runs: Sequence[MeasuredTraining], batches: Sequence[float], epochs: Sequence[float]
) -> Convergence:
    """Return the power with the least scatter; it costs a degree of freedom."""
    if len(set(batches)) < 3:
        raise ValueError("the power law needs trainings at three batches")
    lines = {q: line([_raised(batch, q) for batch in batches], epochs) for q in _POWERS}
    # Of powers that fit equally well, the one nearest to a straight line.
    power = min(lines, key=lambda q: (lines[q].scatter, abs(1 - q)))
    best = lines[power]
    # The search has used up one degree of freedom. Without that, intervals hold too seldom.
    freedom = max(best.freedom - 1, 0)
    scatter = best.scatter * sqrt(best.freedom / freedom) if freedom else 0.0
    best = replace(best, freedom=freedom, scatter=scatter)
    return replace(_known(Law.POWER, runs, best, None), power=power)


def _raised(batch: float, power: float) -> float:
    # A power of 0 is constant, and the logarithm is what ``(B^q - 1) / q`` tends to.
    return batch**power if power else log(batch)


def fit_best(runs: Sequence[MeasuredTraining]) -> Convergence:
    """Return the law that tells left-out batches best; `ValueError` with one batch only.

    Every batch is left out in turn, with all its runs: O(batches * runs). With two batches nothing
    can be left out, so no error tells which law is better. Then it is the gain law where the noise
    of the gradients is known, as in Scavenger's partial search, else the noise law, which needs no
    gradients. Of laws that do nearly as well, the simplest is taken; the power law is tried with
    four batches or more.
    """
    if len({run.batch for run in runs}) < 3:
        noisy = {run.batch for run in runs if run.gamma is not None}
        return fit(runs, Law.GAIN if len(noisy) > 1 else Law.NOISE)
    found = []
    for law in (Law.NOISE, Law.GAIN, Law.POWER):  # the simplest first
        try:
            found.append((left_out_error(runs, law), fit(runs, law)))
        # Laws that the data are too few for are left out. The noise law needs the fewest.
        except ValueError:
            if law is Law.NOISE:
                raise
    times, more = _NEARLY_AS_GOOD
    # A law with more parameters wins by chance if only the least error counts.
    enough = times * min(error for error, _ in found) + more
    return next(convergence for error, convergence in found if error <= enough)


def left_out_error(runs: Sequence[MeasuredTraining], law: Law) -> float:
    """Return the mean relative error of epochs at batches that a law has not seen.

    0 with fewer than three batches, as nothing can be left out then.
    """
    batches = sorted({run.batch for run in runs})
    if len(batches) < 3:
        return 0.0
    errors = []
    for out in batches:
        # All runs of a batch at once: a twin that stays would give away what is to be predicted.
        told = fit([run for run in runs if run.batch != out], law)
        real = [run.epochs for run in runs if run.batch == out]
        errors.append(abs(told.epochs(out).value / (sum(real) / len(real)) - 1.0))
    return sum(errors) / len(errors)


def _known(
    law: Law, runs: Sequence[MeasuredTraining], by: Line, gamma_by: Line | None
) -> Convergence:
    batches = [run.batch for run in runs]
    return Convergence(law, by, gamma_by, min(batches), max(batches))


class Value(NamedTuple):
    """A figure that is to fall, and where in the training it was found."""

    epochs: float  # trained until then
    value: float  # of the figure; infinite where it was no number


@dataclass(frozen=True, slots=True)
class TimeToTarget:
    """How a training stands to its target."""

    epochs: float | None  # until the target was reached; ``None`` if it was not
    nearest: Value  # the least value, where it was found first
    # Whether the first value of all was there already, so that it may have been sooner.
    at_first: bool = False


def reaching(values: Sequence[Value], target: float) -> TimeToTarget:
    """Return when some values first came to a target from above.

    Between the last value above it and the first one at or below it, the figure is taken to fall in
    a straight line.

    >>> reaching([Value(1.0, 0.9), Value(2.0, 0.5), Value(3.0, 0.3)], 0.4).epochs
    2.5
    """
    nearest = min(values, key=lambda one: (one.value, one.epochs))
    for place, one in enumerate(values):
        # Not ``>``, because a value that is no number has not come to the target either.
        if not one.value <= target:
            continue
        # Before the first value nothing is known, so it may have been there sooner.
        before = values[place - 1] if place else one
        # There is no straight line down from infinity.
        if not isfinite(before.value) or before.value <= target:
            return TimeToTarget(one.epochs, nearest, at_first=not place)
        part = (before.value - target) / (before.value - one.value)
        return TimeToTarget(before.epochs + part * (one.epochs - before.epochs), nearest)
    return TimeToTarget(None, nearest)


def smoothed(values: Sequence[Value], memory: float = MEMORY) -> list[Value]:
    """Return the exponential means of values, given by epochs, and of where they were found.

    The loss of one batch scatters, so the first one below a target may be luck. A mean over
    ``memory`` values scatters ``sqrt(2 * memory - 1)`` times less: 4.4 times with 10, which is
    still short beside a training of some hundred measured steps. A mean of losses alone would be
    late, by more epochs the larger the batch; so the epochs are averaged with the same weights, and
    the two belong together wherever the loss is nearly straight over so many steps. Values that are
    no numbers are left out.
    """
    keep, weight, epochs, value = 1.0 - 1.0 / memory, 0.0, 0.0, 0.0
    found = []
    for one in values:
        if one.value == inf:
            continue
        weight = keep * weight + 1.0
        epochs, value = keep * epochs + one.epochs, keep * value + one.value
        # Over the sum of the weights, or the first means would be drawn towards 0.
        found.append(Value(epochs / weight, value / weight))
    return found
