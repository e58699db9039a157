"""Ours: equal finish times under the fitted curves, but only when it pays.

With ``allow_idle`` it also leaves out a worker that holds up the others even with its least share,
and tries it again (`weigh`). A worker with a share of 0 is a ghost: it still runs one sample
through both passes, because the gradient's collectives need every rank. So leaving it out takes it
from its least share to one sample, and no further. That pays where the least share is more than a
sample, by a ``min_share`` or a quantum; a fixed time is as long as before.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import ceil, inf

import numpy as np

from evenstride.core.allocation.integer_splits import apportion
from evenstride.core.allocation.speedup import equal_split, split_by
from evenstride.core.allocation.step_forecast import StepForecast
from evenstride.core.arrays import IntArray, Mask
from evenstride.core.fleet import Fleet, as_array, as_shares
from evenstride.core.policy import Decision, Keep, Move, Situation
from evenstride.core.spec import check_settings, within
from evenstride.core.time_model.observation import Measurements
from evenstride.core.time_model.pooling import pooled

# Known so well that measuring need not be frequent.
_SETTLED_DOUBT = 0.02
# A share that should be larger by this factor tells too little about its worker's speed: what is
# believed of it, by mistake maybe, would never be corrected.
_STARVED = 3
# So doubtful that no move may look worth it.
_BLOCKING = 0.10
# Steps that may each wait for a decision, as is promised of every policy.
_MOST_OPENING = 8

# A worker is left out if a step gets shorter even should its time be so many standard deviations
# shorter than believed.
_SURE_STD = 2.0
# It is tried after this many steps, and after twice as many each further time; later if trying
# it is dear: a trial takes about so many steps, and may cost this part of the steps before it.
_FEWEST_STEPS, _TRIAL_STEPS, _TRIAL_PART = 64, 8, 0.05
# A slow spell may last so many steps.
_SPELL_STEPS = 32
# And at once if a ghost's step takes less than this part of what it took before.
_FASTER = 0.7
# Equally slow workers are left out together, and rounding must not set them apart.
_LIMITING = 1.0 - 1e-9


@dataclass(frozen=True, slots=True)
class Adaptive:
    """Re-split when the expected step is shorter by more than next to nothing.

    The published rules act on throughput and so under-correct when part of a step does not
    scale with the share. Here the curves themselves are fitted (`Estimate`), workers of one kind
    share their evidence (`pooled`), and the exact integer optimum is found (`equal_finish`). It
    is adopted if the *expected maximum* of the uncertain times is smaller under it, which keeps
    a split that only noise makes look uneven (`expected_max`).
    """

    # Smallest gain worth a change, as a part of the step time. A change costs next to nothing, so
    # it is small; what keeps noise from moving the split is the expected maximum. (At 2 % a wrong
    # first step of 1.7 % was kept for good.).
    min_gain: float = field(default=0.005, metadata=within(float, 0, 1))
    # Steps at the start that may each wait for a decision.
    opening_steps: int = field(default=_MOST_OPENING, metadata=within(int, 0, _MOST_OPENING))
    # By how many standard deviations of its own noise a worker is to finish early. With workers
    # whose steps are unequally noisy, 1 makes the steps shorter, as the latest of them counts (3.5
    # % in ``unequal-noise.yaml``), and their means further apart (6 % there). With 0 the mean times
    # are evened out.
    noise_margin: float = field(default=0.0, metadata=within(float, 0, 10))
    # 1 to leave out a worker that holds up the others even with its least share. As it still runs
    # one sample, that helps where its ``min_share`` or quantum is larger than that. It is tried
    # again from time to time (see `weigh`). Of 0, never.
    allow_idle: int = field(default=0, metadata=within(int, 0, 1))

    def __post_init__(self) -> None:
        check_settings("policy adaptive", self)

    def init(self, fleet: Fleet) -> tuple[Idle | None, Move]:
        """Return the split by declared resources, else the equal one: nothing is known yet."""
        # FLOP/s first, as cores say little about a fleet with GPUs.
        declared = split_by("flops", fleet) or split_by("cores", fleet)
        if declared is not None:
            return None, Move(declared, "opening: by declared resources until measured", False)
        opening = equal_split(fleet)
        return None, Move(opening, "opening: equal split until times are measured", False)

    def decide(self, state: Idle | None, situation: Situation) -> tuple[Idle | None, Decision]:
        fleet, estimate = situation.fleet, situation.estimate
        if not estimate.known:
            unknown = fleet.workers[int(np.argmin(estimate.steps))].name
            reason = f"no step of worker {unknown} has been measured yet"
            return state, Keep(reason, settled=False)
        now = as_array(situation.shares)
        # A worker with a share of 0 runs one sample.
        estimate = pooled(estimate, np.maximum(now, 1) if self.allow_idle else now)
        outlook = StepForecast(estimate, fleet, self.noise_margin)

        def usual(outlook: StepForecast) -> Decision:
            return self._compare(outlook, situation)

        if not self.allow_idle:
            return None, usual(outlook)
        return weigh(state or Idle(), situation, outlook, self.min_gain, usual)

    def _compare(self, outlook: StepForecast, situation: Situation) -> Decision:
        fleet, estimate, now = situation.fleet, outlook.estimate, as_array(situation.shares)
        now_s = outlook.step_s(now)
        best, best_s = outlook.best_split(now, now_s)
        step_s = now_s + situation.communication_s
        # A part of the whole step: where communication dominates, a shorter busy time gains little.
        gain = (now_s - best_s) / step_s
        doubt = best_s / estimate.model.makespan_s(np.maximum(best, 1)) - 1.0
        starved = np.flatnonzero(best > _STARVED * np.maximum(now, 1))
        # Only where it costs next to nothing: with one sample of many, no step would ever correct
        # what is believed of the worker.
        if len(starved) and -self.min_gain <= gain <= self.min_gain:
            some = fleet.workers[int(starved[0])].name
            reason = f"worker {some} gets more, because its speed cannot be told from so little"
            return Move(as_shares(best), reason, settled=False)
        if gain <= self.min_gain:
            # With curves that are known well, no gain means that the split has been found.
            trial = outlook.trial(now) if doubt > _BLOCKING else None
            if trial is not None:
                some = fleet.workers[int(np.argmax(trial - now))].name
                reason = f"worker {some} finishes early: it gets more, to learn what that takes"
                return Move(as_shares(trial), reason, settled=False)
            reason = f"best split would be {gain:.1%} faster, under {self.min_gain:.1%}"
            return Keep(reason, settled=doubt < _SETTLED_DOUBT)
        slowest = fleet.workers[int(np.argmax(estimate.model.at(np.maximum(now, 1))))].name
        reason = (
            f"worker {slowest} finishes last: step {step_s * 1e3:.1f} ms -> "
            f"{(step_s - now_s + best_s) * 1e3:.1f} ms expected ({gain:.1%} less)"
        )
        return Move(as_shares(best), reason, settled=False)


@dataclass(frozen=True, slots=True)
class Away:
    """A worker that is left out, or is being tried."""

    worker: int  # its rank
    again: int  # step from which on it is tried
    wait: int  # steps that it was, or is, left out for
    # Shortest usual time of its steps with a ghost; infinite if there were none.
    ghost_s: float = inf
    faster: bool = False  # whether that has become much shorter, so that it is tried at once
    trying: bool = False  # whether it has its least share again, to be measured

    def seen(self, ghost_s: float) -> Away:
        faster = self.faster or ghost_s < _FASTER * self.ghost_s < inf
        return replace(self, ghost_s=min(ghost_s, self.ghost_s), faster=faster)


@dataclass(frozen=True, slots=True)
class Idle:
    """Who is left out, in order of rank; and who may be soon."""

    away: tuple[Away, ...] = ()  # those who are left out or being tried
    # Ranks that had better be left out, with the step since when that has been so.
    late: tuple[tuple[int, int], ...] = ()

    def after(self, situation: Situation) -> Idle:
        """Return it without those who take part again, with what the ghosts' steps took."""
        now, least = as_array(situation.shares), least_shares(situation.fleet)
        told, kept = situation.observations, []
        for one in self.away:
            share = int(now[one.worker])
            if share > (int(least[one.worker]) if one.trying else 0):
                continue
            ghosts = told.median_s[(told.worker == one.worker) & (told.share == 0)]
            kept.append(one.seen(float(ghosts.min())) if len(ghosts) and not share else one)
        return replace(self, away=tuple(kept))

    def ranks(self, which: Callable[[Away], bool]) -> list[int]:
        return [one.worker for one in self.away if which(one)]

    def trying(self, ranks: list[int]) -> Idle:
        tried = [
            replace(one, trying=True, faster=False) if one.worker in ranks else one
            for one in self.away
        ]
        return Idle(tuple(tried), self.late)

    def still(self, ranks: list[int], step: int) -> tuple[Idle, list[int]]:
        """Return it with who had better leave at a step, and which of them now do.

        These are who has been so for a while, and who is being tried: a slow spell is no reason.
        """
        since = {rank: dict(self.late).get(rank, step) for rank in ranks}
        tried = self.ranks(lambda one: one.trying)
        long = [r for r in ranks if r in tried or step - since[r] >= _SPELL_STEPS]
        return replace(self, late=tuple(sorted(since.items()))), sorted(long)

    def leaving(self, ranks: list[int], step: int, slower: float) -> Idle:
        """Return it with some more; whoever was tried in vain waits twice as long."""
        least = max(_FEWEST_STEPS, ceil(_TRIAL_STEPS * slower / _TRIAL_PART))
        before = {one.worker: one for one in self.away}
        for rank in ranks:
            former = before.get(rank)
            wait = least if former is None else max(2 * former.wait, least)
            ghost_s = inf if former is None else former.ghost_s
            before[rank] = Away(rank, step + wait, wait, ghost_s)
        late = tuple(pair for pair in self.late if pair[0] not in ranks)
        return Idle(tuple(before[rank] for rank in sorted(before)), late)


