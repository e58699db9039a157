"""What one worker's step takes, by its share: fitted where it was measured, or carried over."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import exp, hypot, log, sqrt

import numpy as np

from evenstride.core.convergence.regression import Line, line, t975
from evenstride.core.fleet import FloatArray
from evenstride.core.gradients.noise_scale import Z95
from evenstride.core.time_model.observation import median
from evenstride.planner.catalogue.accelerators import Power
from evenstride.planner.workload.workload_profile import Point

_ANY_PART = 12**-0.5  # standard deviation of a part of which nothing is known
_WIDE = 1.5  # sizes that differ by less do not tell a fixed time from one that grows
_NEARLY_NOTHING = 1e-9
_UNKNOWN = 10.0  # deviation of what is not known at all
_LEAST_ERROR = 0.005  # no type is known better: machines of one type differ, and so do days
# By which a type is off that obeys the rule, and the more the less alike the two are; in the
# logarithm. Assumptions.
_RULE_ERROR, _FAR_ERROR = 0.2, 0.1


@dataclass(frozen=True, slots=True)
class Curve:
    """``fixed_s + per_sample_s * b``, for one worker of a type."""

    fixed_s: float  # seconds that no share changes, at least 0
    per_sample_s: float  # seconds per sample, above 0
    error: float  # standard deviation of its mean step from the curve, as a part
    noise: float = 0.0  # standard deviation of one step from its mean, as a part
    measured: bool = True  # whether the type itself was measured
    largest: int = 0  # samples that were measured, or of the type that it was carried over from
    # Variance of the line's value, in seconds squared: what does not change with the share, twice
    # by the share, and by its square; for Student's t of so few points. It grows beyond the sizes
    # that were measured
    spread: tuple[float, float, float] = (0.0, 0.0, 0.0)
    source: str = ""  # type that it was carried over from; empty if it was measured
    # Samples that were measured to take the least time, and the lower end of that in seconds; what
    # a step of so many or more cannot be below
    floor: tuple[int, float] = (1, 0.0)

    def at(self, samples: float) -> float:
        """Return the seconds of a step."""
        return self.fixed_s + self.per_sample_s * samples

    def at_many(self, samples: FloatArray) -> FloatArray:
        """Return the seconds of steps of many sizes."""
        return self.fixed_s + self.per_sample_s * samples

    def error_at(self, samples: float) -> float:
        """Return the deviation of mean steps from the curve, by their size, as a part."""
        return float(self.errors_at(np.array([samples], dtype=np.float64))[0])

    def errors_at(self, samples: FloatArray) -> FloatArray:
        """Return the same of many sizes.

        That of a point, and beside it that of the line itself.
        """
        c00, c01, c11 = self.spread
        of_line = np.maximum(c00 + 2 * c01 * samples + c11 * samples * samples, 0.0)
        found: FloatArray = np.hypot(self.error, np.sqrt(of_line) / self.at_many(samples))
        return np.minimum(found, _UNKNOWN)

    def least_s(self, samples: float) -> float:
        """Return what a step takes at least: as a smaller one that was measured, or its part."""
        size, time_s = self.floor
        return time_s * min(samples / size, 1.0)

    @property
    def surest(self) -> float:
        """The size at which the line is known best, as a part; beyond it less and less."""
        c00, c01, c11 = self.spread
        below = c11 * self.fixed_s - c01 * self.per_sample_s
        above = c00 * self.per_sample_s - c01 * self.fixed_s
        return above / below if above > 0.0 and below > 0.0 else 0.0


def fitted(points: Sequence[Point]) -> Curve:
    """Return the curve through measured points, by least squares on relative errors.

    A point counts the more the better its mean is known, from its steps, their scatter and drift. A
    fixed time below 0, as points that scatter may give, is taken as 0, and times that do not grow
    with the size as all fixed. With points of nearly one size only, as balanced workers have them,
    it is not known which part is fixed: half is taken to be, and the error grows with the distance
    from that size.
    """
    samples = [float(point.samples) for point in points]
    times_s = [point.step_s for point in points]
    noise = median(tuple(point.scatter for point in points))
    largest = max(point.samples for point in points)
    own = [_own_error(point) for point in points]
    # What a machine wanders by from one hour to the next is common to all sizes.
    least = max(_LEAST_ERROR, median(tuple(point.drift for point in points)))
    if largest < _WIDE * min(samples):
        return _of_one_size(points, noise, max(least, min(own)))
    found = line(samples, times_s, own)
    fixed_s, per_sample_s, apart = _parts(found, samples, times_s)
    spread = _spread(found, float(np.sqrt(np.mean(np.square(own)))))
    return Curve(
        *(fixed_s, per_sample_s, max(apart, least), noise),
        largest=largest,
        spread=spread,
        floor=_floor(points),
    )


def _of_one_size(points: Sequence[Point], noise: float, error: float) -> Curve:
    """Return the curve of which one point is known, and not which part of it is fixed."""
    weights = [point.steps for point in points]
    size = float(np.average([point.samples for point in points], weights=weights))
    time_s = float(np.average([point.step_s for point in points], weights=weights))
    unit = (_ANY_PART * time_s) ** 2
    return Curve(
        *(0.5 * time_s, 0.5 * time_s / size, error, noise),
        largest=max(point.samples for point in points),
        spread=(unit, -unit / size, unit / size**2),
        floor=_floor(points),
    )


def _floor(points: Sequence[Point]) -> tuple[int, float]:
    """Return the smallest size, and the lower end of the shortest step that was measured."""
    lowest_s = min(point.step_s * exp(-Z95 * _own_error(point)) for point in points)
    return min(point.samples for point in points), lowest_s


def _parts(
    found: Line, samples: Sequence[float], times_s: Sequence[float]
) -> tuple[float, float, float]:
    """Return the fixed time, that of a sample, and how far points are from both, as a part."""
    if found.slope <= 0:
        mean_s = float(np.mean(times_s))
        return mean_s, _NEARLY_NOTHING * mean_s, float(np.std(times_s)) / mean_s
    if found.start < 0:
        each_s = np.array(times_s) / np.array(samples)
        return 0.0, float(each_s.mean()), float(each_s.std() / each_s.mean())
    return found.start, found.slope, found.scatter


def _own_error(point: Point) -> float:
    """Return the deviation of a point's mean, as a part: of its steps, and of machines and days."""
    return hypot(_LEAST_ERROR, max(point.scatter / sqrt(point.steps), point.drift))


