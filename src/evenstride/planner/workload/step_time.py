"""The time of a step: on one worker by its share, on a mix of machines, and over their links.

One worker's curve is fitted to measurements, or estimated from another type. A mix is evaluated
either roughly, for many mixes, or exactly, for one. The rough evaluation uses real-valued shares.
Then the best split of a batch over two kinds has a closed form, and no integer split is faster: a
lower bound, with the noise of steps. The exact evaluation uses the allocation of real runs, over
every worker.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import exp, hypot, log, sqrt

import numpy as np
import numpy.typing as npt

from evenstride.core.allocation.integer_splits import equal_finish
from evenstride.core.allocation.step_forecast import expected_max
from evenstride.core.convergence.regression import Line, line, t975
from evenstride.core.fleet import FloatArray, IntArray
from evenstride.core.gradients.noise_scale import Z95
from evenstride.core.sync_modes.mode_specs import AllReduce, ParameterServerMode, sync_from_spec
from evenstride.core.time_model.estimates import TimeModel
from evenstride.core.time_model.observation import median
from evenstride.errors import ConfigError
from evenstride.planner.catalogue.offers import Power
from evenstride.planner.workload.workload_profile import Links, Point
from evenstride.sim.engine.network import ParameterServers, Ring

_ANY_PART = 12**-0.5  # standard deviation of a completely unknown fraction.
_WIDE = 1.5  # ratio of sizes below which fixed and growing time cannot be separated.
_NEARLY_NOTHING = 1e-9
_UNKNOWN = 10.0  # deviation of a completely unknown value.
_LEAST_ERROR = 0.005  # smallest error: machines of one type differ, and so do days.
# Error of a type that obeys the rule, and its growth with the difference of the types; in the
# logarithm. Assumptions.
_RULE_ERROR, _FAR_ERROR = 0.2, 0.1


@dataclass(frozen=True, slots=True)
class Curve:
    """``fixed_s + per_sample_s * b``, for one worker of a type."""

    fixed_s: float  # seconds that do not depend on the share, at least 0.
    per_sample_s: float  # seconds per sample, above 0.
    error: float  # relative standard deviation of its mean step from the curve.
    noise: float = 0.0  # relative standard deviation of one step from its mean.
    measured: bool = True  # whether the type itself was measured.
    largest: int = 0  # largest measured size, possibly of the type it was estimated from.
    # Variance of the line's value, in seconds squared: the constant term, half the linear term, and
    # the quadratic term in the share; for Student's t of the few points. It grows beyond the
    # measured sizes.
    spread: tuple[float, float, float] = (0.0, 0.0, 0.0)
    source: str = ""  # type it was estimated from; empty if it was measured.
    # Size with the shortest measured time, and the lower end of that time in seconds; a lower limit
    # for larger steps.
    floor: tuple[int, float] = (1, 0.0)

    def at(self, samples: float) -> float:
        return self.fixed_s + self.per_sample_s * samples

    def at_many(self, samples: FloatArray) -> FloatArray:
        return self.fixed_s + self.per_sample_s * samples

    def error_at(self, samples: float) -> float:
        """Return the relative deviation of mean steps from the curve, by their size."""
        return float(self.errors_at(np.array([samples], dtype=np.float64))[0])

    def errors_at(self, samples: FloatArray) -> FloatArray:
        """Return the same for many sizes: that of a point combined with that of the line."""
        c00, c01, c11 = self.spread
        of_line = np.maximum(c00 + 2 * c01 * samples + c11 * samples * samples, 0.0)
        found: FloatArray = np.hypot(self.error, np.sqrt(of_line) / self.at_many(samples))
        return np.minimum(found, _UNKNOWN)

    def least_s(self, samples: float) -> float:
        """Return a lower limit of a step: that of a smaller measured one, or a fraction of it."""
        size, time_s = self.floor
        return time_s * min(samples / size, 1.0)

    @property
    def surest(self) -> float:
        """The size at which the line is known best, in relative terms."""
        c00, c01, c11 = self.spread
        below = c11 * self.fixed_s - c01 * self.per_sample_s
        above = c00 * self.per_sample_s - c01 * self.fixed_s
        return above / below if above > 0.0 and below > 0.0 else 0.0


def fitted(points: Sequence[Point]) -> Curve:
    """Return the curve through measured points, by least squares on relative errors.

    The weight of a point depends on how well its mean is known, from its steps, scatter and drift.
    Scattered points may give a fixed time below 0, which becomes 0. Times that do not grow
    with the size become all fixed. With points of nearly one size only, as balanced workers have
    them, the fixed part is not known: half is assumed, and the error grows with the distance
    from that size.
    """
    samples = [float(point.samples) for point in points]
    times_s = [point.step_s for point in points]
    noise = median(tuple(point.scatter for point in points))
    largest = max(point.samples for point in points)
    own = [_own_error(point) for point in points]
    # The drift of a machine from one hour to the next is common to all sizes.
    least = max(_LEAST_ERROR, median(tuple(point.drift for point in points)))
    if largest < _WIDE * min(samples):
        return _of_one_size(points, noise, max(least, min(own)))
    found = line(samples, times_s, own)
    fixed_s, per_sample_s, apart = _parts(found, samples, times_s)
    spread = _spread(found, float(np.sqrt(np.mean(np.square(own)))))
    return Curve(
        fixed_s=fixed_s,
        per_sample_s=per_sample_s,
        error=max(apart, least),
        noise=noise,
        largest=largest,
        spread=spread,
        floor=_floor(points),
    )


def _of_one_size(points: Sequence[Point], noise: float, error: float) -> Curve:
    """Return the curve through one known point, whose fixed part is not known."""
    weights = [point.steps for point in points]
    size = float(np.average([point.samples for point in points], weights=weights))
    time_s = float(np.average([point.step_s for point in points], weights=weights))
    unit = (_ANY_PART * time_s) ** 2
    return Curve(
        fixed_s=0.5 * time_s,
        per_sample_s=0.5 * time_s / size,
        error=error,
        noise=noise,
        largest=max(point.samples for point in points),
        spread=(unit, -unit / size, unit / size**2),
        floor=_floor(points),
    )


def _floor(points: Sequence[Point]) -> tuple[int, float]:
    """Return the smallest size, and the lower end of the shortest measured step."""
    lowest_s = min(point.step_s * exp(-Z95 * _own_error(point)) for point in points)
    return min(point.samples for point in points), lowest_s


def _parts(
    found: Line, samples: Sequence[float], times_s: Sequence[float]
) -> tuple[float, float, float]:
    """Return the fixed time, the time per sample, and the relative scatter of the points."""
    if found.slope <= 0:
        mean_s = float(np.mean(times_s))
        return mean_s, _NEARLY_NOTHING * mean_s, float(np.std(times_s)) / mean_s
    if found.start < 0:
        each_s = np.array(times_s) / np.array(samples)
        return 0.0, float(each_s.mean()), float(each_s.std() / each_s.mean())
    return found.start, found.slope, found.scatter


def _own_error(point: Point) -> float:
    """Return the relative deviation of a point's mean: of its steps, and of machines and days."""
    return hypot(_LEAST_ERROR, max(point.scatter / sqrt(point.steps), point.drift))


