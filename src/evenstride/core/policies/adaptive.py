"""Our policy: equal finish times under the fitted curves, if the change is worth it.

With ``allow_idle`` it also leaves out a worker that is slowest even with its smallest share, and
tries it again later (`weigh`). A worker with a share of 0 still runs one ghost sample through both
passes, because the collectives of the gradient need every rank. So leaving it out reduces its work
from its smallest share to one sample, and no further. That helps if the smallest share is more than
one sample, because of ``min_share`` or a quantum. A fixed time stays the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import ceil, inf

import numpy as np

from evenstride.core.allocation.integer_splits import apportion
from evenstride.core.allocation.recurring_speeds import RecurringSpeeds
from evenstride.core.allocation.speedup import equal_split, split_by
from evenstride.core.allocation.step_forecast import StepForecast
from evenstride.core.arrays import FloatArray, IntArray, Mask
from evenstride.core.fleet import Fleet, as_array, as_shares
from evenstride.core.formatting import signed_part
from evenstride.core.policies.local_search import LocalSearch
from evenstride.core.policies.measured_splits import Supervisor, fits
from evenstride.core.policies.speed_averages import SpeedAverages
from evenstride.core.policy import Decision, Keep, Move, Situation
from evenstride.core.spec import check_settings, within
from evenstride.core.time_model.observation import Measurements
from evenstride.core.time_model.pooling import Kinds, pooled, with_shared_cliffs

# Uncertainty below which measurements need not be frequent.
_SETTLED_DOUBT = 0.02
# A share that should be larger by this factor says too little about its worker's speed: a wrong
# estimate would never be corrected.
_STARVED = 3
# Uncertainty at which no move may look worth it.
_BLOCKING = 0.10
# Smallest gain for which to follow the first step of a run, which may start other things.
_FIRST_GAIN = 0.2
# Part of a step by which a worker finishes early if its curve may be wrong.
_EARLY = 0.10
# If each of so many steps or more had new shares, the shares stay for one.
_MOST_MOVES = 6
# Number of steps that may each wait for a decision, the maximum for every policy.
_MOST_OPENING = 8

# A worker is left out if a step gets shorter even if its time is this many standard deviations
# shorter than estimated.
_SURE_STD = 2.0
# It is tried after this many steps, and each further time after twice as many. It is tried later if
# a trial is expensive: a trial takes about this many steps, and may cost this fraction of the steps
# before it.
_FEWEST_STEPS, _TRIAL_STEPS, _TRIAL_PART = 64, 8, 0.05
# Number of steps that a slow spell may last.
_SPELL_STEPS = 32
# It is tried at once if a ghost step takes less than this fraction of its former time.
_FASTER = 0.7
# Equally slow workers are left out together, and rounding must not separate them.
_LIMITING = 1.0 - 1e-9


@dataclass(frozen=True, slots=True)
class Adaptive:
    """Split again if that shortens the expected step by more than a small threshold.

    The published rules use throughput. They under-correct if part of a step does not scale with
    the share. Here the curves themselves are fitted (`Estimate`), workers of one kind share their
    evidence (`pooled`), and the exact integer optimum is computed (`equal_finish`). It is adopted
    if it reduces the *expected maximum* of the uncertain times. That keeps a split that looks
    uneven only because of noise (`expected_max`).
    """

    # Smallest gain for which to change the split, as a fraction of the step time. It is small
    # because a change costs almost nothing; the expected maximum keeps noise from moving the split.
    # (At 2 %, a wrong first step of 1.7 % was kept permanently.)
    min_gain: float = field(default=0.005, metadata=within(float, 0, 1))
    # Number of first steps that may each wait for a decision. After the first, only a large gain
    # counts, so nearly equal workers have two such decisions. More of them gain nothing in
    # simulations, where decisions are free. A leader with a tenth of a core takes 0.1 s for one.
    opening_steps: int = field(default=3, metadata=within(int, 0, _MOST_OPENING))
    # Number of standard deviations of its own noise by which a worker should finish early. If the
    # noise of the workers differs, 1 makes the steps shorter, because the latest worker counts (3.5
    # % in ``unequal-noise.yaml``), and their means less equal (6 % there). 0 balances the mean
    # times.
    noise_margin: float = field(default=0.0, metadata=within(float, 0, 10))
    # 1 to leave out a worker that is the slowest even with its smallest share. It still runs one
    # sample, so this helps if its ``min_share`` or quantum is larger than one. It is tried again
    # from time to time (see `weigh`). 0 to never leave one out.
    allow_idle: int = field(default=0, metadata=within(int, 0, 1))

    def __post_init__(self) -> None:
        check_settings("policy adaptive", self)

    def init(self, fleet: Fleet) -> tuple[AdaptiveState, Move]:
        """Return the split by declared resources, or the equal split: no times are known yet."""
        # FLOP/s first, because cores say little about a fleet with GPUs.
        declared = split_by("flops", fleet) or split_by("cores", fleet)
        if declared is not None:
            opening = "opening: split by declared resources until times are measured"
            return AdaptiveState(), Move(declared, opening, False)
        opening = "opening: equal split until times are measured"
        return AdaptiveState(), Move(equal_split(fleet), opening, False)

    def decide(self, state: AdaptiveState, situation: Situation) -> tuple[AdaptiveState, Decision]:
        state, decision = self._by_curves(state, situation)
        if not state.may_average(situation):
            return replace(state, averages=state.averages.aside()), decision
        averages, decision = state.averages.decide(situation, decision)
        return replace(state, averages=averages), decision

    def _by_curves(
        self, state: AdaptiveState, situation: Situation
    ) -> tuple[AdaptiveState, Decision]:
        """Decide by the fitted curves, and by measured splits where these show more."""
        fleet, estimate = situation.fleet, situation.estimate
        if not estimate.known:
            unknown = fleet.workers[int(np.argmin(estimate.steps))].name
            reason = f"no step of worker {unknown} has been measured yet"
            return state, Keep(reason, settled=False)
        state = state.after(situation)
        now = as_array(situation.shares)
        # A worker with a share of 0 runs one sample.
        at = np.maximum(now, 1) if self.allow_idle else now
        kinds = Kinds.of(estimate, at, state.kinds)
        known = with_shared_cliffs(pooled(estimate, at, kinds), kinds.each)
        outlook = StepForecast(known, fleet, self.noise_margin).daring(now)
        unclear = estimate.seen.unclear
        recurring = None
        if not (unclear.any() or state.idle.away or state.supervisor.overdrawn):
            recurring = _for_recurring(outlook, situation, self.min_gain)
        state = replace(state, kinds=kinds, recurs=recurring is not None)
        if recurring is not None:
            return state, recurring
        state, measured = _by_measured_steps(state, situation, known.seen.limit)
        if measured is not None:
            return state, measured
        if unclear.any():
            some = fleet.workers[int(unclear.argmax())].name
            reason = (
                f"worker {some} is slow with more samples: its next step shows whether it stays"
            )
            return state, Keep(reason, settled=False)

        def usual(outlook: StepForecast) -> Decision:
            return self._compare(outlook, situation, state.supervisor)

        if not self.allow_idle:
            return state, usual(outlook)
        idle, decision = weigh(state.idle, situation, outlook, self.min_gain, usual)
        return replace(state, idle=idle), decision

    def _good_enough(
        self, outlook: StepForecast, now: IntArray, now_s: float, gain_s: float, *, rests: bool
    ) -> bool:
        """Return whether the decision is to keep the split, without a search for the best one."""
        model, at = outlook.estimate.model, np.maximum(now, 1)
        each_s = model.at(at)
        longest_s = float(each_s.max())
        # Otherwise a trial may be due, or a worker may be starved, although no split gains much.
        sure = now_s / longest_s - 1.0 < _SETTLED_DOUBT
        sure = sure and not (rests and (each_s < (1.0 - _EARLY) * longest_s).any())
        return (
            sure
            and not outlook.may_reach(now_s - gain_s)
            and bool((model.at(_STARVED * at + 1) > longest_s).all())
        )

    def _compare(
        self, outlook: StepForecast, situation: Situation, supervisor: Supervisor
    ) -> Decision:
        fleet, estimate, now = situation.fleet, outlook.estimate, as_array(situation.shares)
        now_s = outlook.step_s(now)
        step_s = now_s + situation.communication_s
        rests = supervisor.rests(situation)
        if self._good_enough(outlook, now, now_s, self.min_gain * step_s, rests=rests):
            return Keep(f"no split would make a step {self.min_gain:.1%} shorter", settled=True)
        best, best_s = outlook.best_split(now, now_s)
        # A fraction of the whole step: if communication dominates, shorter busy times gain little.
        gain = (now_s - best_s) / step_s
        doubt = best_s / estimate.model.makespan_s(np.maximum(best, 1)) - 1.0
        starved = np.flatnonzero(best > _STARVED * np.maximum(now, 1))
        # Only if it costs almost nothing: with one sample of many, no step would ever correct the
        # worker's estimate.
        if len(starved) and -self.min_gain <= gain <= self.min_gain:
            some = fleet.workers[int(starved[0])].name
            reason = f"worker {some} gets more, because its share is too small to measure its speed"
            return Move(as_shares(best), reason, settled=False)
        if gain <= self.min_gain:
            # With accurate curves, no gain means that the split has been found.
            trial = outlook.trial(now) if doubt > _BLOCKING else None
            # A wrong curve may also be certain: nothing contradicts it at shares that stay.
            if trial is None and rests:
                trial = outlook.probe(now, _EARLY, supervisor.risk(situation))
            return self._without_gain(outlook, now, trial, gain, doubt)
        if situation.step == 1 and gain < _FIRST_GAIN:
            reason = f"a split that is {signed_part(gain)} by the first step needs a second one"
            return Keep(reason, settled=False)
        first_s = estimate.firsts.split_s(best)
        if first_s > 0:
            best, best_s = _worth(outlook, situation, supervisor, (best, best_s))
            if best_s >= now_s:
                reason = f"a better split would gain {signed_part(gain)}, but its first step costs "
                return Keep(f"{reason}{first_s:.2g} s")
            gain = (now_s - best_s) / step_s
        slowest = fleet.workers[int(np.argmax(estimate.model.at(np.maximum(now, 1))))].name
        reason = (
            f"worker {slowest} finishes last: step {step_s * 1e3:.1f} ms -> "
            f"{(step_s - now_s + best_s) * 1e3:.1f} ms expected ({gain:.1%} less)"
        )
        return Move(as_shares(best), reason, settled=False)

    def _without_gain(
        self,
        outlook: StepForecast,
        now: IntArray,
        trial: IntArray | None,
        gain: float,
        doubt: float,
    ) -> Decision:
        """Return the decision where no split gains enough."""
        if trial is not None:
            some = outlook.fleet.workers[int(np.argmax(trial - now))].name
            reason = f"worker {some} finishes early: it gets more, to measure a larger share"
            return Move(as_shares(trial), reason, settled=False)
        limit = f", below {self.min_gain:.1%}" if gain >= 0 else ""
        reason = f"the best split would be {signed_part(gain)}{limit}"
        return Keep(reason, settled=doubt < _SETTLED_DOUBT)


def _by_measured_steps(
    state: AdaptiveState, situation: Situation, limit: IntArray
) -> tuple[AdaptiveState, Decision | None]:
    """Return the decision if the measured steps leave no choice."""
    if _never_stayed(situation.estimate.recent.share):
        reason = "shares changed at each step: a second step at these shows what new shares cost"
        return state, Keep(reason, settled=False)
    if state.explained:
        return state, None
    supervisor, measured = state.supervisor.judged(situation)
    if supervisor.hold is not None and isinstance(measured, Keep):
        searched = state.search.decide(situation, supervisor, limit)
        if searched is not None:
            search, supervisor, decision = searched
            return replace(state, search=search, supervisor=supervisor), decision
    return replace(state, supervisor=supervisor), measured


def _never_stayed(shares: FloatArray) -> bool:
    """Return whether most workers got another share at each of the recorded steps, ``(n, W)``."""
    # If every step is a first one, its extra time looks like fixed time. Only a second step at the
    # same shares shows the difference.
    moved = np.count_nonzero((shares[1:] != shares[:-1]) & (shares[1:] > 0), axis=1)
    return len(moved) >= _MOST_MOVES and bool((2 * moved > shares.shape[1]).all())


def _worth(
    outlook: StepForecast,
    situation: Situation,
    supervisor: Supervisor,
    best: tuple[IntArray, float],
) -> tuple[IntArray, float]:
    """Return the split that saves most, less its slow first step; the present one if none does."""
    now, firsts = as_array(situation.shares), outlook.estimate.firsts
    steps = supervisor.lasts(situation)
    # Shares that the workers have had cost nothing.
    earlier = [split.shares for split in supervisor.left if fits(split.shares, situation.fleet)]
    splits = [best, *((shares, outlook.step_s(shares)) for shares in (now, *earlier))]
    return min(splits, key=lambda split: steps * split[1] + firsts.split_s(split[0]))


def _for_recurring(outlook: StepForecast, situation: Situation, min_gain: float) -> Decision | None:
    """Return the decision if speeds recur too fast to follow them; ``None`` otherwise."""
    now, apart = as_array(situation.shares), int(situation.observations.steps.max(initial=1))
    speeds = RecurringSpeeds.of(outlook.estimate, situation.estimate)
    if speeds is None:
        return None
    planned = speeds.next_split(situation.fleet, now, situation.lag, apart)
    if planned is None:
        return None
    least, slow, _ = outlook.estimate.seen.cliffs
    if ((slow > 0) & (planned.shares > least)).any():  # its curves know no cliffs
        return None
    gain, why = planned.gain, f"speeds change back and forth {planned.how}"
    if gain <= 2 * min_gain:
        return Keep(f"{why}: the split stays", settled=False)
    # Such splits change often, so they are worth little if each has a slow first step. Some of the
    # workers may seem to have one only because their speeds change at the same time.
    firsts = situation.estimate.firsts
    costly = 2 * np.count_nonzero(firsts.cost > 0) > len(now)
    if costly and firsts.split_s(planned.shares) > gain * outlook.step_s(now) * apart:
        return None
    return Move(as_shares(planned.shares), f"{why}: step {gain:.1%} less expected", settled=False)


@dataclass(frozen=True, slots=True)
class Away:
    """A worker that is left out or on trial."""

    worker: int  # its rank
    again: int  # step from which on it is tried
    wait: int  # number of steps for which it was, or is, left out
    # Shortest usual time of its steps with a ghost sample; infinite if there were none.
    ghost_s: float = inf
    faster: bool = False  # whether that has become much shorter, so that it is tried at once
    trying: bool = False  # whether it has its smallest share again, to be measured

    def seen(self, ghost_s: float) -> Away:
        faster = self.faster or ghost_s < _FASTER * self.ghost_s < inf
        return replace(self, ghost_s=min(ghost_s, self.ghost_s), faster=faster)


@dataclass(frozen=True, slots=True)
class Idle:
    """The workers that are left out, in order of rank, and those that may be soon."""

    away: tuple[Away, ...] = ()  # workers that are left out or on trial
    # Ranks that should be left out, with the step since which that has been so.
    late: tuple[tuple[int, int], ...] = ()

    def after(self, situation: Situation) -> Idle:
        """Return the state without workers that serve again, with new times of ghost steps."""
        now, least = as_array(situation.shares), least_shares(situation.fleet)
        reports, kept = situation.observations, []
        for one in self.away:
            share = int(now[one.worker])
            if share > (int(least[one.worker]) if one.trying else 0):
                continue
            ghosts = reports.median_s[(reports.worker == one.worker) & (reports.share == 0)]
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
        """Return the state with the ranks to leave out, and those that are left out now.

        A rank is left out after it has been slow for a while, or while it is on trial, because a
        slow spell passes.
        """
        since = {rank: dict(self.late).get(rank, step) for rank in ranks}
        tried = self.ranks(lambda one: one.trying)
        long = [r for r in ranks if r in tried or step - since[r] >= _SPELL_STEPS]
        return replace(self, late=tuple(sorted(since.items()))), sorted(long)

    def leaving(self, ranks: list[int], step: int, slower: float) -> Idle:
        """Return the state with more workers; one that failed its trial waits twice as long."""
        least = max(_FEWEST_STEPS, ceil(_TRIAL_STEPS * slower / _TRIAL_PART))
        before = {one.worker: one for one in self.away}
        for rank in ranks:
            former = before.get(rank)
            wait = least if former is None else max(2 * former.wait, least)
            ghost_s = inf if former is None else former.ghost_s
            before[rank] = Away(rank, step + wait, wait, ghost_s)
        late = tuple(pair for pair in self.late if pair[0] not in ranks)
        return Idle(tuple(before[rank] for rank in sorted(before)), late)


@dataclass(frozen=True, slots=True)
class AdaptiveState:
    """What one decision of `Adaptive` leaves to the next."""

    kinds: Kinds | None = None  # the kinds of workers that it used; ``None`` before the first.
    idle: Idle = field(default_factory=Idle)
    supervisor: Supervisor = field(default_factory=Supervisor)
    search: LocalSearch = field(default_factory=LocalSearch)
    discoveries: int = 0  # number of cliffs and waves that the curves knew
    # Whether the curves have explained since why another split took longer. Until the split that
    # they led to has been measured, the steps before it say nothing about it.
    explained: bool = False
    # Whether the split is made for speeds that recur. Each split meets other speeds then, so that
    # measured steps of two of them say nothing about which one is better.
    recurs: bool = False
    averages: SpeedAverages = field(default_factory=SpeedAverages)

    def may_average(self, situation: Situation) -> bool:
        """Whether average speeds may be followed: times depend on shares as the curves say."""
        estimate = situation.estimate
        known = estimate.known and len(estimate.recent.share) > 0
        hold = self.supervisor.hold
        tried = hold is not None and hold.trial is not None
        odd = self.idle.away or self.recurs or self.supervisor.overdrawn or tried
        # Averages change the split often. New shares must have proved to be free.
        cost = estimate.firsts.cost
        costly = cost.max(initial=0) > 0 or 2 * np.count_nonzero(cost < 0) <= len(cost)
        return bool(known and not (odd or costly or estimate.seen.discoveries))

    def after(self, situation: Situation) -> AdaptiveState:
        # A worker that is left out or on trial makes steps longer on purpose.
        if self.idle.away:
            supervisor = Supervisor()
        elif self.recurs:
            supervisor = self.supervisor.aside(situation)
        else:
            supervisor = self.supervisor.after(situation)
        discoveries = situation.estimate.seen.discoveries
        new = discoveries != self.discoveries and supervisor.pardonable
        explained = new or (self.explained and not len(situation.in_force))
        if explained or self.explained:
            supervisor = supervisor.forgiven(new=new)
        return replace(self, supervisor=supervisor, discoveries=discoveries, explained=explained)


def weigh(
    idle: Idle,
    situation: Situation,
    outlook: StepForecast,
    min_gain: float,
    usual: Callable[[StepForecast], Decision],
) -> tuple[Idle, Decision]:
    """Decide which workers serve, and then how they split the batch.

    Cost:
        Two more splits than the usual decision; a few more, ``O(log W)``, when a worker leaves.
        A worker that stays too slow is tried at most ``1 + log2(n / 64)`` times in ``n`` steps,
        and once more each time its ghost step takes 30 % less than ever since it left.
    """
    fleet, now = situation.fleet, as_array(situation.shares)
    idle = idle.after(situation)
    # First of all: until the trial is measured, a decision would use the old curve.
    unmeasured = _unmeasured(idle, situation.observations)
    if unmeasured:
        return idle, Keep(f"{_named(fleet, unmeasured)} is being tried", settled=False)
    out = _mask(fleet, idle.ranks(lambda one: not one.trying))
    if out.any() and not _room(fleet, out):
        # Memory may have narrowed the bounds of the others since.
        return Idle(), _all_in(outlook, now, "the others can no longer hold the batch")
    due = [
        one.worker
        for one in idle.away
        if out[one.worker] and (one.faster or situation.step >= one.again)
    ]
    if due:
        return idle.trying(due), _trial(due, now, outlook, out)
    present = replace(outlook, bounds=_bounds(fleet, out))
    # Only workers that have been slow for a while are left out, because a slow spell passes.
    idle, ranks = idle.still(_hopeless(situation, present, out), situation.step)
    if ranks and (left := _leaving(situation, present, out, ranks, min_gain)) is not None:
        move, slower = left
        return idle.leaving(ranks, situation.step, slower), move
    if out.any():
        now_s = outlook.step_s(now)
        shorter_s = now_s - outlook.best_split(*_start(outlook, now))[1]
        # Without a trial: if the others become slow, the worker helps even at its former speed.
        gain = shorter_s / (now_s + situation.communication_s)
        if gain > min_gain:
            return Idle(), _all_in(outlook, now, f"this makes a step {gain:.1%} shorter")
    return idle, _noting(usual(present), fleet, out)


def least_shares(fleet: Fleet) -> IntArray:
    """Return the fewest samples of each serving worker, ``(W,)``."""
    return np.asarray(np.minimum(fleet.lower + -fleet.lower % fleet.quanta, fleet.upper))


def _trial(due: list[int], now: IntArray, outlook: StepForecast, out: Mask) -> Move:
    fleet = outlook.fleet
    tried, least = _mask(fleet, due), least_shares(fleet)
    lower, upper = _bounds(fleet, out & ~tried)
    bounded = replace(outlook, bounds=(lower, np.where(tried, least, upper)))
    split, _ = bounded.best_split(*_start(bounded, now))
    name = _named(fleet, due)
    return Move(as_shares(split), f"{name} gets its smallest share, to measure its speed", False)


def _hopeless(situation: Situation, present: StepForecast, out: Mask) -> list[int]:
    """Return the workers for which all others wait despite their smallest share, slowest first."""
    # Candidates have just reported times at their smallest share. The result has as many of the
    # slowest as needed until another worker would finish last without them.
    fleet, model = situation.fleet, present.estimate.model
    least = least_shares(fleet)
    least_s = model.at(least)
    may = np.flatnonzero(_at_least_share(situation, least) & ~out)
    # Slowest first, because leaving out a faster one gains nothing while a slower one stays.
    order = may[np.argsort(-least_s[may], kind="stable")]
    low, high = 0, _most_leaving(fleet, out, order)
    while low < high:
        count = (low + high + 1) // 2
        split, _ = _without(present, out, order[: count - 1].tolist())
        # Would all wait for the last one of these if it alone stayed?
        if least_s[order[count - 1]] >= _LIMITING * model.makespan_s(np.maximum(split, 1)):
            low = count
        else:
            high = count - 1
    return [int(rank) for rank in order[:low]]


def _leaving(
    situation: Situation, present: StepForecast, out: Mask, ranks: list[int], min_gain: float
) -> tuple[Move, float] | None:
    """Return the move that leaves out more workers, and how much slower a step is with them."""
    # ``None`` if that gains too little, even if they are faster than estimated.
    now, least = as_array(situation.shares), least_shares(situation.fleet)
    estimate = present.estimate
    surely_s = estimate.model.at(least) * (1.0 - _SURE_STD * estimate.relative_std(least))
    # In favour of the worker: its time may be shorter than estimated.
    with_s = min(present.best_split(*_start(present, now))[1], float(surely_s[ranks].max()))
    found, found_s = _without(present, out, ranks)
    gain = (with_s - found_s) / (present.step_s(now) + situation.communication_s)
    if not gain > min_gain:
        return None
    name = _named(situation.fleet, ranks)
    reason = f"{name} gets no samples, slow even at its smallest share: step {gain:.1%} shorter"
    return Move(as_shares(found), reason, settled=False), with_s / found_s - 1.0


def _all_in(outlook: StepForecast, now: IntArray, why: str) -> Move:
    back, _ = outlook.best_split(*_start(outlook, now))
    return Move(as_shares(back), f"all workers get samples again, because {why}", settled=False)


def _without(present: StepForecast, out: Mask, ranks: list[int]) -> tuple[IntArray, float]:
    gone = out.copy()
    gone[ranks] = True
    bounded = replace(present, bounds=_bounds(present.fleet, gone))
    return bounded.finishing_together()


def _start(outlook: StepForecast, now: IntArray) -> tuple[IntArray, float]:
    """Return the nearest split within an outlook's bounds, and its step."""
    lower, upper = outlook.lower, outlook.upper
    if not ((lower <= now) & (now <= upper)).all():
        # Bounds depend on the workers left out, so the split in force may lie outside of them.
        now = apportion(now.astype(np.float64), outlook.fleet.global_batch, lower, upper)
    return now, outlook.step_s(now)


def _at_least_share(situation: Situation, least: IntArray) -> Mask:
    now, reports = as_array(situation.shares), situation.observations
    here = reports.modelled & (reports.share > 0) & (reports.share <= least[reports.worker])
    return np.asarray((now > 0) & (now <= least) & _mask(situation.fleet, reports.worker[here]))


def _unmeasured(idle: Idle, reports: Measurements) -> list[int]:
    measured = set(reports.worker[reports.modelled & (reports.share > 0)].tolist())
    return idle.ranks(lambda one: one.trying and one.worker not in measured)


def _room(fleet: Fleet, out: Mask) -> bool:
    return int(np.where(out, 0, _whole_upper(fleet)).sum()) >= fleet.global_batch


def _most_leaving(fleet: Fleet, out: Mask, order: IntArray) -> int:
    """Return how many of these, first to last, can leave while the others hold the batch."""
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
    return replace(decision, reason=f"{decision.reason}; {name} gets no samples")


def _named(fleet: Fleet, ranks: list[int]) -> str:
    others = f" (and {len(ranks) - 1} more)" if len(ranks) > 1 else ""
    return f"worker {fleet.workers[ranks[0]].name}{others}"