def _spread(found: Line, own: float) -> tuple[float, float, float]:
    """Return the variance of a line's value."""
    tail = t975(found.freedom) / Z95 if found.freedom else 1.0
    unit = (max(found.scatter, own) * tail) ** 2
    c00, c01, c11 = found.spread
    return unit * c00, unit * c01, unit * c11


def transferred(curve: Curve, own: Power, other: Power, source: str = "") -> Curve:
    """Return the curve of a type that was not measured, from one that was.

    Time per sample is taken to lie between what arithmetic and what memory bandwidth make of it, in
    the middle of their logarithms; half their distance is the error, with what such rules are off
    by. The fixed time, which launches and the host take, is left as it is.

    Source:
        The two ends of the roofline model (Williams et al., CACM 2009), without knowing where on
        it the workload lies; ours.
    """
    by_flops = log(own.flops_per_s / other.flops_per_s)
    by_memory = log(own.bytes_per_s / other.bytes_per_s)
    middle, half = 0.5 * (by_flops + by_memory), 0.5 * (by_flops - by_memory)
    error = sqrt(curve.error**2 + half**2 + _RULE_ERROR**2 + (_FAR_ERROR * middle) ** 2)
    ratio = exp(middle)
    c00, c01, c11 = curve.spread
    return replace(
        curve,
        per_sample_s=curve.per_sample_s * ratio,
        error=error,
        measured=False,
        spread=(c00, c01 * ratio, c11 * ratio**2),
        source=source,
        floor=(1, 0.0),
    )
