"""The whole decision path as one function: ``advance(state, event) -> (state, verdict)``.

The leader's runtime, the simulator and the replay of a trace all call this function. A caller turns
what happens into events and makes all ranks apply the verdict. It keeps no state that affects
decisions: the same events always give the same verdicts. The functions below follow the order of
`advance`: a group forms, times arrive, members change, workers are recognised, an epoch ends with
an open batch size, and steps cannot be measured.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from evenstride.core.allocation.memory import within
from evenstride.core.allocation.step_forecast import StepForecast
from evenstride.core.control.batch_size import BatchOutlook, better_of, sizes
from evenstride.core.control.events import (
    EpochEnded,
    Event,
    Exchanged,
    FleetFormed,
    MembersChanged,
    NotMeasured,
    OpeningSkipped,
    Recalled,
    Verdict,
)
from evenstride.core.control.schedule import ExchangeInterval
from evenstride.core.control.state import (
    Control,
    Roster,
    allowed,
    expected,
    rebatched,
    remember,
    serving,
)
from evenstride.core.fleet import Fleet, IntArray, Mask, Shares, Worker, as_array
from evenstride.core.membership.member_table import (
    DepartureOrder,
    Member,
    Membership,
    MembershipEvent,
    MemberState,
    leave,
)
from evenstride.core.membership.worker_profiles import merged
from evenstride.core.policies.static import Uniform, is_fixed
from evenstride.core.policy import EVERY_STEP, Decision, Keep, Move, Situation, checked
from evenstride.core.time_model.estimates import Estimate
from evenstride.core.time_model.kalman import learn_times
from evenstride.core.time_model.observation import Measurements, communication_s
from evenstride.errors import ConfigError

_POSTPONED = Keep("opening: the first step at a batch size says nothing about speed", settled=False)
_SMOOTHING = 0.3  # factor for the communication time, per exchange


def advance(control: Control, event: Event) -> tuple[Control, Verdict]:
    """Return the next state of the control, and what all ranks must do now.

    Raises:
        ConfigError: the fleet cannot be split (`FleetFormed` only); the state is unchanged.
    """
    match event:
        case FleetFormed():
            return _form(control, event)
        case Exchanged():
            return _decide(control, event)
        case MembersChanged():
            return _change(control, event)
        case Recalled():
            return _recall(control, event)
        case EpochEnded():
            return _epoch_ended(control, event)
        case NotMeasured():
            return _not_measured(control, event)
        case OpeningSkipped():
            following = control.cadence.fewest_steps
            verdict = Verdict(event.step, None, exchange_after=following, judges=False)
            return replace(control, opening_left=0), verdict


def learn(control: Control, event: Exchanged) -> Control:
    """Return the state after an exchange without a decision, for readers of a trace."""
    return _learn(control, event)[0]


def _learn(control: Control, event: Exchanged) -> tuple[Control, Measurements, Mask]:
    """Return the state after an exchange, the serving workers' times, and the valid reports."""
    # Checked before anything is learned: a filter that has taken in a NaN never recovers.
    sound = event.observations.sound & _possible(event.observations, control)
    # Estimates hold only workers that serve; ghost samples of the others say nothing about speed.
    measured = control.roster.inward(event.observations.only(sound))
    memory, fleet = remember(control, event.memory)
    after = replace(
        control,
        fleet=fleet,
        estimate=learn_times(control.believed, measured, compiled=event.compiled),
        memory=memory,
        communication_s=_smoothed_communication(control, measured),
        refused=_refused(control, event.observations.worker[~sound]),
    )
    return after, measured, sound


def _decide(control: Control, event: Exchanged) -> tuple[Control, Verdict]:
    before = control
    # Before the check for the last exchange: the last steps may be the only ones at their share.
    control, measured, sound = _learn(before, event)
    if event.last:
        never = control.cadence.fewest_steps
        return control, Verdict(event.effective, None, reason="the run ends", exchange_after=never)
    lag = max(event.effective - event.step, 0) + 1
    situation = control.situation(
        event.step, measured, lag=lag, epoch=event.epoch, epoch_over=event.epoch_over
    )
    postponed = _too_early(control, measured)
    policy_state, decision = _decision(control, situation, postponed=postponed)
    shares = _shares(control, decision, situation.fleet)
    after = replace(
        control,
        policy_state=policy_state,
        shares=shares,
        opening_left=_opening_left(control, settled=decision.settled, postponed=postponed),
        postponed=postponed,
    )
    # For the new shares, because a rank compares its steps with the share that holds next.
    expect, longest_s = expected(after)
    moved = shares != control.shares
    cadence = _interval(control, event, longest_s, moved=moved, settled=decision.settled)
    after = replace(after, cadence=cadence, exchanged_at=event.step)
    limits = control.memory.reason(before.memory, control.roster.workers, after.formed.global_batch)
    return after, Verdict(
        event.effective,
        after.rank_shares if moved else None,
        after.opening_left > 0,
        expect.expected_s,
        expect.band,
        decision.reason + limits + _ignored(sound),
        exchange_after=1 if after.opening_left else cadence.steps,
    )


