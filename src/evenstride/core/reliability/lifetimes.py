"""Distributions of a machine's lifetime.

`Exponential` has a constant rate, and `TwoRates` mixes two of them. `Bathtub` is the curve of
preemptible machines, which end early or at the provider's limit and seldom in between. The module
`survival_fit` works out which of them fits a recording.

The published bathtub curve is ``F(t) = A (1 - exp(-t/tau1) + exp((t - b)/tau2))``: many go in the
first hours (``tau1``), few in the middle, and the rest near the limit (``b``, as sharply as
``tau2`` is short). As it stands it is no distribution function: ``F(0) = A exp(-b/tau2)`` is above
0, and ``F`` grows beyond 1. Two rules make it one, and neither changes the hazard in between:

- *who ran at all*: nothing is a machine that was gone at age 0, so everything is given survival of
  age 0, ``S(t) = (1 - F(t)) / (1 - F(0))``;
- *the end*: nobody gets older than where ``F`` reaches 1, nor than the provider's limit. Who is
  there at a limit that comes first is taken away at it, all at once.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import exp, inf, isfinite, log
from typing import Protocol

import numpy as np

from evenstride.core.arrays import FloatArray
from evenstride.errors import ConfigError

Ages = FloatArray | float
"""Ages in seconds: an array of any shape, or one of them."""

DAY_S = 86_400.0

_HALVINGS = 80
_LARGEST = 700.0  # exponent whose power is still a float


class Lifetime(Protocol):
    """How long a machine lives, as a distribution; ages are seconds since it came up."""

    def survival(self, age_s: Ages) -> FloatArray:
        """Return the part that gets older than an age."""
        ...

    def hazard_per_s(self, age_s: Ages) -> FloatArray:
        """Return the rate at which those of an age are lost."""
        ...

    def mean_left_s(self, age_s: Ages) -> FloatArray:
        """Return the mean time that those of an age have left."""
        ...

    def quantile_s(self, part: Ages) -> FloatArray:
        """Return the age by which a part, 0 to 1, is gone: a life for a number drawn evenly."""
        ...


@dataclass(frozen=True, slots=True)
class Exponential:
    """The lifetime of a machine that does not age; a `Lifetime`.

    Args:
        mean_s: mean life in seconds, above 0.

    Raises:
        ConfigError: it is not.
    """

    mean_s: float

    def __post_init__(self) -> None:
        if not 0.0 < self.mean_s < inf:
            raise ConfigError(
                f"a mean life of {self.mean_s} s: it is a time above 0 in seconds; a day is 86400"
            )

    def survival(self, age_s: Ages) -> FloatArray:
        """Return the part that gets older than an age; of its shape."""
        return np.asarray(np.exp(-np.asarray(age_s) / self.mean_s))

    def hazard_per_s(self, age_s: Ages) -> FloatArray:
        """Return the rate at which machines are lost, the same at any age."""
        return np.full(np.shape(age_s), 1.0 / self.mean_s)

    def mean_left_s(self, age_s: Ages) -> FloatArray:
        """Return the mean time that is left, the same at any age."""
        return np.full(np.shape(age_s), self.mean_s)

    def quantile_s(self, part: Ages) -> FloatArray:
        """Return the age in seconds by which a part, 0 to 1, is gone; infinite for all."""
        with np.errstate(divide="ignore"):
            return np.asarray(-self.mean_s * np.log1p(-np.asarray(part, dtype=np.float64)))


@dataclass(frozen=True, slots=True)
class TwoRates:
    """The lifetime in a mixture of short-lived and long-lived machines; a `Lifetime`.

    Neither kind ages. But who is still there is the more likely to be of the lasting kind, so the
    hazard falls with age, from the mean of both rates to the lower one.

    Args:
        part: of the short-lived, between 0 and 1.
        short_s: their mean life.
        long_s: that of the others, not below it.

    Raises:
        ConfigError: a value is outside its range.

    Source:
        the hyperexponential distribution of two phases, as textbooks have it.
    """

    part: float
    short_s: float
    long_s: float

    def __post_init__(self) -> None:
        if not (0.0 < self.part < 1.0 and 0.0 < self.short_s <= self.long_s < inf):
            raise ConfigError(
                f"a part {self.part} of machines lives {self.short_s} s, the rest {self.long_s} s: "
                "a part lies between 0 and 1, lives are above 0; give the shorter life first"
            )

    def survival(self, age_s: Ages) -> FloatArray:
        """Return the part that gets older than an age; of its shape."""
        age = np.asarray(age_s, dtype=np.float64)
        short, long = np.exp(-age / self.short_s), np.exp(-age / self.long_s)
        return np.asarray(self.part * short + (1.0 - self.part) * long)

    def hazard_per_s(self, age_s: Ages) -> FloatArray:
        """Return the rate at which those of an age are lost."""
        short = self._short_lived(age_s)
        return short / self.short_s + (1.0 - short) / self.long_s

    def mean_left_s(self, age_s: Ages) -> FloatArray:
        """Return the mean time in seconds that those of an age have left."""
        short = self._short_lived(age_s)
        return short * self.short_s + (1.0 - short) * self.long_s

    def quantile_s(self, part: Ages) -> FloatArray:
        """Return the age in seconds by which a part, 0 to 1, is gone; infinite for all."""
        return inverted(self, part, Exponential(self.long_s).quantile_s(part))

    def _short_lived(self, age_s: Ages) -> FloatArray:
        """Return which part of those of an age are of the short-lived kind."""
        age = np.asarray(age_s, dtype=np.float64)
        # Both over the longer-lived term: at great ages the two exponentials would be 0 each.
        more = self.part * np.exp(-age * (1.0 / self.short_s - 1.0 / self.long_s))
        return np.asarray(more / (more + (1.0 - self.part)))


def inverted(lifetime: Lifetime, part: Ages, latest_s: FloatArray) -> FloatArray:
    """Return the age by which a part is gone, from an age by which at least that is; by halving."""
    gone = np.asarray(part, dtype=np.float64)
    # Neither two rates nor a bathtub have an inverse in closed form.
    low, high = np.zeros_like(gone), np.asarray(latest_s, dtype=np.float64)
    for _ in range(_HALVINGS):
        middle = 0.5 * (low + high)
        early = 1.0 - lifetime.survival(middle) < gone
        low, high = np.where(early, middle, low), np.where(early, high, middle)
    return np.asarray(high)


@dataclass(frozen=True, slots=True)
class Bathtub:
    """The lifetime of a machine that is likely to go early, or late; a `Lifetime`.

    Args:
        a: height of the plateau, between 0 and 1: about the part that goes early.
        tau1_s: how long the early phase lasts.
        tau2_s: how sharp the end is.
        b_s: about when the end begins.
        max_life_s: the provider's limit; infinity where there is none.

    Attributes:
        end_s: the age that nobody exceeds.

    Raises:
        ConfigError: a value is outside its range.

    Source:
        Kadupitiya, Jadhao and Sharma, "Modeling the temporally constrained preemptions of
        transient cloud VMs", HPDC 2020, doi:10.1145/3369583.3392671, arXiv 1911.05160; they
        report 24 h as the limit of the machines they watched. Origin and end are ours, see above.
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
                f"a bathtub of a={self.a}: the height of its plateau lies between 0 and 1; at 0.5 "
                "half of the machines go early"
            )
        for name in ("tau1_s", "tau2_s", "b_s", "max_life_s"):
            value = getattr(self, name)
            if not value > 0.0 or not (isfinite(value) or name == "max_life_s"):
                raise ConfigError(
                    f"a bathtub of {name}={value}: it is a time above 0 in seconds; 24 h are 86400"
                )
        object.__setattr__(self, "end_s", min(self._one_s(), self.max_life_s))

    def published_cdf(self, age_s: Ages) -> FloatArray:
        """Return ``F`` as it was published, which starts above 0 and grows beyond 1."""
        early, late = self._parts(age_s)
        return np.asarray(self.a * (1.0 - early + late))

    def survival(self, age_s: Ages) -> FloatArray:
        """Return the part that gets older than an age; of its shape."""
        return np.where(np.asarray(age_s) < self.end_s, self._left(age_s) / self._left(0.0), 0.0)

    def hazard_per_s(self, age_s: Ages) -> FloatArray:
        """Return the rate at which those of an age are lost; infinite from the end on."""
        early, late = self._parts(age_s)
        density = self.a * (early / self.tau1_s + late / self.tau2_s)
        alive = np.asarray(age_s) < self.end_s
        return np.where(alive, density / np.where(alive, self._left(age_s), 1.0), inf)

    def mean_left_s(self, age_s: Ages) -> FloatArray:
        """Return the mean time in seconds that those of an age have left; 0 from the end on."""
        alive = np.asarray(age_s) < self.end_s
        left = self._area(self.end_s) - self._area(np.minimum(age_s, self.end_s))
        return np.where(alive, left / np.where(alive, self._left(age_s), 1.0), 0.0)

    def quantile_s(self, part: Ages) -> FloatArray:
        """Return the age in seconds by which a part, 0 to 1, is gone; of the shape of ``part``."""
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
