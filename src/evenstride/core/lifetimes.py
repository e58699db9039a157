"""How long a machine may live: as a distribution, of which there are several.

Here are the ones without an end: a constant rate, and two of them mixed. The one with an end is in
`bathtub`; which of them fits what was recorded is worked out in `preemption`.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Protocol

import numpy as np

from evenstride.core.fleet import FloatArray
from evenstride.errors import ConfigError

Ages = FloatArray | float
"""Ages in seconds: an array of any shape, or one of them."""

DAY_S = 86_400.0
_HALVINGS = 80


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
        more = self.part * np.exp(-age * (1.0 / self.short_s - 1.0 / self.long_s))
        return np.asarray(more / (more + (1.0 - self.part)))


def inverted(lifetime: Lifetime, part: Ages, latest_s: FloatArray) -> FloatArray:
    """Return the age by which a part is gone, from an age by which at least that is; by halving."""
    gone = np.asarray(part, dtype=np.float64)
    low, high = np.zeros_like(gone), np.asarray(latest_s, dtype=np.float64)
    for _ in range(_HALVINGS):
        middle = 0.5 * (low + high)
        early = 1.0 - lifetime.survival(middle) < gone
        low, high = np.where(early, middle, low), np.where(early, high, middle)
    return np.asarray(high)
