"""The one seam every way of setting the shares fits into."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeVar

from evenstride.core.arrays import Shares
from evenstride.core.fleet import Fleet, as_array
from evenstride.core.time_model.estimates import Estimate
from evenstride.core.time_model.observation import Measurements

StateT = TypeVar("StateT")


@dataclass(frozen=True, slots=True)
class Keep:
    """Leave the shares as they are; the reason is shown to the user verbatim.

    ``settled`` says that the policy expects no early change, so that the opening phase, in
    which every step waits for a decision, may end.
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
    """What a policy may look at when it decides.

    Args:
        fleet: the workers and their bounds.
        shares: what the latest decision put in force (it may not have taken effect yet).
        step: the leader's latest committed step.
        observations: what was measured since the previous exchange, each with its own share.
        estimate: the fitted time model, these observations included.
        communication_s: part of every step that no split can change, as far as it is known.
        epoch: number of the data's epoch that the next step belongs to; ``None`` if not known.
    """

    fleet: Fleet
    shares: Shares
    step: int
    observations: Measurements
    estimate: Estimate
    communication_s: float = 0.0
    epoch: int | None = None

    @property
    def in_force(self) -> Measurements:
        """What was soundly measured at the very shares in force."""
        seen, shares = self.observations, as_array(self.shares)
        current = (seen.share > 0) & (seen.share == shares[seen.worker])
        return seen.only(seen.modelled & seen.sound & current)


class Policy(Protocol[StateT]):
    """A pure pair: same state and situation in, same state and decision out.

    Implementations hold settings only and never mutate. They read no clock, no environment and
    no global; whatever must be remembered is in the state, which has to be picklable.
    """

    @property
    def opening_steps(self) -> int:
        """Steps at the start that may each wait for a decision; 0 for none."""
        ...

    def init(self, fleet: Fleet) -> tuple[StateT, Move]:
        """Return the state and the opening split for a fleet seen for the first time.

        Args:
            fleet: The workers and the bounds of their shares.
        """
        ...

    def decide(self, state: StateT, situation: Situation) -> tuple[StateT, Decision]:
        """Return the next state and what to do.

        Args:
            state: What `init` or the latest `decide` returned.
            situation: What has been measured, and the shares in force.
        """
        ...
