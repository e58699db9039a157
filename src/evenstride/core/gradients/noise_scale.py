"""The noise of a step's gradient, from gradients over parts of its batch.

A step's batch of ``B`` samples consists of parts: one per worker with samples, or one per
micro-batch. Part ``k`` has ``b_k`` samples and the mean gradient ``g_k`` over them. With the
weights ``lambda_k = b_k / B`` the step's own gradient is ``g = sum lambda_k g_k``. Two numbers are
enough:

    A = sum lambda_k |g_k|^2        T = |g|^2

A sample's gradient has the mean ``G`` and the covariance ``Sigma``, with ``S = trace Sigma``. Over
``n`` parts of any sizes, ``E A = |G|^2 + n S / B`` and ``E T = |G|^2 + S / B``. Hence

    S = B (A - T) / (n - 1)         |G|^2 = (n T - A) / (n - 1)

are unbiased, for any split. The *noise scale* ``S / |G|^2`` is the number of samples at which noise
and gradient have the same size. It is a ratio of two means. If the noise is small, either mean is a
small difference of large numbers. So the estimate is only as good as its interval.

Source:
    McCandlish et al., "An Empirical Model of Large-Batch Training", arXiv 1812.06162, appendix A,
    for two batch sizes. Taken from others' code, not verified in the paper. AdaptDL has the case of
    equal parts with plain means, which are biased for unequal parts: 2.1 times too much noise at
    (8, 16, 40, 64). The weighted form is our own derivation; simulations in the tests check it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import inf, isclose, sqrt

Z95 = 1.959964
"""Half the width of a 95 % interval of a normal variable, in standard deviations."""

# Largest number of incomplete steps. Ranks are never far apart, so older ones were lost.
_MOST_OPEN = 64

# Tolerances for sums of non-integer weights, and for norms of equal gradients on different devices.
_ROUNDING, _ALIKE = 1e-9, 1e-6


@dataclass(frozen=True, slots=True)
class GradientNorms:
    """The norms of one step's gradient that determine its noise."""

    parts: int  # ``n``, number of parts with samples; must be at least 2 for an estimate.
    batch: float  # ``B``, samples of the step; or tokens, if its loss is a mean over those.
    local: float  # ``A``, mean of the parts' squared norms, weighted by their samples.
    mean: float  # ``T``, squared norm of the step's gradient.

    @classmethod
    def of(cls, samples: Sequence[float], squared: Sequence[float], mean: float) -> GradientNorms:
        """Return the norms from the squared norms of the parts' mean gradients, ``|g_k|^2``.

        ``mean`` is the squared norm of their weighted mean. Parts without samples do not count;
        `ValueError` if no part has samples.
        """
        there = [(b, a) for b, a in zip(samples, squared, strict=True) if b > 0]
        batch = sum(b for b, _ in there)
        if not batch:
            raise ValueError("no part has samples, so there is no gradient; pass at least one")
        return cls(len(there), batch, sum(b * a for b, a in there) / batch, mean)

    @property
    def tells(self) -> bool:
        return self.parts > 1

    @property
    def noise(self) -> float:
        """``S``: trace of the covariance of a sample's gradient, unbiased; may be below 0."""
        return self.batch * (self.local - self.mean) / (self.parts - 1)

    @property
    def signal(self) -> float:
        """``|G|^2``, unbiased; may be below 0."""
        return (self.parts * self.mean - self.local) / (self.parts - 1)

    @property
    def gain(self) -> float:
        """``A / T``, Scavenger's noise of this step: 1 if all parts agree, up to about ``n``."""
        return self.local / self.mean if self.mean > 0 else inf


@dataclass(frozen=True, slots=True)
class Interval:
    """A value and its 95 % confidence interval."""

    value: float  # the value
    low: float  # lower end
    high: float  # upper end; infinite if the data do not bound it


