"""Distinguish a change of speed from noise and from a spike, for all workers at once.

Three tests use a worker's times as fractions of their prediction:

* A time far *below* its prediction cannot be a spike: the worker is faster, at once.
* A time far *above* it is a spike (garbage collection, page cache) or a change. A run of slow times
  that spikes could hardly explain is a change. The required length depends on how often
  this worker has spikes: usually two, one for a worker that never does, three for a frequent one.
  The run must also outlast a hiccup of the machine, which slows down many short steps. Or reports
  must be so frequent that a hiccup ends soon.
* Changes too small for either test show in a two-sided CUSUM of the standardised residuals. It
  also shows when they began, so the new speed is the mean since then.

Source:
    Page, "Continuous inspection schemes", Biometrika 41 (1954) for the CUSUM. The rule for
    spikes is ours: the posterior odds of a change against a run of independent spikes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from evenstride.core.arrays import FloatArray, IntArray, Mask
from evenstride.core.control.schedule import HICCUP_S
from evenstride.core.time_model.estimates import HAZARD, LEAST_ODDS, Changes

# A time beyond these limits, in standard deviations and as a fraction, is not noise. Holding back a
# slow one costs at most a step; learning a spike as part of the curve costs more.
_FAST_STD, _SLOW_STD, _FAR_PART = 4.0, 3.0, 0.10
# Slow times of one speed differ by at most this, from the least to the largest.
_ALIKE_STD = 5.0
_BEYOND_STD = 1.5  # beyond the largest of as many standard normal values as there are workers
# A worker that requests an exchange has outlasted a hiccup; others that became slow with it nearly.
_HICCUP_PART = 0.75
# CUSUM: half the smallest shift to detect, and the alarm level, in standard deviations. A
# false alarm then occurs about once in 140,000 steps of normal noise (Siegmund's approximation).
_SLACK, _ALARM = 0.5, 10.0
# Recent changes and dips count this much less after every step. Fewest dips, and fewest for each
# change, that make short times doubtful. (A mistaken change and its end are two changes.)
_RECENT, _DIPS, _DIPS_PART = 0.99, 0.1, 0.35
# Prior of the rate of spikes.
_SPIKES_FIRST, _STEPS_FIRST = 0.5, 100.0


def _fast_std(workers: int) -> float:
    """Return how far below its prediction a time is not noise, in standard deviations."""
    # Among very many workers one is always far off by chance, and a worker that is wrongly regarded
    # as fast slows down all the others.
    return max(_FAST_STD, _BEYOND_STD + math.sqrt(2.0 * math.log(workers)))


@dataclass(frozen=True, slots=True, eq=False)
class Residuals:
    """New times of some workers relative to their predictions; arrays of shape ``(n,)``."""

    workers: IntArray | slice  # their workers, each at most once.
    part: FloatArray  # the time (a median of ``steps``) as a fraction of its prediction.
    least: FloatArray  # the shortest of those steps as a fraction of its prediction.
    # The time as a fraction of the predictions before a drift up, and down, ``(2, n)``.
    anchored: FloatArray
    std: FloatArray  # standard deviation of ``part`` without a change.
    doubt: FloatArray  # its part due to the uncertainty of the prediction.
    noise_std: FloatArray  # its part due to noise.
    foreseen: Mask  # whether the time agrees with the curve before the latest time.
    steps: IntArray  # number of steps in the median.
    time_s: FloatArray  # the time itself, in seconds.
    interval_s: FloatArray  # seconds of all its work since the previous exchange.
    cold: Mask  # whether it is a slow first step at a share that is new to the worker.
    excused: IntArray  # number of such steps directly before this one; they are no spikes.

    @property
    def slow(self) -> Mask:
        """Which times are longer than noise explains, or may be because the share is new."""
        return np.asarray((self.part > self.highest) | self.cold)

    @property
    def highest(self) -> FloatArray:
        """Limit above which a time is not noise, as a fraction of its prediction."""
        # Noise is multiplicative, the uncertainty of a curve additive.
        noise = np.expm1(_SLOW_STD * self.noise_std)
        return np.asarray(1.0 + np.maximum(np.hypot(_SLOW_STD * self.doubt, noise), _FAR_PART))

    @property
    def hiccup_s(self) -> FloatArray:
        """Minimum duration in seconds of a slow stretch that is not a hiccup.

        A decision holds until the next exchange. So a hiccup wrongly regarded as a change does harm
        only for that interval, and waiting longer is unnecessary.
        """
        return np.minimum(_HICCUP_PART * HICCUP_S, self.interval_s)

    def at(self, places: IntArray) -> Residuals:
        whose = places if isinstance(self.workers, slice) else self.workers[places]
        rest = (getattr(self, name)[..., places] for name in self.__slots__[1:])
        return Residuals(whose, *rest)


@dataclass(frozen=True, slots=True, eq=False)
class Judgement:
    """The meaning of some workers' new times, arrays of shape ``(n,)``."""

    jumped: Mask  # the speed has changed.
    held: Mask  # a time that may be a spike, or a dip: not learned yet.
    ratio: FloatArray  # new times as fractions of the predicted ones, after a change.
    averaged: FloatArray  # number of steps in the mean of the ratio.
    # 1 if the times drifted up, -1 down, 0 otherwise; the ratio then refers to the
    # predictions before the drift.
    drifted: IntArray

    def at(self, places: IntArray) -> Judgement:
        return Judgement(*(getattr(self, name)[places] for name in self.__slots__))


