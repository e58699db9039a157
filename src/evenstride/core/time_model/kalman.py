"""Learn every worker's step-time curve from its measurements.

Each worker has two unknowns, a fixed time and a time per sample, in a Kalman filter. They change
at different rates. The *shape* (their ratio) depends on model and device and hardly
changes; the *speed* changes at any time and scales both. So the filter drifts along the curve
itself, which keeps the ratio. A change of speed (found by `Changes`) moves and frees only
that direction: one observation after a slow-down is enough to know the whole new curve.

Three memories keep apart changes of speed and of shape. A slow change is
detected only after some steps, whose residuals have bent the curve by then. The curve is restored
to the state when the change began (`anchors`). When a speed returns to its value before the
latest change, so does the former curve (`former`). And a spike that an uncertain curve
absorbed is dropped when the next time contradicts it (`previous`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from evenstride.core.arrays import FloatArray, IntArray, Mask, Which
from evenstride.core.time_model.change_detection import Judgement, Residuals, judge
from evenstride.core.time_model.curve_update import bent, observed
from evenstride.core.time_model.estimates import (
    LEAST_DRIFT,
    Changes,
    CurveEstimates,
    Estimate,
    Firsts,
    RecentSteps,
)
from evenstride.core.time_model.observation import Measurements, WorkerTimes
from evenstride.core.time_model.share_times import NewTimes, noted
from evenstride.core.time_model.wave_search import with_waves

# Before anything is known about the shape, this fraction of the fastest worker's time is fixed.
# A slower worker's fixed time would be the same if only its arithmetic were slower, and longer
# in proportion if all of it were; a power of the times lies between the two.
# These are tuned for the first new split, which comes before a second share has been measured.
_PRIOR_FIXED, _PRIOR_FIXED_STD, _PRIOR_POWER = 0.37, 0.17, 0.60
# Typical size of a change of speed. An apparent change of speed may be a wrong shape, which must
# not persist: a factor of e adds this much uncertainty of the fixed part. Without it, a spike
# regarded as shape made every new share look like a change of speed, and one run of eight fell to
# half of the best efficiency.
_JUMP_STD, _JUMP_SHAPE_STD = 0.5, 0.10
# A time is near another one if they differ by less than this part of an apparent change. If a
# worker returns to a share, and its time is near the one before there, the curve between has a
# wrong shape rather than another speed. The fixed part then has this uncertainty.
# The same holds if all steps of a worker were first ones at new shares, and a second step at one of
# them is much shorter. With 0.15 of a core, 15 samples took 82 ms, then 51. Scaled by that fall,
# the curve led to 39 samples, where 26 are best.
_NEAR, _SHAPE_STD = 0.7, 0.25
# A curve from before a drift comes back if a time is nearer to it than this part of the change.
_NEAR_ANCHOR = 1 / 3
# A speed this close to the one before the latest change, in standard deviations, is that one.
_BACK_STD = 2.0
# Fraction of a change's uncertainty of shape that returns with the former speed: two alternating
# wrong curves must not persist either.
# A fifth was worse with 1,000 mixed workers, the whole of it no better.
_BACK_DOUBT = 0.5
# A first step at a new share is slow if it takes this many times its prediction. After this many of
# them in a row the next one counts: a worker whose share changes all the time is not ignored.
_SLOW_FIRST, _MOST_SLOW_FIRSTS = 1.25, 3
# Noise makes the second step at a share much shorter than the first for up to so many at once.
_BY_CHANCE = 3
# Part of the first step of a run that counts as compilation, of the worker with the shortest one:
# in a new process it took 64 s, and 21 to 25 s at later shares.
_OF_FIRST = 0.5
# Bounds of the stored cost of new shares: after two cheap first steps, new shares count as free of
# cost until an expensive one.
_COST = (-2, 2)
# Uncertainty of a curve that never averages out.
_MODEL_STD = 0.004
# Variance of the part of a change that may not be known yet, as a part of a step's noise.
_UNSEEN_PART = 0.25
# The logarithm of the drift changes by the rate times the product of two consecutive residuals,
# less the threshold: it falls while they are independent. At a lower rate or a higher threshold,
# drifts are followed less well; at a higher rate, noise is. Then the largest drift.
_DRIFT_RATE, _DRIFT_THRESHOLD, _MOST_DRIFT = 0.2, 0.1, 0.05
# Bounds of the relative variance of one step's time; and the fewest and most steps in its mean
# (with fewer, it would itself be so noisy that every test with it misfires).
_NOISE_LEAST, _NOISE_LIKELY, _NOISE_MOST = 0.005**2, 0.45**2, 0.5**2
_NOISE_STEPS = 4.0, 150.0
# Up to this many steps, no worker's noise is estimated below the common noise of all equally new
# workers, because the common one is known sooner.
_NOISE_ALONE = 8
# Fewest new workers that show whether all of them are noisier than assumed; and the median of the
# square of a standard normal value.
_FEWEST_FRESH, _MEDIAN_SQUARE, _GUESS_STEPS = 3, 0.455, 2.0
# Mean of squared standard normal values of at most 1 each; and recent changes that may be noise.
_MEAN_LIMITED, _OFTEN = 0.516, 3.0
# Largest weight of a time that is not regarded as noise, in variances.
_NOISE_FAR = 6.0
# Steps whose times are kept: about two periods of the slowest change that is looked for. With more
# workers none are kept: some of them are always slow, and decisions must stay cheap.
_RECENT, _MOST_WITH_RECENT = 160, 128


def learn_times(estimate: Estimate, measured: Measurements, *, compiled: bool = False) -> Estimate:
    """Return the estimate after some observations, each worker's own in order of step.

    Observations of ghost samples are skipped. Steps flagged as not modelled show only what a share
    costs that is new to a worker. If the model is ``compiled`` for each share, the first step of
    the run shows that, too.

    Cost:
        ``O(W)`` vectorised per observation of the worker that has the most of them.
    """
    worked = measured.only(measured.share > 0)
    # Steps that are not modelled count here, because they also pass between two exchanges.
    interval_s = np.zeros(len(estimate.steps))
    np.add.at(interval_s, measured.worker, measured.steps * measured.median_s)
    # In turns, because a worker's later time is compared with a curve that includes earlier ones.
    for turn in worked.turns():
        if not (modelled := worked.modelled[turn]).all():
            estimate = _with_unmodelled(estimate, worked, turn[~modelled], compiled=compiled)
            turn = turn[modelled]
        if not len(turn):
            continue
        first, learnable = _First.of(estimate, worked, turn)
        batch = WorkerTimes.of(learnable, turn, interval_s, first.excused(estimate), first.alone)
        shorter = _shorter(estimate, batch)
        common = 2 * np.count_nonzero(shorter) > len(estimate.steps)
        firsts = _firsts_after(estimate, batch, first, shorter & common)
        batch = replace(batch, pivot=_pivots(estimate, batch, shorter & (not common)))
        estimate, batch = _shaped(estimate, batch)
        fresh = estimate.steps[batch.workers] == 0
        after = _update(_begin(estimate, batch.only(fresh)), batch.only(~fresh))
        estimate = with_waves(replace(after, firsts=firsts))
    usable = worked.only(worked.modelled)
    return replace(estimate, recent=with_recent(estimate.recent, usable))


def _with_unmodelled(
    estimate: Estimate, measured: Measurements, at: IntArray, *, compiled: bool
) -> Estimate:
    """Return the estimate with first steps at new shares that say nothing about speed.

    The next step at that share shows what a new share costs: of a compiled model, and on an
    accelerator. The first step of a run also starts other things, so it counts only if the model
    is ``compiled``, and then in part.
    """
    firsts, w = estimate.firsts, measured.worker[at]
    new = firsts.new(w, measured.share[at]) & (compiled | (estimate.steps[w] > 0))
    at, w = at[new], w[new]
    slow = _slow_firsts(estimate, measured, at)
    if not slow.any():
        return estimate
    at, w = at[slow], w[slow]
    share, slow_s, first_s = firsts.share.copy(), firsts.slow_s.copy(), firsts.first_s.copy()
    share[w], slow_s[w] = measured.share[at], measured.first_s(at)
    first_s[w] = slow_s[w]
    had = _had_after(firsts.had, w, measured.share[at])
    return replace(
        estimate, firsts=replace(firsts, share=share, had=had, slow_s=slow_s, first_s=first_s)
    )


def _shaped(estimate: Estimate, batch: WorkerTimes) -> tuple[Estimate, WorkerTimes]:
    """Return the estimate with the new times in its record, and those that show a speed."""
    seen, w = estimate.seen, batch.workers
    curves, whole = (
        estimate.now.of(w),
        seen.counted(w, batch.share) if seen.has_waves else batch.share,
    )

    before = seen.counted(w, seen.share[0, w])

    def curve(places: IntArray) -> tuple[FloatArray, FloatArray, FloatArray]:
        mine, known = curves.of(places), estimate.steps[w][places] > 0
        times_s = mine.time_s(whole[places]), mine.time_s(before[places])
        doubt = np.where(known, mine.relative_std(whole[places]), 0.0)
        return np.where(known, times_s[0], 0.0), np.where(known, times_s[1], 0.0), doubt

    new = NewTimes(w, batch.share, batch.time_s, batch.steps, estimate.firsts.cost[w] < 0, curve)
    seen, shape, off = noted(seen, new)
    # Its time at a share beyond a cliff says nothing about a worker's line.
    pivot = seen.counted(w, batch.pivot)
    batch = replace(batch, share=whole, before=before, pivot=pivot, off=off)
    return replace(estimate, seen=seen), batch.only(~shape)


def _slow_firsts(estimate: Estimate, measured: Measurements, at: IntArray) -> Mask:
    """Return which observations of workers with a curve begin with a step that is too long."""
    w = measured.worker[at]
    usual_s = estimate.now.of(w).time_s(estimate.seen.counted(w, measured.share[at]))
    return np.asarray(measured.first_s(at) > _SLOW_FIRST * usual_s)


@dataclass(frozen=True, slots=True, eq=False)
class _First:
    """What a turn's observations say about first steps at new shares, arrays ``(n,)``."""

    workers: IntArray  # their workers.
    new: Mask  # whether the share is new to the worker.
    alone: Mask  # whether it is a single step at such a share.
    open: Mask  # whether it is a single step, slow at a new share: the next one decides.
    dropped: Mask  # whether its slow first step was left out because later ones were normal.
    over_s: FloatArray  # by how much that one was longer, in seconds

    @classmethod
    def of(
        cls, estimate: Estimate, measured: Measurements, turn: IntArray
    ) -> tuple[_First, Measurements]:
        """Return it with the observations that remain to be learned."""
        workers, shares = measured.worker[turn], measured.share[turn]
        new = estimate.firsts.new(workers, shares)
        # A worker without a curve has no usual time to compare with.
        slow = new & (estimate.steps[workers] > 0)
        at = np.flatnonzero(slow)
        if len(at):
            slow[at] = _slow_firsts(estimate, measured, turn[at])
        alone = measured.steps[turn] == 1
        # If there are several steps, the later ones show whether only the first was slow.
        shorter = measured.without_slow_first(turn[slow & ~alone], _SLOW_FIRST)
        dropped = shorter.steps[turn] < measured.steps[turn]
        over_s = np.where(dropped, measured.first_s(turn) - shorter.median_s[turn], 0.0)
        return cls(workers, new, new & alone, slow & alone, dropped, over_s), shorter

    def excused(self, estimate: Estimate) -> Mask:
        """Return which slow steps may be caused by the share alone."""
        firsts, w = estimate.firsts, self.workers
        row = firsts.row[w]
        alone = (row > 0) | (estimate.changes.run[w] == 0)  # no other step was slow before
        return np.asarray(
            self.open & alone & (row < _MOST_SLOW_FIRSTS) & (firsts.cost[w] > _COST[0])
        )


