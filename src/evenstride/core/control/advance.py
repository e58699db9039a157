"""The whole decision path as one function: ``advance(state, event) -> (state, verdict)``.

The leader's runtime, the simulator and the replay of a trace all call this very function. A
shell turns what happens into events, lets all ranks apply the verdict, and remembers nothing
that matters: the same events always give the same verdicts.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from evenstride.core.allocation.memory_caps import Memory, within
from evenstride.core.allocation.memory_model import PeakMemory
from evenstride.core.arrays import IntArray, Mask
from evenstride.core.control.batch_size import epoch_ended
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
from evenstride.core.control.fleet_changes import change, form, not_measured, recall
from evenstride.core.control.state import Control, allowed, expected
from evenstride.core.fleet import Fleet
from evenstride.core.policy import Move
from evenstride.core.time_model.observation import Measurements, communication_s

_SMOOTHING = 0.3  # of the communication time, per exchange


def advance(control: Control, event: Event) -> tuple[Control, Verdict]:
    """Return the next state of the control, and what all ranks must now do.

    Raises:
        ConfigError: the fleet cannot be served (`FleetFormed` only); the state is unchanged.
    """
    match event:
        case FleetFormed():
            return form(control, event)
        case Exchanged():
            return _decide(control, event)
        case MembersChanged():
            return change(control, event)
        case Recalled():
            return recall(control, event)
        case EpochEnded():
            return epoch_ended(control, event)
        case NotMeasured():
            return not_measured(control, event)
        case OpeningSkipped():
            following = control.cadence.fewest_steps
            verdict = Verdict(event.step, None, exchange_after=following, judges=False)
            return replace(control, opening_left=0), verdict


def learn(control: Control, event: Exchanged) -> Control:
    """Return what an exchange teaches, with nothing decided yet.

    For those who look at a run, as what was decided is in its trace; `advance` decides as well.
    """
    return _learn(control, event)[0]


def _learn(control: Control, event: Exchanged) -> tuple[Control, Measurements, Mask]:
    """Return what is known then, what those who serve measured, and which reports were sound."""
    assert control.fleet is not None, "a fleet forms before it exchanges"
    assert control.estimate is not None, "a fleet forms with an empty estimate"
    # Checked before anything is learned: a filter that has taken in one nan never loses it.
    sound = event.observations.sound & _possible(event.observations, control)
    # Estimates hold only the workers that serve; the ghosts of the others say nothing of speed.
    measured = control.roster.inward(event.observations.only(sound))
    memory, fleet = _remember(control, event.memory)
    after = replace(
        control,
        fleet=fleet,
        estimate=control.estimate.learn(measured),
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
    situation = control.situation(event.step, measured, event.epoch)
    fleet, shared_s = situation.fleet, control.communication_s
    policy_state, decision = control.policy.decide(control.policy_state, situation)
    shares = decision.shares if isinstance(decision, Move) else control.shares
    # Also for a policy that keeps its shares: memory may have narrowed the bounds since it set
    # them. `running`, because a run must go on even with a worker that the policy had left out.
    shares = allowed(within(shares, fleet), fleet, running=True)
    moved = shares != control.shares
    # A settled policy expects no early change, so no more steps need to wait for decisions.
    opening_left = 0 if decision.settled else max(0, control.opening_left - 1)
    after = replace(control, policy_state=policy_state, shares=shares, opening_left=opening_left)
    # For the new shares, because a rank judges its steps at the share that holds next.
    expect, longest_s = expected(after)
    step_s = longest_s + shared_s if longest_s else 0.0
    # A policy that has not settled may move soon, so the interval must not double yet.
    cadence = control.cadence.following(changed=moved or not decision.settled, step_s=step_s)
    after = replace(after, cadence=cadence)
    reason = decision.reason + control.memory.reason(
        before.memory, control.roster.workers, fleet.global_batch
    )
    if not sound.all():
        reason += f" (refused {int((~sound).sum())} impossible report(s))"
    return after, Verdict(
        event.effective,
        after.rank_shares if moved else None,
        opening_left > 0,
        expect.expected_s,
        expect.band,
        reason,
        exchange_after=1 if opening_left else cadence.steps,
    )


def _remember(control: Control, held: tuple[PeakMemory, ...]) -> tuple[Memory, Fleet]:
    """Return what is known of the ranks' memory, and the fleet that it bounds."""
    fleet, asked, roster = control.fleet, control.asked, control.roster
    assert fleet is not None, "a fleet forms before it exchanges"
    assert asked is not None, "it is what was asked for when it formed"
    if control.memory_fraction is None:
        return control.memory, fleet
    memory = control.memory.learn(held, len(roster.workers), control.memory_fraction)
    # Caps also rise, so the bounds are made from those asked for, not from those in force.
    same = memory.caps == control.memory.caps
    return memory, fleet if same else memory.of(roster.serving).bound(asked)


def _possible(told: Measurements, control: Control) -> Mask:
    """Return which observations are of ranks that there are, at shares that there can be."""
    assert control.fleet is not None, "a fleet forms before it exchanges"
    # A negative rank would count from the end and teach another worker.
    here = (told.worker >= 0) & (told.worker < len(control.roster.workers))
    return np.asarray(here & (told.share >= 0) & (told.share <= control.fleet.global_batch))


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