def weigh(
    idle: Idle,
    situation: Situation,
    outlook: StepForecast,
    min_gain: float,
    usual: Callable[[StepForecast], Decision],
) -> tuple[Idle, Decision]:
    """Decide who takes part, and then how the others share the batch.

    Cost:
        Two more splits than the usual decision; a few more, ``O(log W)``, when somebody leaves.
        A worker that stays hopeless is tried at most ``1 + log2(n / 64)`` times in ``n`` steps,
        and once more each time its ghost's step takes 30 % less than ever since it left.
    """
    fleet, now = situation.fleet, as_array(situation.shares)
    idle = idle.after(situation)
    # First of all: until the trial has been measured, a decision would rest on the old curve.
    untold = _untold(idle, situation.observations)
    if untold:
        return idle, Keep(f"{_named(fleet, untold)} is being tried", settled=False)
    out = _mask(fleet, idle.ranks(lambda one: not one.trying))
    if out.any() and not _room(fleet, out):
        # Memory may have narrowed the bounds of the others since.
        return Idle(), _all_in(outlook, now, "the others cannot hold the batch any more")
    due = [
        one.worker
        for one in idle.away
        if out[one.worker] and (one.faster or situation.step >= one.again)
    ]
    if due:
        return idle.trying(due), _trial(due, now, outlook, out)
    present = replace(outlook, bounds=_bounds(fleet, out))
    # Only workers that have been slow for a while leave, because a slow spell passes.
    idle, ranks = idle.still(_hopeless(situation, present, out), situation.step)
    if ranks and (left := _leaving(situation, present, out, ranks, min_gain)) is not None:
        move, slower = left
        return idle.leaving(ranks, situation.step, slower), move
    if out.any():
        now_s = outlook.step_s(now)
        shorter_s = now_s - outlook.best_split(*_start(outlook, now))[1]
        # Without a trial: if the others become slow, the worker is of use even as slow as it was.
        gain = shorter_s / (now_s + situation.communication_s)
        if gain > min_gain:
            return Idle(), _all_in(outlook, now, f"a step is then {gain:.1%} shorter")
    return idle, _noting(usual(present), fleet, out)


