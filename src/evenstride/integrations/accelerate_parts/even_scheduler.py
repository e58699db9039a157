"""Prepared learning rate schedulers, whose pace follows the global batch."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from accelerate.scheduler import AcceleratedScheduler
from accelerate.state import AcceleratorState

from evenstride.integrations.accelerate_parts.even_batches import Run


@dataclass
class SchedulePace:
    """How often a prepared scheduler steps in an update.

    Scripts compute the length of a schedule for one process: from the batches of a loader that is
    not prepared yet. Accelerate therefore steps once per process, as its global batch is that many
    times larger. What matters is the global batch, which stays the same when processes leave.
    """

    split: bool
    stride: Run | None = None
    unit: int = 1  # samples of an update of one process

    def follow(self, stride: Run | None, unit: int = 1) -> None:
        """Follow the global batch of a run; of none with ``None``."""
        self.stride, self.unit = stride, unit

    @property
    def value(self) -> Fraction:
        """Steps per update."""
        if self.stride is None:
            return Fraction(1 if self.split else AcceleratorState().num_processes)
        return Fraction(self.stride.global_batch, self.unit)


class EvenScheduler(AcceleratedScheduler):  # type: ignore[misc]
    """A prepared scheduler, whose pace is set by the global batch."""

    pace = SchedulePace(split=True)
    _owed = Fraction(0)  # part of a step that the next update adds to

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Step as often as the update has batches of one process, unless there was no update."""
        if not self.step_with_optimizer:
            self.scheduler.step(*args, **kwargs)
            return
        skipped = any(optimizer.step_was_skipped for optimizer in self.optimizers)
        if not self.gradient_state.sync_gradients or skipped:
            return
        self._owed += self.pace.value
        steps = int(self._owed)
        self._owed -= steps
        most = getattr(self.scheduler, "total_steps", None)  # of OneCycleLR, which ends with it
        for _ in range(steps):
            if most is None or self.scheduler.last_epoch < most:
                self.scheduler.step(*args, **kwargs)

    def state_dict(self) -> dict[str, Any]:
        """Return the scheduler's state, and the part of a step that is owed."""
        return {**self.scheduler.state_dict(), "evenstride_owed": str(self._owed)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state, of Accelerate's schedulers too."""
        state = dict(state_dict)
        self._owed = Fraction(state.pop("evenstride_owed", "0"))
        self.scheduler.load_state_dict(state)
