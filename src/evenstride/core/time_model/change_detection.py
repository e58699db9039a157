"""Tell a change of speed from noise and from a spike, for all workers at once.

Three tests, on a worker's times as parts of their prediction:

* A time far *below* its prediction cannot be a spike: the worker is faster, at once.
* A time far *above* it is a spike (garbage collection, page cache) or a change. As many in a
  row as spikes alone could hardly explain are a change. How many that is follows from how often
  this worker spikes: two as a rule, one for a worker that never does, three for a nervous one.
  And they must outlast a hiccup of the machine, which slows down many steps that are short, or
  be reported so often that a hiccup is soon over.
* Changes too small for either show in a two-sided CUSUM of the standardised residuals, which
  also tells when they began, so that the new speed is the mean since then.

Source:
    Page, "Continuous inspection schemes", Biometrika 41 (1954) for the CUSUM. The rule for
    spikes is the posterior odds of a change against a run of independent spikes; ours.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from evenstride.core.arrays import FloatArray, IntArray, Mask
from evenstride.core.control.schedule import HICCUP_S
from evenstride.core.time_model.estimates import HAZARD, LEAST_ODDS, Changes

# Further than this, in standard deviations and in parts, a time is no noise. Holding back a slow
# one costs a step at most; taking a spike for a fact about the curve costs more.
_FAST_STD, _SLOW_STD, _FAR_PART = 4.0, 3.0, 0.10
# Slow times of one speed differ by no more than this, the largest from the least.
_ALIKE_STD = 5.0
_BEYOND_STD = 1.5  # beyond the furthest of as many standard normal values as there are workers
# Who asks for an exchange has outlasted a hiccup; those who became slow with it have nearly so.
_HICCUP_PART = 0.75
# CUSUM: half the smallest shift worth finding and the alarm level, in standard deviations. A
# false alarm then comes about once in 140,000 steps of normal noise (Siegmund's approximation).
_SLACK, _ALARM = 0.5, 10.0
# What is believed of spikes before any was seen.
_SPIKES_FIRST, _STEPS_FIRST = 0.5, 100.0


def _fast_std(workers: int) -> float:
    """Return how far below its prediction a time is no noise, in standard deviations."""
    # Among very many workers somebody is always far off by chance; and one that is taken for fast
    # by mistake holds up all the others.
    return max(_FAST_STD, _BEYOND_STD + math.sqrt(2.0 * math.log(workers)))


@dataclass(frozen=True, slots=True, eq=False)
class Residuals:
    """A new time of each of some workers beside its prediction; arrays of shape ``(n,)``."""

    workers: IntArray | slice  # whose they are, each at most once
    part: FloatArray  # the time (a median of ``steps``) as a part of its prediction
    least: FloatArray  # the shortest of those steps as a part of its prediction
    # The time as a part of what was predicted before times began to drift up, and down, ``(2, n)``.
    anchored: FloatArray
    std: FloatArray  # standard deviation of ``part`` if nothing has changed
    doubt: FloatArray  # what of it is doubt about the prediction
    foreseen: Mask  # whether the time agrees with what was believed before the latest one
    steps: IntArray  # steps that the time is the median of
    time_s: FloatArray  # the time itself, in seconds
    interval_s: FloatArray  # seconds of all its work since the exchange before
    cold: Mask  # whether it is a slow first step at a share that is new to the worker
    excused: IntArray  # such steps in a row before this one; they are no spikes

    @property
    def slow(self) -> Mask:
        """Which times are longer than noise makes them, or may be because the share is new."""
        return np.asarray((self.part > self.highest) | self.cold)

    @property
    def highest(self) -> FloatArray:
        """Above which a time is no noise, as a part of its prediction."""
        return np.asarray(1.0 + np.maximum(_SLOW_STD * self.std, _FAR_PART))

    @property
    def hiccup_s(self) -> FloatArray:
        """Seconds that a stretch must last to be no hiccup.

        What is decided holds until the next exchange, so a hiccup that was taken for a change by
        mistake does harm for as long as these are apart; there is no need to wait longer.
        """
        return np.minimum(_HICCUP_PART * HICCUP_S, self.interval_s)

    def at(self, places: IntArray) -> Residuals:
        whose = places if isinstance(self.workers, slice) else self.workers[places]
        rest = (getattr(self, name)[..., places] for name in self.__slots__[1:])
        return Residuals(whose, *rest)


@dataclass(frozen=True, slots=True, eq=False)
class Judgement:
    """What some workers' new times mean, arrays of shape ``(n,)``."""

    jumped: Mask  # the speed has changed
    held: Mask  # a slow time that may be a spike: not to be learned from yet
    ratio: FloatArray  # new times as parts of those predicted, where it changed
    told: FloatArray  # steps that the ratio is a mean of
    # 1 where the times had drifted up, -1 down, 0 elsewhere; the ratio is then one to the
    # predictions before the drift.
    drifted: IntArray

    def at(self, places: IntArray) -> Judgement:
        return Judgement(*(getattr(self, name)[places] for name in self.__slots__))