def _firsts_after(estimate: Estimate, batch: WorkerTimes, first: _First, common: Mask) -> Firsts:
    """Return what is known of first steps; ``common`` are those that most workers had long."""
    before, w = estimate.firsts, batch.workers
    fresh = estimate.steps[w] == 0
    moved, before_s = before.share[w] != batch.share, before.first_s[w]
    if not (moved.any() or before.row[w].any() or before_s.any()):
        return before
    # The second step at a share shows why the first one was slow.
    second = ~moved & (before.slow_s[w] > 0)
    # A change of speed would have made the second step as slow as the first.
    costly = first.dropped | (second & (_SLOW_FIRST * batch.time_s < before_s)) | common
    second = second | common
    # An undecided first step is counted when the second has arrived.
    cheap = (first.new | second) & ~costly & ~first.open & ~fresh
    share, had, row = before.share.copy(), before.had, before.row.copy()
    first_s, slow_s, cost = before.first_s.copy(), before.slow_s.copy(), before.cost.copy()
    if first.new.any():
        had = _had_after(had, first.workers[first.new], batch.share[first.new])
    share[w], row[w] = batch.share, np.where(batch.cold, row[w] + 1, 0)
    slow_s[w] = np.where(first.open, batch.time_s, 0.0)
    first_s[w] = np.where(batch.new, batch.time_s, 0.0)
    # The very first step of a worker has no prediction to compare with.
    known = before.share[w] > 0
    cost[w] = np.clip(cost[w] + known * (1 * costly - 1 * cheap), *_COST)
    cost[w] = np.where(common, np.maximum(cost[w], 1), cost[w])
    over_s = np.where(second & costly, before_s - batch.time_s, first.over_s)
    if (of_run := fresh & costly).any():
        over_s = np.where(of_run, _OF_FIRST * over_s[of_run].min(), over_s)
    extra_s, known_s = before.extra_s, before.extra_s[w]
    if costly.any() or (known_s * cheap).any():
        extra_s = extra_s.copy()
        # The very first cost counts as it is; a mean follows the later ones.
        mean_s = np.where(known_s > 0, 0.5 * (known_s + over_s), over_s)
        extra_s[w] = np.where(costly | cheap, mean_s, known_s)
    return Firsts(share, had, row, first_s, slow_s, cost, extra_s)