@dataclass(frozen=True, slots=True)
class NoiseEstimate:
    """Noise of the recent steps; older steps count less and less.

    It keeps weighted sums over steps, each with its own unbiased estimate. So a split that changes
    from step to step causes no bias.
    """

    weight: float = 0.0  # sum of the weights
    squares: float = 0.0  # sum of their squares
    sums: tuple[float, float] = (0.0, 0.0)  # of ``S`` and ``|G|^2``
    # Of ``S S``, ``S |G|^2`` and ``|G|^2 |G|^2``.
    products: tuple[float, float, float] = (0.0, 0.0, 0.0)
    gains: tuple[float, float] = (0.0, 0.0)  # of ``A`` and ``T``

    def after(self, norms: GradientNorms, memory: float = 100.0) -> NoiseEstimate:
        """Return the estimate after another measured step; the same if the step has no estimate.

        After ``memory`` further steps, a step counts ``1 / e`` of its initial weight; with an
        infinite ``memory`` all count the same.
        """
        if not norms.tells:
            return self
        keep = 1.0 if memory == inf else memory / (1.0 + memory)
        s, g = norms.noise, norms.signal
        return NoiseEstimate(
            keep * self.weight + 1.0,
            keep**2 * self.squares + 1.0,
            (keep * self.sums[0] + s, keep * self.sums[1] + g),
            (
                keep * self.products[0] + s * s,
                keep * self.products[1] + s * g,
                keep * self.products[2] + g * g,
            ),
            (keep * self.gains[0] + norms.local, keep * self.gains[1] + norms.mean),
        )

    @property
    def steps(self) -> float:
        """Number of steps of equal weight with the same information."""
        # Kish's effective size: unequal weights carry less information than equal ones.
        return self.weight**2 / self.squares if self.squares else 0.0

    @property
    def noise(self) -> float:
        return self.sums[0] / self.weight if self.weight else 0.0

    @property
    def signal(self) -> float:
        return self.sums[1] / self.weight if self.weight else 0.0

    @property
    def gain(self) -> float:
        """Scavenger's noise of the recent steps: the mean ``A`` over the mean ``T``."""
        return self.gains[0] / self.gains[1] if self.gains[1] > 0 else inf

    def scale(self, z: float = Z95) -> Interval:
        """Return the noise scale ``S / |G|^2`` in samples, with an interval.

        The interval is Fieller's, for a ratio of two means. It stays valid if the denominator is
        uncertain: then it has no upper end. Steps count as independent.

        Source:
            Fieller, "Some problems in interval estimation", JRSS B 1954. Our own derivation: the
            interval holds the ratios ``r`` for which the mean of ``S - r |G|^2`` may be 0.
        """
        s, g = self.noise, self.signal
        value = s / g if g > 0 else inf
        # A single step says nothing about the scatter of steps.
        if self.steps < 2:
            return Interval(value, 0.0, inf)
        spread = [z * z * v for v in self._variances()]
        a, b, c = g * g - spread[2], s * g - spread[1], s * s - spread[0]
        inside = b * b - a * c
        # The signal differs significantly from 0, so the ratio is bounded on both sides.
        if a > 0 and inside >= 0 and g > 0:
            root = sqrt(inside)
            return Interval(value, max((b - root) / a, 0.0), max((b + root) / a, 0.0))
        # Only the side of the ratio itself; it is at least 0, whatever the sign of the signal.
        if a < 0 and inside >= 0 and (g > 0 or c > 0):
            return Interval(value, max((b - sqrt(inside)) / a, 0.0), inf)
        return Interval(value, 0.0, inf)

    def _variances(self) -> tuple[float, float, float]:
        """Return the variances of both means, with their covariance between them."""
        s, g = self.noise, self.signal
        ss, sg, gg = (p / self.weight for p in self.products)
        # Not ``1 / steps``: the scatter is about their own mean.
        part = 1.0 / (self.steps - 1.0)
        # Rounding may make a variance negative.
        return max(ss - s * s, 0.0) * part, (sg - s * g) * part, max(gg - g * g, 0.0) * part


@dataclass(frozen=True, slots=True)
class StepParts:
    """One or more parts of a measured step, as a worker reports them."""

    step: int  # its number.
    parts: int  # number of parts.
    weight: float  # of these parts, in samples (or the unit of the loss's mean), above 0.
    batch: float  # ``B``, of all parts of the step.
    local: float  # sum of their squared norms times their weights, ``sum b_k |g_k|^2``.
    mean: float  # ``T``, squared norm of the step's own gradient on this worker.
    # Sum of their mean losses times their weights; ``None`` if one is not known.
    loss: float | None = None

    @property
    def norms(self) -> GradientNorms:
        return GradientNorms(self.parts, self.batch, self.local / self.weight, self.mean)

    @property
    def whole(self) -> bool:
        return isclose(self.weight, self.batch, rel_tol=_ROUNDING)

    @property
    def mean_loss(self) -> float | None:
        return None if self.loss is None else self.loss / self.weight

    def joined(self, other: StepParts) -> StepParts | None:
        weight = self.weight + other.weight
        alike = self.step == other.step and self.batch == other.batch
        # All ranks have the same gradient after the all-reduce, so another norm is another step.
        if not alike or not isclose(self.mean, other.mean, rel_tol=_ALIKE):
            return None
        if weight > self.batch * (1 + _ROUNDING):
            return None
        return StepParts(
            self.step,
            self.parts + other.parts,
            weight,
            self.batch,
            self.local + other.local,
            self.mean,
            None if self.loss is None or other.loss is None else self.loss + other.loss,
        )


@dataclass(frozen=True, slots=True)
class NoiseOfRun:
    """The noise of a run's gradients, from all steps measured so far.

    Each worker reports its own parts of a step. Parts of one step may arrive in different
    exchanges, in any order, or never if a worker is lost. A step is complete when the weights of
    its reported parts sum to its batch, so the list of workers with samples is not needed.
    """

    estimate: NoiseEstimate = field(default_factory=NoiseEstimate)  # from the complete steps
    steps: int = 0  # number of complete steps
    # Steps with missing parts, by number; those that never become complete make room for later
    # ones.
    open: tuple[StepParts, ...] = ()

    def hear(self, reports: Iterable[StepParts]) -> tuple[NoiseOfRun, tuple[StepParts, ...]]:
        """Return the state after more parts, and the steps that have become complete.

        A step of one part has no estimate and is left out. If parts with the same number cannot
        belong to the same step, the later ones are kept.
        """
        pending, whole = {parts.step: parts for parts in self.open}, list[StepParts]()
        for parts in reports:
            before = pending.pop(parts.step, None)
            both = parts if before is None else before.joined(parts) or parts
            if not both.whole:
                pending[parts.step] = both
            elif both.norms.tells:
                whole.append(both)
        # Older steps have less weight, so the estimate needs them in order of steps.
        whole.sort(key=lambda parts: parts.step)
        estimate = self.estimate
        for parts in whole:
            estimate = estimate.after(parts.norms)
        # Only at the end: a long exchange may have more open steps than this before it is merged.
        kept = sorted(pending.values(), key=lambda parts: parts.step)[-_MOST_OPEN:]
        return NoiseOfRun(estimate, self.steps + len(whole), tuple(kept)), tuple(whole)
