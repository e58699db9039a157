"""The split for speeds that come back sooner than a decision takes effect.

If other jobs slow a worker down again and again, each decision arrives when the speed that it was
made for has passed. One split for all recent speeds is then better than the best split for the
latest ones. Which of the two is better is decided by the recent steps themselves.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from evenstride.core.allocation.integer_splits import equal_finish
from evenstride.core.allocation.speedup import equal_split
from evenstride.core.arrays import FloatArray, IntArray, Mask
from evenstride.core.fleet import Fleet, as_array
from evenstride.core.time_model.estimates import CurveEstimates, Estimate, TimeModel

_FEWEST = 16  # steps to look at
# Times of a worker have two levels if their means differ by this many standard deviations of the
# shorter ones, and by this much as logarithms. (For the two halves of normal noise it is 2.6, of
# uniform noise 3.5.)
_APART_STD, _APART = 5.0, 0.12
# Both levels of some worker must have this fraction of the steps. Spikes are rarer. Then this
# smaller fraction suffices for others, up to this number of workers: a split that leaves out their
# slow steps would be judged too well.
_OFTEN, _RARELY, _OTHERS = 0.19, 0.05, 64
# A speed that lasts longer than this many times the longest earlier one has come to stay.
_LASTING, _LASTING_STEPS = 1.5, 3
# Workers to look at: those with the most changes and spikes, at least so many, or with a noise of
# this variance.
_MOST, _TURNS, _NOISY = 16, 0.5, 0.01
# Fixed times to try, as parts of the time of the samples. The usual one of the fleet is taken if
# its scatter, times this, is the least.
_OFFSETS, _PREFERRED = (0.0, 0.1, 0.25, 0.5, 1.0, 2.0), 0.7
# A speed recurs if it has changed this many times.
_FEWEST_TURNS = 3
# The shares of two splits for all speeds may differ by this fraction. The search for such a split
# takes this many rounds, and its strides begin with this fraction of the shares.
_SLACK, _ROUNDS, _STRIDE = 0.05, 24, 0.5
# Part of the slow steps that must repeat for a period, and the fewest steps of it. And the part of
# a step that a period must save over one split for all speeds, and over following them.
_SAME, _CONFIRMED, _MUCH_BETTER = 0.9, 24, 0.03
# The part that one split for all speeds must save over following them, and while it is in force.
# It was made for the very steps that it is judged by.
_BEST_AFTERWARDS, _STILL_BEST = 0.10, 0.05
# Equal shares, and those for the higher speeds, were not made for these steps. They must save this
# part, and may lose it while a split is in force that differs by the second part at most.
_EQUALLY_GOOD, _NEAR = 0.01, 0.01
# Give every set of workers a number of its own.
_WEIGHTS = np.sqrt(np.arange(1, 129) * 2.0 + 1.0)


@dataclass(frozen=True, slots=True, eq=False)
class RecurringSplit:
    """A split for recurring speeds."""

    shares: IntArray
    how: str  # how the speeds recur
    gain: float  # part of the step that it saves


@dataclass(frozen=True, slots=True, eq=False)
class RecurringSpeeds:
    """Recent times of all workers relative to their estimates, where they show other speeds."""

    parts: FloatArray  # ``(n, W)``, without noise; 1 for workers with one speed
    slow: Mask  # ``(n, m)``, where each of the ``m`` workers with two speeds had the lower one
    model: TimeModel  # the curves, at the higher of two speeds.
    # By how much longer than these the latest steps took, and by how much noise alone explains.
    longer: float
    by_noise: float

    @classmethod
    def of(cls, pooled: Estimate, latest: Estimate) -> RecurringSpeeds | None:
        """Return them if some speeds recur; ``None`` otherwise.

        ``pooled`` has the curves to split by; ``latest`` those that follow each worker.

        Cost: ``O(n W)`` for the ``n`` steps that `RecentSteps` keeps.
        """
        recent, changes = latest.recent, latest.changes
        if len(recent.share) < _FEWEST:
            return None
        often = changes.turns + changes.spikes / (1.0 + _OFTEN * changes.steps)
        # Two speeds from the first step on are estimated as noise.
        often = often + _TURNS * latest.noise / _NOISY
        most = np.argsort(-often, kind="stable")[:_OTHERS]
        some = most[:_MOST][often[most[:_MOST]] > _TURNS]
        if not len(some):
            return None
        fixed_part = _fixed_part(recent.share, latest.now)
        for workers, least in ((some, _OFTEN), (most, _RARELY)):
            times = recent.share[:, workers].T, recent.time_s[:, workers].T
            found = _TwoSpeeds.of(*times, latest.now.of(workers), fixed_part, least)
            by_speed = [
                _returns(slow) and not _by_share(slow, share)
                for slow, share in zip(found.slow, times[0], strict=True)
            ]
            again = np.flatnonzero(by_speed)
            if not len(again):
                return None
        some, found = most[again], found.at(again)
        # Other workers are as fast as estimated, apart from noise.
        fixed, slope = pooled.now.fixed_s.copy(), pooled.now.per_sample_s.copy()
        fixed[some], slope[some] = found.curves
        parts = np.ones(recent.share.shape)
        parts[:, some] = np.where(found.slow.T, found.ratio, 1.0)
        model, lately = TimeModel.affine(fixed, slope), slice(-_FEWEST, None)
        expected_s = (model.at(np.maximum(recent.share[lately], 1)) * parts[lately]).max(axis=1)
        longer = float(recent.time_s[lately].max(axis=1).sum() / expected_s.sum())
        noise = np.sort(latest.noise)[len(latest.noise) // 4]
        by_noise = 1.0 + math.sqrt(2.0 * math.log(len(latest.noise)) * noise)
        return cls(parts, found.slow.T, model, longer, by_noise)

    def next_split(
        self, fleet: Fleet, now: IntArray, lag: int, apart: int
    ) -> RecurringSplit | None:
        """Return the split for the steps to come; ``None`` if it should follow the latest speeds.

        ``now`` are the shares in force, ``lag`` the steps until a decision takes effect, ``apart``
        those between two decisions.
        """
        batch, parts = fleet.global_batch, self.parts
        one = self._finishing(_balanced(parts, self.model), fleet, now)
        one_s, now_s = self.mean_s(one, parts), self.mean_s(now, parts)
        delay, half = lag + apart // 2, len(parts) // 2
        # Spells that are much shorter than a delay have passed after a shorter one, too.
        delay = min(delay, max(half - _FEWEST, 2 * self._longest_spell()))
        # A slow time counts when the next one is slow, too.
        known = np.minimum(parts[1:], parts[:-1])
        enough = half >= _FEWEST + delay
        followed_s = self._with_delay_s(known, parts[1:], batch, delay) if enough else np.inf
        period = self._period(lag) if apart == 1 else None
        if period is not None and (at := len(parts) + lag - 1 - period[1]) >= period[0]:
            again_s = self._with_delay_s(parts, parts, batch, period[0])
            better = again_s < (1.0 - _MUCH_BETTER) * min(one_s, followed_s)
            if better and not self._harms(again_s, fleet):
                # A spike does not come back after another period.
                row = np.minimum(parts[at], parts[at - period[0]])[np.newaxis]
                soon = self._finishing(row[0], fleet, now)
                gain = 1.0 - self.mean_s(soon, row) / self.mean_s(now, row)
                return RecurringSplit(soon, f"every {period[0]} steps", gain)
        if not enough:
            return None
        for shares, lead in self._instead(one, known, fleet, now, delay):
            shares_s = self.mean_s(shares, parts)
            if shares_s <= (1.0 - lead) * followed_s and not self._harms(shares_s, fleet):
                how = "faster than decisions take effect"
                return RecurringSplit(shares, how, 1.0 - shares_s / now_s)
        return None

    def _instead(
        self, one: IntArray, known: FloatArray, fleet: Fleet, now: IntArray, delay: int
    ) -> Iterator[tuple[IntArray, float]]:
        """Yield splits that may replace following the speeds, and the part each must save."""
        # Part of a period more or less must not end the split that is in force.
        if (np.abs(now - one) <= 1 + _SLACK * now).all():
            yield one, _STILL_BEST
        elif self._best_in_both_halves(known, fleet, now, delay):
            yield one, _BEST_AFTERWARDS
        for shares in as_array(equal_split(fleet)), self._finishing(np.ones(len(now)), fleet, now):
            near = bool((np.abs(now - shares) <= 1 + _NEAR * now).all())
            yield shares, -_EQUALLY_GOOD if near else _EQUALLY_GOOD

    def _best_in_both_halves(
        self, known: FloatArray, fleet: Fleet, now: IntArray, delay: int
    ) -> bool:
        """Return whether the best split for each half of the steps is also good in the other."""
        # By chance, spikes seem to recur.
        half = len(self.parts) // 2
        for here, there in ((slice(half), slice(half, None)), (slice(half, None), slice(half))):
            fitted = self._finishing(_balanced(self.parts[here], self.model), fleet, now)
            passed = self.parts[1:][there]
            follow_s = self._with_delay_s(known[there], passed, fleet.global_batch, delay)
            if self.mean_s(fitted, passed[delay:]) > (1.0 - _BEST_AFTERWARDS) * follow_s:
                return False
        return True

    def _longest_spell(self) -> int:
        """Return the most steps in a row in which a worker that changes had one speed."""
        turns = np.vstack([self.slow[1:] != self.slow[:-1], np.ones(self.slow.shape[1], bool)])
        return max(int(np.diff(np.flatnonzero(each), prepend=-1).max()) for each in turns.T)

    def _harms(self, step_s: float, fleet: Fleet) -> bool:
        """Return whether equal shares may be better than a split of this mean step.

        No measured split is compared with another here, because each has met other speeds.
        """
        equal_s = self.mean_s(as_array(equal_split(fleet)), self.parts)
        return step_s * self.longer > equal_s * self.by_noise

    def _finishing(self, parts: FloatArray, fleet: Fleet, near: IntArray) -> IntArray:
        """Return the split with which all finish together if times are multiplied by some parts."""
        model = TimeModel.affine(self.model.fixed_s * parts, self.model.per_sample_s * parts)
        bounds = fleet.lower, fleet.upper, fleet.global_batch
        return equal_finish(model, *bounds, quantum=fleet.quanta, near=near)

    def _period(self, lag: int) -> tuple[int, int] | None:
        """Return after how many steps the same workers are slow again, and ``lag`` or more."""
        states = self.slow @ _WEIGHTS[: self.slow.shape[1]]
        steps = len(states)
        if steps <= _CONFIRMED:
            return None
        # Where the latest steps occurred before; the last place is where they are now.
        earlier = np.lib.stride_tricks.sliding_window_view(states, _CONFIRMED)[:-1]
        alike = np.flatnonzero(_alike(earlier, states[-_CONFIRMED:], 0))
        for period in (steps - _CONFIRMED - alike[::-1]).tolist():
            # Two more periods must confirm it: what is alike twice may be chance.
            count = max(2 * period, _CONFIRMED)
            if period + count > steps:
                return None
            before, now = states[-count - period : -period], states[-count:]
            # Long spells also repeat after a few steps. The changes must repeat, so half a period
            # has to predict worse.
            missed = np.count_nonzero(before != now)
            half = max(period // 2, 1)
            changed = np.count_nonzero(states[-count - half : -half] != now)
            if (
                2 * missed < changed
                and before[-1] == now[-1]
                and _alike(before, now, _FEWEST_TURNS)
            ):
                return period, -(-lag // period) * period
        return None

    def mean_s(self, shares: IntArray, parts: FloatArray) -> float:
        """Return the mean over some steps of the time that the last worker would have taken."""
        times_s = self.model.at(np.maximum(shares, 1)) * parts
        return float(times_s.max(axis=1).mean())

    def _with_delay_s(self, seen: FloatArray, passed: FloatArray, batch: int, delay: int) -> float:
        """Return the mean step of splits for the parts of some steps before."""
        seen, passed = seen[: len(seen) - delay], passed[delay:]
        return float((self._level_s(seen, batch) * (passed / seen).max(axis=1)).mean())

    def _level_s(self, parts: FloatArray, batch: int) -> FloatArray:
        """Return the time at which all finish together if times are multiplied by some parts."""
        slope, fixed = self.model.per_sample_s, self.model.fixed_s
        return np.asarray((batch + (fixed / slope).sum()) / (1.0 / (parts * slope)).sum(axis=-1))


def _returns(slow: Mask) -> bool:
    """Return whether a worker's two speeds, ``(n,)``, come back again and again."""
    turns = np.flatnonzero(slow[1:] != slow[:-1]) + 1
    if len(turns) < _FEWEST_TURNS:
        return False
    lasted = np.diff(turns, prepend=0, append=len(slow))
    # The latest speed may have come to stay; it is compared with the same speed before, apart from
    # the very first time, which may have lasted since before the speeds began to change.
    return bool(lasted[-1] <= _LASTING * lasted[-3:0:-2].max() + _LASTING_STEPS)


