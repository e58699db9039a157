"""Estimates of workers' step times: mean curves, their uncertainty, and the history of both.

`TimeModel` has only the mean curves. `CurveEstimates` has the two coefficients of each curve,
``t = fixed + share * slope``, with their covariance. Everything is stored in rows of
one array, because at ten thousand workers small matrices dominate the cost. `Estimate` is all that
a decision may use. `kalman` learns it, with `curve_update` and `share_times`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any

import numpy as np

from evenstride.core.arrays import FloatArray, IntArray, Mask, Shares, Which

Samples = FloatArray | IntArray | float
"""Samples of each of some workers, or one number for all."""

# Larger than any share; floats are exact integers up to this value.
_MOST_SAMPLES = 2.0**53
# More than the rounding of a time, as a fraction of the longest.
_ROUNDING = 1e-14
_HAD = 8  # number of recent shares stored for each worker
# Relative deviation of a worker that was never measured from the median of the others.
_GUESS_STD = 0.5
# Relative variance of one step's time before any was measured. A compromise: with 5 %, noise of
# 20 % is not recognised; with 10 % and more, cold starts of calm, unequal workers take longer.
_NOISE_FIRST = 0.09**2
_ENTRIES = 12  # stored shares of each worker; the longest unused one is replaced
# Prior of the noise of one step at a share, and the number of steps for which it counts.
_SHARE_NOISE, _SHARE_NOISE_STEPS = 0.03**2, 4.0
_NO_TIME_S = 1e-200  # beyond a cliff that a worker does not have
# A sample beyond a bend costs at most so many before it; if it costs more, there is a cliff.
_BEND = 4.0
PROOF = 2
"""Number of slow steps that show a cliff rather than a cold start."""
LEAST_DRIFT = 0.0005
"""Smallest relative drift of a speed per square root of a step: `Changes` finds larger changes."""
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
        limits: largest share without a cliff, one above it, and the seconds of that one, ``(W,)``
            each; others above it take as long per sample. ``None`` for no cliffs.
    """

    fixed_s: FloatArray
    per_sample_s: FloatArray
    floor_s: FloatArray
    speed: FloatArray
    quantum: IntArray | None = None
    limits: tuple[IntArray, IntArray, FloatArray] | None = None

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
        below, slow, slow_s = self.limits
        return np.where(shares > below, np.maximum(time_s, slow_s * (shares / slow)), time_s)

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
            below, slow, slow_s = self.limits
            beyond = (deadline_s / slow_s * slow).clip(0.0, _MOST_SAMPLES).astype(np.int64) + 1
            for _ in range(2):  # rounding may put the quotient on either side of a whole number
                beyond -= slow_s * (beyond / slow) > deadline_s
            share = np.minimum(share, np.maximum(beyond, below))
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
    first_s: FloatArray  # time of the latest step if it was a single first one, else 0.
    slow_s: FloatArray  # the same, if it was also a slow one.
    # First steps that were slow without a change of speed, minus those that were not; kept within
    # ``_COST``.
    cost: IntArray
    extra_s: FloatArray  # how much longer a first step takes than the second, in seconds, smoothed

    @classmethod
    def none(cls, workers: int) -> Firsts:
        none, none_s = np.zeros(workers, dtype=np.int64), np.zeros(workers)
        had = np.zeros((_HAD, workers), dtype=np.int64)
        return cls(none, had, none, none_s, none_s, none, none_s)

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
class ShareTimes:
    """The entries of ``W`` workers; row 0 of each is its present share."""

    share: IntArray  # ``(n, W)``, 0 for no entry.
    # ``(n, W)``, of the earlier shares (the first row is unused): logarithm of the seconds at the
    # reference speed, number of steps in it, and of the worker's steps when it was left.
    level: FloatArray
    count: FloatArray
    used: IntArray
    here: FloatArray  # ``(2, W)``, the first two of the present share.
    slower: FloatArray  # ``(W,)``, logarithm of the present times relative to the entries.
    steps: IntArray  # ``(W,)``, number of steps seen.
    held: Mask  # ``(W,)``, whether the latest step was far from its entry, and may be a spike.
    sought: Mask  # ``(W,)``, whether waves are sought.
    squares: FloatArray  # ``(2, W)``, sum of squared deviations at one share, and their number.
    odd: Mask  # ``(W,)``, whether entries have come that the curve did not foresee.
    # ``(W,)``, samples of a wave: times change only at its multiples. 1 for any share.
    quantum: IntArray
    # ``(3, W)``: above ``least`` samples times are far too long, as seen at ``most`` samples, at
    # the step ``since``; 0 for no limit.
    limit: IntArray
    limit_level: FloatArray  # ``(W,)``, the entry's level there.
    proof: IntArray  # ``(W,)``, number of steps that were slow above it.
    tries: IntArray  # ``(W,)``, number of times that a cliff or waves were found.

    @classmethod
    def none(cls, workers: int, sought: Mask | None = None) -> ShareTimes:
        whole, flat = np.zeros((_ENTRIES, workers), np.int64), np.zeros(workers)
        rows, never = np.zeros((_ENTRIES, workers)), np.zeros(workers, np.bool_)
        none = np.zeros(workers, np.int64)
        limit, one = np.zeros((3, workers), np.int64), np.ones(workers, np.int64)
        pair = np.zeros((2, workers))
        sought = ~never if sought is None else sought
        return cls(
            *(whole, rows, rows, whole, pair, flat, none, never, sought, pair, never),
            *(one, limit, flat, none, none),
        )

    @property
    def noise(self) -> FloatArray:
        """Relative variance of one step, ``(W,)``."""
        # All workers count a little, because the first steps of one say almost nothing.
        squares, count = self.squares
        common = (_SHARE_NOISE * _SHARE_NOISE_STEPS + squares.sum()) / (
            _SHARE_NOISE_STEPS + count.sum()
        )
        return np.asarray((common * _SHARE_NOISE_STEPS + squares) / (_SHARE_NOISE_STEPS + count))

    @property
    def has_waves(self) -> bool:
        return bool((self.quantum > 1).any())

    @property
    def limits_s(self) -> tuple[IntArray, IntArray, FloatArray] | None:
        """The limits of the times, as `TimeModel` has them."""
        limited = (self.limit[1] > 0) & (self.proof >= PROOF)
        if not limited.any():
            return None
        here = self.share[0] >= self.limit[1]
        slow = np.where(here, self.share[0], self.limit[1])
        slow_s = np.exp(np.where(here, self.here[0], self.limit_level) + self.slower)
        return self.limit[0], np.where(limited, slow, 1), np.where(limited, slow_s, _NO_TIME_S)

    def trying(self, shares: IntArray) -> ShareTimes:
        """Return the record with cliffs above decided shares that have not been measured yet."""
        least, most, _ = self.limit
        under_way = (shares > least) & (shares < most)
        if not under_way.any():
            return self
        limit = self.limit.copy()
        limit[0] = np.where(under_way, shares, least)
        return replace(self, limit=limit)

    def bolder(self) -> tuple[ShareTimes, Mask, int]:
        """Return the record with each cliff halfway to the smallest slow share.

        Also the workers for which that differs, and the steps since the latest cliff was met, over
        the number of times that one was: each trial waits for twice as long.
        """
        least, most, since = self.limit
        middle = (least + most) // 2
        open_to = (middle > least) & (self.proof >= PROOF)
        waited = (self.steps - since)[open_to] >> np.minimum(self.tries[open_to] - 1, 30)
        return self.trying(middle * open_to), open_to, int(waited.min(initial=2**40))

    def halfway_to_bends(self) -> ShareTimes:
        """Return the record with what may be a bend, not a cliff, halfway to the slow share."""
        (least, most, _), (share, level, _) = self.limit, self.entries
        below = np.where((share == least) & (share > 0), level, -np.inf).max(axis=0)
        longer = np.expm1(np.minimum(self.limit_level - below, 50.0))
        open_to = (self.proof >= PROOF) & (longer <= _BEND * (most / np.maximum(least, 1) - 1.0))
        return self.trying((least + most) // 2 * open_to)

    @property
    def entries(self) -> tuple[IntArray, FloatArray, FloatArray]:
        """The shares, levels and numbers of steps of all entries, ``(n, W)`` each."""
        level, count = self.here[:, np.newaxis]
        return (
            self.share,
            np.concatenate([level, self.level[1:]]),
            np.concatenate([count, self.count[1:]]),
        )

    @property
    def discoveries(self) -> int:
        return int(self.tries.sum())

    @property
    def cliffs(self) -> FloatArray:
        """Each worker's largest share below a cliff, the smallest slow one, and its seconds.

        ``(3, W)``, 0 without a cliff.
        """
        slow_s = np.exp(self.limit_level + self.slower) * (self.proof >= PROOF)
        return np.where((self.limit[1] > 0) & (slow_s > 0), [*self.limit[:2], slow_s], 0.0)

    def shaped(self, workers: IntArray, quanta: IntArray, cliffs: FloatArray) -> ShareTimes:
        """Return the record with the waves and cliffs of workers without entries."""
        if not len(workers):
            return self
        quantum, limit = self.quantum.copy(), self.limit.copy()
        limit_level, proof = self.limit_level.copy(), self.proof.copy()
        quantum[workers] = np.where(self.sought[workers], quanta, 1)
        limit[:2, workers] = cliffs[:2].astype(np.int64)
        limit_level[workers] = np.log(np.where(cliffs[2] > 0, cliffs[2], 1.0))
        proof[workers] = PROOF
        return replace(self, quantum=quantum, limit=limit, limit_level=limit_level, proof=proof)

    @property
    def unclear(self) -> Mask:
        """Which workers were slow for one step with more samples than ever, ``(W,)``."""
        least, most, _ = self.limit
        return np.asarray((most > 0) & (self.proof < PROOF) & (self.share[0] > least))

    def counted(self, workers: IntArray | slice, shares: IntArray) -> IntArray:
        """Return the samples whose time counts: shares rounded up to whole waves."""
        if not self.has_waves:  # a division of integers costs as much as ten products
            return shares
        quantum = self.quantum[workers]
        return np.asarray(-(-shares // quantum) * quantum)


@dataclass(frozen=True, slots=True, eq=False)
class RecentSteps:
    """Shares and times of ``W`` workers in up to 160 consecutive steps, the latest last."""

    end: int  # the step after the latest
    share: FloatArray  # ``(n, W)``; 0 where a worker has no usable time
    time_s: FloatArray  # ``(n, W)``, seconds of each step

    @classmethod
    def none(cls, workers: int) -> RecentSteps:
        return cls(0, np.zeros((0, workers)), np.zeros((0, workers)))


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
    drift: FloatArray  # ``(W,)``, relative drift of the speed per square root of a step.
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
            drift=np.full(workers, LEAST_DRIFT),
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
    return replace(line, quantum=quantum, limits=limits)


def _taking(into: Any, other: Any, here: IntArray, there: IntArray) -> Any:
    """Copy rows between two values of one type: arrays, or tuples and classes made of them."""
    if isinstance(into, CurveEstimates):
        every = np.ones(len(here), dtype=np.bool_)
        return into.put(here, every, other.of(there))
    if isinstance(into, RecentSteps):
        return into  # the other group of workers has no steps in common with this one
    if isinstance(into, np.ndarray):
        taken = into.copy()
        taken[..., here] = other[..., there]
        return taken
    if isinstance(into, tuple):
        return tuple(_taking(a, b, here, there) for a, b in zip(into, other, strict=True))
    parts = {f.name: (getattr(into, f.name), getattr(other, f.name)) for f in fields(into)}
    return type(into)(**{name: _taking(*pair, here, there) for name, pair in parts.items()})
