"""The noise of a step's gradient, from gradients over parts of its batch.

A step's batch of ``B`` samples is cut into parts, one per worker that has samples or one per
micro-batch; part ``k`` has ``b_k`` samples and the mean gradient ``g_k`` over them. With the
weights ``lambda_k = b_k / B`` the step's own gradient is ``g = sum lambda_k g_k``. Two numbers are
enough:

    A = sum lambda_k |g_k|^2        T = |g|^2

A sample's gradient has the mean ``G`` and the covariance ``Sigma``, with ``S = trace Sigma``. So
over ``n`` parts, however they differ in size, ``E A = |G|^2 + n S / B`` and
``E T = |G|^2 + S / B``. Hence

    S = B (A - T) / (n - 1)         |G|^2 = (n T - A) / (n - 1)

are unbiased, for any split. The *noise scale* ``S / |G|^2`` is the number of samples at which noise
and gradient are as large as each other. It is a ratio of two means, and either of them is a small
difference of large numbers where the noise is small: it is only as good as its interval.

Source:
    McCandlish et al., "An Empirical Model of Large-Batch Training", arXiv 1812.06162, appendix A,
    for two batch sizes. Not verified: known from the code of others. AdaptDL has the case of equal
    parts with plain means, which unequal parts bias: 2.1 times too much noise at (8, 16, 40, 64).
    The weighted form is our own derivation, and checked by simulation in the tests.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import inf, isclose, sqrt

Z95 = 1.959964
"""Half the width of a 95 % interval of a normal variable, in standard deviations."""

# Steps that may be incomplete at a time. Ranks are never far apart, so what is older was lost.
_MOST_OPEN = 64

# Sums of weights that are no whole numbers, and norms of equal gradients on devices of other kinds.
_ROUNDING, _ALIKE = 1e-9, 1e-6


@dataclass(frozen=True, slots=True)
class GradientNorms:
    """What one step's gradient tells of its noise."""

    parts: int  # ``n``, how many parts have samples; at least 2 to tell anything
    batch: float  # ``B``, samples of the step; tokens, say, where its loss is a mean over those
    local: float  # ``A``, mean of the parts' squared norms, weighted by their samples
    mean: float  # ``T``, squared norm of the step's gradient

    @classmethod
    def of(cls, samples: Sequence[float], squared: Sequence[float], mean: float) -> GradientNorms:
        """Return what parts tell whose mean gradients have these squared norms, ``|g_k|^2``.

        ``mean`` is the squared norm of their weighted mean. Parts without samples do not count;
        `ValueError` if none has any.
        """
        there = [(b, a) for b, a in zip(samples, squared, strict=True) if b > 0]
        batch = sum(b for b, _ in there)
        if not batch:
            raise ValueError("no part has samples, so there is no gradient; give some")
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
        """``A / T``, Scavenger's noise of this step: 1 if all parts agree, about ``n`` if none."""
        return self.local / self.mean if self.mean > 0 else inf


@dataclass(frozen=True, slots=True)
class Interval:
    """A figure and where it lies with 95 % confidence."""

    value: float  # the figure
    low: float  # lower end
    high: float  # upper end; infinite if the data do not bound it