def least_shares(fleet: Fleet) -> IntArray:
    """Return the fewest samples of each worker that takes part, ``(W,)``."""
    return np.asarray(np.minimum(fleet.lower + -fleet.lower % fleet.quanta, fleet.upper))


def _trial(due: list[int], now: IntArray, outlook: StepForecast, out: Mask) -> Move:
    fleet = outlook.fleet
    tried, least = _mask(fleet, due), least_shares(fleet)
    lower, upper = _bounds(fleet, out & ~tried)
    bounded = replace(outlook, bounds=(lower, np.where(tried, least, upper)))
    split, _ = bounded.best_split(*_start(bounded, now))
    name = _named(fleet, due)
    return Move(as_shares(split), f"{name} gets its least share, to see how fast it is", False)


def _hopeless(situation: Situation, present: StepForecast, out: Mask) -> list[int]:
    """Return for whom all the others wait although it has its least share; the slowest first."""
    # Of those whose times with their least share have just been told, these are the ones who take
    # longest, as many as it takes until somebody else would finish last without them.
    fleet, model = situation.fleet, present.estimate.model
    least = least_shares(fleet)
    least_s = model.at(least)
    may = np.flatnonzero(_at_least_share(situation, least) & ~out)
    # Slowest first, because leaving out a quicker one gains nothing while a slower one stays.
    order = may[np.argsort(-least_s[may], kind="stable")]
    low, high = 0, _most_leaving(fleet, out, order)
    while low < high:
        count = (low + high + 1) // 2
        split, _ = _without(present, out, order[: count - 1].tolist())
        # Would all wait for the last one of these, if it alone stayed?
        if least_s[order[count - 1]] >= _LIMITING * model.makespan_s(np.maximum(split, 1)):
            low = count
        else:
            high = count - 1
    return [int(rank) for rank in order[:low]]