def _interval(
    control: Control, event: Exchanged, longest_s: float, *, moved: bool, settled: bool
) -> ExchangeInterval:
    """Return the next interval; ``longest_s`` is the expected time of the slowest worker."""
    step_s = longest_s + control.communication_s if longest_s else 0.0
    former_s = expected(control)[1] if moved else 0.0  # a policy that waits may move soon
    return control.cadence.following(
        # A policy that has not settled may move soon, so the interval must not double yet.
        changed=moved or not settled,
        step_s=step_s,
        gain=1 - step_s / (former_s + control.communication_s) if step_s and former_s else 1.0,
        decision_s=event.decision_s,
        passed=event.step - control.exchanged_at,
    )


def _opening_left(control: Control, *, settled: bool, postponed: bool = False) -> int:
    """Return how many further steps wait for decisions."""
    if control.opening_left == EVERY_STEP:
        return EVERY_STEP
    # A settled policy expects no early change, so no further steps wait for decisions.
    return 0 if settled else max(0, control.opening_left - (not postponed))


def _ignored(sound: Mask) -> str:
    """Return the words on reports that are not valid."""
    return "" if sound.all() else f" (ignored {int((~sound).sum())} invalid report(s))"


def _decision(control: Control, situation: Situation, *, postponed: bool) -> tuple[Any, Decision]:
    """Return the policy's next state and its decision."""
    if postponed:
        return control.policy_state, _POSTPONED
    return control.policy.decide(control.policy_state, situation)


def _shares(control: Control, decision: Decision, fleet: Fleet) -> Shares:
    """Return the fleet's next shares."""
    shares = control.shares
    if isinstance(decision, Move):
        shares = checked(decision, control.policy, fleet).shares
    # Also for a policy that keeps its shares: memory may have narrowed the bounds since. `running`,
    # because a run must go on even with a worker that the policy had left out.
    return allowed(within(shares, fleet), fleet, running=True)


def _too_early(control: Control, reports: Measurements) -> bool:
    """Return whether a decision of the opening waits for a step that says something about speed.

    On an accelerator, and of a compiled model, the first step at a new batch size says nothing.
    """
    if not control.opening_left or control.postponed:
        return False
    worked = reports.share > 0
    return bool(worked.any() and not reports.modelled[worked].any())


def _possible(reports: Measurements, control: Control) -> Mask:
    """Return which observations have an existing rank and a possible share."""
    # A negative rank would count from the end and change another worker's estimate.
    here = (reports.worker >= 0) & (reports.worker < len(control.roster.workers))
    return np.asarray(here & (reports.share >= 0) & (reports.share <= control.formed.global_batch))


def _refused(control: Control, workers: IntArray) -> tuple[int, ...]:
    known = workers[(workers >= 0) & (workers < len(control.refused))]
    if not len(known):
        return control.refused
    new = np.bincount(known, minlength=len(control.refused)).tolist()
    return tuple(before + now for before, now in zip(control.refused, new, strict=True))


def _smoothed_communication(control: Control, measured: Measurements) -> float:
    seen_s = communication_s(measured, control.shares)
    if seen_s is None:
        return control.communication_s
    before_s = control.communication_s
    return seen_s if before_s == 0 else before_s + _SMOOTHING * (seen_s - before_s)


def _form(control: Control, event: FleetFormed) -> tuple[Control, Verdict]:
    roster, membership, why = _entered(control, event)
    formed = replace(
        control,
        membership=membership,
        memory=control.memory.following(event.workers, control.roster.workers),
        refused=_still_refused(control, event.workers),
        # A notice for which the previous group saved is saved for again in this group.
        saved_for=frozenset(),
        cadence=replace(control.cadence, excess=0.0),
        exchanged_at=event.step,
    )
    after, opening = serving(formed, roster, event.global_batch, event.step)
    # A single worker has no split to search for, so no step needs to wait.
    opening_left = control.policy.opening_steps if len(event.workers) > 1 else 0
    after = replace(after, opening_left=opening_left)
    return after, Verdict(
        event.step,
        roster.spread(opening.shares, 0),
        opening_left > 0,
        reason=why + opening.reason,
        exchange_after=1 if opening_left else control.cadence.fewest_steps,
    )