def _shorter(estimate: Estimate, batch: WorkerTimes) -> Mask:
    """Return which second steps at a share show that the first one was long.

    If all steps before were first ones, none of them seemed slow.
    """
    firsts, w, longer_s = estimate.firsts, batch.workers, _SLOW_FIRST * batch.time_s
    # The first step of a run is left out, because it also starts other things.
    shorter = (firsts.share[w] == batch.share) & (firsts.had[1, w] > 0)
    shorter &= longer_s < firsts.first_s[w]
    if not shorter.any() or np.count_nonzero(shorter) > _BY_CHANCE:
        return np.asarray(shorter)
    # A spike has not changed the prediction. Long first steps at all shares have.
    usual_s = estimate.now.of(w).time_s(estimate.seen.counted(w, batch.share))
    return np.asarray(shorter & (longer_s < usual_s))


def _pivots(estimate: Estimate, batch: WorkerTimes, shorter: Mask) -> IntArray:
    """Return the shares whose times the curves keep if first steps have bent them; 0 for none."""
    if not shorter.any():  # nearly always
        return batch.pivot
    had, share = estimate.firsts.had[:, batch.workers], batch.share
    # All other steps of the worker were first ones, too.
    young = shorter & (np.count_nonzero(had, axis=0) == estimate.steps[batch.workers])
    off = np.where(had > 0, np.abs(np.log(np.maximum(had, 1) / share)), 0.0)
    pivot = had[off.argmax(axis=0), np.arange(len(share))]
    # If fewer samples took less time, only a change of speed explains it.
    pivot_s = estimate.now.of(batch.workers).time_s(estimate.seen.counted(batch.workers, pivot))
    young &= (batch.time_s > pivot_s) == (share > pivot)
    return np.where(young, pivot, 0)


