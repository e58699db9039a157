"""First steps at shares that are new to a worker: which of them count, and what they cost.

A compiler, an autotuner or an empty cache makes such a step longer. Only a second step at the share
shows whether it is that, or a change of speed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from evenstride.core.arrays import FloatArray, IntArray, Mask
from evenstride.core.time_model.estimates import Estimate, Firsts
from evenstride.core.time_model.observation import Batch, Measurements

# A first step at a new share is slow if it takes this many times its prediction. After this many of
# them in a row the next one counts: a worker whose share changes all the time is not ignored.
_SLOW_FIRST, _MOST_SLOW_FIRSTS = 1.25, 3
# Noise and spikes make the second step at a share much shorter for so many workers at once.
_BY_CHANCE = 3
# Part of the first step of a run that counts as compilation, of the worker with the shortest one:
# in a new process it took 64 s, and 21 to 25 s at later shares.
_OF_FIRST = 0.5
# Bounds of the stored cost of new shares: after two cheap first steps, new shares count as free of
# cost until an expensive one.
_COST = (-2, 2)


@dataclass(frozen=True, slots=True, eq=False)
class FirstSteps:
    """What a turn's observations say about first steps at new shares, arrays ``(n,)``."""

    workers: IntArray  # their workers.
    new: Mask  # whether the share is new to the worker.
    open: Mask  # whether it is a single step, slow at a new share: the next one decides.
    dropped: Mask  # whether its slow first step was left out because later ones were normal.
    over_s: FloatArray  # by how much that one was longer, in seconds

    @classmethod
    def of(
        cls, estimate: Estimate, measured: Measurements, turn: IntArray
    ) -> tuple[FirstSteps, Measurements]:
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
        return cls(workers, new, slow & alone, dropped, over_s), shorter

    def excused(self, estimate: Estimate) -> Mask:
        """Return which slow steps may be caused by the share alone."""
        firsts, w = estimate.firsts, self.workers
        row = firsts.row[w]
        alone = (row > 0) | (estimate.changes.run[w] == 0)  # no other step was slow before
        return np.asarray(
            self.open & alone & (row < _MOST_SLOW_FIRSTS) & (firsts.cost[w] > _COST[0])
        )


def firsts_after(estimate: Estimate, batch: Batch, first: FirstSteps) -> Firsts:
    """Return what is known of first steps after a batch."""
    before, w = estimate.firsts, batch.workers
    fresh = estimate.steps[w] == 0
    moved, before_s = before.share[w] != batch.share, before.first_s[w]
    if not (moved.any() or before.row[w].any() or before_s.any()):
        return before
    # The second step at a share shows why the first one was slow.
    second = ~moved & (before.slow_s[w] > 0)
    # If all steps before were first ones, none of them seemed slow. The first step of a run is left
    # out, because it also starts other things.
    common = if_most(faster_again(estimate, batch) & (before.had[1, w] > 0), before)
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


def faster_again(estimate: Estimate, batch: Batch) -> Mask:
    """Return which second steps at a share show that the first one was long."""
    firsts, w, longer_s = estimate.firsts, batch.workers, _SLOW_FIRST * batch.time_s
    again = (firsts.share[w] == batch.share) & (longer_s < firsts.first_s[w])
    if np.count_nonzero(again) > _BY_CHANCE:
        return np.asarray(again)
    # A spike has not changed the prediction. Long first steps at all shares have.
    usual_s = estimate.now.of(w).time_s(estimate.seen.counted(w, batch.share))
    return np.asarray(again & (longer_s < usual_s))


def if_most(which: Mask, firsts: Firsts) -> Mask:
    """Return the mask if it has more than half of the workers, and else an empty one."""
    return which & (2 * np.count_nonzero(which) > len(firsts.share))


def _had_after(before: IntArray, workers: IntArray, shares: IntArray) -> IntArray:
    had = before.copy()
    had[1:, workers] = had[:-1, workers]
    had[0, workers] = shares
    return had


def _slow_firsts(estimate: Estimate, measured: Measurements, at: IntArray) -> Mask:
    """Return which observations of workers with a curve begin with a step that is too long."""
    w = measured.worker[at]
    usual_s = estimate.now.of(w).time_s(estimate.seen.counted(w, measured.share[at]))
    return np.asarray(measured.first_s(at) > _SLOW_FIRST * usual_s)


def with_unmodelled(
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
