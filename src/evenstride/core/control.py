"""The whole decision path as one function: ``advance(state, event) -> (state, instructions)``.

The leader's runtime, the simulator and the replay of a trace all call this very function. A
shell turns what happens into events, executes the instructions in order, and remembers nothing
that matters: the same events always give the same instructions.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from evenstride.core.cadence import Cadence
from evenstride.core.caps import Held, Memory, within
from evenstride.core.curves import Mask
from evenstride.core.estimation import Estimate
from evenstride.core.fleet import Fleet, IntArray, Shares, Worker, as_array, as_shares
from evenstride.core.memory import FRACTION
from evenstride.core.observation import Measured, communication_s
from evenstride.core.policy import Move, Policy, Situation
from evenstride.core.quanta import in_quanta
from evenstride.errors import InfeasibleShares

# How far a step may stray from its expected time before its rank asks for an exchange: this
# many standard deviations of its noise, and at least this part of the time.
_BAND_STD, _BAND_PART = 5.0, 0.15
_SMOOTHING = 0.3  # of the communication time, per exchange


@dataclass(frozen=True, slots=True)
class FleetFormed:
    """A generation of workers has met and agreed on the settings.

    Args:
        generation: 0 for the first; counts changes of membership.
        step: the first step this fleet will train.
        global_batch: ``B``, samples per step.
        workers: in rank order.
    """

    generation: int
    step: int
    global_batch: int
    workers: tuple[Worker, ...]


@dataclass(frozen=True, slots=True)
class Exchanged:
    """All ranks have told the leader what they measured.

    Args:
        step: steps the leader had committed.
        effective: first step that no rank has drawn yet, so that a decision may change it.
        observations: everything measured since the exchange before.
        memory: the most memory that workers have held since then, as far as it is known.
    """

    step: int
    effective: int
    observations: Measured
    memory: tuple[Held, ...] = ()


@dataclass(frozen=True, slots=True)
class OpeningSkipped:
    """The steps at the start do not wait for decisions, because the loader prefetches."""

    step: int


Event = FleetFormed | Exchanged | OpeningSkipped


@dataclass(frozen=True, slots=True)
class SetShares:
    """Use ``shares`` from step ``effective`` on, on every rank."""

    effective: int
    shares: Shares
    reason: str


@dataclass(frozen=True, slots=True)
class KeepShares:
    """Change nothing; tell the reason."""

    reason: str


@dataclass(frozen=True, slots=True)
class Expect:
    """Let a worker ask for an exchange when its time leaves ``expected_s * (1 +- band)``.

    Both have one entry per worker; an expected time of 0 means that nothing is expected yet.
    """

    expected_s: tuple[float, ...]
    band: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class ExchangeAfter:
    """Exchange again after so many further steps of the leader.

    ``blocking`` steps wait for the exchange's decision before they are drawn; they serve to
    find the first split quickly and end with the opening phase.
    """

    steps: int
    blocking: bool


Instruction = SetShares | KeepShares | Expect | ExchangeAfter


@dataclass(frozen=True, slots=True, eq=False)
class Control:
    """Everything the leader knows; replaced as a whole by every event.

    ``refused`` counts, for each worker, the observations that could not be believed: those with
    a time that is not a positive, finite number, or with a share that cannot be. Nothing is learned
    from them. All shares are multiples of the workers' quanta, whatever the policy asks for
    (`in_quanta`).
    ``fleet`` has the bounds that hold: those that were ``asked`` for, and what ``memory`` allows
    within ``memory_fraction`` of each worker's limit (``None`` to let it allow anything).
    """

    policy: Policy[Any]
    policy_state: Any = None
    fleet: Fleet | None = None
    shares: Shares = ()
    estimate: Estimate | None = None
    cadence: Cadence = field(default_factory=Cadence)
    communication_s: float = 0.0
    generation: int = 0
    opening_left: int = 0
    refused: tuple[int, ...] = ()
    memory: Memory = field(default_factory=Memory)
    memory_fraction: float | None = FRACTION
    asked: Fleet | None = None


def advance(control: Control, event: Event) -> tuple[Control, tuple[Instruction, ...]]:
    """Return the next state of the control and what the shell must now do, in order.

    Raises:
        ConfigError: the fleet cannot be served (`FleetFormed` only); the state is unchanged.
    """
    match event:
        case FleetFormed():
            return _form(control, event)
        case Exchanged():
            return _decide(control, event)
        case OpeningSkipped():
            after = ExchangeAfter(control.cadence.fewest_steps, False)
            return replace(control, opening_left=0), (after,)


def _form(control: Control, event: FleetFormed) -> tuple[Control, tuple[Instruction, ...]]:
    asked = Fleet(event.workers, event.global_batch)
    memory = control.memory.following(asked, control.asked)
    fleet = memory.bound(asked) if memory.caps else asked
    policy_state, opening = control.policy.init(fleet)
    opening = replace(opening, shares=_allowed(opening.shares, fleet))
    estimate = _remembered(control, fleet)
    if estimate.steps.any():
        known = Situation(fleet, opening.shares, event.step, Measured.of(()), estimate.guessed())
        policy_state, decision = control.policy.decide(policy_state, known)
        if isinstance(decision, Move):
            opening = replace(decision, shares=_allowed(decision.shares, fleet))
    opening_left = control.policy.opening_steps if len(fleet) > 1 else 0
    after = replace(
        control,
        policy_state=policy_state,
        fleet=fleet,
        asked=asked,
        memory=memory,
        shares=opening.shares,
        estimate=estimate,
        generation=event.generation,
        opening_left=opening_left,
        refused=_still_refused(control, fleet),
    )
    # The first step of a pass is never modelled, so the first exchange worth having is the
    # one after the second step.
    first = ExchangeAfter(2 if opening_left else control.cadence.fewest_steps, opening_left > 0)
    return after, (SetShares(event.step, opening.shares, opening.reason), first)


def _remembered(control: Control, fleet: Fleet) -> Estimate:
    """Return what is known of a new fleet's workers: those of the one before, by their names."""
    unknown = Estimate.unknown(len(fleet))
    if control.fleet is None or control.estimate is None:
        return unknown
    former = {worker.name: rank for rank, worker in enumerate(control.fleet.workers)}
    stayed = [(rank, former.get(worker.name)) for rank, worker in enumerate(fleet.workers)]
    pairs = [(rank, before) for rank, before in stayed if before is not None]
    return unknown.taking(control.estimate, pairs)