def _entered(control: Control, event: FleetFormed) -> tuple[Roster, Membership, str]:
    """Return the ranks of a new group, their membership, and why the group formed."""
    names = tuple(worker.name for worker in event.workers)
    if not event.happenings:
        return Roster.whole(event.workers), Membership.formed(event.generation, names), ""
    after, transitions = control.membership.after_all(event.happenings)
    why = "; ".join(transition.reason for transition in transitions)
    if set(after.workers) != set(names):
        strange = ", ".join(sorted(set(after.workers) ^ set(names)))
        raise ConfigError(
            f"the new group does not match the reported changes ({why}): they differ in {strange}; "
            "report every worker that joins or leaves"
        )
    # In the order of the new group: the reported changes do not contain new ranks.
    members = tuple(Member(name, after.standing(name)) for name in names)
    membership = Membership(event.generation, members)
    return Roster(event.workers, membership.serving), membership, why + "; "


def _change(control: Control, event: MembersChanged) -> tuple[Control, Verdict]:
    membership, transitions = control.membership.after_all(event.happenings)
    assert not any(transition.regroups for transition in transitions), "those form another fleet"
    reasons = [transition.reason for transition in transitions]
    after = replace(control, membership=membership)
    # A second notice for a worker that is leaving already changes no share.
    if membership.serving != control.roster.serving:
        after, reason = _others_take_over(after, event.step)
        reasons.append(reason)
    leaves, after = _leaves(after, event)
    reasons += [f"{name}: {each.reason}" for name, each in leaves.items()]
    reason = "; ".join(reasons)
    names = control.membership.workers
    going = tuple(sorted(names.index(name) for name, each in leaves.items() if each.go))
    # A rank receives this at the latest when it draws the step at which it takes effect.
    parting = event.effective + 1
    verdict = _verdict(after, event.effective, reason, _moved(control, after))
    return after, replace(
        verdict,
        save_after=parting if any(each.save for each in leaves.values()) else None,
        go_after=parting if going else None,
        going=going,
        why_going=reason if going else "",
        exchange_after=control.cadence.fewest_steps,
    )


def _others_take_over(control: Control, step: int) -> tuple[Control, str]:
    """Return the control with the fleet of those that serve now, if they can hold the batch."""
    roster = replace(control.roster, serving=control.membership.serving)
    try:
        after, opening = serving(control, roster, control.formed.global_batch, step)
    except ConfigError as error:
        # A worker that cannot be replaced serves until it leaves, because the batch must be held.
        return control, f"the shares stay unchanged, because {error}"
    return replace(after, opening_left=_opening_left(control, settled=True)), opening.reason


def _leaves(control: Control, event: MembersChanged) -> tuple[dict[str, DepartureOrder], Control]:
    notices = {
        one.worker: one
        for one in event.happenings
        if one.change is MembershipEvent.NOTICE
        and control.membership.standing(one.worker)
        in (MemberState.LEAVING, MemberState.LEAVING_EARLY)
    }
    # Steps that ranks have drawn are trained before anything takes effect.
    steps = event.effective + 1 - event.step
    ahead_s = steps * (expected(control)[1] + control.communication_s)
    saved = control.saved_for
    leaves = {
        name: leave(one.left_s, event.save_s, ahead_s, final=one.final, again=name in saved)
        for name, one in notices.items()
    }
    # A notice that is withdrawn and then repeated is saved for again.
    stay = {one.worker for one in event.happenings if one.change is MembershipEvent.WITHDRAWN}
    done = frozenset(name for name, each in leaves.items() if each.save)
    return leaves, replace(control, saved_for=(saved | done) - stay)


def _recall(control: Control, event: Recalled) -> tuple[Control, Verdict]:
    membership = replace(control.membership, generation=event.generation)
    known = merged(event.profiles, control.profiles)
    after = replace(control, membership=membership, profiles=known)
    after, opening = serving(after, control.roster, control.formed.global_batch, event.step)
    new = int((after.believed.steps > 0).sum() - (control.believed.steps > 0).sum())
    reason = f"{new} of {len(control.formed)} worker(s) are known from the checkpoint"
    keep = Verdict(
        event.effective,
        None,
        control.opening_left > 0,
        reason=reason,
        exchange_after=1,
    )
    if not new:  # known workers may return later
        return replace(control, membership=membership, profiles=known), keep
    moved = _verdict(after, event.effective, f"{reason}; {opening.reason}", after.rank_shares)
    return after, replace(moved, opening=keep.opening, exchange_after=keep.exchange_after)


