"""Estimates of workers' step times: mean curves, their uncertainty, and the history of both.

`TimeModel` has only the mean curves. `CurveEstimates` has the two coefficients of each curve,
``t = fixed + share * slope``, with their covariance. Everything is stored in rows of
one array, because at ten thousand workers small matrices dominate the cost. `Estimate` is all that
a decision may use; `kalman` learns it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any

import numpy as np

from evenstride.core.arrays import FloatArray, IntArray, Mask, Shares
from evenstride.core.time_model.recent_steps import RecentSteps
from evenstride.core.time_model.share_times import ShareTimes

Which = IntArray | slice
"""Ranks of some workers, or a slice for all of them."""
Samples = FloatArray | IntArray | float
"""Samples of each of some workers, or one number for all."""

# Larger than any share; floats are exact integers up to this value.
_MOST_SAMPLES = 2.0**53
# More than the rounding of a time, as a fraction of the longest.
_ROUNDING = 1e-14
# At least this fraction of a time must come from the samples: a curve that is wrongly flat would
# attract the whole batch to one worker.
_FLATTEST = 0.02
# Below this fraction, residuals and their logarithms are treated as equal.
_LINEAR = 0.08
# Standard deviation, as a fraction of the time, of a completely unknown fixed time.
_WIDEST_STD = 0.25
_HAD = 8  # number of recent shares stored for each worker
# Relative deviation of a worker that was never measured from the median of the others.
_GUESS_STD = 0.5
# Relative variance of one step's time before any was measured. A compromise: with 5 %, noise of
# 20 % is not recognised; with 10 % and more, cold starts of calm, unequal workers take longer.
_NOISE_FIRST = 0.09**2
HAZARD = 1e-3
"""Probability per step that a speed changes."""
LEAST_ODDS = math.log(HAZARD)
"""Smallest value to store of the log odds that a change was a mistake."""


@dataclass(frozen=True, slots=True, eq=False)
class TimeModel:
    """``t_k(b) = max(floor_k, fixed_k + per_sample_k * b) / speed_k`` for ``W`` workers.

    The *shape* (floor, fixed, per sample) depends on model and device and changes slowly. The
    *speed* (1 = as fast as when the shape was learned, higher is faster) changes at any time.
    Launch and network time may not scale with the speed; this model divides all of it.

    Args:
        fixed_s: seconds that do not depend on the share, shape ``(W,)``, at least 0.
        per_sample_s: seconds per sample, shape ``(W,)``, above 0.
        floor_s: shortest possible time in seconds, shape ``(W,)``.
        speed: current speed, shape ``(W,)``, above 0.
        quantum: samples of a wave, ``(W,)``: a share takes as long as one of whole waves. ``None``
            if every sample counts.
        limits: largest share without a cliff, and the least time in seconds above it, ``(W,)``
            both; ``None`` for no cliffs.
    """

    fixed_s: FloatArray
    per_sample_s: FloatArray
    floor_s: FloatArray
    speed: FloatArray
    quantum: IntArray | None = None
    limits: tuple[IntArray, FloatArray] | None = None

    @classmethod
    def affine(
        cls, fixed_s: FloatArray | list[float], per_sample_s: FloatArray | list[float]
    ) -> TimeModel:
        """Return the model without floors, at speed 1."""
        fixed = np.asarray(fixed_s, dtype=np.float64)
        per_sample = np.asarray(per_sample_s, dtype=np.float64)
        return cls(fixed, per_sample, np.zeros(fixed.shape), np.ones(fixed.shape))

    def __len__(self) -> int:
        return len(self.fixed_s)

    def at(self, shares: IntArray) -> FloatArray:
        """Return each worker's step time in seconds, shape ``(W,)``."""
        whole = shares if self.quantum is None else -(-shares // self.quantum) * self.quantum
        linear = self.fixed_s + self.per_sample_s * whole
        time_s = np.maximum(self.floor_s, linear) / self.speed
        if self.limits is None:
            return time_s
        below, beyond_s = self.limits
        return np.where(shares > below, np.maximum(time_s, beyond_s), time_s)

    def capacity(self, deadline_s: float) -> IntArray:
        """Return per worker the largest share whose time is at most ``deadline_s``.

        The closed form may be one sample off because of rounding. A comparison with `at` corrects
        it, so the allocation is exact for the times that `at` returns.
        """
        scaled = deadline_s * self.speed
        exact = ((scaled - self.fixed_s) / self.per_sample_s).clip(0.0, _MOST_SAMPLES)
        share = exact.astype(np.int64)
        rounding = _ROUNDING * scaled.max(initial=0.0) / self.per_sample_s.min(initial=1.0)
        unsure = (np.abs(exact - np.rint(exact)) <= rounding).nonzero()[0]
        if len(unsure):
            share[unsure] = self._of(unsure)._corrected(share[unsure], deadline_s)
        # The closed form ignores floors: before its floor, a worker does not end even one sample.
        share[self.floor_s / self.speed > deadline_s] = 0
        if self.quantum is not None:
            share -= share % self.quantum
        if self.limits is not None:
            below, beyond_s = self.limits
            share = np.where(beyond_s > deadline_s, np.minimum(share, below), share)
        return share

    def _of(self, workers: IntArray) -> TimeModel:
        fixed_s, per_sample_s = self.fixed_s[workers], self.per_sample_s[workers]
        return TimeModel(fixed_s, per_sample_s, self.floor_s[workers], self.speed[workers])

    def _corrected(self, share: IntArray, deadline_s: float) -> IntArray:
        """Return exact shares from ones that are at most one sample off."""
        share = share + (self.at(share + 1) <= deadline_s)
        return share - ((share > 0) & (self.at(share) > deadline_s))

    def makespan_s(self, shares: IntArray | Shares) -> float:
        """Return the time in seconds of the worker that finishes last."""
        return float(self.at(np.asarray(shares, dtype=np.int64)).max())


@dataclass(frozen=True, slots=True, eq=False)
class CurveEstimates:
    """Estimates of ``n`` curves."""

    # ``(5, n)``: fixed seconds, seconds per sample, the variance of the first, the covariance of
    # both, the variance of the second.
    rows: FloatArray

    @classmethod
    def unknown(cls, workers: int) -> CurveEstimates:
        """Return curves that are completely unknown; all zero."""
        return cls(np.zeros((5, workers)))

    @classmethod
    def certain(cls, fixed_s: FloatArray, per_sample_s: FloatArray) -> CurveEstimates:
        """Return curves without uncertainty; arguments of shape ``(n,)``."""
        none = np.zeros_like(fixed_s)
        return cls(np.stack([fixed_s, per_sample_s, none, none, none]))

    @property
    def fixed_s(self) -> FloatArray:
        return np.asarray(self.rows[0])

    @property
    def per_sample_s(self) -> FloatArray:
        return np.asarray(self.rows[1])

    def of(self, workers: Which) -> CurveEstimates:
        return CurveEstimates(self.rows[:, workers])

    def put(self, workers: Which, mask: Mask, curves: CurveEstimates) -> CurveEstimates:
        """Return these curves with those of ``workers`` replaced where the mask is true."""
        if isinstance(workers, slice):
            return curves.where(mask, self)
        rows = self.rows.copy()
        rows[:, workers[mask]] = curves.rows[:, mask]
        return CurveEstimates(rows)

    def where(self, mask: Mask, other: CurveEstimates) -> CurveEstimates:
        """Return these curves where the mask is true, and the other ones elsewhere."""
        count = np.count_nonzero(mask)
        if count in (0, len(mask)):
            return self if count else other
        # One of the two usually covers almost all, and a copy costs less than a selection.
        many, few, rare = (other, self, mask) if 2 * count < len(mask) else (self, other, ~mask)
        some = np.flatnonzero(rare)
        # With a balanced mask `np.where` is three to four times as slow, so it is used only
        # if many columns would have to be copied one by one.
        if 8 * len(some) > len(mask):
            return CurveEstimates(np.where(mask, self.rows, other.rows))
        rows = many.rows.copy()
        rows[:, some] = few.rows[:, some]
        return CurveEstimates(rows)

    def time_s(self, shares: Samples) -> FloatArray:
        """Return the expected times at some shares, ``(n,)``; one share is for all."""
        # Above 0, because times are divided by it; unknown curves are all zero.
        return np.asarray(np.maximum(self.rows[0] + self.rows[1] * shares, 1e-12))

    def relative_std(self, shares: Samples) -> FloatArray:
        return np.asarray(np.sqrt(self.variance_s(shares)) / self.time_s(shares))

    def variance_s(self, shares: Samples) -> FloatArray:
        """Return the variance of those times, in seconds squared."""
        _, _, ff, fs, ss = self.rows
        # Rounding may make the small difference of large terms negative.
        return np.asarray(np.maximum(ff + (2.0 * fs + ss * shares) * shares, 0.0))

    @property
    def least_relative_std(self) -> FloatArray:
        """Return the smallest relative standard deviation over all shares.

        It is the minimum of ``(x' P x) / (m' x)^2``, which is ``1 / (m' P^-1 m)``, for the
        mean ``m`` and covariance ``P`` of the two coefficients.
        """
        fixed, slope, ff, fs, ss = self.rows
        whole = ss * fixed**2 - 2.0 * fs * fixed * slope + ff * slope**2
        # Both are 0 for a curve without uncertainty, and rounding may make either negative.
        part = np.maximum(ff * ss - fs**2, 0.0) / np.maximum(whole, 1e-300)
        return np.asarray(np.sqrt(part))

    def surest_share(self, shares: IntArray) -> FloatArray:
        """Return the shares at which the times are known best, ``(n,)``.

        They are at least 1, and at most a hundred times the given shares. The given share stays if
        no share is best.
        """
        fixed, slope, ff, fs, ss = self.rows
        over, under = ff * slope - fs * fixed, ss * fixed - fs * slope
        # If only the speed is uncertain, both are pure rounding errors.
        known = (over > 1e-9 * np.abs(fs) * fixed) & (under > 1e-9 * np.abs(fs) * slope)
        best = np.divide(over, under, out=shares.astype(np.float64), where=known)
        return np.asarray(best.clip(1.0, np.maximum(100.0 * shares, 1.0)))

    def observed(self, shares: Samples, time_s: FloatArray, variance: FloatArray) -> CurveEstimates:
        """Return the curves after one more time of each: a Kalman filter's update; all ``(n,)``.

        The ``variance`` is of the times, relative to their prediction squared.
        """
        fixed, slope, ff, fs, ss = self.rows
        # Noise is relative to the time, so its variance in seconds follows from the prediction.
        predicted_s = self.time_s(shares)
        with_fixed, with_slope = ff + fs * shares, fs + ss * shares
        whole = with_fixed + with_slope * shares + variance * predicted_s**2
        gain_fixed, gain_slope = with_fixed / whole, with_slope / whole
        gain = gain_fixed + gain_slope * shares
        off_s = predicted_s * _in_logarithms(time_s / predicted_s, gain)
        fixed, slope = _physical(
            fixed + gain_fixed * off_s, slope + gain_slope * off_s, shares, slope
        )
        left = (
            ff - gain_fixed * with_fixed,
            fs - gain_fixed * with_slope,
            ss - gain_slope * with_slope,
        )
        return CurveEstimates(np.array((fixed, slope, *left)))._possible(shares)

    def _possible(self, shares: Samples) -> CurveEstimates:
        """Return the curves, in place, with the uncertainty of their shape limited."""
        # Uncertainty from far longer times may exceed what a fixed time between 0 and the whole
        # time allows. It is cut to the whole; the uncertainty of the time at ``shares`` stays.
        # (If it is cut to a half or a quarter, workers among thousands are trusted too soon.)
        widest = self.time_s(shares) ** 2
        some = (self.rows[2] > widest).nonzero()[0]
        if len(some):
            # After one far too long first step, this kept a worker at one sample permanently.
            at = np.maximum(np.broadcast_to(shares, widest.shape)[some], 1.0)
            variance = self.of(some).variance_s(at)
            self.rows[2, some], self.rows[3, some] = widest[some], -widest[some] / at
            self.rows[4, some] = (variance + widest[some]) / at**2
        return self

    def times(self, ratio: FloatArray | float, variance: FloatArray) -> CurveEstimates:
        """Return the curves with all times multiplied by an uncertain ratio.

        The ``variance`` is the relative variance of the ratio, ``(n,)``.
        """
        fixed, slope = self.rows[0] * ratio, self.rows[1] * ratio
        ff, fs, ss = self.rows[2:] * np.square(ratio)
        doubt = (
            ff + variance * fixed**2,
            fs + variance * fixed * slope,
            ss + variance * slope**2,
        )
        return CurveEstimates(np.array((fixed, slope, *doubt)))

    def bent(self, shares: FloatArray | IntArray, std: FloatArray) -> CurveEstimates:
        """Return the curves with a less certain shape, but the same certainty at ``shares``.

        ``std`` is the standard deviation of each fixed time as a fraction of the time there,
        ``(n,)``. A fixed time lies between 0 and the whole time; wider uncertainty does not grow.
        """
        fixed, slope, ff, fs, ss = self.rows
        time_s = self.time_s(shares)
        room = np.maximum(_WIDEST_STD**2 - ff / time_s**2, 0.0)
        by_s = time_s * np.sqrt(np.minimum(std**2, room))
        per_sample = by_s / np.maximum(shares, 1)
        # A longer fixed time means less time per sample, because the time at ``shares`` stays.
        doubt = (ff + by_s**2, fs - by_s * per_sample, ss + per_sample**2)
        return CurveEstimates(np.array((fixed, slope, *doubt)))


def _in_logarithms(part: FloatArray, gain: FloatArray) -> FloatArray:
    """Return the residuals of times, given as fractions of their prediction, for a filter's gain.

    Noise is multiplicative, so a filter of the logarithms moves a time to ``part ** gain`` of it.
    In a linear one, slow times would count more than equally likely fast ones. If all of the time
    is new (a gain of 1), there is no difference.
    """
    off = part - 1.0
    some = np.flatnonzero(np.abs(off) > _LINEAR)
    if len(some):  # elsewhere both are the same within a tenth of a percent
        some_gain = np.clip(gain[some], 1e-6, 1.0)
        off[some] = np.expm1(some_gain * np.log(np.maximum(part[some], 1e-9))) / some_gain
    return np.asarray(off)


def _physical(
    fixed: FloatArray, slope: FloatArray, shares: Samples, before: FloatArray
) -> tuple[FloatArray, FloatArray]:
    """Return both with a fixed time of at least 0 and a positive time per sample."""
    # The time at the observed share stays. A curve that was flatter ``before`` may stay so: at a
    # very small share, this fraction of the time would be far too much per sample.
    predicted = np.maximum(fixed + slope * shares, 1e-9)
    # A steeper slope would need a negative fixed time.
    steepest = predicted / np.maximum(shares, 1e-9)
    slope = slope.clip(np.minimum(_FLATTEST * steepest, before), steepest)
    return predicted - slope * shares, slope


@dataclass(frozen=True, slots=True, eq=False)
class Changes:
    """History of ``W`` workers' recent residuals; all arrays have last dimension W."""

    run: FloatArray  # number of slow outliers in a row that are held back.
    run_odds: FloatArray  # log probability of such a run without a change.
    run_low: FloatArray  # least of their times relative to their predictions.
    run_high: FloatArray  # largest of them.
    lasting: FloatArray  # number of slow changes that were followed by times at the new speed.
    # Log probability that the latest change was a mistake, or has passed since.
    mistaken: FloatArray
    spikes: FloatArray  # number of steps that turned out to be spikes.
    steps: FloatArray  # number of steps evaluated.
    cusum: FloatArray  # ``(2, W)``, cumulative drift of residuals up and down.
    since: FloatArray  # ``(2, W)``, steps since each of the two was last 0.
    sums: FloatArray  # ``(2, W)``, sum since then of the times relative to the predictions then.
    begun: Mask  # ``(2, W)``, whether the latest time was the first of those.
    # The latest time as a fraction of its prediction if that was too short to be noise, else 0; and
    # the number of such times that a normal one followed at once.
    dip: FloatArray
    dips: FloatArray
    turns: FloatArray  # number of recent changes of speed; older ones count less.

    @classmethod
    def none(cls, workers: int) -> Changes:
        flat, pair = np.zeros(workers), np.zeros((2, workers))
        mistaken = np.full(workers, LEAST_ODDS)
        return cls(
            *(flat, flat, flat, flat, flat, mistaken, flat, flat),
            *(pair, pair, pair, pair > 0, flat, flat, flat),
        )

    def copy(self) -> Changes:
        """Return a copy with its own arrays, which may be written to during a turn."""
        return Changes(*(getattr(self, name).copy() for name in self.__slots__))


@dataclass(frozen=True, slots=True, eq=False)
class Firsts:
    """History of ``W`` workers' first steps at shares that are new to them.

    A compiler, an autotuner or a growing allocator slows down such a step, and the next one is
    normal. So a slow first step changes nothing by itself: the next step at that share decides.
    This holds until the worker has shown that new shares are free of cost. After that, a slow step
    is evidence of a slower worker at any share.
    """

    share: IntArray  # of each worker's latest step; 0 before the first.
    had: IntArray  # ``(_HAD, W)``, its latest new shares; 0 if there are fewer.
    row: IntArray  # number of slow first steps in a row that did not count.
    slow_s: FloatArray  # time of the latest step if it was a slow first one, else 0.
    # First steps that were slow without a change of speed, minus those that were not; kept within
    # ``_COST``.
    cost: IntArray
    extra_s: FloatArray  # how much longer a first step takes than the second, in seconds, smoothed

    @classmethod
    def none(cls, workers: int) -> Firsts:
        none, none_s = np.zeros(workers, dtype=np.int64), np.zeros(workers)
        had = np.zeros((_HAD, workers), dtype=np.int64)
        return cls(none, had, none, none_s, none, none_s)

    def new(self, workers: IntArray, shares: IntArray) -> Mask:
        new = self.share[workers] != shares
        at = np.flatnonzero(new)
        # A share that the worker had before is warm for compilers and allocators.
        new[at] = (self.had[:, workers[at]] != shares[at]).all(axis=0)
        return np.asarray(new)

    def split_s(self, shares: IntArray) -> float:
        """Return the additional seconds of the first step of a split."""
        workers = np.flatnonzero(self.extra_s * (shares > 0))
        new = workers[self.new(workers, shares[workers])] if len(workers) else workers
        # The workers compile at the same time, and the others wait.
        return float(self.extra_s[new].max(initial=0.0))


@dataclass(frozen=True, slots=True, eq=False)
class Estimate:
    """Estimates of ``W`` workers' step times, with their uncertainty."""

    now: CurveEstimates  # the curves
    former: CurveEstimates  # the curves before each worker's latest change of speed; zero if none
    # The curves before each worker's latest time was learned; zero if none.
    previous: CurveEstimates
    # The curves before times began to drift up, and down; only meaningful during a drift.
    anchors: tuple[CurveEstimates, CurveEstimates]
    noise: FloatArray  # ``(W,)``, relative variance of one step's time.
    latest: FloatArray  # ``(W,)``, latest time relative to its prediction; NaN if none.
    steps: IntArray  # ``(W,)``, number of learned steps; 0 means that the worker is unknown.
    changes: Changes  # history of the latest residuals.
    firsts: Firsts  # history of first steps at new shares.
    seen: ShareTimes  # times at each worker's latest shares, and the waves and cliffs they show.
    recent: RecentSteps  # the times of the latest steps.

    @classmethod
    def unknown(cls, workers: int, sought: Mask | None = None) -> Estimate:
        """Return the estimate before any step; ``sought`` are workers whose waves are sought."""
        none = CurveEstimates.unknown(workers)
        return cls(
            now=none,
            former=none,
            previous=none,
            anchors=(none, none),
            noise=np.full(workers, _NOISE_FIRST),
            latest=np.full(workers, np.nan),
            steps=np.zeros(workers, dtype=np.int64),
            changes=Changes.none(workers),
            firsts=Firsts.none(workers),
            seen=ShareTimes.none(workers, sought),
            recent=RecentSteps.none(workers),
        )

    def taking(self, other: Estimate, pairs: list[tuple[int, int]]) -> Estimate:
        if not pairs:
            return self
        here, there = np.array(pairs, dtype=np.int64).T
        taken: Estimate = _taking(self, other, here, there)
        return taken

    def knowing(
        self, workers: Which, curves: CurveEstimates, noise: FloatArray, steps: IntArray
    ) -> Estimate:
        """Return the estimate with curves of workers that it does not know yet.

        ``noise`` is the relative variance of one step's time of each, ``steps`` the number of
        steps that each curve is based on.
        """
        if not len(steps):
            return self
        every = np.ones(len(steps), dtype=np.bool_)
        up, down = (anchor.put(workers, every, curves) for anchor in self.anchors)
        now = self.now.put(workers, every, curves)
        noises, counts = self.noise.copy(), self.steps.copy()
        noises[workers], counts[workers] = noise, steps
        return replace(self, now=now, anchors=(up, down), noise=noises, steps=counts)

    @property
    def known(self) -> bool:
        return bool((self.steps > 0).all())

    def known_at(self, shares: IntArray) -> bool:
        return bool(((self.steps > 0) | (np.asarray(shares) == 0)).all())

    @property
    def model(self) -> TimeModel:
        """The mean curves; only meaningful where `steps` is above 0."""
        return _model(self)

    def counted(self, shares: IntArray) -> IntArray:
        """Return the samples whose time counts, ``(W,)``: shares rounded up to whole waves."""
        return self.seen.counted(slice(None), shares) if self.seen.has_waves else shares

    def guessed(self) -> Estimate:
        """Return the estimate with a guess for unknown workers, counted as known.

        The guess is the median curve, for a split until they have been measured.
        """
        unknown = self.steps == 0
        if not unknown.any():
            return self
        middle = np.median(self.now.rows[:2, ~unknown], axis=1)
        alike = np.ones(len(self.steps))
        guess = CurveEstimates.certain(middle[0] * alike, middle[1] * alike)
        guess = guess.times(1.0, _GUESS_STD**2 * alike)
        steps = np.maximum(self.steps, 1)
        return replace(self, now=guess.where(unknown, self.now), steps=steps)

    def relative_std(self, shares: IntArray) -> FloatArray:
        """Return the standard deviation of each predicted mean time, as a fraction of it."""
        return self.now.relative_std(self.counted(shares))


@lru_cache(maxsize=4)  # one decision asks several times
def _model(estimate: Estimate) -> TimeModel:
    seen, line = estimate.seen, TimeModel.affine(estimate.now.fixed_s, estimate.now.per_sample_s)
    quantum, limits = seen.quantum if seen.has_waves else None, seen.limits_s
    if quantum is None and limits is None:
        return line
    return replace(line, quantum=quantum, limits=limits)


def _taking(into: Any, other: Any, here: IntArray, there: IntArray) -> Any:
    """Copy rows between two values of one type: arrays, or tuples and classes made of them."""
    if isinstance(into, CurveEstimates):
        every = np.ones(len(here), dtype=np.bool_)
        return into.put(here, every, other.of(there))
    if isinstance(into, RecentSteps):
        return into.taking(other, here, there)
    if isinstance(into, np.ndarray):
        taken = into.copy()
        taken[..., here] = other[..., there]
        return taken
    if isinstance(into, tuple):
        return tuple(_taking(a, b, here, there) for a, b in zip(into, other, strict=True))
    parts = {f.name: (getattr(into, f.name), getattr(other, f.name)) for f in fields(into)}
    return type(into)(**{name: _taking(*pair, here, there) for name, pair in parts.items()})
