"""The interface of all policies."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

import numpy as np

from evenstride.core.arrays import Shares
from evenstride.core.fleet import Fleet, as_array
from evenstride.core.time_model.estimates import Estimate
from evenstride.core.time_model.observation import Measurements
from evenstride.errors import ConfigError

StateT = TypeVar("StateT")

EVERY_STEP = 2**31
"""As `Policy.opening_steps`: every step of the run waits for its decision, settled or not.

Each step then costs an exchange, and loading its batch does not overlap with the step before. On an
accelerator and for a compiled model, the first step at a new share says nothing about speed, so a
decision follows every second step while shares change. Modes without a common step ignore it.
"""


@dataclass(frozen=True, slots=True)
class Keep:
    """Leave the shares unchanged; the reason is shown to the user verbatim.

    ``settled`` says that the policy expects no early change. The opening, in which every step
    waits for a decision, may then end.
    """

    reason: str
    settled: bool = True


@dataclass(frozen=True, slots=True)
class Move:
    """Adopt ``shares`` from the next possible step on."""

    shares: Shares
    reason: str
    settled: bool = True


Decision = Keep | Move


@dataclass(frozen=True, slots=True)
class Situation:
    """The input of a policy's decision.

    Args:
        fleet: the workers and their bounds.
        shares: the shares of the latest decision (it may not have taken effect yet).
        step: the leader's latest committed step.
        observations: what was measured since the previous exchange, each with its own share.
        estimate: the fitted time model, these observations included.
        communication_s: part of every step that does not depend on the split, as far as known.
        epoch: number of the data's epoch with the latest step; ``None`` if not known.
        lag: steps from ``step`` until a decision takes effect.
        epoch_over: whether all workers are at the end of that epoch (see `follows_epochs`). The
            decision then holds from the first step of the next.
    """

    fleet: Fleet
    shares: Shares
    step: int
    observations: Measurements
    estimate: Estimate
    communication_s: float = 0.0
    epoch: int | None = None
    lag: int = 1
    epoch_over: bool = False

    @property
    def in_force(self) -> Measurements:
        """The valid measurements at exactly the shares in force."""
        seen, shares = self.observations, as_array(self.shares)
        current = (seen.share > 0) & (seen.share == shares[seen.worker])
        return seen.only(seen.modelled & seen.sound & current)


class Policy(Protocol[StateT]):
    """Two pure methods: the same state and situation always give the same state and decision.

    Implementations hold settings only and never mutate. They read no clock, no environment and
    no global. All memory is in the state, which must be picklable.

    Two attributes are optional. With ``epoch_steps = 0``, all ranks exchange at the end of each
    epoch, and the decision holds from the first step of the next. With ``partition = "epoch"``,
    `Stride.loader` uses that partition unless it is given one.
    """

    @property
    def opening_steps(self) -> int:
        """Number of first steps that may each wait for a decision; 0 for none, or `EVERY_STEP`."""
        ...

    def init(self, fleet: Fleet) -> tuple[StateT, Move]:
        """Return the state and the opening split for a fleet seen for the first time.

        Args:
            fleet: The workers and the bounds of their shares.
        """
        ...

    def decide(self, state: StateT, situation: Situation) -> tuple[StateT, Decision]:
        """Return the next state and the decision.

        Args:
            state: What `init` or the latest `decide` returned.
            situation: The measurements, and the shares in force.
        """
        ...


def follows_epochs(policy: object) -> bool:
    """Return whether a policy decides at the end of each epoch of the data."""
    return getattr(policy, "epoch_steps", None) == 0


def checked(move: Move, policy: Policy[Any], fleet: Fleet) -> Move:
    """Return a move whose shares are Python integers that sum to the global batch.

    `ConfigError` names the policy if they are not, because a wrong split would repeat or lose
    samples, or if a share is neither 0 nor at least the worker's lower bound. The upper bounds are
    applied later, because memory may narrow them at any time.
    """
    shares: tuple[Any, ...] = tuple(move.shares)
    # Nearly always plain integers, which need no look at each one.
    plain = {*map(type, shares)} == {int}
    whole = plain or all(hasattr(share, "__index__") for share in shares)
    whole = whole and min(shares, default=0) >= 0
    if not whole or len(shares) != len(fleet) or sum(shares) != fleet.global_batch:
        raise ConfigError(
            f"policy {type(policy).__name__} returned the shares {shares}: expected {len(fleet)} "
            f"whole number(s) of at least 0 that sum to the global batch of {fleet.global_batch}"
        )
    split = shares if plain else tuple(map(int, shares))
    at = as_array(split)
    for rank in np.flatnonzero((at > 0) & (at < fleet.lower))[:1]:
        raise ConfigError(
            f"policy {type(policy).__name__} returned a share of {at[rank]} for worker "
            f"{fleet.workers[rank].name}: expected 0, or at least its min_share of "
            f"{fleet.lower[rank]}; keep the shares within fleet.lower and fleet.upper, or lower "
            "min_share"
        )
    return replace(move, shares=split)