def _leaving(
    situation: Situation, present: StepForecast, out: Mask, ranks: list[int], min_gain: float
) -> tuple[Move, float] | None:
    """Return the move that leaves some more out, and how much slower a step is with them."""
    # Nothing if that gains too little, should they even be faster than believed.
    now, least = as_array(situation.shares), least_shares(situation.fleet)
    estimate = present.estimate
    surely_s = estimate.model.at(least) * (1.0 - _SURE_STD * estimate.relative_std(least))
    # The worker is given the benefit of the doubt: its time may be shorter than believed.
    with_s = min(present.best_split(*_start(present, now))[1], float(surely_s[ranks].max()))
    found, found_s = _without(present, out, ranks)
    gain = (with_s - found_s) / (present.step_s(now) + situation.communication_s)
    if not gain > min_gain:
        return None
    name = _named(situation.fleet, ranks)
    reason = f"{name} is left out, late even with its least share: a step is {gain:.1%} shorter"
    return Move(as_shares(found), reason, settled=False), with_s / found_s - 1.0


def _all_in(outlook: StepForecast, now: IntArray, why: str) -> Move:
    back, _ = outlook.best_split(*_start(outlook, now))
    return Move(as_shares(back), f"all workers take part again, as {why}", settled=False)


def _without(present: StepForecast, out: Mask, ranks: list[int]) -> tuple[IntArray, float]:
    gone = out.copy()
    gone[ranks] = True
    bounded = replace(present, bounds=_bounds(present.fleet, gone))
    return bounded.finishing_together()


def _start(outlook: StepForecast, now: IntArray) -> tuple[IntArray, float]:
    """Return the split within an outlook's bounds that is next to another one, and its step."""
    lower, upper = outlook.lower, outlook.upper
    if not ((lower <= now) & (now <= upper)).all():
        # Bounds differ with who is left out, so the split in force may lie outside of them.
        now = apportion(now.astype(np.float64), outlook.fleet.global_batch, lower, upper)
    return now, outlook.step_s(now)


def _at_least_share(situation: Situation, least: IntArray) -> Mask:
    now, told = as_array(situation.shares), situation.observations
    here = told.modelled & (told.share > 0) & (told.share <= least[told.worker])
    return np.asarray((now > 0) & (now <= least) & _mask(situation.fleet, told.worker[here]))


def _untold(idle: Idle, told: Measurements) -> list[int]:
    measured = set(told.worker[told.modelled & (told.share > 0)].tolist())
    return idle.ranks(lambda one: one.trying and one.worker not in measured)


def _room(fleet: Fleet, out: Mask) -> bool:
    return int(np.where(out, 0, _whole_upper(fleet)).sum()) >= fleet.global_batch


def _most_leaving(fleet: Fleet, out: Mask, order: IntArray) -> int:
    """Return how many of these, first to last, can leave such that the others hold the batch."""
    upper = np.where(out, 0, _whole_upper(fleet))
    left = int(upper.sum()) - np.cumsum(upper[order])
    return int(np.count_nonzero(left >= fleet.global_batch))


def _whole_upper(fleet: Fleet) -> IntArray:
    return np.asarray(fleet.upper - fleet.upper % fleet.quanta)


def _bounds(fleet: Fleet, out: Mask) -> tuple[IntArray, IntArray]:
    return np.where(out, 0, fleet.lower), np.where(out, 0, fleet.upper)


def _mask(fleet: Fleet, ranks: list[int] | IntArray) -> Mask:
    mask = np.zeros(len(fleet), dtype=np.bool_)
    mask[ranks] = True
    return mask


def _noting(decision: Decision, fleet: Fleet, out: Mask) -> Decision:
    if not out.any():
        return decision
    name = _named(fleet, np.flatnonzero(out).tolist())
    return replace(decision, reason=f"{decision.reason}; {name} is left out")


def _named(fleet: Fleet, ranks: list[int]) -> str:
    others = f" (and so for {len(ranks) - 1} more)" if len(ranks) > 1 else ""
    return f"worker {fleet.workers[ranks[0]].name}{others}"