def _decide(control: Control, event: Exchanged) -> tuple[Control, tuple[Instruction, ...]]:
    assert control.fleet is not None, "a fleet forms before it exchanges"
    assert control.estimate is not None, "a fleet forms with an empty estimate"
    sound = event.observations.sound & _possible(event.observations, control.fleet)
    measured = event.observations.only(sound)
    estimate = control.estimate.learn(measured)
    memory, fleet = _remember(control, event.memory)
    shared_s = _smoothed_communication(control, measured)
    situation = Situation(fleet, control.shares, event.step, measured, estimate, shared_s)
    policy_state, decision = control.policy.decide(control.policy_state, situation)
    shares = decision.shares if isinstance(decision, Move) else control.shares
    shares = _allowed(within(shares, fleet), fleet, running=True)
    moved = shares != control.shares
    opening_left = 0 if decision.settled else max(0, control.opening_left - 1)
    expect, longest_s = _expect(estimate, shares)
    step_s = longest_s + shared_s if longest_s else 0.0
    cadence = control.cadence.following(changed=moved or not decision.settled, step_s=step_s)
    after = replace(
        control,
        policy_state=policy_state,
        fleet=fleet,
        shares=shares,
        estimate=estimate,
        memory=memory,
        opening_left=opening_left,
        cadence=cadence,
        communication_s=shared_s,
        refused=_refused(control, event.observations.worker[~sound]),
    )
    reason = decision.reason + memory.reason(control.memory, fleet)
    if not sound.all():
        reason += f" (refused {int((~sound).sum())} impossible report(s))"
    verdict: Instruction = (
        SetShares(event.effective, shares, reason) if moved else KeepShares(reason)
    )
    following = ExchangeAfter(1, True) if opening_left else ExchangeAfter(cadence.steps, False)
    return after, (verdict, expect, following)


