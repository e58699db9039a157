"""The split for speeds that come back sooner than a decision takes effect.

If other jobs slow a worker down again and again, each decision arrives when the speed that it was
made for has passed. One split for all recent speeds is then better than the best split for the
latest ones. Which of the two is better is decided by the recent steps themselves.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from evenstride.core.allocation.integer_splits import equal_finish
from evenstride.core.arrays import FloatArray, IntArray, Mask
from evenstride.core.fleet import Fleet
from evenstride.core.time_model.estimates import Estimate, TimeModel

_FEWEST = 16  # steps to look at
# Times of a worker have two levels if their means differ by this many standard deviations of the
# shorter ones, and by this much as logarithms. (For the two halves of normal noise it is 2.6, of
# uniform noise 3.5.)
_APART_STD, _APART = 5.0, 0.12
# Both levels must have this fraction of the steps. Spikes are rarer.
_OFTEN = 0.08
# A speed that lasts longer than this many times the longest earlier one has come to stay.
_LASTING, _LASTING_STEPS = 1.5, 3
_FEWEST_TURNS = 3  # changes of a speed that show that it recurs
_BETTER = 0.02  # part of a step that the split for all speeds must save over following them
_ROUNDS, _STRIDE = 24, 0.5  # of the search for that split


@dataclass(frozen=True, slots=True, eq=False)
class RecurringSpeeds:
    """Recent times of all workers relative to their estimates, where they tell of other speeds."""

    parts: FloatArray  # ``(n, W)``, without noise; 1 for workers with one speed
    slow: Mask  # ``(n, W)``, where a worker with two speeds had the lower one
    model: TimeModel  # the curves in force

    @classmethod
    def of(
        cls, pooled: Estimate, latest: Estimate, shares: IntArray
    ) -> RecurringSpeeds | None:
        """Return them if some speeds recur; ``None`` otherwise.

        ``pooled`` has the curves to split by; ``latest`` those that follow each worker;
        ``shares`` are those in force.

        Cost: ``O(n W)`` for the ``n`` steps that `RecentSteps` keeps.
        """
        recent = latest.recent
        if len(recent.share) < _FEWEST:
            return None
        usual_s = latest.now.time_s(np.maximum(recent.share, 1.0))
        logs = np.log(np.where(recent.share > 0, recent.time_s, usual_s) / usual_s)
        slow, usual = _two_speeds(logs)
        some = slow.any(axis=0)
        if not some.any():
            return None
        turns = np.flatnonzero((slow[1:] != slow[:-1]).any(axis=1)) + 1
        if len(turns) < _FEWEST_TURNS:
            return None
        if len(logs) - turns[-1] > _LASTING * np.diff(turns).max() + _LASTING_STEPS:
            return None
        # Other workers are as fast as estimated, apart from noise.
        own = latest.now.time_s(shares) / pooled.now.time_s(shares)
        parts = np.where(some, own * np.exp(np.where(slow, logs, usual)), 1.0)
        return cls(parts, slow, pooled.model)

    def split(self, fleet: Fleet, near: IntArray, delay: int) -> tuple[IntArray, float] | None:
        """Return the split with the least mean step over these speeds, and its time in seconds.

        ``None`` if splits that follow the speeds, ``delay`` steps later, would have been nearly as
        good or better.
        """
        if len(self.parts) < _FEWEST + delay:
            return None
        followed_s = self._followed_s(fleet.global_batch, delay)
        parts = self._balanced()
        model = TimeModel.affine(self.model.fixed_s * parts, self.model.per_sample_s * parts)
        shares = equal_finish(
            *(model, fleet.lower, fleet.upper, fleet.global_batch),
            quantum=fleet.quanta,
            near=near,
        )
        mean_s = self.mean_s(shares)
        return (shares, mean_s) if mean_s < (1.0 - _BETTER) * followed_s else None

    def mean_s(self, shares: IntArray) -> float:
        """Return the mean over these steps of the time that the last worker would have taken."""
        times_s = self.model.at(np.maximum(shares, 1)) * self.parts
        return float(times_s.max(axis=1).mean())

    def _followed_s(self, batch: int, delay: int) -> float:
        """Return the mean step of splits that follow the speeds of so many steps before."""
        # A slow time counts when the next one is slow, too.
        known = np.minimum(self.parts[1:], self.parts[:-1])[: len(self.parts) - 1 - delay]
        passed = self.parts[1 + delay :] / known
        return float((self._level_s(known, batch) * passed.max(axis=1)).mean())

    def _level_s(self, parts: FloatArray, batch: int) -> FloatArray:
        """Return the time at which all finish together if times are multiplied by some parts."""
        slope, fixed = self.model.per_sample_s, self.model.fixed_s
        return np.asarray((batch + (fixed / slope).sum()) / (1.0 / (parts * slope)).sum(axis=-1))

    def _balanced(self) -> FloatArray:
        """Return by how much slower each worker should count, ``(W,)``."""
        # If all finish together when each is as slow as its own part, the mean step is the time of
        # that times the mean of the largest quotient. By its gradient, in logarithms: a worker
        # counts as slower if it is the last in more steps than its part of the work.
        best, best_cost = np.ones(self.parts.shape[1]), np.inf
        logs, stride = np.log(self.parts.max(axis=0)), _STRIDE
        for turn in range(_ROUNDS):
            part = np.exp(logs)
            passed = self.parts / part
            last, most = passed.argmax(axis=1), passed.max(axis=1)
            work = 1.0 / (part * self.model.per_sample_s)
            cost = most.sum() / work.sum()
            if cost < best_cost:
                best, best_cost = part, cost
            late = np.bincount(last, most, minlength=len(part)) / most.sum()
            logs = logs + stride / (1.0 + 0.5 * turn) * (late - work / work.sum())
        return best


def _two_speeds(logs: FloatArray) -> tuple[Mask, FloatArray]:
    """Return where workers with two levels of time are at the longer one, and the mean shorter one.

    ``logs`` are logarithms of times, ``(n, W)``; the results are ``(n, W)`` and ``(W,)``.

    Source:
        The threshold with the largest variance between both parts is that of Otsu, "A threshold
        selection method from gray-level histograms" (IEEE SMC 1979).
    """
    steps = len(logs)
    ordered = np.sort(logs, axis=0)
    low = int(np.ceil(_OFTEN * steps))
    count = np.arange(low, steps - low + 1)[:, np.newaxis]
    sums, squares = np.cumsum(ordered, axis=0), np.cumsum(ordered**2, axis=0)
    under = sums[low - 1 : steps - low]
    apart = (sums[-1] - under) / (steps - count) - under / count
    best = (count * (steps - count) * apart**2).argmax(axis=0)
    at, each = best + low, np.arange(logs.shape[1])
    usual, apart = under[best, each] / at, apart[best, each]
    variance = squares[at - 1, each] / at - usual**2
    two = apart > np.maximum(_APART_STD * np.sqrt(np.maximum(variance, 0.0)), _APART)
    return (logs > 0.5 * (ordered[at - 1, each] + ordered[at, each])) & two, usual