def _had_after(before: IntArray, workers: IntArray, shares: IntArray) -> IntArray:
    had = before.copy()
    had[1:, workers] = had[:-1, workers]
    had[0, workers] = shares
    return had


def _begin(estimate: Estimate, batch: WorkerTimes) -> Estimate:
    """Start new workers from the prior shape through their first time."""
    if not len(batch.share):
        return estimate
    y, noise = batch.time_s, estimate.noise[batch.workers]
    least_s = _fastest_s(estimate, batch)
    # Part of the time must remain for the samples, or any share would seem as good as another.
    fixed = np.minimum(_PRIOR_FIXED * y**_PRIOR_POWER * least_s ** (1 - _PRIOR_POWER), 0.9 * y)
    curves = CurveEstimates.certain(fixed, (y - fixed) / batch.share)
    curves = curves.times(1.0, batch.variance(noise) + _MODEL_STD**2)
    curves = bent(curves, batch.share, np.full(len(y), _PRIOR_FIXED_STD))
    return estimate.knowing(batch.workers, curves, noise, batch.steps)


def _fastest_s(estimate: Estimate, batch: WorkerTimes) -> float:
    """Return the shortest time of new and of known workers, near the same share."""
    known = estimate.steps > 0
    if not known.any():
        return float(batch.time_s.min())
    theirs_s = estimate.now.of(np.flatnonzero(known)).time_s(float(batch.share.mean()))
    return min(float(batch.time_s.min()), float(theirs_s.min()))


