"""The state of the leader, and what follows from it without an event.

A `Roster` has the ranks of a generation. The ranks of it that serve are the workers of its fleet.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np

from evenstride.core.allocation.integer_splits import apportion, in_quanta
from evenstride.core.allocation.memory import FRACTION, Memory, within
from evenstride.core.control.events import Expect
from evenstride.core.control.schedule import ExchangeInterval
from evenstride.core.fleet import Fleet, Shares, Worker, as_array, as_shares
from evenstride.core.membership.member_table import Membership
from evenstride.core.membership.worker_profiles import WorkerProfile, merged, profiles_of, recalled
from evenstride.core.policy import Move, Policy, Situation, checked
from evenstride.core.time_model.estimates import CurveEstimates, Estimate
from evenstride.core.time_model.observation import Measurements, PeakMemory
from evenstride.errors import InfeasibleShares

T = TypeVar("T")

# How far a step may deviate from its expected time before its rank requests an exchange: this
# many standard deviations of its noise, and at least this fraction of the time.
_BAND_STD, _BAND_PART = 5.0, 0.15


@dataclass(frozen=True, slots=True)
class Roster:
    """All ranks, some of which may get no samples.

    Policies and estimates see only the fleet of serving ranks, so they need not handle departures.
    """

    workers: tuple[Worker, ...]  # of all ranks, in rank order
    serving: tuple[int, ...]  # the ranks that get samples, ascending

    @classmethod
    def whole(cls, workers: tuple[Worker, ...]) -> Roster:
        return cls(workers, tuple(range(len(workers))))

    @property
    def all_serve(self) -> bool:
        return len(self.serving) == len(self.workers)

    def fleet(self, global_batch: int) -> Fleet:
        """Return the fleet of serving ranks; `InfeasibleShares` if they cannot hold the batch."""
        return Fleet(tuple(self.workers[rank] for rank in self.serving), global_batch)

    def spread(self, values: tuple[T, ...], nothing: T) -> tuple[T, ...]:
        """Return a value for each rank, given those of the fleet."""
        if self.all_serve:
            return values
        of_ranks = [nothing] * len(self.workers)
        for rank, value in zip(self.serving, values, strict=True):
            of_ranks[rank] = value
        return tuple(of_ranks)

    def inward(self, measured: Measurements) -> Measurements:
        """Return the measurements of the serving ranks, numbered as in the fleet."""
        if self.all_serve:
            return measured
        places = np.full(len(self.workers), -1, dtype=np.int64)
        places[list(self.serving)] = np.arange(len(self.serving))
        # A negative rank would count from the end.
        known = (measured.worker >= 0) & (measured.worker < len(places))
        at = np.where(known, places[np.where(known, measured.worker, 0)], -1)
        return measured.renumbered(at).only(at >= 0)


@dataclass(frozen=True, slots=True, eq=False)
class Control:
    """The state of the leader; every event replaces it as a whole.

    All shares are multiples of the workers' quanta, whatever the policy decides (`in_quanta`).
    """

    policy: Policy[Any]
    policy_state: Any = None  # of the workers that serve
    fleet: Fleet | None = None  # serving workers, with the bounds in force; ``None`` at first
    shares: Shares = ()  # of the fleet
    estimate: Estimate | None = None  # of the fleet
    cadence: ExchangeInterval = field(default_factory=ExchangeInterval)
    exchanged_at: int = 0  # step of the latest exchange
    communication_s: float = 0.0  # per step, smoothed
    opening_left: int = 0  # exchanges for which each step still waits for its decision
    # For each rank, the number of invalid observations: a time that is not a positive, finite
    # number, or an impossible share. Nothing is learned from them.
    refused: tuple[int, ...] = ()
    memory: Memory = field(default_factory=Memory)  # of all ranks
    # Fraction of each worker's limit that ``memory`` allows; ``None`` for no limit.
    memory_fraction: float | None = FRACTION
    asked: Fleet | None = None  # the fleet with the requested bounds
    roster: Roster = field(default_factory=lambda: Roster((), ()))  # all ranks
    membership: Membership = field(default_factory=Membership)
    profiles: tuple[WorkerProfile, ...] = ()  # of earlier workers
    saved_for: frozenset[str] = frozenset()
    # Whether the opening has just postponed a decision by one step.
    postponed: bool = False
    # Why steps cannot be measured; empty if they can. With a reason, the policy is a fixed one and
    # nothing is learned.
    not_measured: str = ""

    @property
    def formed(self) -> Fleet:
        """The fleet, for events that require one."""
        assert self.fleet is not None, "a fleet forms before anything else happens"
        return self.fleet

    @property
    def believed(self) -> Estimate:
        """The estimate, which exists as soon as a fleet does."""
        assert self.estimate is not None, "a fleet forms with an empty estimate"
        return self.estimate

    @property
    def generation(self) -> int:
        return self.membership.generation

    @property
    def rank_shares(self) -> Shares:
        return self.roster.spread(self.shares, 0)

    @property
    def known(self) -> tuple[WorkerProfile, ...]:
        if self.fleet is None or self.estimate is None:
            return self.profiles
        one = self.estimate
        known = profiles_of(
            self.fleet.workers,
            one.now.rows,
            one.noise,
            one.steps,
            one.seen.quantum,
            one.seen.cliffs,
        )
        return merged(self.profiles, known)

    def situation(
        self,
        step: int,
        observations: Measurements,
        *,
        epoch: int | None = None,
        epoch_over: bool = False,
        lag: int = 1,
    ) -> Situation:
        """Return what the policy decides on; see `Situation` for the arguments."""
        return Situation(
            self.formed,
            self.shares,
            step,
            observations,
            self.believed,
            self.communication_s,
            epoch=epoch,
            epoch_over=epoch_over,
            lag=lag,
        )


def allowed(shares: Shares, fleet: Fleet, *, running: bool = False) -> Shares:
    """Return the split in multiples of the workers' quanta; workers without samples stay so.

    The exception is a run (``running``) whose bounds have narrowed: it uses them if it must.
    `InfeasibleShares` if no such split exists.
    """
    if (fleet.quanta == 1).all():
        return shares
    at = as_array(shares)
    # Rounding must not add a worker that was left out, nor reject a share outside the bounds.
    lower, upper = np.minimum(fleet.lower, at), np.where(at > 0, fleet.upper, 0)
    try:
        return as_shares(in_quanta(at, lower, np.maximum(upper, at), fleet.quanta))
    except InfeasibleShares:
        if not running:
            raise
        return as_shares(in_quanta(at, fleet.lower, np.maximum(fleet.upper, at), fleet.quanta))


def expected(control: Control) -> tuple[Expect, float]:
    """Return the expected times of every rank, and the longest of them; 0 if unknown."""
    estimate, roster, at = control.believed, control.roster, as_array(control.shares)
    if not estimate.known_at(at):
        # Without expected times no rank requests an exchange; only the interval triggers one.
        nothing = (0.0,) * len(roster.workers)
        return Expect(nothing, nothing), 0.0
    # A ghost sample's time is not modelled, so the rank has no expected time.
    expected_s = np.round(np.where(at > 0, estimate.model.at(at), 0.0), 7)
    # The uncertainty of the curve counts as well: a time within it is no news.
    band = np.maximum(
        _BAND_PART, _BAND_STD * np.sqrt(estimate.noise + estimate.relative_std(at) ** 2)
    )
    expect = Expect(
        roster.spread(tuple(expected_s.tolist()), 0.0),
        roster.spread(tuple(np.round(band, 4).tolist()), 0.0),
    )
    return expect, float(expected_s.max())


def serving(
    control: Control,
    roster: Roster,
    global_batch: int,
    step: int,
    begin_with: Callable[[Fleet], Move | None] | None = None,
) -> tuple[Control, Move]:
    """Return the control with another fleet, and its opening split; `ConfigError` if impossible.

    ``step`` is the number of steps that the leader has committed. ``begin_with`` returns the split
    to begin with; ``None`` for the policy's own opening.
    """
    asked, memory = roster.fleet(global_batch), control.memory.of(roster.serving)
    fleet = memory.bound(asked) if memory.caps else asked
    # Taken before the fleet changes, so that workers that leave it are remembered as well.
    profiles = control.known
    policy_state, opening = control.policy.init(fleet)
    given = begin_with(fleet) if begin_with else None
    opening = _of_policy(opening, control, fleet) if given is None else _whole(given, fleet)
    # First what was measured in this run; profiles fill only what is still unknown.
    estimate = _remembered(control, fleet)
    if not control.not_measured:
        estimate = _recognised(estimate, fleet, profiles)
    if estimate.steps.any():
        # A policy waits until all workers are measured, so the unknown ones are guessed here. A
        # run that knows its workers then has its split before its first step.
        known = Situation(fleet, opening.shares, step, Measurements.of(()), estimate.guessed())
        policy_state, decision = control.policy.decide(policy_state, known)
        if isinstance(decision, Move):
            opening = _of_policy(decision, control, fleet)
    after = replace(
        control,
        policy_state=policy_state,
        fleet=fleet,
        asked=asked,
        roster=roster,
        shares=opening.shares,
        estimate=estimate,
        profiles=profiles,
    )
    return after, opening


def _of_policy(move: Move, control: Control, fleet: Fleet) -> Move:
    """Return a move of the policy within the bounds; `ConfigError` if it is not a split."""
    move = checked(move, control.policy, fleet)
    return _whole(replace(move, shares=within(move.shares, fleet)), fleet)


def _whole(move: Move, fleet: Fleet) -> Move:
    return replace(move, shares=allowed(move.shares, fleet))


def _remembered(control: Control, fleet: Fleet) -> Estimate:
    """Return the estimate for a new fleet, with the former workers' estimates by name."""
    unknown = Estimate.unknown(len(fleet), np.array([w.quantum is None for w in fleet.workers]))
    if control.fleet is None or control.estimate is None:
        return unknown
    former = {worker.name: rank for rank, worker in enumerate(control.fleet.workers)}
    # By name, because another generation may number its ranks differently.
    stayed = [(rank, former.get(worker.name)) for rank, worker in enumerate(fleet.workers)]
    pairs = [(rank, before) for rank, before in stayed if before is not None]
    return unknown.taking(control.estimate, pairs)