@dataclass(frozen=True, slots=True)
class NoiseEstimate:
    """What the measured steps of late have told, those longer ago less and less.

    Kept are weighted sums over steps, each by its own unbiased estimate. So a split that changes
    from step to step biases nothing.
    """

    weight: float = 0.0  # sum of the weights
    squares: float = 0.0  # sum of their squares
    sums: tuple[float, float] = (0.0, 0.0)  # of ``S`` and ``|G|^2``
    # Of ``S S``, ``S |G|^2`` and ``|G|^2 |G|^2``.
    products: tuple[float, float, float] = (0.0, 0.0, 0.0)
    gains: tuple[float, float] = (0.0, 0.0)  # of ``A`` and ``T``

    def after(self, norms: GradientNorms, memory: float = 100.0) -> NoiseEstimate:
        """Return the estimate after another measured step; the same if the step tells nothing.

        After ``memory`` further steps one counts ``1 / e`` of what it did; infinite to let all
        count alike.
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
        """How many steps of equal weight would tell as much."""
        # Kish's effective size: unequal weights tell less than as many equal ones.
        return self.weight**2 / self.squares if self.squares else 0.0

    @property
    def noise(self) -> float:
        return self.sums[0] / self.weight if self.weight else 0.0

    @property
    def signal(self) -> float:
        return self.sums[1] / self.weight if self.weight else 0.0

    @property
    def gain(self) -> float:
        """Scavenger's noise of late: the mean ``A`` over the mean ``T``."""
        return self.gains[0] / self.gains[1] if self.gains[1] > 0 else inf

    def scale(self, z: float = Z95) -> Interval:
        """Return the noise scale ``S / |G|^2`` in samples, with an interval.

        The interval is Fieller's, of a ratio of two means. It is right where the denominator is
        hardly known: then it has no upper end. Steps count as independent.

        Source:
            Fieller, "Some problems in interval estimation", JRSS B 1954. Derived anew here, from
            the ratio ``r`` being where the mean of ``S - r |G|^2`` is not told from 0.
        """
        s, g = self.noise, self.signal
        value = s / g if g > 0 else inf
        # A single step says nothing about how much steps differ.
        if self.steps < 2:
            return Interval(value, 0.0, inf)
        spread = [z * z * v for v in self._variances()]
        a, b, c = g * g - spread[2], s * g - spread[1], s * s - spread[0]
        inside = b * b - a * c
        # The signal differs from 0 beyond doubt, so the ratio is bounded on both sides.
        if a > 0 and inside >= 0 and g > 0:
            root = sqrt(inside)
            return Interval(value, max((b - root) / a, 0.0), max((b + root) / a, 0.0))
        # Only the side on which the ratio itself lies; it is at least 0, whatever the signal seems.
        if a < 0 and inside >= 0 and (g > 0 or c > 0):
            return Interval(value, max((b - sqrt(inside)) / a, 0.0), inf)
        return Interval(value, 0.0, inf)

    def _variances(self) -> tuple[float, float, float]:
        """Return the variances of both means, and between them their covariance."""
        s, g = self.noise, self.signal
        ss, sg, gg = (p / self.weight for p in self.products)
        # Not one over all steps: the scatter is about their own mean.
        part = 1.0 / (self.steps - 1.0)
        # Rounding may take a variance below 0.
        return max(ss - s * s, 0.0) * part, (sg - s * g) * part, max(gg - g * g, 0.0) * part


@dataclass(frozen=True, slots=True)
class StepParts:
    """One or more parts of a measured step, as a worker tells of them."""

    step: int  # its number
    parts: int  # how many
    weight: float  # of these parts, in samples (or whatever the loss is a mean over), above 0
    batch: float  # ``B``, of all parts of the step
    local: float  # sum of their squared norms times their weights, ``sum b_k |g_k|^2``
    mean: float  # ``T``, squared norm of the step's own gradient, as this worker sees it
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
        # All ranks have the same gradient after its reduction, so another norm is another step.
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
    """What a run's measured steps have told of the noise of its gradient so far.

    Each worker tells of its own part of a step, when it comes to it: parts of one step may come in
    different exchanges, in any order, or never where a worker is lost. A step is whole when the
    parts that were told weigh as much as its batch, so nobody has to know who had samples in it.
    """

    estimate: NoiseEstimate = field(default_factory=NoiseEstimate)  # from the steps that are whole
    steps: int = 0  # how many these are
    # Steps of which parts are still to come, by number; those that never become whole make way for
    # later ones.
    open: tuple[StepParts, ...] = ()

    def hear(self, told: Iterable[StepParts]) -> tuple[NoiseOfRun, tuple[StepParts, ...]]:
        """Return what is known with more parts, and the steps that have become whole.

        A step of one part tells nothing and is left out. Parts that cannot be of one step under the
        same number are of different steps: the later ones are kept.
        """
        pending, whole = {parts.step: parts for parts in self.open}, list[StepParts]()
        for parts in told:
            before = pending.pop(parts.step, None)
            both = parts if before is None else before.joined(parts) or parts
            if not both.whole:
                pending[parts.step] = both
            elif both.norms.tells:
                whole.append(both)
        # Older steps weigh less, so the estimate must get them in order, however they came.
        whole.sort(key=lambda parts: parts.step)
        estimate = self.estimate
        for parts in whole:
            estimate = estimate.after(parts.norms)
        # Only now: in a long exchange more steps than these may be open until it is put together.
        kept = sorted(pending.values(), key=lambda parts: parts.step)[-_MOST_OPEN:]
        return NoiseOfRun(estimate, self.steps + len(whole), tuple(kept)), tuple(whole)