def judge(before: Changes, seen: Residuals) -> tuple[Changes, Judgement]:
    workers, steps = seen.workers, seen.steps
    fast, slow = _faster(before, seen), seen.slow
    far = fast | slow
    watched = _watched(before, workers, slow)
    run = _SlowRuns.of(before, seen.at(watched))
    drift = _Drift.of(before, seen, far)
    # Far times are left to the other two tests, which need fewer steps.
    drifting = np.flatnonzero(drift.alarm & ~far)
    length, _, _ = drift.since_begun(drifting)
    # A hiccup slows down many short steps, so a drift must outlast one too.
    drifting = drifting[length * seen.time_s[drifting] >= HICCUP_S]
    length, mean, side = drift.since_begun(drifting)

    ratio, told = np.where(fast, seen.part, 1.0), steps.astype(np.float64)
    jumped, confirmed = fast.copy(), watched[run.confirmed]
    # The whole run shows the new speed, so it counts as that many steps.
    ratio[confirmed], told[confirmed] = run.level[run.confirmed], run.length[run.confirmed]
    ratio[drifting], told[drifting] = mean, length
    jumped[confirmed] = jumped[drifting] = True
    drifted = np.zeros(len(jumped), dtype=np.int64)
    drifted[drifting] = 1 - 2 * side

    after = before.copy()
    after.steps[workers] += steps
    run.put(after, usual=~far[watched])
    drift.put(after, workers, keep=~jumped, skip=far)
    return after, Judgement(jumped, slow & ~jumped, ratio, told, drifted)


def _watched(before: Changes, workers: IntArray | slice, slow: Mask) -> IntArray:
    """Return the places of those who are slow now, or were and are not yet done with it."""
    return np.flatnonzero(
        slow | (before.run[workers] > 0) | (before.mistaken[workers] > LEAST_ODDS)
    )


def _faster(before: Changes, seen: Residuals) -> Mask:
    """Return which times are too short to be noise."""
    # A time cannot fall by more than all of itself, so noise is measured in logarithms on the
    # way down; the doubt about a curve, which is a sum, is not.
    furthest = np.maximum(_fast_std(len(before.run)) * seen.std, _FAR_PART)
    # Nor is it a change if that doubt is likelier than one, or than a false alarm before.
    odds = -2.0 * before.mistaken[seen.workers]
    unlikely = (1.0 - seen.part) ** 2 > odds * seen.doubt**2
    return np.asarray((-np.log(seen.part) > furthest) & (unlikely | seen.foreseen))