def _by_share(slow: Mask, share: FloatArray) -> bool:
    """Return whether a worker is slow where it has more samples: its curve has a cliff there."""
    return bool(share[slow].min() > share[~slow].max())


def _alike(before: FloatArray, now: FloatArray, fewest: int) -> Mask:
    """Return whether the same workers were slow in the same steps, along the last axis.

    At least ``fewest`` steps must have a slow worker.
    """
    slow = (before > 0) | (now > 0)
    same = slow & (before == now)
    count = slow.sum(axis=-1)
    return np.asarray((same.sum(axis=-1) >= _SAME * count) & (count >= fewest))


def _balanced(parts: FloatArray, model: TimeModel) -> FloatArray:
    """Return by how much slower each worker should count in one split for some steps, ``(W,)``."""
    # If all finish together when each is as slow as its own part, the mean step is the time of
    # that times the mean of the largest quotient. By its gradient, in logarithms: a worker counts
    # as slower if it is the last in more steps than its part of the work.
    best, best_cost = np.ones(parts.shape[1]), np.inf
    logs = np.log(parts.max(axis=0))
    for turn in range(_ROUNDS):
        part = np.exp(logs)
        passed = parts / part
        last, most = passed.argmax(axis=1), passed.max(axis=1)
        work = 1.0 / (part * model.per_sample_s)
        cost = most.sum() / work.sum()
        if cost < best_cost:
            best, best_cost = part, cost
        late = np.bincount(last, most, minlength=len(part)) / most.sum()
        logs = logs + _STRIDE / (1.0 + 0.5 * turn) * (late - work / work.sum())
    return best


