"""The seam between the training of one rank and those who train with it.

The loader and the training step ask the same of them in both kinds of run. In the ordinary one the
team stays as it was formed
(`evenstride.runtime.session.team_coordinator.TeamCoordinator`). In live mode workers come and go,
and each step is voted on (`evenstride.integrations.torchft.live_run.LiveRun`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from evenstride.core.sampling.draw import Draw
from evenstride.runtime.coordination.draw_barrier import DrawBarrier


@dataclass(frozen=True, slots=True)
class Standing:
    """This rank's place among those who train a step, and the gate that tells their shares."""

    rank: int
    gate: DrawBarrier


class Coordinator(Protocol):
    """Who trains a step together, by which shares, and whether it counts."""

    @property
    def standing(self) -> Standing:
        """Where this rank stood last; not collective."""
        ...

    def stand(self) -> Standing:
        """Agree on who takes part in the next step; called before each fetch of a first batch.

        So it is called before the first step, and after the last one of an epoch, too. Another
        object than the last time means another group, in which drawing begins anew at the committed
        position.

        Raises:
            EvenstrideError: this rank cannot train on with the others.
        """
        ...

    def exchange(self) -> None:
        """Let what was measured be decided on, if that is due; called after a step and a loop."""
        ...

    def commit(self, draw: Draw) -> None:
        """Take a step whose gradients are synchronised: count it, or let a vote keep or drop it."""
        ...

    def explain_failure(self) -> None:
        """Raise why a collective of this rank never came through, if another rank is the reason."""
        ...
