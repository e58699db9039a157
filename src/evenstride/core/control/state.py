"""Everything the leader knows, and what follows from it without any event."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from evenstride.core.allocation.memory_caps import Memory
from evenstride.core.allocation.memory_model import FRACTION
from evenstride.core.allocation.min_max import in_quanta
from evenstride.core.arrays import Shares
from evenstride.core.control.events import Expect
from evenstride.core.control.exchange_interval import ExchangeInterval
from evenstride.core.fleet import Fleet, as_array, as_shares
from evenstride.core.membership.member_table import Membership
from evenstride.core.membership.roster import Roster
from evenstride.core.membership.worker_profiles import WorkerProfile, merged, profiles_of, recalled
from evenstride.core.policy import Move, Policy, Situation
from evenstride.core.time_model.kalman import Estimate
from evenstride.core.time_model.observation import Measurements
from evenstride.errors import InfeasibleShares

# How far a step may stray from its expected time before its rank asks for an exchange: this
# many standard deviations of its noise, and at least this part of the time.
_BAND_STD, _BAND_PART = 5.0, 0.15


@dataclass(frozen=True, slots=True, eq=False)
class Control:
    """Everything the leader knows; replaced as a whole by every event.

    ``refused`` counts, for each rank, the observations that could not be believed: those with
    a time that is not a positive, finite number, or with a share that cannot be. Nothing is learned
    from them. All shares are multiples of the workers' quanta, whatever the policy asks for
    (`in_quanta`).
    ``roster`` has all ranks, ``fleet`` those of them that serve, with the bounds that hold: those
    that were ``asked`` for, and what ``memory`` (of all ranks) allows within ``memory_fraction``
    of each worker's limit (``None`` to let it allow anything). ``policy_state``, ``shares`` and
    ``estimate`` are of the fleet. ``profiles`` are of workers that were there before.
    ``not_measured`` says why steps cannot be measured; empty if they can. The policy is a fixed one
    then, and nothing is learned.
    """

    policy: Policy[Any]
    policy_state: Any = None
    fleet: Fleet | None = None
    shares: Shares = ()
    estimate: Estimate | None = None
    cadence: ExchangeInterval = field(default_factory=ExchangeInterval)
    communication_s: float = 0.0
    opening_left: int = 0
    refused: tuple[int, ...] = ()
    memory: Memory = field(default_factory=Memory)
    memory_fraction: float | None = FRACTION
    asked: Fleet | None = None
    roster: Roster = field(default_factory=lambda: Roster((), ()))
    membership: Membership = field(default_factory=Membership)
    profiles: tuple[WorkerProfile, ...] = ()
    saved_for: frozenset[str] = frozenset()
    not_measured: str = ""

    @property
    def generation(self) -> int:
        """Of the membership: 0 for the first."""
        return self.membership.generation

    @property
    def rank_shares(self) -> Shares:
        """The shares of all ranks, 0 for those who do not serve."""
        return self.roster.spread(self.shares, 0)

    @property
    def known(self) -> tuple[WorkerProfile, ...]:
        """What is known of the workers that are here or were."""
        if self.fleet is None or self.estimate is None:
            return self.profiles
        one = self.estimate
        known = profiles_of(self.fleet.workers, one.now, one.noise, one.steps)
        return merged(self.profiles, known)

    def situation(
        self, step: int, observations: Measurements, epoch: int | None = None
    ) -> Situation:
        """Return what a policy may look at, and whoever else judges the workers of the fleet."""
        assert self.fleet is not None, "a fleet forms before it exchanges"
        assert self.estimate is not None, "a fleet forms with an empty estimate"
        return Situation(
            self.fleet,
            self.shares,
            step,
            observations,
            self.estimate,
            self.communication_s,
            epoch,
        )


def allowed(shares: Shares, fleet: Fleet, *, running: bool = False) -> Shares:
    """Return the split in multiples of the workers' quanta; whoever is left out stays so.

    Unless the others cannot do without in a run, which must go on: bounds may have narrowed.

    Raises:
        InfeasibleShares: there is no such split.
    """
    if (fleet.quanta == 1).all():
        return shares
    at = as_array(shares)
    # Rounding must not wake a worker that was left out, nor refuse a share that lies outside.
    lower, upper = np.minimum(fleet.lower, at), np.where(at > 0, fleet.upper, 0)
    try:
        return as_shares(in_quanta(at, lower, np.maximum(upper, at), fleet.quanta))
    except InfeasibleShares:
        if not running:
            raise
        return as_shares(in_quanta(at, fleet.lower, np.maximum(fleet.upper, at), fleet.quanta))


def expected(control: Control) -> tuple[Expect, float]:
    """Return what to expect of every rank, and the longest of the times; 0 if unknown."""
    estimate, shares, roster = control.estimate, control.shares, control.roster
    assert estimate is not None, "a fleet forms with an empty estimate"
    at = as_array(shares)
    if not estimate.known_at(at):
        # Without expectations no rank asks for an exchange; the interval alone brings the next one.
        nothing = (0.0,) * len(roster.workers)
        return Expect(nothing, nothing), 0.0
    # A ghost's time is not modelled, so nothing is expected of it.
    expected_s = np.round(np.where(at > 0, estimate.model.at(at), 0.0), 7)
    # The doubt about the curve counts as well: a time within it is no news.
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
    """Return the control with another fleet, and its opening split.

    Args:
        control: before.
        roster: the ranks, and who of them serve.
        global_batch: samples per step.
        step: steps the leader had committed.
        begin_with: returns the split to begin with; ``None``, for the policy's own opening.

    Raises:
        ConfigError: the fleet cannot be served.
    """
    asked, memory = roster.fleet(global_batch), control.memory.of(roster.serving)
    fleet = memory.bound(asked) if memory.caps else asked
    # Taken before the fleet changes, so that workers that leave it are remembered as well.
    profiles = control.known
    policy_state, opening = control.policy.init(fleet)
    opening = (begin_with(fleet) if begin_with else None) or opening
    opening = replace(opening, shares=allowed(opening.shares, fleet))
    # First what was measured in this run; profiles fill only what is then still unknown.
    estimate = _remembered(control, fleet)
    if not control.not_measured:
        estimate = estimate.knowing(*recalled(estimate.steps, fleet.workers, profiles))
    if estimate.steps.any():
        # A policy waits until all workers are measured, so the unknown ones are guessed here. With
        # that, a run that knows its workers has its split before its first step.
        known = Situation(fleet, opening.shares, step, Measurements.of(()), estimate.guessed())
        policy_state, decision = control.policy.decide(policy_state, known)
        if isinstance(decision, Move):
            opening = replace(decision, shares=allowed(decision.shares, fleet))
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


def _remembered(control: Control, fleet: Fleet) -> Estimate:
    """Return what is known of a new fleet's workers: those of the one before, by their names."""
    unknown = Estimate.unknown(len(fleet))
    if control.fleet is None or control.estimate is None:
        return unknown
    former = {worker.name: rank for rank, worker in enumerate(control.fleet.workers)}
    # By name, because another generation may number its ranks differently.
    stayed = [(rank, former.get(worker.name)) for rank, worker in enumerate(fleet.workers)]
    pairs = [(rank, before) for rank, before in stayed if before is not None]
    return unknown.taking(control.estimate, pairs)