def _spread(found: Line, own: float) -> tuple[float, float, float]:
    tail = t975(found.freedom) / Z95 if found.freedom else 1.0
    unit = (max(found.scatter, own) * tail) ** 2
    c00, c01, c11 = found.spread
    return unit * c00, unit * c01, unit * c11


def transferred(curve: Curve, own: Power, other: Power, source: str = "") -> Curve:
    """Return the curve of a type that was not measured, from one that was.

    Time per sample is assumed to lie between the ratios of arithmetic and of memory bandwidth, in
    the middle of their logarithms. Half their distance, plus the error of such rules, is the error.
    The fixed time, which launches and the host take, stays unchanged.

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


_MOST = 2.0**53  # samples; infinity times no worker would be NaN
_LATE = 0.97  # fraction of the cost of noise that counts: expected maxima have two digits
_BALANCED = 1e-9  # relative difference of equal times


def servers_of(sync: str) -> int:
    """Return the number of parameter servers of a mode; 0 for the all-reduce."""
    mode = sync_from_spec(sync)
    if not isinstance(mode, AllReduce | ParameterServerMode):
        raise ConfigError(
            f"cannot plan for sync mode {sync}, because its number of epochs is not known; "
            "plan for bsp, or bsp-ps(servers=1)"
        )
    return mode.servers


Reduces = Ring | ParameterServers
"""The exchange after which all workers have the sum of their gradients, or the new weights."""


@dataclass(frozen=True, slots=True)
class Workers:
    """Workers of one kind."""

    curve: Curve  # of each
    count: int  # their number
    most_samples: int | None = None  # that fit into one's memory; ``None`` for no limit


@dataclass(frozen=True, slots=True)
class StepEstimate:
    """The time of a step."""

    compute_s: float  # until the last worker is done, noise included
    communication_s: float  # after that
    # Of one worker of each kind; the largest, if they differ by rounding
    shares: tuple[int, ...]

    @property
    def time_s(self) -> float:
        return self.compute_s + self.communication_s


def exact_step(fleet: Sequence[Workers], batch: int, ring: Reduces) -> StepEstimate:
    """Return the time of a step with the best integer split of a global batch in samples.

    Noise of single workers' steps makes the last of them later than any is on average; the expected
    maximum counts. ``ring`` is the all-reduce, or the servers in its place.

    Raises:
        InfeasibleShares: no split fits the workers' memory, or there are more workers than samples.
    """
    counts = np.array([kind.count for kind in fleet])
    fixed_s, per_sample_s, noise = (
        np.repeat([getattr(kind.curve, name) for kind in fleet], counts)
        for name in ("fixed_s", "per_sample_s", "noise")
    )
    most = [batch if kind.most_samples is None else kind.most_samples for kind in fleet]
    model, workers = TimeModel.affine(fixed_s, per_sample_s), int(counts.sum())
    upper = np.repeat(np.array(most, dtype=np.int64), counts)
    shares = equal_finish(model, np.ones(workers, dtype=np.int64), upper, batch)
    times_s = model.at(shares)
    groups = np.split(shares, np.cumsum(counts)[:-1])
    return StepEstimate(
        max(expected_max(times_s, times_s * noise), float(times_s.max())),
        ring.all_reduce_s(workers) if workers > 1 else 0.0,
        tuple(int(group.max()) for group in groups),
    )


def least_compute_s(
    first: Curve,
    second: Curve,
    counts: IntArray,
    batches: IntArray,
    most: tuple[float, float],
    late: FloatArray,
) -> tuple[FloatArray, FloatArray]:
    """Return a lower bound of a step's compute time, with integer shares and noise.

    With integer shares, no kind's workers get less on average than the best share minus one sample:
    a worker with room for another sample would end later than the best split allows. The expected
    maximum is convex in the means and grows with each of them. So it is at least that of equal
    means within a kind. By its slope at equality, it is hardly less for two kinds of which one has
    slightly more than its part, and the other slightly less.

    ``counts`` are workers of both kinds, ``(2, n)``; ``batches`` global batches in samples,
    ``(n,)``; ``most`` the samples that fit into a worker of each kind, possibly infinite. ``late``
    is the result of `lateness`. Returns seconds, ``(n,)``, never above `exact_step`, infinite if a
    batch does not fit; and a lower bound of their relative deviation.
    """
    shares = _best_shares(first, second, counts, batches, most)
    both, fits = counts[1] > 0, shares[2]
    one_s = first.at_many(shares[0])
    two_s = np.where(both, second.at_many(shares[1]), one_s)
    least_s = np.maximum(one_s, two_s)
    if max(first.noise, second.noise) > 0.0:
        means = [
            curve.at_many(np.maximum(share - both, 1.0))
            for curve, share in zip((first, second), shares[:2], strict=True)
        ]
        late = _LATE * late
        alone = [
            mean * (1.0 + curve.noise * late[count])
            for mean, curve, count in zip(means, (first, second), counts, strict=True)
        ]
        least_s = np.maximum(least_s, np.maximum(alone[0], np.where(both, alone[1], 0.0)))
        noise = min(first.noise, second.noise)
        together = 1.0 + noise * late[counts.sum(axis=0)]
        even_s = _even_s(first, second, counts, one_s, two_s)
        lower_s = np.where(both, np.minimum(*means), 0.0)
        least_s = np.maximum(least_s, together * np.maximum(lower_s, even_s))
    return np.where(fits, least_s, np.inf), _least_error((first, second), shares[:2], both)


def _least_error(
    curves: tuple[Curve, Curve],
    shares: tuple[FloatArray, FloatArray],
    both: npt.NDArray[np.bool_],
) -> FloatArray:
    """Return a lower bound of the error of the less certain curve: it grows with larger shares."""
    one, two = (
        curve.errors_at(np.maximum(share - 1.0, max(curve.surest, 1.0)))
        for curve, share in zip(curves, shares, strict=True)
    )
    return np.asarray(np.where(both, np.maximum(one, two), one))


def _even_s(
    first: Curve, second: Curve, counts: IntArray, one_s: FloatArray, two_s: FloatArray
) -> FloatArray:
    """Return a lower bound of the mean over all workers, if both kinds could end together; or 0."""
    apart_s = first.per_sample_s - second.per_sample_s
    moved = np.maximum(counts[0] * apart_s, -counts[1] * apart_s) / counts.sum(axis=0)
    equal = np.abs(one_s - two_s) <= _BALANCED * one_s
    return np.asarray(np.where(equal & (counts[1] > 0), one_s - moved, 0.0))


def _best_shares(
    first: Curve, second: Curve, counts: IntArray, batches: IntArray, most: tuple[float, float]
) -> tuple[FloatArray, FloatArray, npt.NDArray[np.bool_]]:
    """Return the best real-valued shares of both kinds, and whether the batch fits."""
    one, two = counts.astype(np.float64)
    rate = one / first.per_sample_s + two / second.per_sample_s
    start = one * first.fixed_s / first.per_sample_s + two * second.fixed_s / second.per_sample_s
    finish_s = (batches + start) / rate
    # One-dimensional and convex: the best share within bounds is nearest to the unbounded best.
    share = (finish_s - first.fixed_s) / first.per_sample_s
    low = np.maximum(1.0, (batches - two * min(most[1], _MOST)) / one)
    high = np.minimum(most[0], (batches - two) / one)
    share = np.clip(share, low, high)
    with np.errstate(divide="ignore", invalid="ignore"):
        others = np.where(two > 0, (batches - one * share) / two, 0.0)
    return share, others, low <= high * (1 + 1e-12)


@lru_cache(maxsize=8)
def lateness(most: int) -> FloatArray:
    """Return the expected delay of the last of ``0 .. most`` equal workers, in deviations."""
    late = [0.0, 0.0]
    late += [expected_max(np.zeros(n), np.ones(n)) for n in range(2, most + 1)]
    return np.array(late[: most + 1])


_USUAL_LATENCY_S = 1e-4
_NOTHING_S = 1e-15  # seconds per byte; less is rounding, because no link is that fast


def links(measured: Iterable[tuple[int, float]], gradient_bytes: float) -> Links | None:
    """Return the links from communication measured with several numbers of workers.

    A ring of ``W`` takes ``2 (W - 1) (latency + bytes / W / bandwidth)``, fitted by least squares
    on relative errors, with neither part below 0. With only one number of workers, a latency of
    0.1 ms is assumed, and the rest is bandwidth. ``None`` if nothing was measured.
    """
    every = [(workers, time_s) for workers, time_s in measured if workers > 1]
    rows = [(workers, time_s) for workers, time_s in every if time_s > 0]
    if not rows:
        return Links(latency_s=0.0) if every else None
    workers, times_s = (np.array(column, dtype=np.float64) for column in zip(*rows, strict=True))
    messages = 2 * (workers - 1)
    carried = messages * gradient_bytes / workers
    if len(set(workers.tolist())) == 1:
        latency_s = min(_USUAL_LATENCY_S, float((times_s / messages).mean()))
        per_byte_s = _least(carried, times_s - latency_s * messages)
    else:
        latency_s, per_byte_s = _least_of_both(messages / times_s, carried / times_s)
    rate = 1 / per_byte_s if per_byte_s > _NOTHING_S else None
    return Links(latency_s=latency_s, bytes_per_s=rate)


def _least_of_both(first: FloatArray, second: FloatArray) -> tuple[float, float]:
    """Return the non-negative multiples of two vectors whose sum is nearest to 1 everywhere."""
    ones = np.ones(len(first))
    found = np.linalg.lstsq(np.stack([first, second], axis=1), ones, rcond=None)[0]
    if (found >= 0).all():
        return float(found[0]), float(found[1])
    alone = (_least(first, ones), 0.0), (0.0, _least(second, ones))
    return min(alone, key=lambda one: float(((one[0] * first + one[1] * second - 1) ** 2).sum()))


def _least(by: FloatArray, wanted: FloatArray) -> float:
    """Return the non-negative multiple of a vector that is nearest to the wanted one."""
    square = float(by @ by)
    return max(float(by @ wanted) / square, 0.0) if square > 0 else 0.0
