"""A line through a few points, and how far from it the next one may lie."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, sqrt

import numpy as np

from evenstride.core.arrays import FloatArray
from evenstride.core.gradients.noise_scale import Z95, Interval

# Student's t at 97.5 %, for 1 to 10 degrees of freedom; the tests compare it with scipy.
_T975 = (12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281)


def t975(freedom: int) -> float:
    """Return Student's t at 97.5 %: half the width of a 95 % interval, in standard errors.

    Source:
        A table up to 10, then the expansion of Cornish and Fisher in ``1 / freedom``, whose error
        there is below 1e-3.
    """
    if freedom < 1:
        # A line fits any two points exactly, so they do not show the scatter.
        return inf
    if freedom <= len(_T975):
        return _T975[freedom - 1]
    z = Z95
    first, second = (z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96
    return z + first / freedom + second / freedom**2


@dataclass(frozen=True, slots=True)
class Line:
    """``y = start + slope * x``, fitted by least squares on relative errors."""

    start: float  # at ``x = 0``
    slope: float  # per unit of ``x``
    # Standard deviation of a typical point from the line, as a fraction of its value there.
    scatter: float
    freedom: int  # number of points minus parameters
    # Inverse of the normal matrix, in units of ``scatter ** 2``: its ``(0, 0)``, ``(0, 1)`` and
    # ``(1, 1)``.
    spread: tuple[float, float, float]

    def at(self, x: float) -> float:
        return self.start + self.slope * x

    def mean(self, x: float) -> Interval:
        """Return the line's value with a 95 % interval for the true line."""
        return self._within(x, 0.0)

    def next(self, x: float) -> Interval:
        """Return the line's value with a 95 % interval for one more point."""
        return self._within(x, 1.0)

    def _within(self, x: float, own: float) -> Interval:
        value, t = self.at(x), t975(self.freedom)
        c00, c01, c11 = self.spread
        of_line = c00 + 2 * c01 * x + c11 * x * x
        # Rounding may make the quadratic form negative.
        error = self.scatter * sqrt(max(of_line, 0.0) + own * value * value)
        half = t * error if self.freedom > 0 else inf
        return Interval(value, value - half, value + half)


def line(xs: Sequence[float], ys: Sequence[float], errors: Sequence[float] = ()) -> Line:
    """Return the line through some points, with errors proportional to their values.

    ``errors`` are relative errors of the values. Only their ratios matter; a typical point has
    their root mean square. Without errors, all points have the same weight.

    Raises:
        ValueError: all points have the same ``x``, or a value is not above 0.
    """
    x, y = np.asarray(xs, dtype=np.float64), np.asarray(ys, dtype=np.float64)
    if len(set(xs)) < 2:
        raise ValueError("a line needs points at two different x; measure at another one")
    if not (y > 0).all():
        raise ValueError(f"the smallest value is {y.min()}; relative errors need values above 0")
    unit = float(np.abs(x).max())  # keeps the normal matrix well conditioned
    weights = _weights(errors, len(y))
    # Divided by the values, so that the squares are of relative errors.
    design = np.stack([weights / y, weights * x / unit / y], axis=1)
    (start, slope), *_ = np.linalg.lstsq(design, weights, rcond=None)
    left = weights - design @ (start, slope)
    freedom = len(y) - 2
    # With no degrees of freedom the scatter is unknown; `_within` makes the interval infinite.
    scatter = sqrt(float(left @ left) / freedom) if freedom else 0.0
    inverse = np.linalg.inv(design.T @ design)
    c00, c01, c11 = float(inverse[0, 0]), float(inverse[0, 1]), float(inverse[1, 1])
    spread = (c00, c01 / unit, c11 / unit**2)
    return Line(float(start), float(slope) / unit, scatter, freedom, spread)


def _weights(errors: Sequence[float], points: int) -> FloatArray:
    own = np.asarray(errors, dtype=np.float64) if len(errors) else np.ones(points)
    found: FloatArray = np.sqrt(np.mean(own * own)) / own
    return found
