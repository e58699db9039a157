"""Splits by plain averages of the latest speeds, for times that fit the filter's model badly.

The estimate of a worker assumes a noise and a kind of change. Under heavy noise, or with speeds
that never stand still, plain averages as in the published rules may give shorter steps. The
measured steps decide: each worker's time is scaled to the share that it would have had.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np

from evenstride.core.allocation.integer_splits import equal_finish
from evenstride.core.allocation.speedup import equal_split
from evenstride.core.arrays import FloatArray, IntArray
from evenstride.core.fleet import as_array, as_shares
from evenstride.core.policy import Decision, Keep, Move, Situation
from evenstride.core.time_model.estimates import TimeModel
from evenstride.core.time_model.observation import StepsAtSplit, whole_steps
from evenstride.errors import InfeasibleShares

# Weights of the latest step in the averages.
_WEIGHTS = np.array([[1.0], [0.3], [0.1], [0.03]])
# Earlier steps count less by this factor per step.
_PASSING = math.exp(-1 / 60)
# Steps to compare before another split is used. The part of a step that it must save, beyond one
# standard error, and that by which it must be better than one that is used already.
_FEWEST, _MUCH, _BETTER = 20, 0.005, 0.002
# Samples that a worker may get, as a multiple of the most that it has had lately.
_MORE = 1.25
# Rounds in which samples that bounds keep from a worker go to others, and those that may be left.
_ROUNDS, _NEARLY, _TINY = 3, 0.5, 1e-300
_PLANS = 40  # decisions to remember until their steps have been measured
_OWN, _EQUAL, _AVERAGES = 0, 1, 2  # the splits, in this order


@dataclass(frozen=True, slots=True, eq=False)
class SpeedAverages:
    """Averages of measured times, and how splits by them would have done."""

    # ``(4, W)``, measured times relative to the curves of ``model``; ones before the first step.
    times: FloatArray = field(default_factory=lambda: np.ones((len(_WEIGHTS), 1)))
    model: TimeModel | None = None  # ``None``: relative to any curves that come next
    # Steps from which on decisions hold, with the splits ``(6, W)`` that could be used then: that
    # of the curves, the equal one, and those by the averages.
    plans: tuple[tuple[int, IntArray], ...] = ()
    # Of the six splits: number, sum and squares of the logarithms of their steps, relative to the
    # first one's, ``(3, 6)``.
    compared: FloatArray = field(default_factory=lambda: np.zeros((3, _AVERAGES + len(_WEIGHTS))))
    used: int = _OWN

    def aside(self) -> SpeedAverages:
        """Return the state after steps that say nothing about averages."""
        return replace(self, model=None, plans=(), used=_OWN)

    def decide(self, situation: Situation, own: Decision) -> tuple[SpeedAverages, Decision]:
        """Return the next state and the decision; ``own`` is the one by the curves.

        Cost: ``O(n W)`` for ``n`` new steps, and one more split while another one is used.
        """
        fleet, now = situation.fleet, as_array(situation.shares)
        state, curves = self._after(situation), situation.estimate.now
        # What a much larger share than ever would take is not known. Without more, a worker that
        # has been slow would stay at its small share.
        most = np.minimum(fleet.upper, _MORE * situation.estimate.recent.share.max(axis=0))
        most = most.astype(np.int64)
        fixed, slope = curves.fixed_s * state.times, curves.per_sample_s * state.times
        averages = _finishing_together(fixed, slope, fleet.global_batch, (fleet.lower, most))
        whole = np.abs(averages.sum(axis=1) - fleet.global_batch) < _NEARLY
        by_curves = as_array(own.shares) if isinstance(own, Move) else now
        averages = np.where(whole[:, np.newaxis], np.rint(averages), by_curves)
        splits = np.vstack([by_curves, equal_split(fleet), averages]).astype(np.int64)
        plan = situation.step + situation.lag, np.maximum(splits, 1)
        state = replace(state, plans=(*state.plans[-_PLANS:], plan), used=state._best())
        at = state.used - _AVERAGES
        if state.used == _OWN or (at >= 0 and not whole[at]):
            return state, own
        shares = splits[_EQUAL]
        if state.used != _EQUAL:
            model, bounds = TimeModel.affine(fixed[at], slope[at]), (fleet.lower, most)
            try:
                shares = equal_finish(
                    model, *bounds, fleet.global_batch, quantum=fleet.quanta, near=now
                )
            except InfeasibleShares:  # by whole quanta
                return state, own
        if (shares == now).all():
            return state, Keep(state._reason(), settled=False)
        return state, Move(as_shares(shares), state._reason(), settled=False)

    def _after(self, situation: Situation) -> SpeedAverages:
        """Return the state with the new steps."""
        seen, model, fleet = situation.observations, situation.estimate.model, situation.fleet
        state, seen = self, seen.only(seen.modelled & seen.sound)
        for part in whole_steps(seen, len(fleet), fleet.global_batch):
            if (part.shares > 0).all():
                state = state._with_steps(part, model)
        return replace(state, model=model)

    def _with_steps(self, part: StepsAtSplit, model: TimeModel) -> SpeedAverages:
        curves_s, times, compared = model.at(part.shares), self.times, self.compared
        # New steps move the curves. The average is one of times, so it does not move with them.
        if self.model is not None:
            times = times * (self.model.at(part.shares) / curves_s)
        relative = part.busy_s / curves_s
        # An exchange may bring hundreds of steps, so only the running sums are a loop over them.
        for each in relative:
            times = times + _WEIGHTS * (each - times)
        for splits, since, until in self._plans_of(part):
            for powers in _powers(splits, part.shares, model, relative[since:until]):
                compared = _PASSING * compared + powers
        return replace(self, times=times, compared=compared, model=model)

    def _plans_of(self, part: StepsAtSplit) -> Iterator[tuple[IntArray, int, int]]:
        """Yield the plans for some steps, each with its first step among them and the one after."""
        end = len(part.busy_s)
        begins = [min(max(first - part.first, 0), end) for first, _ in self.plans]
        for (_, splits), (since, until) in zip(self.plans, pairwise([*begins, end]), strict=True):
            if since < until:
                yield splits, since, until

    def _best(self) -> int:
        """Return the split to use."""
        count, total, squares = self.compared
        if count[_OWN] <= _FEWEST:
            return self.used
        mean = total / count
        surely = mean + np.sqrt(np.maximum(squares / count - mean**2, 0.0) / count)
        best, used = int(surely.argmin()), self.used
        if surely[best] < -_MUCH and (used == _OWN or mean[best] < mean[used] - _BETTER):
            return best
        return used if mean[used] < 0 else _OWN

    def _reason(self) -> str:
        shorter = 1.0 - math.exp(self.compared[1, self.used] / self.compared[0, self.used])
        what = "the equal split" if self.used == _EQUAL else "a split by average speeds"
        return f"{what} would have made recent steps {shorter:.1%} shorter"


def _powers(
    splits: IntArray, shares: IntArray, model: TimeModel, relative: FloatArray
) -> FloatArray:
    """Return what `SpeedAverages.compared` sums of each step, ``(n, 3, 6)``."""
    # The curves may be too flat. In proportion to the share is the most.
    more = splits / shares
    scaled_s = np.where(more > 1.0, more * model.at(shares), model.at(splits))
    steps_s = (scaled_s * relative[:, np.newaxis]).max(axis=2)
    longer = np.log(steps_s / steps_s[:, [_OWN]])
    return np.stack([np.ones(longer.shape), longer, longer**2], axis=1)


def _finishing_together(
    fixed_s: FloatArray, slope_s: FloatArray, batch: int, bounds: tuple[IntArray, IntArray]
) -> FloatArray:
    """Return the shares that finish together, ``(n, W)``, not rounded.

    If bounds limit most of the workers, they sum to another batch.
    """
    together_s = batch + (fixed_s / slope_s).sum(axis=1, keepdims=True)
    together_s /= (1.0 / slope_s).sum(axis=1, keepdims=True)
    shares = ((together_s - fixed_s) / slope_s).clip(*bounds)
    for _ in range(_ROUNDS):
        free = ((shares > bounds[0]) & (shares < bounds[1])) / slope_s
        part = free / np.maximum(free.sum(axis=1, keepdims=True), _TINY)
        shares = (shares + part * (batch - shares.sum(axis=1, keepdims=True))).clip(*bounds)
    return np.asarray(shares)
