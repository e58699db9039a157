"""Compare measured steps before and after each change of the split, and go back if it was worse.

A model may be wrong in ways that no test of it shows: the times of a GPU rise in stairs, a cache or
a memory overflows at some share. A `Supervisor` uses no model. Its evidence is the longest busy
time of each step, and one fact: a worker does not get faster with more samples. So the workers that
had no more samples in a step than in an earlier split bound that split's time from below, also
after all of them have become slower.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil, exp, log, sqrt

import numpy as np

from evenstride.core.allocation.speedup import equal_split
from evenstride.core.arrays import FloatArray, IntArray, Mask, Shares
from evenstride.core.fleet import Fleet, as_array, as_shares
from evenstride.core.formatting import signed_part
from evenstride.core.policy import Decision, Keep, Move, Situation
from evenstride.core.time_model.estimates import Estimate
from evenstride.core.time_model.observation import StepsAtSplit, whole_steps

_RECENT = 16  # steps of a split that count
# A split is worse, or better, if it is so by this many standard errors and this part of a step.
_SURE_STD, _LEAST = 3.0, 0.005
# A median is less certain than a mean by this factor.
_MEDIAN_COST = 1.25
# Steps of a split that are no slower than before, after which it counts as the better one.
_ENOUGH = 3
# First steps at new shares are left out, unless they have been shown to be as fast as later ones.
# At most this many in a row are; one that takes this many times as long only if it is the first.
_SLOW_FIRST, _MOST_SLOW_FIRSTS = 1.25, 3
# After a split that was worse, the shares stay for this many steps; for twice as many each further
# time; and until the time that it cost is this part of the time since.
_STAYS, _MOST_STAYS, _BUDGET = 16, 65_536, 0.005
_LASTING = 32  # steps for which a change of speed must last, if the run has lost too much
# Part of the measured gain over the equal split that may be spent on trials, too; and the most.
_OF_GAIN, _MOST_SPENT = 0.25, 0.02
# A worker's speed has changed if its time has, by this many standard deviations and this part; by
# the second number of them if `ShareTimes` has found that, because it has more steps to compare.
_CHANGED_STD, _FOUND_STD, _CHANGED = 5.0, 2.5, 0.10
_AGAIN = 4  # steps of a split after which it is known again
# Recent changes of speed count this much less after every step; and the additional steps of a split
# that each of them needs before it is worse.
_PASSING, _PATIENCE = 0.99, 4.0
# Fewest steps that a new split is expected to last, and that while the latest one is not measured.
_LASTS, _UNMEASURED = 64, 8
# Steps that a trial takes, and the part by which each may be longer at most.
_TRIAL_STEPS, _MOST_RISK = 8, 0.5
# What is known of a whole run, whatever its splits.
_OF_THE_RUN = ("equal", "uneven", "total_s", "lost_s", "regret_s", "pardons")
_FEW = 5  # fewer steps than these have no mean.
_LEFT = 6  # number of earlier splits that are remembered
# Steps of the equal split that a run may lose before the bound on the regret applies, and the part
# of the run that an earlier gain makes up for.
_ALLOWED, _CREDIT = 4.0, 0.01
# A run that has lost so many steps, and the part of the run above, trusts measured steps and no
# curves: no recurring speeds, and after this many times no newly discovered shape either.
_MOST_LOST, _PARDONS = 16.0, 2


@dataclass(frozen=True, slots=True, eq=False)
class Tried:
    """A split, and its latest measured steps."""

    shares: IntArray  # ``(W,)``.
    # Logarithms of their longest times in seconds, of the latest `_RECENT` steps.
    logs: tuple[float, ...]
    busy_s: FloatArray  # times of its latest few steps, ``(n, W)``.
    steps: int  # number of its steps since it was last adopted.
    slower: FloatArray  # what `ShareTimes` knew then about the workers' speeds, ``(W,)``.

    @classmethod
    def of(cls, seen: StepsAtSplit, estimate: Estimate) -> Tried:
        logs = tuple(np.log(seen.longest_s()[-_RECENT:]).tolist())
        slower = estimate.seen.slower
        return cls(seen.shares, logs, seen.busy_s[-_ENOUGH:], len(seen.busy_s), slower)

    def after(self, seen: StepsAtSplit, estimate: Estimate) -> Tried:
        """Return it after more steps."""
        more = Tried.of(seen, estimate)
        logs = _alike((*self.logs, *more.logs)[-_RECENT:], _noise(estimate))
        busy_s = np.concatenate([self.busy_s, more.busy_s])[-_ENOUGH:]
        return Tried(self.shares, logs, busy_s, self.steps + more.steps, more.slower)

    def at_least_s(self, estimate: Estimate) -> float:
        """Return what a step would take now, if a worker has become slower since.

        That is known where its time has changed although its share had not.
        """
        more = estimate.seen.slower - self.slower
        return float((self.each_s * np.exp(more))[_found(more, estimate)].max(initial=0.0))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Tried):
            return NotImplemented
        # Arrays have no truth value of their own.
        return all(np.array_equal(getattr(self, n), getattr(other, n)) for n in self.__slots__)

    __hash__ = None  # type: ignore[assignment]

    @property
    def step_s(self) -> float:
        return exp(_mean(self.logs))

    def now_s(self, noise: float) -> float:
        """Return what a step took just before the split was left.

        The latest step may be the first after a slow-down, which is why the split was left.
        """
        usual, latest = _mean(self.logs), self.logs[-1]
        return exp(latest if latest > usual + max(_CHANGED_STD * noise, _CHANGED) else usual)

    @property
    def each_s(self) -> FloatArray:
        # The shorter of two, because spikes of two workers in two steps are no slower split.
        return np.asarray(np.sort(self.busy_s, axis=0)[(len(self.busy_s) - 1) // 2])


@dataclass(frozen=True, slots=True)
class Departed:
    """Steps since the better split was left, at other splits."""

    now: Tried  # the split of the latest ones.
    # Logarithms of the longest times in seconds, of the latest `_RECENT` steps.
    logs: tuple[float, ...] = ()
    least: tuple[float, ...] = ()  # the same of what the better split would have taken, at least.
    here: int = 0  # number of these that are at the latest split.
    began: tuple[float, ...] = ()  # the first few of these.
    firsts: int = 0  # number of first steps in a row that were left out.
    doubtful: bool = False  # whether the latest step is a slow one of these.
    cost_s: float = 0.0  # additional time of all of them.

    @classmethod
    def after(
        cls,
        before: Departed | None,
        seen: StepsAtSplit,
        other: Tried,
        estimate: Estimate,
        least_s: float = 0.0,
    ) -> Departed:
        """Return it after more steps; ``before`` is ``None`` if these are the first.

        ``least_s`` is what a step of the other split would take at least.
        """
        noise, longest_s = _noise(estimate), seen.longest_s()
        new = before is None or bool((before.now.shares != seen.shares).any())
        now = Tried.of(seen, estimate)
        if before is not None and not new:
            now = before.now.after(seen, estimate)
        before, begin = before or cls(now), 0
        firsts, usual_s, slow = before.firsts, other.now_s(noise), False
        if new:
            free = bool((estimate.firsts.cost < 0).all())
            slow = longest_s[0] > _SLOW_FIRST * usual_s
            begin = int(not free and firsts < (1 if slow else _MOST_SLOW_FIRSTS))
            firsts = firsts + 1 if begin else 0
        longest_s = longest_s[begin:]
        each_s = np.maximum(seen.at_least_s(other.shares)[begin:], max(least_s, 1e-9))
        more_s = longest_s - np.maximum(each_s, usual_s)
        logs, least = np.log(longest_s), np.log(each_s)
        return cls(
            now,
            (*before.logs, *logs.tolist())[-_RECENT:],
            (*before.least, *least.tolist())[-_RECENT:],
            len(logs) + (0 if new else before.here),
            ((() if new else before.began) + tuple(logs.tolist()))[:_ENOUGH],
            firsts,
            slow and begin == 1 and not len(logs),
            before.cost_s + float(more_s.sum()),
        )

    def compared(self, other: Tried, estimate: Estimate, count: int) -> tuple[float, float]:
        """Return by how much the latest steps are slower, in logarithms, and how uncertain."""
        count = min(count, len(self.logs))
        if not count:
            return 0.0, 1.0
        logs, least = self.logs[-count:], _mean(self.least[-count:])
        std = _spread(logs, other.logs, _noise(estimate))
        std *= _MEDIAN_COST * sqrt(1.0 / count + 1.0 / len(other.logs))
        usual = log(other.now_s(_noise(estimate)))
        # Noise alone puts the bound above the usual time now and then.
        return _mean(logs) - (least if least > usual + std else usual), std

    def surely_worse(
        self, other: Tried, estimate: Estimate, least: float, patience: int
    ) -> float | None:
        """Return by how much the split is surely slower, after more than ``patience`` steps."""
        off, std = self.compared(other, estimate, self.here)
        enough = self.here + self.firsts > 1 + patience and off > _SURE_STD * std + least
        if not enough and not (self.here >= _RECENT and off > least):
            return None
        # Spikes of different workers make steps longer, but no worker.
        if log(float(self.now.each_s.max() / other.each_s.max())) < off / 2:
            return None
        # If steps were not much slower at first, a worker has become slower.
        return off if self.slower_at_first(other, estimate) > max(least, off / 2) else None

    def slower_at_first(self, other: Tried, estimate: Estimate) -> float:
        return _median(self.began) - log(other.now_s(_noise(estimate))) if self.began else 0.0

    def storm(self, other: Tried, estimate: Estimate, least: float, patience: int) -> float | None:
        """Return by how much several splits are slower together, if that is certain."""
        latest, latest_std = self.compared(other, estimate, self.here)
        off, std = self.compared(other, estimate, _RECENT)
        sure = len(self.logs) > max(self.here, 1 + patience) and off > _SURE_STD * std + least
        return off if sure and latest > -latest_std else None


@dataclass(frozen=True, slots=True)
class Hold:
    """The shares stay, because another split was worse."""

    begun: int  # the step at which it began.
    until: int  # the step from which on another split is tried.
    reason: str
    kept: Tried  # the split that is kept, as it was then.
    other: float  # logarithm of what a step took at the other split, in seconds.
    patience: int = 1  # steps for which a change of speed must last to end it
    lasted: int = 0  # steps for which one has lasted
    trial: Shares | None = None  # the latest split that `LocalSearch` tried meanwhile


@dataclass(frozen=True, slots=True)
class Supervisor:
    """What the splits of a fleet have been measured to take.

    It compares the steps since the latest change with the split before it. If they take longer, it
    goes back, and no split is tried until the time that this has cost is a small part of the run:
    for twice as many steps each further time. It compares all splits with the equal one, too.
    """

    better: Tried | None = None  # the best split measured so far.
    equal: Tried | None = None  # the equal split.
    away: Departed | None = None  # the steps since the best split, ``None`` at it.
    uneven: Departed | None = None  # the steps since the equal split, ``None`` at it.
    hold: Hold | None = None
    failures: int = 0  # number of splits in a row that were worse.
    begun: int = 0  # the first measured step of the latest split.
    # The latest splits that were left: their shapes are compiled, if shapes cost anything.
    left: tuple[Tried, ...] = ()
    mistakes: int = 0  # number of returns to a split that had become slower itself.
    changes: float = 0.0  # number of recent changes of speed while the shares stayed.
    debt_s: float = 0.0  # what the splits that were worse cost.
    total_s: float = 0.0  # time of all steps.
    lost_s: float = 0.0  # time lost against the equal split, below 0 for a gain.
    regret_s: float = 0.0  # the same, but earlier gains make up only for a small part of the run.
    pardons: int = 0  # number of times that another split was allowed although too much was lost.

    @property
    def overdrawn(self) -> bool:
        """Whether the run has lost so much against the equal split that no curves are trusted."""
        return self.equal is not None and self._beyond(_MOST_LOST, self.equal)

    @property
    def pardonable(self) -> bool:
        """Whether newly discovered curves may end the wait after a worse split."""
        return self.pardons < _PARDONS or not self.overdrawn

    def forgiven(self, *, new: bool) -> Supervisor:
        """Return the state in which any split may be tried; ``new`` if that has a new reason."""
        pardons = self.pardons + (new and self.overdrawn)
        return replace(self, away=None, hold=None, failures=0, debt_s=0.0, pardons=pardons)

    def aside(self, situation: Situation) -> Supervisor:
        """Return the state after some more measurements, without any split but the equal one."""
        run = {name: getattr(self, name) for name in _OF_THE_RUN}
        state = Supervisor(**run)
        for seen in _whole_steps(situation):
            state = state._with_equal(seen, situation)
        return state

    def after(self, situation: Situation) -> Supervisor:
        """Return the state after some more measurements."""
        state = self
        for seen in _whole_steps(situation):
            state = state._noticing(seen, situation.estimate)._leaving(seen)
            state = state._with_equal(seen, situation)._after(seen, situation.estimate)
        return state

    @property
    def latest(self) -> Tried | None:
        """The split of the latest measured steps."""
        return self.better if self.away is None else self.away.now

    def lasts(self, situation: Situation) -> int:
        """Return for how many steps the next split probably lasts.

        As long as the present one has lasted, so that after long enough any gain is worth a cost.
        """
        latest = self.latest
        if latest is None or as_shares(latest.shares) != situation.shares:
            return _UNMEASURED  # the next measurement may change everything
        return max(_LASTS, situation.step - self.begun)

    def rests(self, situation: Situation) -> bool:
        """Return whether the split has lasted so long that the cost of a trial hardly counts."""
        latest = self.latest
        if latest is None or as_shares(latest.shares) != situation.shares:
            return False
        lasted = situation.step - self.begun
        cost_s = float(situation.estimate.firsts.extra_s.max())
        return lasted >= _LASTS and cost_s <= _BUDGET * lasted * latest.step_s

    def risk(self, situation: Situation) -> float:
        """Return by what part the steps of a trial may be longer, after so long without one."""
        return min(self.spare() * (situation.step - self.begun) / _TRIAL_STEPS, _MOST_RISK)

    def _noticing(self, seen: StepsAtSplit, estimate: Estimate) -> Supervisor:
        """Return the state with the changes of speed that the split in force cannot explain."""
        changes, latest = self.changes * _PASSING ** len(seen.busy_s), self.latest
        noise = _noise(estimate)
        if latest is not None and (latest.shares == seen.shares).all():
            every = min(len(latest.logs) + len(seen.busy_s), _RECENT)
            changes += len(latest.after(seen, estimate).logs) < every
        elif latest is not None and len(latest.logs) >= _ENOUGH:
            # It was left because its last step was slow.
            changes += latest.now_s(noise) > latest.step_s
        return replace(self, changes=changes)

    def _leaving(self, seen: StepsAtSplit) -> Supervisor:
        latest = self.latest
        if latest is None or (latest.shares == seen.shares).all():
            return self
        others = [split for split in self.left if (split.shares != seen.shares).any()]
        return replace(self, begun=seen.first, left=(*others, latest)[-_LEFT:])

    def _after(self, seen: StepsAtSplit, estimate: Estimate) -> Supervisor:
        better = self.better
        if better is None:
            return replace(self, better=Tried.of(seen, estimate))
        if (seen.shares == better.shares).all():
            # What it took before the other splits is no longer certain.
            back = self.away is not None and self.hold is not None
            known = Tried.of(seen, estimate) if back else better.after(seen, estimate)
            return replace(self, better=known, away=None)._waiting(estimate, len(seen.busy_s))
        away = Departed.after(self.away, seen, better, estimate, better.at_least_s(estimate))
        state = replace(self, away=away)
        if (hold := self.hold) is not None:  # measured before the return took effect, or on trial
            cost_s = away.cost_s - (self.away.cost_s if self.away else 0.0)
            return state if as_shares(seen.shares) == hold.trial else state._owing(hold, cost_s)
        off, std = away.compared(better, estimate, away.here)
        calm = away.here >= _ENOUGH and off <= std
        if calm or (away.here >= _RECENT and off <= _LEAST):
            failures = 0 if off < -(_SURE_STD * std + _LEAST) else state.failures
            return replace(state, better=away.now, away=None, failures=failures)
        return state

    def _with_equal(self, seen: StepsAtSplit, situation: Situation) -> Supervisor:
        total_s = self.total_s + float(seen.longest_s().sum())
        state, equal, estimate = replace(self, total_s=total_s), self.equal, situation.estimate
        shares = as_array(equal_split(situation.fleet)) if equal is None else equal.shares
        if (seen.shares == shares).all():
            known = Tried.of(seen, estimate) if equal is None else equal.after(seen, estimate)
            return replace(state, equal=known, uneven=None)
        if equal is None:
            return state
        uneven = Departed.after(self.uneven, seen, equal, estimate, equal.at_least_s(estimate))
        lost_s = uneven.cost_s - (self.uneven.cost_s if self.uneven else 0.0)
        regret_s = max(self.regret_s + lost_s, -_CREDIT * total_s)
        lost_s += self.lost_s
        return replace(state, uneven=uneven, lost_s=lost_s, regret_s=regret_s)

    def _owing(self, hold: Hold, cost_s: float) -> Supervisor:
        debt_s = max(self.debt_s + cost_s, 0.0)
        hold = replace(hold, until=self._until(hold.begun, debt_s, self.failures))
        return replace(self, debt_s=debt_s, hold=hold)

    def _gains(self) -> float:
        """Return by what part steps of the equal split are longer than those of the best one."""
        equal, better = self.equal, self.better
        return max(equal.step_s / better.step_s - 1.0, 0.0) if equal and better else 0.0

    def spare(self) -> float:
        """Return the part of a step that may be spent on trials."""
        return _BUDGET + min(_OF_GAIN * self._gains(), _MOST_SPENT)

    def _until(self, step: int, debt_s: float, failures: int) -> int:
        """Return the step until which the shares stay."""
        assert self.better is not None
        repaid = ceil(debt_s / (self.better.step_s * self.spare()))
        stays = max(_STAYS, repaid) * 2 ** min(failures - 1, 12)
        return step + min(int(stays), _MOST_STAYS)

    def _waiting(self, estimate: Estimate, steps: int) -> Supervisor:
        """Return the state after more steps of the split that is kept."""
        hold, better = self.hold, self.better
        if hold is None or better is None or better.steps < 2:
            return self
        part = 1.0 / min(better.steps, _ENOUGH) + 1.0 / min(hold.kept.steps, _ENOUGH)
        off = np.abs(np.log(np.maximum(better.each_s, 1e-9) / np.maximum(hold.kept.each_s, 1e-9)))
        changed = off > np.maximum(_CHANGED_STD * np.sqrt(estimate.noise * part), _CHANGED)
        changed |= _found(better.slower - hold.kept.slower, estimate) & (off > _CHANGED / 2)
        slower = _mean(better.logs) > hold.other + _CHANGED_STD * _noise(estimate) * sqrt(part)
        if slower or (better.steps >= _ENOUGH and changed.any()):
            hold = replace(hold, lasted=hold.lasted + steps)
            if hold.lasted < hold.patience:
                return replace(self, hold=hold)
            # A speed has changed, so the other split may be the better one now.
            mistakes, failures = self.mistakes + slower, max(0, self.failures - 1)
            state = replace(self, hold=None, debt_s=0.0, failures=failures, mistakes=mistakes)
            equal = self.equal is not None and (self.equal.shares == better.shares).all()
            # If the equal split has become slower, nothing was lost against it.
            return replace(state, regret_s=min(self.regret_s, 0.0)) if slower and equal else state
        kept = better if hold.kept.steps < _AGAIN <= better.steps else hold.kept
        return replace(self, hold=replace(hold, kept=kept, lasted=0))

    def judged(self, situation: Situation) -> tuple[Supervisor, Decision | None]:
        """Return the decision if the measured steps leave no choice."""
        better, state = self.better, self
        if better is None or not fits(better.shares, situation.fleet):
            return Supervisor(equal=self.equal), None
        if state.hold is not None and situation.step >= state.hold.until:
            state = replace(state, hold=None, debt_s=0.0, mistakes=self.mistakes // 2)
        hold, here = state.hold, situation.shares
        if hold is not None and hold.trial == here:
            return state, Keep("local search: a split is on trial", settled=False)
        if (hold is None or state.overdrawn) and (worse := state._back(situation)) is not None:
            return worse
        away, kept = state.away, as_shares(better.shares)
        if hold is not None:
            reason = f"{hold.reason}; the shares stay until step {hold.until}{self._balance()}"
            settled = away is None and better.steps >= _AGAIN
            # Without a trial, average speeds have led to other shares.
            back = Move(kept, reason, settled=False) if hold.trial else None
            return state, Keep(reason, settled) if kept == here else back
        if away is None or not away.doubtful or as_shares(away.now.shares) != here:
            return state, None
        reason = "the first step at this split took long; the next ones show whether all do"
        return state, Keep(reason, settled=False)

    def _balance(self) -> str:
        """Return what the run has gained or lost against the equal split."""
        if self.equal is None or not self.total_s:
            return ""
        part = -self.lost_s / self.total_s
        return f"; so far the run is {signed_part(part)} than with equal shares"

    def _back(self, situation: Situation) -> tuple[Supervisor, Decision] | None:
        """Return to the best split, or to the equal one, if the latest one is surely worse."""
        estimate = situation.estimate
        # Where speeds change often, only a large difference is caused by the split.
        least = _LEAST + _CHANGED / 2 * self.mistakes
        # A change of speed may come at the same time as a split.
        patience = int(_PATIENCE * self.changes)
        better, equal = (self.better, self.away), (self.equal, self.uneven)
        # A split that stays is left for the equal one only. Among bursts, a run that has lost too
        # much would go on from one bad split to the next.
        only = self.hold or (self.overdrawn and not self._gains())
        for split, away in (equal,) if only else (better, equal):
            if split is None or away is None or as_shares(split.shares) == situation.shares:
                continue
            # The curves have learned from the first slow steps, and what they led to has not been
            # measured yet.
            early = len(away.logs) + away.firsts <= situation.lag + 2
            if early and as_shares(away.now.shares) != situation.shares:
                continue
            off = None if self.hold else away.surely_worse(split, estimate, least, patience)
            if off is None and split is self.better:
                off = away.storm(split, estimate, least, patience)
            if off is None and split is self.equal:
                off = self._beyond_bound(away, split, estimate)
            if off is not None and fits(split.shares, situation.fleet):
                return self._returned(split, away, off, situation.step)
        return None

    def _beyond(self, steps: float, equal: Tried) -> bool:
        """Return whether the regret exceeds so many equal steps and a part of the run."""
        return self.regret_s > _BUDGET * self.total_s + steps * equal.step_s

    def _beyond_bound(self, away: Departed, equal: Tried, estimate: Estimate) -> float | None:
        """Return by how much the latest steps are slower than equal ones, if all lost too much."""
        if not self._beyond(_ALLOWED, equal):
            return None
        off, _ = away.compared(equal, estimate, _RECENT)
        return off if min(off, away.slower_at_first(equal, estimate)) > 0 else None

    def _returned(
        self, split: Tried, away: Departed, off: float, step: int
    ) -> tuple[Supervisor, Decision]:
        failures, debt_s = self.failures + 1, self.debt_s + max(away.cost_s, 0.0)
        which = "the equal split" if split is self.equal else "an earlier split"
        state = replace(self, better=split, away=away, failures=failures, debt_s=debt_s)
        until = state._until(step, debt_s, failures)
        reason = f"steps measured {exp(off) - 1:.1%} longer at another split"
        patience = _LASTING if self.overdrawn and split is self.equal else 1
        hold = Hold(step, until, reason, split, _mean(away.logs), patience)
        text = f"back to {which}: {reason}{self._balance()}"
        decision = Move(as_shares(split.shares), text, settled=False)
        return replace(state, hold=hold), decision


def fits(shares: IntArray, fleet: Fleet) -> bool:
    """Return whether these are a split of the fleet within its bounds."""
    whole = len(shares) == len(fleet) and int(shares.sum()) == fleet.global_batch
    return whole and bool(((fleet.lower <= shares) & (shares <= fleet.upper)).all())


def _alike(logs: tuple[float, ...], noise: float) -> tuple[float, ...]:
    """Return the latest values that are not from before a change of speed."""
    if abs(logs[-1] - _median(logs[:-1] or logs)) <= _CHANGED / 2:
        return logs
    for count in range(2, len(logs) - 1):
        early, late = logs[:-count], logs[-count:]
        usual, off = _median(early), max(_CHANGED_STD * noise / sqrt(count), _CHANGED / 2)
        if min(late) > usual + off or max(late) < usual - off:
            return late
    return logs


def _median(values: tuple[float, ...]) -> float:
    # The lower one of two, because a single spike among two steps must not decide.
    return sorted(values)[(len(values) - 1) // 2]


def _mean(values: tuple[float, ...]) -> float:
    """Return the mean without the shortest and the longest fifth, of a few values the median."""
    # A median would take the shorter steps for all where a worker is slow in every second one.
    count = len(values)
    if count < _FEW:
        return _median(values)
    ordered = sorted(values)[count // 5 : count - count // 5]
    return sum(ordered) / len(ordered)


def _whole_steps(situation: Situation) -> Iterator[StepsAtSplit]:
    fleet = situation.fleet
    return whole_steps(situation.observations, len(fleet), fleet.global_batch)


def _found(slower: FloatArray, estimate: Estimate) -> Mask:
    """Return whose speeds have changed by so much, in logarithms, while their shares stayed."""
    return np.asarray(np.abs(slower) > np.maximum(_FOUND_STD * np.sqrt(estimate.noise), _CHANGED))


@lru_cache(maxsize=2)  # one decision asks several times
def _noise(estimate: Estimate) -> float:
    return sqrt(float(np.median(estimate.noise)))


def _spread(one: tuple[float, ...], other: tuple[float, ...], prior: float) -> float:
    """Return the standard deviation of the logarithms of two splits' steps."""
    away = [abs(x - usual) for part in (one, other) for usual in (_mean(part),) for x in part]
    known = len(away) - 2
    if known < 4:
        return prior
    # Two of them say nothing, because two means fit them.
    return max(1.4826 * sorted(away)[2 + (known - 1) // 2], 0.2 * prior, 1e-3)
