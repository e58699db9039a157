"""Distributions of a machine's lifetime.

`Exponential` has a constant rate, and `TwoRates` mixes two of them. `Bathtub` is the curve of
preemptible machines, which end early or at the provider's limit and rarely in between. The module
`survival_fit` determines which of them fits a recording.

The published bathtub curve is ``F(t) = A (1 - exp(-t/tau1) + exp((t - b)/tau2))``: many machines
end in the first hours (``tau1``), few in the middle, and the rest near the limit (``b``; a short
``tau2`` makes the end sharp). It is not a distribution function: ``F(0) = A exp(-b/tau2)`` is above
0, and ``F`` grows beyond 1. Two rules make it one without a change of the hazard in between:

- *start*: no machine is gone at age 0, so everything is conditional on survival of age 0,
  ``S(t) = (1 - F(t)) / (1 - F(0))``;
- *end*: no machine gets older than the age at which ``F`` reaches 1, nor than the provider's limit.
  If the limit comes first, all remaining machines end there at once.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import exp, inf, isfinite, log
from typing import Protocol

import numpy as np

from evenstride.core.arrays import FloatArray
from evenstride.errors import ConfigError

Ages = FloatArray | float
"""Ages in seconds: an array of any shape, or one number."""

DAY_S = 86_400.0

_HALVINGS = 80
_LARGEST = 700.0  # largest exponent whose power is a finite float


class Lifetime(Protocol):
    """A distribution of a machine's lifetime; ages are seconds since it started."""

    def survival(self, age_s: Ages) -> FloatArray:
        """Return the fraction that exceeds an age."""
        ...

    def hazard_per_s(self, age_s: Ages) -> FloatArray:
        """Return the rate of loss at an age."""
        ...

    def mean_left_s(self, age_s: Ages) -> FloatArray:
        """Return the mean remaining time at an age."""
        ...

    def quantile_s(self, part: Ages) -> FloatArray:
        """Return the age by which a fraction, 0 to 1, is gone: maps a uniform number to a life."""
        ...


@dataclass(frozen=True, slots=True)
class Exponential:
    """The lifetime of a machine that does not age; a `Lifetime`.

    Args:
        mean_s: mean life in seconds, above 0.

    Raises:
        ConfigError: ``mean_s`` is not above 0 and finite.
    """

    mean_s: float

    def __post_init__(self) -> None:
        if not 0.0 < self.mean_s < inf:
            raise ConfigError(
                f"invalid mean life {self.mean_s} s: expected a time above 0 s; one day is 86400 s"
            )

    def survival(self, age_s: Ages) -> FloatArray:
        """Return the fraction that exceeds an age; of its shape."""
        return np.asarray(np.exp(-np.asarray(age_s) / self.mean_s))

    def hazard_per_s(self, age_s: Ages) -> FloatArray:
        """Return the rate of loss, the same at any age."""
        return np.full(np.shape(age_s), 1.0 / self.mean_s)

    def mean_left_s(self, age_s: Ages) -> FloatArray:
        """Return the mean remaining time, the same at any age."""
        return np.full(np.shape(age_s), self.mean_s)

    def quantile_s(self, part: Ages) -> FloatArray:
        """Return the age in seconds by which a fraction, 0 to 1, is gone; infinite for 1."""
        with np.errstate(divide="ignore"):
            return np.asarray(-self.mean_s * np.log1p(-np.asarray(part, dtype=np.float64)))


@dataclass(frozen=True, slots=True)
class TwoRates:
    """The lifetime in a mixture of short-lived and long-lived machines; a `Lifetime`.

    Neither kind ages. But a surviving machine is more likely to be of the long-lived kind, so the
    hazard falls with age, from the mean of both rates to the lower one.

    Args:
        part: fraction of short-lived machines, between 0 and 1.
        short_s: their mean life.
        long_s: mean life of the others, not below ``short_s``.

    Raises:
        ConfigError: a value is outside its range.

    Source:
        The hyperexponential distribution of two phases, a textbook distribution.
    """

    part: float
    short_s: float
    long_s: float

    def __post_init__(self) -> None:
        if not (0.0 < self.part < 1.0 and 0.0 < self.short_s <= self.long_s < inf):
            raise ConfigError(
                f"invalid two rates: fraction {self.part} with a mean life of {self.short_s} s, "
                f"the rest with {self.long_s} s: expected a fraction between 0 and 1 and lives "
                "above 0 s, the shorter one first"
            )

    def survival(self, age_s: Ages) -> FloatArray:
        """Return the fraction that exceeds an age; of its shape."""
        age = np.asarray(age_s, dtype=np.float64)
        short, long = np.exp(-age / self.short_s), np.exp(-age / self.long_s)
        return np.asarray(self.part * short + (1.0 - self.part) * long)

    def hazard_per_s(self, age_s: Ages) -> FloatArray:
        """Return the rate of loss at an age."""
        short = self._short_lived(age_s)
        return short / self.short_s + (1.0 - short) / self.long_s

    def mean_left_s(self, age_s: Ages) -> FloatArray:
        """Return the mean remaining time in seconds at an age."""
        short = self._short_lived(age_s)
        return short * self.short_s + (1.0 - short) * self.long_s

    def quantile_s(self, part: Ages) -> FloatArray:
        """Return the age in seconds by which a fraction, 0 to 1, is gone; infinite for 1."""
        return inverted(self, part, Exponential(self.long_s).quantile_s(part))

    def _short_lived(self, age_s: Ages) -> FloatArray:
        """Return the fraction of short-lived machines at an age."""
        age = np.asarray(age_s, dtype=np.float64)
        # Both divided by the longer-lived term: at great ages both exponentials would be 0.
        more = self.part * np.exp(-age * (1.0 / self.short_s - 1.0 / self.long_s))
        return np.asarray(more / (more + (1.0 - self.part)))