def _not_measured(control: Control, event: NotMeasured) -> tuple[Control, Verdict]:
    # A policy that needs times would wait for times that never arrive.
    fixed = control.policy if is_fixed(control.policy) else Uniform()
    blank = replace(
        control,
        policy=fixed,
        estimate=Estimate.unknown(len(control.formed)),
        communication_s=0.0,
        opening_left=0,
        not_measured=event.reason,
    )
    after, opening = serving(blank, control.roster, control.formed.global_batch, event.step)
    reason = f"steps cannot be measured ({event.reason}): {opening.reason}"
    verdict = _verdict(after, event.step, reason, _moved(control, after))
    return after, replace(verdict, exchange_after=control.cadence.fewest_steps)


def _still_refused(control: Control, workers: tuple[Worker, ...]) -> tuple[int, ...]:
    before = control.roster.workers
    counts = {worker.name: n for worker, n in zip(before, control.refused, strict=True)}
    return tuple(counts.get(worker.name, 0) for worker in workers)


@dataclass(frozen=True, slots=True, eq=False)
class _Prospect:
    """A possible next batch: its predicted times, its control state and its split."""

    outlook: BatchOutlook
    control: Control
    opening: Move


def _epoch_ended(control: Control, event: EpochEnded) -> tuple[Control, Verdict]:
    present = control.formed.global_batch
    nearest = min(max(present, event.low), event.high)
    # A batch outside its bounds must change, whatever the gain.
    if nearest != present:
        after, opening = rebatched(control, nearest, event.step)
        allowed_are = f"{event.low} to {event.high}" if event.low < event.high else "restored"
        why = f"global batch {present} -> {nearest} ({allowed_are})"
        return _changed(after, event, why, opening)
    now = _prospect(control, Move(control.shares, ""))
    known = now is not None and event.scale_low is not None
    others = list(_others(control, event)) if known else []
    outlooks = [one.outlook for one in others]
    best, reason = better_of(now.outlook if now else None, outlooks, event)
    if best is None:
        return _kept(control, event, reason)
    return _changed(others[best].control, event, reason, others[best].opening)


def _others(control: Control, event: EpochEnded) -> Iterator[_Prospect]:
    fleet = control.formed
    for batch in sizes(event.low, event.high, fleet.global_batch, int(fleet.quanta.max())):
        try:
            # Caps may be raised for a batch that a run must have, not for an optional one.
            if not control.memory.of(control.roster.serving).fits(control.roster.fleet(batch)):
                continue
            prospect = _prospect(*rebatched(control, batch, event.step))
        except ConfigError:  # bounds or fixed shares do not sum to it
            continue
        if prospect is not None:
            yield prospect


def _prospect(control: Control, opening: Move) -> _Prospect | None:
    """Return the prediction for a batch under a split; ``None`` if it is not known."""
    estimate, fleet = control.estimate, control.formed
    if estimate is None or not estimate.known:
        return None
    at, shared_s = as_array(opening.shares), control.communication_s
    # Ghost samples take part in the collectives: a rank with a share of 0 runs one sample.
    mean_s = estimate.model.at(np.maximum(at, 1))
    step_s = float(mean_s.max()) + shared_s
    late_s = StepForecast(estimate, fleet).step_s(at) + shared_s
    return _Prospect(BatchOutlook(fleet.global_batch, step_s, late_s), control, opening)


def _changed(
    control: Control, event: EpochEnded, why: str, opening: Move
) -> tuple[Control, Verdict]:
    # What was stable with the former batch says nothing about this one.
    cadence = control.cadence.renewed()
    after = replace(control, cadence=cadence)
    blocking = after.opening_left > 0
    return after, replace(
        _verdict(after, event.effective, opening.reason, after.rank_shares),
        opening=blocking,
        batch=control.formed.global_batch,
        why_batch=why,
        exchange_after=1 if blocking else cadence.fewest_steps,
    )


def _kept(control: Control, event: EpochEnded, reason: str) -> tuple[Control, Verdict]:
    blocking = control.opening_left > 0
    following = 1 if blocking else control.cadence.steps
    kept = _verdict(control, event.effective, reason, None)
    return control, replace(kept, opening=blocking, exchange_after=following)


def _moved(before: Control, after: Control) -> Shares | None:
    return after.rank_shares if after.rank_shares != before.rank_shares else None


def _verdict(control: Control, effective: int, reason: str, shares: Shares | None) -> Verdict:
    """Return the verdict that applies shares, with the times then expected of the ranks."""
    expect, _ = expected(control)
    return Verdict(effective, shares, expected_s=expect.expected_s, band=expect.band, reason=reason)
