"""The interface between the training of one rank and the workers that train with it.

Loader and training step use it in both kinds of run. In an ordinary run the team stays as it
was formed (`evenstride.runtime.session.team_coordinator.TeamCoordinator`). In live mode workers
join and leave, and each step is voted on (`evenstride.integrations.torchft.live_run.LiveRun`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from evenstride.core.sampling.draw import Draw
from evenstride.runtime.coordination.draw_barrier import DrawBarrier


@dataclass(frozen=True, slots=True)
class Standing:
    """This rank's number in a step, and the draw barrier that knows the shares."""

    rank: int
    gate: DrawBarrier


class Coordinator(Protocol):
    """Decides which workers train a step, with which shares, and whether the step counts."""

    @property
    def standing(self) -> Standing:
        """Where this rank stood last. Not collective."""
        ...

    def stand(self) -> Standing:
        """Agree on the workers of the next step; called before each fetch of a first micro-batch.

        That includes the first step, and the call after the last step of an epoch. Another object
        than the last time means another group. Drawing then restarts at the committed position.

        Raises:
            EvenstrideError: this rank cannot continue to train with the others.
        """
        ...

    def exchange(self) -> None:
        """Run the exchange that is due, if any; called after each step and each loop."""
        ...

    def commit(self, draw: Draw) -> None:
        """Count a step whose gradients are synchronised, or vote on whether to keep it."""
        ...

    def explain_failure(self) -> None:
        """Raise the reason why this rank's collective failed, if another rank caused it."""
        ...