def _update(estimate: Estimate, batch: WorkerTimes) -> Estimate:
    if not len(batch.share):
        return estimate
    w = batch.workers
    # A drift along the curve: the speed gets less certain with every step, the shape does not.
    estimate = _noisier(estimate, batch)
    drift = estimate.drift[w] ** 2 * batch.steps + _unseen(estimate, batch)
    curves = estimate.now.of(w).times(1.0, drift)
    variance = batch.variance(estimate.noise[w]) + _MODEL_STD**2
    residuals = _residuals(estimate, batch, curves, variance)
    changes, judged = judge(estimate.changes, residuals)
    # Computed for all, because nearly all times are normal; held-back times are left out below.
    after = observed(curves, batch.share, batch.time_s, variance)
    if judged.jumped.any():  # rare, and only for few workers
        some = np.flatnonzero(judged.jumped)
        jumped = _jumped(estimate, batch.at(some), curves.of(some), judged.at(some))
        after.rows[:, some] = jumped.rows
    learnt = replace(
        estimate,
        drift=_drift_after(estimate, residuals),
        now=estimate.now.put(w, ~judged.held, after),
        former=estimate.former.put(w, judged.jumped, curves),
        previous=estimate.previous.put(w, ~judged.held, curves),
        anchors=_anchored(estimate, changes, w, curves),
        changes=changes,
    )
    unclear = (residuals.doubt**2 > _NOISE_FAR * estimate.noise[w]) | batch.cold
    return _noted(learnt, batch, residuals.part, judged, unclear)


def _unseen(estimate: Estimate, batch: WorkerTimes) -> FloatArray:
    """Return the variance of speeds that may have changed before a share moved, ``(n,)``."""
    # A share moves after a change of speed, part of which may not be known yet. Without this, it
    # would seem to be shape: the curve of a worker that gets faster, then more samples, gets flat.
    w, turns = batch.workers, estimate.changes.turns
    if estimate.seen.discoveries:  # a cliff of one worker is likely to be one of all
        return np.zeros(len(batch.share))
    # More samples that take longer may show a cliff. A slow first step at a share is no speed.
    slow = batch.time_s > estimate.now.of(w).time_s(batch.share)
    moved = (batch.share < batch.before) | ((batch.share > batch.before) & ~slow)
    often = np.minimum(turns[w] + turns.mean(), 1.0) * (estimate.firsts.cost[w] <= 0)
    return np.where(moved, _UNSEEN_PART * often * estimate.noise[w], 0.0)


