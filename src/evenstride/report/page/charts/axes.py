"""Axes: where a value stands, and at which values there are labels."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, floor, inf, log10

import numpy as np
import numpy.typing as npt

from evenstride.core.fleet import FloatArray

_MINUTES = (1.0, 2.0, 5.0, 10.0, 15.0, 30.0, 60.0, 120.0, 300.0, 600.0, 900.0, 1800.0, 3600.0)
_LEAST = 1e-300  # what is narrower has no powers of ten to label it by
_HOURS = (7200.0, 14400.0, 28800.0, 43200.0, 86400.0, 172800.0, 604800.0)


@dataclass(frozen=True, slots=True)
class Scale:
    """Values from ``low`` to ``high`` on a length from 0 to ``size``."""

    low: float
    high: float
    size: float

    def __call__(self, values: npt.ArrayLike) -> FloatArray:
        """Return where values stand."""
        wide = self.high - self.low or 1.0
        return np.asarray((np.asarray(values, dtype=np.float64) - self.low) * (self.size / wide))

    def part(self, value: float) -> float:
        """Return where a value stands, in percent of the length."""
        return 100.0 * float(self(value)) / self.size


Ticks = list[tuple[float, str]]


def ticks(low: float, high: float, about: int = 5) -> Ticks:
    """Return round values within a range, each with its label.

    >>> ticks(0.0, 23.0)
    [(0.0, '0'), (5.0, '5'), (10.0, '10'), (15.0, '15'), (20.0, '20')]
    """
    if not _LEAST < high - low < inf:
        return [(low, f"{low:.4g}")]
    return [(value, _label(value)) for value in _multiples(low, high, _nice((high - low) / about))]


def _label(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1e4 else f"{value:.4g}"


def _nice(least: float) -> float:
    power = 10.0 ** floor(log10(least))
    return next(n * power for n in (1.0, 2.0, 2.5, 5.0, 10.0) if n * power >= least * (1 - 1e-9))


def _multiples(low: float, high: float, each: float) -> list[float]:
    return [n * each for n in range(ceil(low / each - 1e-9), floor(high / each + 1e-9) + 1)]


def time_ticks(low_s: float, high_s: float, about: int = 6) -> Ticks:
    """Return round times within a range, each with its label.

    >>> [label for _, label in time_ticks(0.0, 400.0)]
    ['0 s', '2 min', '4 min', '6 min']
    """
    least = (high_s - low_s) / about
    if not _LEAST < least < inf:
        return [(low_s, f"{low_s:.4g} s")]
    known = next((one for one in (*_MINUTES, *_HOURS) if one >= least), 0.0)
    each = known if least > 1.0 and known else _nice(least)
    return [(value, _time(value, each)) for value in _multiples(low_s, high_s, each)]


def _time(value_s: float, each_s: float) -> str:
    if value_s == 0.0 or each_s % 60.0:
        return f"{value_s:.6g} s"
    return f"{value_s / 60:.6g} min" if each_s % 3600.0 else f"{value_s / 3600:.6g} h"


def step_ticks(first: int, last: int, about: int = 6) -> list[int]:
    """Return round numbers of steps.

    >>> step_ticks(0, 599)
    [0, 100, 200, 300, 400, 500]
    """
    if last <= first:
        return [first]
    each = max(1.0, _nice((last - first) / about))
    each = each if each != 2.5 else 5.0
    return [int(value) for value in _multiples(first, last, each)]
