"""What a step is expected to take under a split, and the split with the shortest one.

Times are known only roughly, so a step is as long as the expected maximum of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from evenstride.core.allocation.integer_splits import equal_finish
from evenstride.core.arrays import FloatArray, IntArray
from evenstride.core.fleet import Fleet
from evenstride.core.time_model.estimates import Estimate, TimeModel
from evenstride.errors import InfeasibleShares

_POINTS = 33  # at which the distribution of the maximum is evaluated
_WIDE = 5.0  # standard deviations beyond which a normal value is not looked for
_MOST = 512  # workers that are looked at one by one; of more, a part stands for all

# Known so well that no margin is needed.
_NO_DOUBT = 0.002
# If the best split is slower by this than the one in force, or as doubtful in a small fleet, wide
# margins are the only way to another split.
_STUCK = 0.01
# So doubtful that a step is expected to take much longer than the split's mean times say; and the
# margins that are tried then, in standard deviations.
_VERY_DOUBTFUL = 0.05
_WARY = (1.0, 2.0)
# The part of the step that a trial must promise: where less is left, a split has been found.
_TRIAL = 0.05
# A margin makes no curve flatter than this part of what it is.
_FLATTEST = 0.2
# Of so many workers it is not worth while to give a doubtful one less.
# Measured: among eight workers the margin gained nothing, among ten thousand three per cent.
_FEW = 8


def expected_max(mean: FloatArray, std: FloatArray) -> float:
    """Return the expected maximum of independent normal values, given by mean and std, ``(W,)``.

    The maximum of several uncertain times is later than the latest of their means: with eight
    equal ones by 1.4 standard deviations. Comparing splits by it, rather than by the means,
    keeps a split that noise alone makes look uneven.

    Cost:
        ``O(W log W)``; of more than 512 values that may be the largest, every so many-th
        stands for its neighbours in order of size.

    Source:
        ``E max = high - integral of prod Phi``, by the trapezoid rule; ``Phi`` by the logistic
        fit of Bowling et al., "A logistic approximation to the cumulative normal distribution",
        JIEM 2009 (error under 0.00014).

    >>> import numpy as np
    >>> round(expected_max(np.zeros(8), np.ones(8)), 2)
    1.42
    """
    # Certain values would divide by 0. This little is far below what a time can be measured to.
    std = np.maximum(std, 1e-15 + 1e-10 * np.abs(mean))
    low, high = float((mean - _WIDE * std).max()), float((mean + _WIDE * std).max())
    # Some value is at least ``low``, so one that stays below it is never the maximum.
    near = np.flatnonzero(mean + _WIDE * std > low)
    weight = 1.0
    if len(near) > _MOST:
        # In order of size, so that those that are left stand for neighbours like themselves.
        near = near[np.argsort(mean[near] + std[near])[::-1]]
        weight = len(near) / _MOST
        near = near[np.linspace(0, len(near) - 1, _MOST).astype(np.int64)]
    points = np.linspace(low, high, _POINTS)
    z = (points[:, np.newaxis] - mean[near]) / std[near]  # at least -5, so that no exp overflows
    fit = (0.07056 * z * z + 1.5976) * z
    # A sum of logarithms: the product of thousands of small probabilities would become 0 too soon.
    below = -np.log1p(np.exp(-fit)).sum(axis=1) * weight
    distribution = np.exp(below)
    inner = distribution.sum() - 0.5 * (distribution[0] + distribution[-1])
    return high - float(inner) * (high - low) / (_POINTS - 1)


@dataclass(frozen=True, slots=True, eq=False)
class StepForecast:
    """What steps are expected to take under one split or another."""

    estimate: Estimate  # of all workers, each known
    fleet: Fleet  # whose bounds hold
    # By how many standard deviations of its own noise each is to finish early; above 0, the noise
    # of the steps counts as well as the doubt.
    noise_margin: float = 0.0
    # Fewest and most samples of each worker, ``(W,)`` both; the fleet's if ``None``.
    bounds: tuple[IntArray, IntArray] | None = None

    @property
    def lower(self) -> IntArray:
        return self.fleet.lower if self.bounds is None else self.bounds[0]

    @property
    def upper(self) -> IntArray:
        return self.fleet.upper if self.bounds is None else self.bounds[1]

    def step_s(self, shares: IntArray) -> float:
        """Return the expected time of a step in seconds, the doubt about every worker included."""
        shares = np.maximum(shares, 1)
        mean_s, std = self.estimate.model.at(shares), self.estimate.relative_std(shares)
        if self.noise_margin:
            std = np.sqrt(std**2 + self.estimate.noise)
        return expected_max(mean_s, std * mean_s)

    def best_split(self, now: IntArray, now_s: float) -> tuple[IntArray, float]:
        """Return the split with the shortest expected step of those looked at, and that step.

        That of equal mean finish times gives a worker of whom little is known as much as the
        others, and all wait for it if it is slower than believed. Among many workers somebody
        is, so there it is given less. If that is no better than the split in force, which may
        be due to a worker of whom nothing more is ever learned at its present share, everybody
        is given a margin. And so is who is noisy, if that is asked for.
        """
        late, model = _late_std(len(now)), self.estimate.model
        found = self._finishing(model, now)
        # Without doubt, every margin leads to the same split.
        doubtful = found[1] > (1.0 + _NO_DOUBT) * model.makespan_s(np.maximum(found[0], 1))
        for std in (late - _late_std(_FEW), late):
            # The whole margin is only for splits that are stuck.
            if doubtful and std > 0 and (std < late or found[1] > (1.0 + _STUCK) * now_s):
                found = self._better(found, _latest(self.estimate, now, found[0], std))
        for std in _WARY:
            doubt = found[1] / model.makespan_s(np.maximum(found[0], 1)) - 1.0
            # In large fleets wide margins hide a starved worker from its rescue.
            many = len(now) > _FEW  # of few, only where there is no better way out
            if (many or found[1] >= now_s) and doubt > (_VERY_DOUBTFUL if many else _STUCK):
                found = self._better(found, _latest(self.estimate, now, found[0], std))
        if self.noise_margin:
            late_s = 1.0 + self.noise_margin * np.sqrt(self.estimate.noise)
            early = TimeModel.affine(model.fixed_s * late_s, model.per_sample_s * late_s)
            found = self._better(found, early)
        return found

    def _better(self, found: tuple[IntArray, float], model: TimeModel) -> tuple[IntArray, float]:
        return min(found, self._finishing(model, found[0]), key=lambda split: split[1])

    def trial(self, now: IntArray) -> IntArray | None:
        """Return a split that is tried although it is doubtful; ``None`` if none is worth it.

        Doubt about curves away from where they were measured can forbid every move for ever. The
        time per sample does not grow with the share, so a worker that finishes early can take
        more in proportion to its slack without becoming the last. A trial does no more than that,
        where the late workers may well be faster with less: by curves that are steeper by a
        standard deviation.
        """
        if not ((self.estimate.firsts.share == now) | (now == 0)).all():
            return None  # what is in force has not been measured yet
        at, curves = np.maximum(now, 1), self.estimate.now
        now_s, std = self.estimate.model.at(at), curves.relative_std(at)
        # No steeper than through the origin, since no fixed time is below 0.
        slope = np.minimum(curves.per_sample_s + np.sqrt(curves.rows[4]), now_s / at)
        model = TimeModel.affine(now_s - slope * at, slope)
        upper = np.minimum(self.upper, (at * (now_s.max() / now_s)).astype(np.int64))
        # A worker keeps at least what it has: rounded down, the slack may be less than that.
        bounds = self.lower, np.maximum(upper, np.minimum(now, self.upper))
        batch, quantum = self.fleet.global_batch, self.fleet.quanta
        try:
            split = equal_finish(model, *bounds, batch, quantum=quantum, near=now)
        except InfeasibleShares:
            return None
        then_s = model.at(np.maximum(split, 1))
        # Both with the doubt at the present shares: that elsewhere would forbid every trial.
        before_s, after_s = expected_max(now_s, std * now_s), expected_max(then_s, std * then_s)
        return split if after_s < (1.0 - _TRIAL) * before_s else None

    def finishing_together(self) -> tuple[IntArray, float]:
        return self._finishing(self.estimate.model, None)

    def _finishing(self, model: TimeModel, near: IntArray | None) -> tuple[IntArray, float]:
        """Return the split in which all finish together under a model, and its expected step."""
        bounds = self.lower, self.upper, self.fleet.global_batch
        split = equal_finish(model, *bounds, quantum=self.fleet.quanta, near=near)
        return split, self.step_s(split)


def _late_std(workers: int) -> float:
    """Return the expected maximum of some standard normal values (Gumbel's limit); 0 of one."""
    if workers < 2:
        return 0.0
    far = math.sqrt(2.0 * math.log(workers))
    return far - (math.log(math.log(workers)) + math.log(4.0 * math.pi)) / (2.0 * far)


def _latest(estimate: Estimate, now: IntArray, best: IntArray, std: float) -> TimeModel:
    """Return curves through times that are late by some standard deviations at two splits."""
    model, apart = estimate.model, best - now
    now_s = model.at(now) * (1.0 + std * estimate.relative_std(now))
    best_s = model.at(best) * (1.0 + std * estimate.relative_std(best))
    slope = np.divide(best_s - now_s, apart, out=model.per_sample_s.copy(), where=apart != 0)
    # Nearly flat, a curve would draw the batch to its worker; beyond the origin it is impossible.
    slope = np.clip(slope, _FLATTEST * model.per_sample_s, best_s / np.maximum(best, 1))
    return TimeModel.affine(np.maximum(best_s - slope * best, 0.0), slope)
