"""Another fleet of workers: a group has met, somebody is to leave, or workers are recognised."""

from __future__ import annotations

from dataclasses import replace

from evenstride.core.control.events import (
    FleetFormed,
    MembersChanged,
    NotMeasured,
    Recalled,
    Verdict,
)
from evenstride.core.control.state import Control, expected, serving
from evenstride.core.fleet import Worker
from evenstride.core.membership.departure import DepartureOrder, leave
from evenstride.core.membership.member_table import Member, Membership, MembershipEvent, MemberState
from evenstride.core.membership.roster import Roster
from evenstride.core.membership.worker_profiles import merged
from evenstride.core.policies.static import Uniform, is_fixed
from evenstride.core.time_model.kalman import Estimate
from evenstride.errors import ConfigError


def form(control: Control, event: FleetFormed) -> tuple[Control, Verdict]:
    roster, membership, told = _entered(control, event)
    formed = replace(
        control,
        membership=membership,
        memory=control.memory.following(event.workers, control.roster.workers),
        refused=_still_refused(control, event.workers),
        # A notice that the former group saved for is saved for again in this one.
        saved_for=frozenset(),
    )
    after, opening = serving(formed, roster, event.global_batch, event.step)
    # A single worker has nothing to search for, so none of its steps should wait.
    opening_left = control.policy.opening_steps if len(event.workers) > 1 else 0
    after = replace(after, opening_left=opening_left)
    return after, Verdict(
        event.step,
        roster.spread(opening.shares, 0),
        opening_left > 0,
        reason=told + opening.reason,
        # The first step of a pass is never modelled, so the first exchange worth having is the
        # one after the second step.
        exchange_after=2 if opening_left else control.cadence.fewest_steps,
    )


def _entered(control: Control, event: FleetFormed) -> tuple[Roster, Membership, str]:
    """Return the ranks of a new group, their standings, and why it formed.

    Raises:
        ConfigError: what has happened does not make these members of those before.
    """
    names = tuple(worker.name for worker in event.workers)
    if not event.happenings:
        return Roster.whole(event.workers), Membership.formed(event.generation, names), ""
    after, transitions = control.membership.after_all(event.happenings)
    told = "; ".join(transition.reason for transition in transitions)
    if set(after.workers) != set(names):
        strange = ", ".join(sorted(set(after.workers) ^ set(names)))
        raise ConfigError(
            f"the new group differs from what has happened ({told}) by {strange}; every worker "
            "that comes or goes must be told of"
        )
    # In the order of the group that has met: what happened does not know of new ranks.
    members = tuple(Member(name, after.standing(name)) for name in names)
    membership = Membership(event.generation, members)
    return Roster(event.workers, membership.serving), membership, told + "; "


def change(control: Control, event: MembersChanged) -> tuple[Control, Verdict]:
    membership, transitions = control.membership.after_all(event.happenings)
    assert not any(transition.regroups for transition in transitions), "those form another fleet"
    told = [transition.reason for transition in transitions]
    after = replace(control, membership=membership)
    # A second notice for a worker that is leaving already changes no share.
    if membership.serving != control.roster.serving:
        after, reason = _others_take_over(after, event.step)
        told.append(reason)
    leaves, after = _leaves(after, event)
    told += [f"{name}: {each.reason}" for name, each in leaves.items()]
    reason = "; ".join(told)
    names = control.membership.workers
    going = tuple(sorted(names.index(name) for name, each in leaves.items() if each.go))
    # A rank hears of this at the latest when it draws the step that it takes effect at.
    parting = event.effective + 1
    expect, _ = expected(after)
    return after, Verdict(
        event.effective,
        after.rank_shares if after.rank_shares != control.rank_shares else None,
        False,
        expect.expected_s,
        expect.band,
        reason,
        save_after=parting if any(each.save for each in leaves.values()) else None,
        go_after=parting if going else None,
        going=going,
        why_going=reason if going else "",
        exchange_after=control.cadence.fewest_steps,
    )


def _others_take_over(control: Control, step: int) -> tuple[Control, str]:
    """Return the control with the fleet of those who serve now, if they can hold the batch."""
    assert control.fleet is not None, "a fleet forms before its members change"
    roster = replace(control.roster, serving=control.membership.serving)
    try:
        after, opening = serving(control, roster, control.fleet.global_batch, step)
    except ConfigError as error:
        # Someone must hold the batch: a worker that cannot be replaced serves until it goes.
        return control, f"the shares stay as they are, because {error}"
    return replace(after, opening_left=0), opening.reason


def _leaves(control: Control, event: MembersChanged) -> tuple[dict[str, DepartureOrder], Control]:
    """Return what is done about each worker that is told to leave."""
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
    # A notice that is withdrawn and then comes back is saved for again.
    stay = {one.worker for one in event.happenings if one.change is MembershipEvent.WITHDRAWN}
    done = frozenset(name for name, each in leaves.items() if each.save)
    return leaves, replace(control, saved_for=(saved | done) - stay)


def recall(control: Control, event: Recalled) -> tuple[Control, Verdict]:
    assert control.fleet is not None, "a fleet forms before it recalls"
    assert control.estimate is not None, "a fleet forms with an empty estimate"
    membership = replace(control.membership, generation=event.generation)
    known = merged(event.profiles, control.profiles)
    after = replace(control, membership=membership, profiles=known)
    before = int((control.estimate.steps > 0).sum())
    after, opening = serving(after, control.roster, control.fleet.global_batch, event.step)
    assert after.estimate is not None, "a fleet has an estimate"
    new = int((after.estimate.steps > 0).sum()) - before
    reason = f"{new} of {len(control.fleet)} worker(s) are known from the checkpoint"
    keep = Verdict(
        event.effective,
        None,
        control.opening_left > 0,
        reason=reason,
        # If the opening goes on, it exchanges after two steps: the first of a pass is never
        # modelled.
        exchange_after=2 if control.opening_left else 1,
    )
    if not new:  # they may come back
        return replace(control, membership=membership, profiles=known), keep
    expect, _ = expected(after)
    return after, replace(
        keep,
        shares=after.rank_shares,
        expected_s=expect.expected_s,
        band=expect.band,
        reason=f"{reason}; {opening.reason}",
    )


def not_measured(control: Control, event: NotMeasured) -> tuple[Control, Verdict]:
    assert control.fleet is not None, "a fleet forms before it is known how it is measured"
    # A policy that acts on times would wait for some that never come.
    fixed = control.policy if is_fixed(control.policy) else Uniform()
    blank = replace(
        control,
        policy=fixed,
        estimate=Estimate.unknown(len(control.fleet)),
        communication_s=0.0,
        opening_left=0,
        not_measured=event.reason,
    )
    after, opening = serving(blank, control.roster, control.fleet.global_batch, event.step)
    expect, _ = expected(after)
    return after, Verdict(
        event.step,
        after.rank_shares if after.rank_shares != control.rank_shares else None,
        False,
        expect.expected_s,
        expect.band,
        f"steps cannot be measured ({event.reason}): {opening.reason}",
        exchange_after=control.cadence.fewest_steps,
    )


def _still_refused(control: Control, workers: tuple[Worker, ...]) -> tuple[int, ...]:
    """Return the counts of those who stay."""
    before = control.roster.workers
    counts = {worker.name: n for worker, n in zip(before, control.refused, strict=True)}
    return tuple(counts.get(worker.name, 0) for worker in workers)