def _drift_after(estimate: Estimate, residuals: Residuals) -> FloatArray:
    """Return the drift of all workers after these times; slow first steps do not count."""
    # If a curve follows its speed, consecutive residuals are independent. If it is too slow for
    # the drift, most of them have the same sign, and if it is too quick, opposite ones. `Changes`
    # finds a drift only where the sum of residuals is large.
    w, drift = residuals.workers, estimate.drift.copy()
    product = np.log(residuals.part) * np.log(estimate.latest[w]) / residuals.std**2
    usable = ~residuals.cold & ~np.isnan(product)
    excess = np.where(usable, np.clip(product, -1.0, 1.0) - _DRIFT_THRESHOLD, 0.0)
    drift[w] = (drift[w] * np.exp(_DRIFT_RATE * excess)).clip(LEAST_DRIFT, _MOST_DRIFT)
    return drift


def _noisier(estimate: Estimate, batch: WorkerTimes) -> Estimate:
    """Return the estimate with more noise if many new workers are far from their predictions."""
    # Before they are judged: at first every worker's noise is a guess, and if that is too small,
    # all of them seem to change their speeds at once, and their first times to be accurate.
    w = batch.workers
    before, steps = estimate.noise[w], estimate.steps[w]
    # At another share, the prior of the shape may be wrong instead.
    fresh = (steps < _NOISE_ALONE) & (estimate.firsts.share[w] == batch.share)
    cold = batch.cold & fresh
    if int(fresh.sum()) < max(_FEWEST_FRESH, 2 * int(cold.sum())):
        return estimate
    curves = estimate.now.of(w)
    off = np.log(batch.time_s / curves.time_s(batch.share))
    # What all have in common is no noise between them: their first steps may all have been slow.
    off -= np.median(off[fresh])
    # Slow first steps at new shares say nothing about noise. But without the slow ones, the others
    # would seem calmer than they are, so only fast ones count then.
    some = np.flatnonzero(fresh & ((off < 0) if cold.any() else True))
    if not len(some):
        return estimate
    theirs, share = curves.of(some), batch.share[some]
    # An uncertain shape is no noise, and explains times at another share.
    shape = theirs.relative_std(share) ** 2 - theirs.least_relative_std**2
    seen = np.maximum(off[some] ** 2 - shape, 0.0) / (1.0 / batch.steps[some] + 1.0 / steps[some])
    # Limited by the median, because a few workers may really have changed.
    usual = np.minimum(seen, _NOISE_FAR * np.median(seen) / _MEDIAN_SQUARE).mean()
    known = _GUESS_STEPS + (steps[some] - 1.0).sum()
    common = (known * before[some].mean() + len(some) * usual) / (known + len(some))
    # More than that is the first step of a compiler, which slows down fast workers the most.
    if common > _NOISE_LIKELY:
        return estimate
    more = np.where(fresh, np.maximum(common - before, 0.0), 0.0)
    if not more.any():
        return estimate
    noise = estimate.noise.copy()
    noise[w] = before + more
    unsure = curves.times(1.0, more / np.maximum(steps, 1))
    return replace(estimate, noise=noise, now=estimate.now.put(w, fresh, unsure))


def _residuals(
    estimate: Estimate, batch: WorkerTimes, curves: CurveEstimates, variance: FloatArray
) -> Residuals:
    share, w = batch.share, batch.workers
    doubt = curves.relative_std(share)
    # The curve before the latest time is an older one only if that time was no change itself.
    foreseen = _explains(estimate.previous.of(w), share, batch.time_s, variance)
    foreseen &= ~np.isnan(estimate.latest[w])
    anchored_s = [anchor.of(w).time_s(share) for anchor in estimate.anchors]
    return Residuals(
        workers=w,
        part=batch.time_s / curves.time_s(share),
        least=batch.least_s / curves.time_s(share),
        anchored=batch.time_s / np.stack(anchored_s),
        std=np.sqrt(doubt**2 + variance),
        doubt=doubt,
        noise_std=np.sqrt(variance),
        foreseen=foreseen,
        steps=batch.steps,
        time_s=batch.time_s,
        interval_s=batch.interval_s,
        cold=batch.cold,
        excused=estimate.firsts.row[w],
    )