@dataclass(frozen=True, slots=True, eq=False)
class _TwoSpeeds:
    """Which of ``k`` workers have two levels of time, and where they are at the longer one."""

    slow: Mask  # ``(k, n)``
    ratio: FloatArray  # ``(k,)``, the longer level as a multiple of the shorter one
    curves: FloatArray  # ``(2, k)``, fixed seconds and seconds per sample at the shorter one

    def at(self, places: IntArray) -> _TwoSpeeds:
        return _TwoSpeeds(self.slow[places], self.ratio[places], self.curves[:, places])

    @classmethod
    def of(
        cls,
        share: FloatArray,
        time_s: FloatArray,
        now: CurveEstimates,
        fixed_part: float,
        often: float,
    ) -> _TwoSpeeds:
        """Find them in the shares and times of ``n`` steps, ``(k, n)`` both; a share of 0 is none.

        Estimates that follow such a worker also bend its curve. So the one with the least scatter
        around two levels is taken, of some with other fixed times. Each level has the part
        ``often`` of the steps or more.

        Source:
            The threshold with the largest variance between both parts is that of Otsu, "A threshold
            selection method from gray-level histograms" (IEEE SMC 1979).
        """
        offsets, logs = _by_shape(share, time_s, now, fixed_part)
        steps, each = logs.shape[2], np.arange(len(share))
        ordered = np.sort(logs, axis=2)
        least = math.ceil(often * steps)
        count = np.arange(least, steps - least + 1)
        sums, squares = np.cumsum(ordered, axis=2), np.cumsum(ordered**2, axis=2)
        under = sums[:, :, least - 1 : steps - least]
        apart = (sums[:, :, -1:] - under) / (steps - count) - under / count
        between = count * (steps - count) / steps * apart**2
        within = squares[:, :, -1] - sums[:, :, -1] ** 2 / steps - between.max(axis=2)
        within[0] *= _PREFERRED
        which = within.argmin(axis=0)
        cut = between[which, each].argmax(axis=1)
        number, apart = cut + least, apart[which, each, cut]
        ordered = ordered[which, each]
        level = under[which, each, cut] / number
        upper = np.arange(steps) >= number[:, np.newaxis]
        # Otherwise a few slow steps and the slowest of the noise would be a level.
        means = level[:, np.newaxis] + upper * apart[:, np.newaxis]
        squares = (ordered - means) ** 2
        std = np.sqrt(
            np.maximum(
                (squares * upper).sum(axis=1) / (steps - number),
                (squares * ~upper).sum(axis=1) / number,
            )
        )
        two = apart > np.maximum(_APART_STD * std, _APART)
        limit = 0.5 * (ordered[each, number - 1] + ordered[each, number])
        slow = (logs[which, each] > limit[:, np.newaxis]) & two[:, np.newaxis]
        slope = np.exp(level)
        return cls(slow, np.exp(apart), np.stack([offsets[which, each] * slope, slope]))


