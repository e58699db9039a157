"""The marks of a step whose gradients another framework computes.

There is no loss of torch then, so no hook can see the backward pass. The integration says where
the step is. Its `Stride` has ``engine="none"``. Only one thread at a time may call.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch

from evenstride.errors import UsageError
from evenstride.runtime.loss.batch_in_hand import StepEvent


class SteppedRun(Protocol):
    """The part of a `Stride` that the marks use, so that they need not import it."""

    _session: Any  # a `RankSession`


class OutsideStep:
    """Marks of the current step: gradients ready, then summed over the ranks, then applied."""

    def __init__(self, run: SteppedRun) -> None:
        session = run._session
        self._step, self._clock = session.step, session.state.clock
        self._world_size: int = session.team.world_size
        self._again = False  # whether a step that is committed already is averaged again

    @property
    def committed(self) -> bool:
        """Whether the gradients of the current batch are summed."""
        return bool(self._step.batch.committed)

    def ready(self, reduction: str) -> float:
        """Mark that this rank's gradients are complete; return their factor in the sum.

        Args:
            reduction: ``mean`` or ``sum``; see `Stride.scale`.

        Raises:
            UsageError: There is no batch.
        """
        batch = self._step.batch
        if batch.draw is None:
            raise UsageError(
                "gradients were averaged outside the training loop; do it once per batch, inside "
                "`for batch in loader:`"
            )
        self._again = batch.committed
        if self._again:  # the gradients of another optimizer
            self._clock.timer.wait_began()
        else:
            self._clock.timer.gradients_ready()
        # In float64, because this is the factor itself and no loss.
        factor = self._step.scaling.scale(torch.ones((), dtype=torch.float64), None, reduction)
        batch.happened(StepEvent.BACKWARD_BEGINS)
        batch.happened(StepEvent.GRADIENTS_READY)
        return float(factor) / self._world_size

    def summed(self) -> None:
        """Mark that the gradients of all ranks are summed, which commits the step."""
        if self._again:
            self._clock.timer.wait_ended()
        else:
            self._step.backward.synchronised()

    def applied(self) -> None:
        """Mark that the weights are updated."""
        self._step.batch.happened(StepEvent.OPTIMIZER_STEPS)

    def spoil(self) -> None:
        """Mark that this step is no measure of the rank's speed."""
        self._clock.timer.spoil()