@dataclass(frozen=True, slots=True, eq=False)
class _SlowRuns:
    """The runs of slow times after a residual, of those workers that had or have one."""

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
        # A slow median tells of half the steps, a slow shortest time of all of them.
        count = np.where(seen.least > highest, seen.steps, -(-seen.steps // 2))
        # The least and the largest time of an earlier run say nothing about this one.
        first = before.run[workers] == 0
        length = np.where(slow, before.run[workers] + count, 0.0)
        low = np.where(first, part, np.minimum(before.run_low[workers], part))
        high = np.where(first, part, np.maximum(before.run_high[workers], part))
        rate = (before.spikes[workers] + _SPIKES_FIRST) / (before.steps[workers] + _STEPS_FIRST)
        by_noise = np.exp(-0.5 * ((part - 1.0) / std) ** 2)  # a bound of the normal tail
        # Noise counts as well as spikes: without it, three standard deviations would do for a
        # worker that never spiked.
        by_chance = np.log(np.minimum(rate + by_noise, 1.0)) * count
        odds = np.where(slow, before.run_odds[workers] + by_chance, 0.0)
        # After a change, times are alike; unless one of them was a spike as well.
        alike = np.log(high / low) <= _ALIKE_STD * std
        # Where speeds change often, in this worker or in all, less is needed to believe it.
        often = before.lasting[workers] + before.lasting.mean() - 0.5
        hazard = np.maximum(HAZARD, often / (before.steps[workers] + _STEPS_FIRST))
        # If the times differ, one of them must have been a spike too, which is less likely.
        change = np.log(hazard) + np.where(alike, 0.0, np.log(rate))
        confirmed = slow & (length * seen.time_s >= seen.hiccup_s) & (odds < change)
        confirmed &= ~seen.cold  # the next step at that share tells
        # Of times that differ, the larger may be a spike: 2.9 and 1.16 are no change of 2.0.
        level = np.where(alike, np.sqrt(low * high), low)
        clear = np.log(level) > _FAST_STD * std
        of_run = length, odds, low, high, rate, confirmed, clear, level, seen.excused
        return cls(workers, seen.steps, slow, *of_run)

    def put(self, after: Changes, usual: Mask) -> None:
        """Write the runs; those that were confirmed begin anew."""
        workers = self.workers
        # A run that ended without being confirmed was spikes, first steps at new shares apart.
        spikes = np.maximum(after.run[workers] - self.excused, 0.0)
        after.spikes[workers] += np.where(self.slow, 0.0, spikes)
        after.run[workers] = np.where(self.confirmed, 0.0, self.length)
        after.run_odds[workers] = np.where(self.confirmed, 0.0, self.odds)
        after.run_low[workers], after.run_high[workers] = self.low, self.high
        # What lasts was no mistake.
        before = after.mistaken[workers]
        lasted = before + np.where(self.slow, 0.0, np.log(self.spike_rate) * self.steps)
        # Only changes that lasted are counted. Counting the others makes the next one likelier to
        # be believed, which feeds on itself.
        after.lasting[workers] += (before > LEAST_ODDS) & (lasted <= LEAST_ODDS) & usual
        # And a first sign that was believed, and fast again at once, was a spike, or a very short
        # change: it counts half.
        after.spikes[workers] += 0.5 * ((before > 0) & ~self.slow & ~usual)
        # The surer the change, the sooner times at the new speed settle that it was one.
        unclear = np.maximum(self.odds - LEAST_ODDS, LEAST_ODDS + 0.1)
        mistaken = np.where(self.slow, before, np.where(usual, lasted, LEAST_ODDS))
        # Of one so small that its end would not stand out from noise, nothing could be told later.
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
        # A spike or a jump would raise the alarm alone, and is judged by the other two tests.
        off = np.where(far, 0.0, seen.part - 1.0)
        # The mean of m steps says as much as m residuals that are sqrt(m) times noisier.
        score = np.sqrt(steps) * off / np.maximum(seen.std, 1e-9)
        since = before.since[:, workers]
        cusum = before.cusum[:, workers] + np.stack([score, -score]) - _SLACK * steps
        # As parts of the prediction before the drift, which has bent the present one by now.
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

    def since_begun(self, places: IntArray) -> tuple[FloatArray, FloatArray, IntArray]:
        """Return of some drifts the steps, the mean of their times, and 0 if up, 1 if down."""
        side = self.cusum[:, places].argmax(axis=0)
        length = np.maximum(self.since[side, places], 1.0)
        return length, self.sums[side, places] / length, side

    def put(self, after: Changes, workers: IntArray | slice, *, keep: Mask, skip: Mask) -> None:
        """Write the sums where a time was judged (not ``skip``); empty ones unless ``keep``."""
        ranks = np.arange(len(after.run)) if isinstance(workers, slice) else workers
        passed_over, emptied = np.flatnonzero(skip & keep), ranks[~keep]
        for name in ("cusum", "since", "sums"):  # few are passed over or emptied
            rows = getattr(after, name)
            before = rows[:, ranks[passed_over]]
            rows[:, workers] = getattr(self, name)
            rows[:, emptied] = 0
            rows[:, ranks[passed_over]] = before
        # Who is passed over does not begin again: that would overwrite what was believed before.
        after.begun[:, workers] = self.begun & keep & ~skip