def _fixed_part(share: FloatArray, now: CurveEstimates) -> float:
    """Return the usual fixed time in a fleet, as a part of the time of the samples."""
    # A filter may hold a fixed time below 0, or no time per sample.
    samples_s = np.maximum(now.per_sample_s * share.mean(axis=0), 1e-12)
    parts = np.sort(np.maximum(now.fixed_s, 0.0) / samples_s)
    return float(min(parts[(len(parts) - 1) // 2], _OFFSETS[-1]))


def _by_shape(
    share: FloatArray, time_s: FloatArray, now: CurveEstimates, fixed_part: float
) -> tuple[FloatArray, FloatArray]:
    """Return the logarithms of times relative to some shapes of the curve, ``(shapes, k, n)``.

    The shapes come first: the fixed time of each in samples, ``(shapes, k)``. The first is the
    usual one of the fleet.
    """
    known = share > 0
    usual = np.maximum(share.sum(axis=1) / np.maximum(known.sum(axis=1), 1), 1.0)
    # A worker's own shape is not used: a split that follows two speeds well gives each its own
    # share. Then every shape fits, and a filter learns that more samples take no longer.
    offsets = np.outer((fixed_part, *_OFFSETS), usual)
    at = np.where(known, share, usual[:, np.newaxis])
    logs = np.log(np.maximum(np.where(known, time_s, now.time_s(at.T).T), 1e-12))
    return offsets, logs - np.log(offsets[:, :, np.newaxis] + at)