def _recognised(estimate: Estimate, fleet: Fleet, profiles: tuple[WorkerProfile, ...]) -> Estimate:
    """Return the estimate, with profiles for workers that were not measured yet."""
    found = recalled(estimate.steps, fleet.workers, profiles)
    # Only the speed is uncertain, because the shape depends on model and device.
    curves = CurveEstimates(found.curves).times(1.0, found.doubt**2)
    known = estimate.knowing(found.ranks, curves, found.noise, found.steps)
    return replace(known, seen=known.seen.shaped(found.ranks, found.quanta, found.cliffs))


def rebatched(control: Control, batch: int, step: int) -> tuple[Control, Move]:
    """Return the control with the same workers and another global batch, and its split.

    Everything learned about the workers stays. A policy that has moved the shares continues from
    shares in the same proportion; any other continues from its opening. `ConfigError` if no split
    is possible.
    """
    return serving(control, control.roster, batch, step, lambda fleet: _scaled(control, fleet))


def _scaled(control: Control, fleet: Fleet) -> Move | None:
    before = control.formed
    # Shares that are still those of the opening are computed again: scaled up, the remainder of an
    # equal split would grow with the batch.
    if _of_policy(control.policy.init(before)[1], control, before).shares == control.shares:
        return None
    at = as_array(control.shares)
    upper = np.where(at > 0, fleet.upper, 0)
    lower = np.minimum(fleet.lower, upper)
    if int(upper.sum()) < fleet.global_batch:  # workers without samples are needed now
        lower, upper = fleet.lower, fleet.upper
    shares = apportion(at.astype(np.float64), fleet.global_batch, lower, upper)
    return Move(as_shares(shares), "in proportion to the shares before")


def remember(control: Control, held: tuple[PeakMemory, ...]) -> tuple[Memory, Fleet]:
    """Return what is known about the ranks' memory, and the fleet with its bounds."""
    fleet, roster = control.formed, control.roster
    assert control.asked is not None, "the requested fleet is known once it forms"
    if control.memory_fraction is None:
        return control.memory, fleet
    memory = control.memory.learn(held, len(roster.workers), control.memory_fraction)
    # Caps also rise, so the bounds come from the requested ones, not from those in force.
    same = memory.caps == control.memory.caps
    return memory, fleet if same else memory.of(roster.serving).bound(control.asked)
