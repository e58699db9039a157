"""The expected time of a step under a split, and the split with the shortest one.

Times are known only roughly, so the expected step time is the expected maximum of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from evenstride.core.allocation.integer_splits import equal_finish, reach
from evenstride.core.arrays import FloatArray, IntArray
from evenstride.core.fleet import Fleet
from evenstride.core.time_model.estimates import Estimate, TimeModel
from evenstride.errors import InfeasibleShares

_POINTS = 33  # points at which the distribution of the maximum is evaluated
_WIDE = 5.0  # standard deviations beyond which a normal value is ignored
_MOST = 512  # workers that are evaluated one by one; of more, a sample stands for all

# Uncertainty below which no margin is needed.
_NO_DOUBT = 0.002
# Wide margins are the only way to another split if the best split is slower by this than the
# current one, or, in a small fleet, as uncertain.
_STUCK = 0.01
# Uncertainty at which a step probably takes much longer than the split's mean times; and the
# margins to try then, in standard deviations.
_VERY_DOUBTFUL = 0.05
_WARY = (1.0, 2.0)
# Saving that a trial must promise, as a fraction of the step; below it, the split is found.
_TRIAL = 0.05
_ROUNDING = 1e-9  # more than that of a time, as a part of it
# Steps that the failure of a trial takes.
_FAILED_STEPS = 3
# Part of its share by which the share of a worker that finishes early grows at most, to measure it.
_MORE = 0.25
# A margin makes no curve flatter than this fraction of its slope.
_FLATTEST = 0.2
# Up to this number of workers, giving an uncertain one less is not worthwhile.
# Measured: with eight workers the margin gained nothing, with ten thousand it gained 3 %.
_FEW = 8


def expected_max(mean: FloatArray, std: FloatArray) -> float:
    """Return the expected maximum of independent normal values, given by mean and std, ``(W,)``.

    The maximum of several uncertain times is above the largest of their means: by 1.4 standard
    deviations with eight equal ones. A comparison by this maximum keeps a split that looks uneven
    only because of noise.

    Cost:
        ``O(W log W)``; of more than 512 values that may be the largest, every n-th in order of
        size stands for its neighbours.

    Source:
        ``E max = high - integral of prod Phi``, by the trapezoid rule; ``Phi`` by the logistic
        fit of Bowling et al., "A logistic approximation to the cumulative normal distribution",
        JIEM 2009 (error under 0.00014).

    >>> import numpy as np
    >>> round(expected_max(np.zeros(8), np.ones(8)), 2)
    1.42
    """
    # Certain values would divide by 0. This amount is far below the resolution of a measured time.
    std = np.maximum(std, 1e-15 + 1e-10 * np.abs(mean))
    low, high = float((mean - _WIDE * std).max()), float((mean + _WIDE * std).max())
    # Some value is at least ``low``, so a value that stays below it is never the maximum.
    near = np.flatnonzero(mean + _WIDE * std > low)
    weight = 1.0
    if len(near) > _MOST:
        # In order of size, so that each selected value stands for similar neighbours.
        near = near[np.argsort(mean[near] + std[near])[::-1]]
        weight = len(near) / _MOST
        near = near[np.linspace(0, len(near) - 1, _MOST).astype(np.int64)]
    points = np.linspace(low, high, _POINTS)
    z = (points[:, np.newaxis] - mean[near]) / std[near]  # at least -5, so exp does not overflow
    fit = (0.07056 * z * z + 1.5976) * z
    # A sum of logarithms, because the product of thousands of small probabilities underflows.
    # (`log1p` is ten times as slow; what it would add to the sum is below its rounding.)
    below = -np.log(1.0 + np.exp(-fit)).sum(axis=1) * weight
    distribution = np.exp(below)
    inner = distribution.sum() - 0.5 * (distribution[0] + distribution[-1])
    return high - float(inner) * (high - low) / (_POINTS - 1)


@dataclass(frozen=True, slots=True, eq=False)
class StepForecast:
    """Expected step times under different splits."""

    estimate: Estimate  # of all workers, each known
    fleet: Fleet  # with the bounds in force
    # Standard deviations of its own noise by which each worker should finish early; above 0, the
    # noise of the steps counts in addition to the uncertainty.
    noise_margin: float = 0.0
    # Fewest and most samples of each worker, ``(W,)`` both; the fleet's if ``None``.
    bounds: tuple[IntArray, IntArray] | None = None

    @property
    def lower(self) -> IntArray:
        return self.fleet.lower if self.bounds is None else self.bounds[0]

    @property
    def upper(self) -> IntArray:
        return self.fleet.upper if self.bounds is None else self.bounds[1]

    def daring(self, now: IntArray) -> StepForecast:
        """Return the forecast without part of a cliff, if meeting it again may pay.

        A cliff lies between the largest share below it and the smallest slow one. A trial halfway
        pays once the time lost without it would have paid for its failure.
        """
        if not self.estimate.seen.limit[1].any():
            return self
        seen = self.estimate.seen.trying(now)
        careful = replace(self, estimate=replace(self.estimate, seen=seen))
        if seen is self.estimate.seen:
            # The step halfway to what may be a bend shows at once whether it is one.
            halfway = seen.halfway_to_bends()
            if halfway is not seen:
                return replace(self, estimate=replace(self.estimate, seen=halfway))
        bolder, open_to, waited = seen.bolder()
        if seen is not self.estimate.seen or not open_to.any() or waited < 1:
            return careful
        bold = replace(self, estimate=replace(self.estimate, seen=bolder))
        now_s = careful.step_s(now)
        careful_s, bold_s = careful.best_split(now, now_s)[1], bold.best_split(now, now_s)[1]
        limits = seen.limits_s
        assert limits is not None, "some worker's cliff is sure"
        at_risk_s = float(limits[2][open_to].max()) - careful_s
        pays = waited * (careful_s - bold_s) > _FAILED_STEPS * at_risk_s
        return bold if pays else careful

    def step_s(self, shares: IntArray) -> float:
        """Return the expected time of a step in seconds, with the uncertainty of every worker."""
        shares = np.maximum(shares, 1)
        mean_s, std = self.estimate.model.at(shares), self.estimate.relative_std(shares)
        if self.noise_margin:
            std = np.sqrt(std**2 + self.estimate.noise)
        return expected_max(mean_s, std * mean_s)

    def may_reach(self, step_s: float) -> bool:
        """Return whether a split with an expected step this short may exist. One pass.

        An expected maximum is at least the largest mean, so the batch must fit into what the
        workers finish by then.
        """
        most = self.estimate.model.capacity(step_s).clip(self.lower, self.upper)
        return reach(most, self.fleet.quanta) >= self.fleet.global_batch

    def best_split(self, now: IntArray, now_s: float) -> tuple[IntArray, float]:
        """Return the split with the shortest expected step among those tried, and its time.

        With equal mean finish times, an uncertain worker gets as much as the others, and all wait
        if it is slower than estimated. Among many workers one always is, so uncertain workers get
        less there. If that is no better than the split in force, all workers get a margin: the
        cause may be a worker whose estimate cannot improve at its present share. With a noise
        margin, noisy workers get less, too.
        """
        late, model = _late_std(len(now)), self.estimate.model
        found = self._finishing(model, now)
        # Without uncertainty, every margin leads to the same split.
        doubtful = found[1] > (1.0 + _NO_DOUBT) * model.makespan_s(np.maximum(found[0], 1))
        for std in (late - _late_std(_FEW), late):
            # The full margin is only for splits that are stuck.
            if doubtful and std > 0 and (std < late or found[1] > (1.0 + _STUCK) * now_s):
                found = self._better(found, late_curves(self.estimate, now, found[0], std))
        for std in _WARY:
            doubt = found[1] / model.makespan_s(np.maximum(found[0], 1)) - 1.0
            # In large fleets wide margins keep a starved worker from getting samples again.
            many = len(now) > _FEW  # small fleets use margins only if no better split exists
            if (many or found[1] >= now_s) and doubt > (_VERY_DOUBTFUL if many else _STUCK):
                found = self._better(found, late_curves(self.estimate, now, found[0], std))
        if self.noise_margin:
            late_s = 1.0 + self.noise_margin * np.sqrt(self.estimate.noise)
            line_s = model.fixed_s * late_s, model.per_sample_s * late_s
            early = replace(model, fixed_s=line_s[0], per_sample_s=line_s[1])
            found = self._better(found, early)
        return found

    def _better(self, found: tuple[IntArray, float], model: TimeModel) -> tuple[IntArray, float]:
        return min(found, self._finishing(model, found[0]), key=lambda split: split[1])

    def trial(self, now: IntArray) -> IntArray | None:
        """Return a split to try although it is uncertain; ``None`` if no trial is worth it.

        Uncertainty away from the measured shares can prevent every move permanently. The time per
        sample does not grow with the share, so a worker that finishes early can take more in
        proportion to its slack without becoming the last. A trial does only this, if the late
        workers may well be faster with less: by curves that are steeper by one standard
        deviation.
        """
        if not ((self.estimate.firsts.share == now) | (now == 0)).all():
            return None  # the current split has not been measured yet
        at, curves = np.maximum(now, 1), self.estimate.now
        now_s, std = self.estimate.model.at(at), self.estimate.relative_std(at)
        # At most as steep as through the origin, because no fixed time is below 0.
        whole = self.estimate.counted(at)
        slope = np.minimum(curves.per_sample_s + np.sqrt(curves.rows[4]), now_s / whole)
        model = replace(
            self.estimate.model, fixed_s=now_s - slope * whole, per_sample_s=slope, limits=None
        )
        upper = np.minimum(self.upper, (at * (now_s.max() / now_s)).astype(np.int64))
        # A worker keeps at least its share: rounded down, the slack may be less.
        bounds = self.lower, np.maximum(upper, np.minimum(now, self.upper))
        batch, quantum = self.fleet.global_batch, self.fleet.quanta
        try:
            split = equal_finish(model, *bounds, batch, quantum=quantum, near=now)
        except InfeasibleShares:
            return None
        then_s = model.at(np.maximum(split, 1))
        # Both with the uncertainty at the present shares: that elsewhere would prevent every trial.
        before_s, after_s = expected_max(now_s, std * now_s), expected_max(then_s, std * then_s)
        return split if after_s < (1.0 - _TRIAL) * before_s else None

    def probe(self, now: IntArray, early: float, risk: float) -> IntArray | None:
        """Return a split in which the earliest worker has a share that it never had, or ``None``.

        A wrong curve may be certain, because nothing contradicts it at shares that stay. One more
        step shows the truth, and in proportion to the share it takes only so much longer.

        Args:
            now: the split in force, ``(W,)``.
            early: part of a step by which the worker must finish early.
            risk: part by which the step may become longer in proportion to the share.
        """
        model, firsts, every = self.estimate.model, self.estimate.firsts, np.arange(len(now))
        now_s, quanta = model.at(np.maximum(now, 1)), self.fleet.quanta
        if not len(now) or not ((firsts.share == now) | (now == 0)).all():
            return None
        last_s = float(now_s.max())
        quanta = quanta if model.quantum is None else np.maximum(quanta, model.quantum)
        more = now + np.maximum((now * np.minimum(last_s / now_s - 1.0, _MORE)).astype(int), 1)
        more += -more % quanta
        more_s = now_s * more / np.maximum(now, 1)
        # A longer predicted time is a known cliff. Above it, both are equal but for rounding.
        no_jump = model.at(more) <= (1.0 + _ROUNDING) * more_s
        may = (more_s <= (1.0 + risk) * last_s) & no_jump & (more <= self.upper)
        may &= (now_s < (1.0 - early) * last_s) & (now > 0) & firsts.new(every, more)
        if not may.any():
            return None
        one = int(np.argmin(np.where(may, now_s, np.inf)))
        lower, upper = self.lower.copy(), np.minimum(self.upper, np.maximum(now, self.lower))
        lower[one] = upper[one] = more[one]
        try:
            bounds = lower, upper, self.fleet.global_batch
            split = equal_finish(model, *bounds, quantum=self.fleet.quanta, near=now)
        except InfeasibleShares:
            return None
        # It pays only if the last worker can have less.
        return split if split[now_s.argmax()] < now[now_s.argmax()] else None

    def finishing_together(self) -> tuple[IntArray, float]:
        return self._finishing(self.estimate.model, None)

    def _finishing(self, model: TimeModel, near: IntArray | None) -> tuple[IntArray, float]:
        """Return the split in which all finish together under a model, and its expected time."""
        bounds = self.lower, self.upper, self.fleet.global_batch
        split = equal_finish(model, *bounds, quantum=self.fleet.quanta, near=near)
        return split, self.step_s(split)


def _late_std(workers: int) -> float:
    """Return the expected maximum of standard normal values (Gumbel's limit); 0 for one value."""
    if workers < 2:
        return 0.0
    far = math.sqrt(2.0 * math.log(workers))
    return far - (math.log(math.log(workers)) + math.log(4.0 * math.pi)) / (2.0 * far)


def late_curves(estimate: Estimate, now: IntArray, best: IntArray, std: float) -> TimeModel:
    """Return curves through times that are late by some standard deviations at two splits."""
    model = estimate.model
    # A worker with a share of 0 runs one sample.
    now, best = (estimate.counted(np.maximum(shares, 1)) for shares in (now, best))
    apart = best - now
    now_s = model.at(now) * (1.0 + std * estimate.relative_std(now))
    best_s = model.at(best) * (1.0 + std * estimate.relative_std(best))
    slope = np.divide(best_s - now_s, apart, out=model.per_sample_s.copy(), where=apart != 0)
    # A nearly flat curve would attract the batch; one steeper than the origin is impossible.
    slope = np.clip(slope, _FLATTEST * model.per_sample_s, best_s / best)
    return replace(model, fixed_s=np.maximum(best_s - slope * best, 0.0), per_sample_s=slope)