def inverted(lifetime: Lifetime, part: Ages, latest_s: FloatArray) -> FloatArray:
    """Return the age by which a fraction is gone, by bisection below an upper limit."""
    gone = np.asarray(part, dtype=np.float64)
    # Neither two rates nor a bathtub have a closed-form inverse.
    low, high = np.zeros_like(gone), np.asarray(latest_s, dtype=np.float64)
    for _ in range(_HALVINGS):
        middle = 0.5 * (low + high)
        early = 1.0 - lifetime.survival(middle) < gone
        low, high = np.where(early, middle, low), np.where(early, high, middle)
    return np.asarray(high)


@dataclass(frozen=True, slots=True)
class Bathtub:
    """The lifetime of a machine that probably ends early or late; a `Lifetime`.

    Args:
        a: height of the plateau, between 0 and 1: about the fraction that ends early.
        tau1_s: duration of the early phase.
        tau2_s: sharpness of the end.
        b_s: approximate start of the end.
        max_life_s: the provider's limit; infinity if it has none.

    Attributes:
        end_s: the maximum age.

    Raises:
        ConfigError: a value is outside its range.

    Source:
        Kadupitiya, Jadhao and Sharma, "Modeling the temporally constrained preemptions of
        transient cloud VMs", HPDC 2020, doi:10.1145/3369583.3392671, arXiv 1911.05160; they
        report 24 h as the limit of the observed machines. Start and end are ours, see above.
    """

    a: float
    tau1_s: float
    tau2_s: float
    b_s: float
    max_life_s: float = DAY_S
    end_s: float = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not 0.0 < self.a < 1.0:
            raise ConfigError(
                f"invalid bathtub with a={self.a}: the height of its plateau must be between 0 "
                "and 1; at 0.5 half of the machines end early"
            )
        for name in ("tau1_s", "tau2_s", "b_s", "max_life_s"):
            value = getattr(self, name)
            if not value > 0.0 or not (isfinite(value) or name == "max_life_s"):
                raise ConfigError(
                    f"invalid bathtub with {name}={value}: expected a time above 0 s; 24 h are "
                    "86400 s"
                )
        object.__setattr__(self, "end_s", min(self._one_s(), self.max_life_s))

    def published_cdf(self, age_s: Ages) -> FloatArray:
        """Return ``F`` as published, which starts above 0 and grows beyond 1."""
        early, late = self._parts(age_s)
        return np.asarray(self.a * (1.0 - early + late))

    def survival(self, age_s: Ages) -> FloatArray:
        """Return the fraction that exceeds an age; of its shape."""
        return np.where(np.asarray(age_s) < self.end_s, self._left(age_s) / self._left(0.0), 0.0)

    def hazard_per_s(self, age_s: Ages) -> FloatArray:
        """Return the rate of loss at an age; infinite from the end on."""
        early, late = self._parts(age_s)
        density = self.a * (early / self.tau1_s + late / self.tau2_s)
        alive = np.asarray(age_s) < self.end_s
        return np.where(alive, density / np.where(alive, self._left(age_s), 1.0), inf)

    def mean_left_s(self, age_s: Ages) -> FloatArray:
        """Return the mean remaining time in seconds at an age; 0 from the end on."""
        alive = np.asarray(age_s) < self.end_s
        left = self._area(self.end_s) - self._area(np.minimum(age_s, self.end_s))
        return np.where(alive, left / np.where(alive, self._left(age_s), 1.0), 0.0)

    def quantile_s(self, part: Ages) -> FloatArray:
        """Return the age in seconds by which a fraction, 0 to 1, is gone; of the same shape."""
        return inverted(self, part, np.full(np.shape(part), self.end_s))

    def _parts(self, age_s: Ages) -> tuple[FloatArray, FloatArray]:
        age = np.asarray(age_s, dtype=np.float64)
        late = np.exp(np.minimum((age - self.b_s) / self.tau2_s, _LARGEST))
        return np.exp(-age / self.tau1_s), late

    def _left(self, age_s: Ages) -> FloatArray:
        return np.maximum(1.0 - self.published_cdf(age_s), 0.0)

    def _area(self, age_s: Ages) -> FloatArray:
        """Return the integral of ``1 - F``, up to a constant."""
        early, late = self._parts(age_s)
        return age_s - self.a * (age_s + self.tau1_s * early + self.tau2_s * late)

    def _one_s(self) -> float:
        """Return the age at which the published curve reaches 1."""
        over = 1.0 / self.a - 1.0
        low, high = 0.0, self.b_s + self.tau2_s * log(1.0 / self.a)
        for _ in range(_HALVINGS):
            middle = 0.5 * (low + high)
            below = exp((middle - self.b_s) / self.tau2_s) - exp(-middle / self.tau1_s) < over
            low, high = (middle, high) if below else (low, middle)
        return high