def _jumped(
    estimate: Estimate, batch: WorkerTimes, curves: CurveEstimates, judged: Judgement
) -> CurveEstimates:
    # In order of preference: the curve from before a drift, if it explains the new time (the
    # drift was spikes, then); the curve from before the latest change, if the speed has returned;
    # otherwise the present one at another speed.
    w, share = batch.workers, batch.share
    up, down = (anchor.of(w) for anchor in estimate.anchors)
    # If the first drifting time already raises the alarm, the present curve predicted it.
    drifting = estimate.changes.since[:, w] > 0
    base = down.where(drifting[1] & (judged.drifted == -1), curves)
    base = up.where(drifting[0] & (judged.drifted == 1), base)
    # As certain as the mean of all the steps that showed the change.
    free = estimate.noise[w] / judged.averaged + _MODEL_STD**2
    # The larger the apparent change, the more a wrong shape may contribute to it.
    doubt = _JUMP_SHAPE_STD * np.minimum(np.abs(np.log(judged.ratio)), 1.0)
    time_s = base.time_s(share) * judged.ratio
    # Far from where a curve was measured, its shape may be the cause rather than the speed.
    unsure = base.times(1.0, np.full(len(share), _JUMP_STD**2))
    moved = bent(observed(unsure, share, time_s, free), share, doubt)
    if batch.pivot.any():
        moved = _reshaped(batch, curves, batch.pivot, free, batch.pivot > 0, moved)
    former = estimate.former.of(w)
    # Without this uncertainty, two wrong curves could alternate forever.
    returned = observed(bent(former, share, _BACK_DOUBT * doubt), share, time_s, free)
    after = returned.where(_explains(former, share, time_s, free), moved)
    # The time before this one may have been a spike that an uncertain curve absorbed.
    previous = estimate.previous.of(w)
    # Only for a fall: a spike makes a curve too slow, never too fast.
    misled = (judged.ratio < 1) & (judged.drifted == 0)
    misled &= _explains(previous, share, time_s, free)
    after = observed(previous, share, time_s, free).where(misled, after)
    size = np.abs(np.log(judged.ratio))
    for side, anchor, beyond in ((0, up, judged.ratio < 1), (1, down, judged.ratio > 1)):
        undrifted = drifting[side] & beyond & (judged.drifted == 0)
        undrifted &= _explains(anchor, share, time_s, free)
        # A curve from before a large change of the share explains almost any time at the new one.
        undrifted &= np.abs(np.log(time_s / anchor.time_s(share))) < _NEAR_ANCHOR * size
        after = observed(anchor, share, time_s, free).where(undrifted, after)
    as_before = batch.off < _NEAR * size
    if not as_before.any():
        return after
    return _reshaped(batch, curves, batch.before, free, as_before, after)


def _reshaped(
    batch: WorkerTimes,
    curves: CurveEstimates,
    pivot: IntArray,
    free: FloatArray,
    which: Mask,
    after: CurveEstimates,
) -> CurveEstimates:
    """Return ``which`` curves through their times at two shares, the other one being ``pivot``."""
    unsure = bent(curves, pivot, np.full(len(batch.share), _SHAPE_STD))
    shaped = observed(unsure, batch.share, batch.time_s, free)
    fits = _explains(shaped, batch.share, batch.time_s, free)
    return shaped.where(which & fits, after)


def _explains(
    curves: CurveEstimates, shares: IntArray, time_s: FloatArray, noise: FloatArray
) -> Mask:
    """Return which known curves explain a time within their uncertainty."""
    off = time_s / curves.time_s(shares) - 1.0
    near = np.abs(off) <= _BACK_STD * np.sqrt(curves.relative_std(shares) ** 2 + noise)
    # A curve of zeros is unknown and explains nothing.
    return np.asarray(near & (curves.per_sample_s > 0))


def _anchored(
    estimate: Estimate, changes: Changes, workers: Which, before: CurveEstimates
) -> tuple[CurveEstimates, CurveEstimates]:
    """Keep the curves from before times began to drift; they are unused without a drift."""
    begun = changes.begun[:, workers]
    up, down = (
        anchor.put(workers, begun[side], before) for side, anchor in enumerate(estimate.anchors)
    )
    return up, down