def judge(before: Changes, seen: Residuals) -> tuple[Changes, Judgement]:
    workers, steps = seen.workers, seen.steps
    short, slow = _faster(before, seen), seen.slow
    dip, dips = before.dip[workers], before.dips[workers]
    # Where short times have been noise more often than changes, two in a row show a faster worker,
    # and the longer of them how much faster.
    changed = before.turns[workers] + before.turns.mean()
    often = dips + before.dips.mean() > np.maximum(_DIPS, _DIPS_PART * changed)
    level = np.where(often, np.maximum(dip, seen.part), seen.part)
    fast = short & (~often | (dip > 0))
    far = short | slow
    watched = _watched(before, workers, slow)
    # Usually no worker is slow.
    run = _SlowRuns.of(before, seen.at(watched)) if len(watched) else None
    drift = _Drift.of(before, seen, far)
    # Far times are left to the other two tests, which need fewer steps.
    drifting = drift.lasting(np.flatnonzero(drift.alarm & ~far), seen.time_s)
    length, mean, side = drift.since_begun(drifting)

    ratio, averaged = np.where(fast, level, 1.0), steps.astype(np.float64)
    jumped = fast.copy()
    if run is not None:
        confirmed = watched[run.confirmed]
        # The whole run shows the new speed, so it counts as that many steps.
        ratio[confirmed], averaged[confirmed] = run.level[run.confirmed], run.length[run.confirmed]
        jumped[confirmed] = True
    ratio[drifting], averaged[drifting] = mean, length
    jumped[drifting] = True
    drifted = np.zeros(len(jumped), dtype=np.int64)
    drifted[drifting] = 1 - 2 * side

    after = before.copy()
    after.steps[workers] += steps
    after.dip[workers] = np.where(short, seen.part, 0.0)
    # A held one is followed by a normal time; after a mistaken change that seems slow.
    after.turns[workers] = before.turns[workers] * _RECENT**steps + jumped
    after.dips[workers] = dips * _RECENT**steps + ((dip > 0) & ~short & (often | slow))
    if run is not None:
        run.put(after, usual=~far[watched])
    drift.put(after, workers, keep=~jumped, skip=far)
    return after, Judgement(jumped, far & ~jumped, ratio, averaged, drifted)