def _remember(control: Control, held: tuple[Held, ...]) -> tuple[Memory, Fleet]:
    """Return what is known of the workers' memory, and the fleet that it bounds."""
    fleet, asked = control.fleet, control.asked
    assert fleet is not None, "a fleet forms before it exchanges"
    assert asked is not None, "it is what was asked for when it formed"
    if control.memory_fraction is None:
        return control.memory, fleet
    memory = control.memory.learn(held, len(fleet), control.memory_fraction)
    return memory, fleet if memory.caps == control.memory.caps else memory.bound(asked)


def _possible(told: Measured, fleet: Fleet) -> Mask:
    """Return which observations are of workers that there are, at shares that there can be."""
    here = (told.worker >= 0) & (told.worker < len(fleet))
    return np.asarray(here & (told.share >= 0) & (told.share <= fleet.global_batch))


def _allowed(shares: Shares, fleet: Fleet, *, running: bool = False) -> Shares:
    """Return the split in multiples of the workers' quanta; whoever is left out stays so.

    Unless the others cannot do without in a run, which must go on: bounds may have narrowed.

    Raises:
        InfeasibleShares: there is no such split.
    """
    if (fleet.quanta == 1).all():
        return shares
    at = as_array(shares)
    lower, upper = np.minimum(fleet.lower, at), np.where(at > 0, fleet.upper, 0)
    try:
        return as_shares(in_quanta(at, lower, np.maximum(upper, at), fleet.quanta))
    except InfeasibleShares:
        if not running:
            raise
        return as_shares(in_quanta(at, fleet.lower, np.maximum(fleet.upper, at), fleet.quanta))


def _still_refused(control: Control, fleet: Fleet) -> tuple[int, ...]:
    """Return the counts of those who stay."""
    before = control.fleet.workers if control.fleet is not None else ()
    counts = {worker.name: n for worker, n in zip(before, control.refused, strict=True)}
    return tuple(counts.get(worker.name, 0) for worker in fleet.workers)


def _refused(control: Control, workers: IntArray) -> tuple[int, ...]:
    known = workers[(workers >= 0) & (workers < len(control.shares))]
    if not len(known):
        return control.refused
    new = np.bincount(known, minlength=len(control.shares)).tolist()
    return tuple(before + now for before, now in zip(control.refused, new, strict=True))


def _smoothed_communication(control: Control, measured: Measured) -> float:
    seen_s = communication_s(measured, control.shares)
    if seen_s is None:
        return control.communication_s
    before_s = control.communication_s
    return seen_s if before_s == 0 else before_s + _SMOOTHING * (seen_s - before_s)


def _expect(estimate: Estimate, shares: Shares) -> tuple[Expect, float]:
    """Return what to expect of every worker, and the longest of the times; 0 if unknown."""
    at = as_array(shares)
    if not estimate.known_at(at):
        return Expect((0.0,) * len(shares), (0.0,) * len(shares)), 0.0
    expected_s = np.round(np.where(at > 0, estimate.model.at(at), 0.0), 7)
    band = np.maximum(
        _BAND_PART, _BAND_STD * np.sqrt(estimate.noise + estimate.relative_std(at) ** 2)
    )
    expect = Expect(tuple(expected_s.tolist()), tuple(np.round(band, 4).tolist()))
    return expect, float(expected_s.max())