def _common_noise(noise: FloatArray, before: IntArray, seen: FloatArray, steps: IntArray) -> float:
    """Return the common noise of workers that each have only few steps.

    ``noise`` is the present estimate of each; ``before`` is the number of its earlier steps, the
    first of which has no information if it was alone; ``seen`` is the noise of the new times, and
    ``steps`` their number.
    """
    # The prior counts as a few steps, so that a single step cannot outweigh it.
    known = _NOISE_STEPS[0] + np.maximum(before - 1.0, 0.0).sum()
    return float((known * noise.mean() + (steps * seen).sum()) / (known + steps.sum()))


def _noted(
    estimate: Estimate, batch: WorkerTimes, part: FloatArray, judged: Judgement, unclear: Mask
) -> Estimate:
    """Count the steps and update the noise with these times."""
    # Two consecutive times differ by noise alone, however far both are from their prediction,
    # unless the prediction was ``unclear``. An outlier counts too, but with a limited weight: many
    # outliers are noise after all.
    w, calm = batch.workers, ~judged.held & ~judged.jumped
    noise, latest, steps = estimate.noise.copy(), estimate.latest.copy(), estimate.steps.copy()
    # Half, because the difference of two times has the variance of both. The residual is
    # unsuitable: it grows while a speed falls slowly, and the noise would then hide that.
    between = 0.5 * np.log(part / latest[w]) ** 2 * batch.steps
    seen = np.where(np.isnan(batch.spread), between, batch.spread)
    memory = np.clip(steps[w], *_NOISE_STEPS)
    weight = batch.steps / (batch.steps + memory)
    seen = np.clip(seen, 0.0, np.where(calm, _NOISE_MOST, _NOISE_FAR * noise[w]))
    # A wrong shape makes times at two shares differ, too, so large differences count less. They
    # count in full while noise is a guess, and if it may be what seems to change the speed.
    moved = (batch.share != batch.before) & np.isnan(batch.spread) & (steps[w] > _NOISE_STEPS[0])
    moved &= estimate.changes.turns[w] < _OFTEN
    seen = np.where(moved, np.minimum(seen, noise[w]) / _MEAN_LIMITED, seen)
    blended = (1 - weight) * noise[w] + weight * seen
    usable = ~np.isnan(seen) & ~unclear
    fresh = np.flatnonzero(usable & (steps[w] < _NOISE_ALONE))
    if len(fresh) > 1:
        # At least: after a first spike, a worker would otherwise seem as noisy as the others calm.
        common = _common_noise(noise[w][fresh], steps[w][fresh], seen[fresh], batch.steps[fresh])
        blended[fresh] = np.maximum(blended[fresh], common)
    noise[w] = np.where(usable, np.maximum(blended, _NOISE_LEAST), noise[w])
    # Times before and after a change differ by more than noise, so they are never compared.
    latest[w] = np.where(judged.jumped, np.nan, np.where(judged.held, latest[w], part))
    steps[w] += np.where(judged.held, 0, batch.steps)
    return replace(estimate, noise=noise, latest=latest, steps=steps)


def with_recent(recent: RecentSteps, measured: Measurements) -> RecentSteps:
    """Return the steps with new ones; ``measured`` has usable observations only.

    Cost: ``O(n W)`` for copies.
    """
    workers = recent.share.shape[1]
    if workers > _MOST_WITH_RECENT or not len(measured):
        return recent
    step = measured.step_of_times()
    end = max(recent.end, int(step.max()) + 1)
    # After a gap, as after a restart, earlier steps say nothing about what follows.
    kept = recent if int(step.min()) <= recent.end + _RECENT else RecentSteps.none(workers)
    first = max(end - _RECENT, kept.end - len(kept.share) if len(kept.share) else int(step.min()))
    share, time_s = np.zeros((2, end - first, workers))
    old = kept.share[max(len(kept.share) - (kept.end - first), 0) :]
    share[: len(old)], time_s[: len(old)] = old, kept.time_s[len(kept.share) - len(old) :]
    here = step >= first
    at = step[here] - first, np.repeat(measured.worker, measured.steps)[here]
    share[at] = np.repeat(measured.share, measured.steps)[here]
    time_s[at] = measured.busy_s[here]
    return RecentSteps(end, share, time_s)