def _watched(before: Changes, workers: IntArray | slice, slow: Mask) -> IntArray:
    """Return the places of workers that are slow now, or were slow and are not settled yet."""
    return np.flatnonzero(
        slow | (before.run[workers] > 0) | (before.mistaken[workers] > LEAST_ODDS)
    )


def _faster(before: Changes, seen: Residuals) -> Mask:
    """Return which times are too short to be noise."""
    # A time cannot fall by more than itself, so noise is measured in logarithms downwards.
    # The uncertainty of a curve, which is a sum, is not.
    furthest = np.maximum(_fast_std(len(before.run)) * seen.std, _FAR_PART)
    # It is no change if that uncertainty is likelier, or a previous false alarm is.
    odds = -2.0 * before.mistaken[seen.workers]
    unlikely = (1.0 - seen.part) ** 2 > odds * seen.doubt**2
    return np.asarray((-np.log(seen.part) > furthest) & (unlikely | seen.foreseen))


@dataclass(frozen=True, slots=True, eq=False)
class _SlowRuns:
    """The runs of slow times after new times, for workers with such a run before or after."""

    workers: IntArray
    steps: IntArray
    slow: Mask
    length: FloatArray
    odds: FloatArray
    low: FloatArray
    high: FloatArray
    spike_rate: FloatArray
    confirmed: Mask
    clear: Mask
    level: FloatArray
    excused: IntArray

    @classmethod
    def of(cls, before: Changes, seen: Residuals) -> _SlowRuns:
        workers = np.asarray(seen.workers)
        part, std, highest = seen.part, seen.std, seen.highest
        slow = seen.slow
        # A slow median stands for half the steps, a slow shortest time for all of them.
        count = np.where(seen.least > highest, seen.steps, -(-seen.steps // 2))
        # The least and the largest time of an earlier run say nothing about this one.
        first = before.run[workers] == 0
        length = np.where(slow, before.run[workers] + count, 0.0)
        low = np.where(first, part, np.minimum(before.run_low[workers], part))
        high = np.where(first, part, np.maximum(before.run_high[workers], part))
        rate = (before.spikes[workers] + _SPIKES_FIRST) / (before.steps[workers] + _STEPS_FIRST)
        by_noise = np.exp(-0.5 * (np.log(part) / std) ** 2)  # a bound of the normal tail
        # Noise counts as well as spikes: without it, three standard deviations would be enough for
        # a worker that never had a spike.
        by_chance = np.log(np.minimum(rate + by_noise, 1.0)) * count
        odds = np.where(slow, before.run_odds[workers] + by_chance, 0.0)
        # After a change, times are similar, unless one of them was a spike as well.
        alike = np.log(high / low) <= _ALIKE_STD * std
        # If speeds change often, in this worker or in all, less evidence is required.
        often = before.lasting[workers] + before.lasting.mean() - 0.5
        hazard = np.maximum(HAZARD, often / (before.steps[workers] + _STEPS_FIRST))
        # If the times differ, one of them must have been a spike too, which is less likely.
        change = np.log(hazard) + np.where(alike, 0.0, np.log(rate))
        confirmed = slow & (length * seen.time_s >= seen.hiccup_s) & (odds < change)
        confirmed &= ~seen.cold  # the next step at that share decides
        # If times differ, the larger may be a spike: 2.9 and 1.16 do not show a change to 2.0.
        level = np.where(alike, np.sqrt(low * high), low)
        clear = np.log(level) > _FAST_STD * std
        of_run = length, odds, low, high, rate, confirmed, clear, level, seen.excused
        return cls(workers, seen.steps, slow, *of_run)

    def put(self, after: Changes, usual: Mask) -> None:
        """Write the runs; confirmed ones start again."""
        workers = self.workers
        # A run that ended unconfirmed was spikes, except for first steps at new shares.
        spikes = np.maximum(after.run[workers] - self.excused, 0.0)
        after.spikes[workers] += np.where(self.slow, 0.0, spikes)
        after.run[workers] = np.where(self.confirmed, 0.0, self.length)
        after.run_odds[workers] = np.where(self.confirmed, 0.0, self.odds)
        after.run_low[workers], after.run_high[workers] = self.low, self.high
        # A lasting slow-down was no mistake.
        before = after.mistaken[workers]
        lasted = before + np.where(self.slow, 0.0, np.log(self.spike_rate) * self.steps)
        # Only lasting changes count. If the others counted, the next one would become likelier,
        # and this would reinforce itself.
        after.lasting[workers] += (before > LEAST_ODDS) & (lasted <= LEAST_ODDS) & usual
        # A confirmed run followed by a fast time at once was a spike, or a very short change: it
        # counts half.
        after.spikes[workers] += 0.5 * ((before > 0) & ~self.slow & ~usual)
        # The surer the change, the sooner times at the new speed confirm it.
        unclear = np.maximum(self.odds - LEAST_ODDS, LEAST_ODDS + 0.1)
        mistaken = np.where(self.slow, before, np.where(usual, lasted, LEAST_ODDS))
        # If a change is so small that its end would look like noise, it cannot be checked later.
        mistaken = np.where(self.confirmed, np.where(self.clear, unclear, LEAST_ODDS), mistaken)
        after.mistaken[workers] = np.maximum(mistaken, LEAST_ODDS)


@dataclass(frozen=True, slots=True, eq=False)
class _Drift:
    """The two one-sided sums after a residual: up in row 0, down in row 1."""

    cusum: FloatArray
    since: FloatArray
    sums: FloatArray
    begun: Mask

    @classmethod
    def of(cls, before: Changes, seen: Residuals, far: Mask) -> _Drift:
        workers, steps = seen.workers, seen.steps
        # A spike or a jump would raise the alarm alone; the other two tests handle it.
        off = np.where(far, 0.0, seen.part - 1.0)
        # The mean of m steps has the information of m residuals with sqrt(m) times the noise.
        score = np.sqrt(steps) * off / np.maximum(seen.std, 1e-9)
        since = before.since[:, workers]
        cusum = before.cusum[:, workers] + np.stack([score, -score]) - _SLACK * steps
        # Relative to the prediction before the drift, which has bent the present one since.
        anchored = np.where(since > 0, seen.anchored, seen.part)
        going = cusum > 0
        return cls(
            np.maximum(cusum, 0.0),
            (since + steps) * going,
            (before.sums[:, workers] + anchored * steps) * going,
            going & (since == 0),
        )

    @property
    def alarm(self) -> Mask:
        return np.asarray((self.cusum > _ALARM).any(axis=0))

    def lasting(self, places: IntArray, time_s: FloatArray) -> IntArray:
        """Return which of some drifts are longer than a hiccup."""
        # A hiccup slows down many short steps, so a drift must outlast one, too.
        length, _, _ = self.since_begun(places)
        return places[length * time_s[places] >= HICCUP_S]

    def since_begun(self, places: IntArray) -> tuple[FloatArray, FloatArray, IntArray]:
        """Return for some drifts the steps, the mean of their times, and 0 if up, 1 if down."""
        side = self.cusum[:, places].argmax(axis=0)
        length = np.maximum(self.since[side, places], 1.0)
        return length, self.sums[side, places] / length, side

    def put(self, after: Changes, workers: IntArray | slice, *, keep: Mask, skip: Mask) -> None:
        """Write the sums of usable times (not ``skip``); empty ones unless ``keep``."""
        ranks = np.arange(len(after.run)) if isinstance(workers, slice) else workers
        passed_over, emptied = np.flatnonzero(skip & keep), ranks[~keep]
        for name in ("cusum", "since", "sums"):  # few are skipped or emptied
            rows = getattr(after, name)
            before = rows[:, ranks[passed_over]]
            rows[:, workers] = getattr(self, name)
            rows[:, emptied] = 0
            rows[:, ranks[passed_over]] = before
        # A skipped worker does not start again: that would overwrite the earlier curve.
        after.begun[:, workers] = self.begun & keep & ~skip
