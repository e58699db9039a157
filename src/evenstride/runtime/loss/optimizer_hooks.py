"""What the steps of optimizers mean: the end of a step, and in some modes its synchronisation."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.hooks import RemovableHandle

from evenstride.runtime import usage_errors
from evenstride.runtime.engines.watched_models import WatchedModels
from evenstride.runtime.loss.backward_hooks import BackwardHooks
from evenstride.runtime.loss.batch_in_hand import BatchInHand
from evenstride.runtime.loss.scaler_hook import register_scaler_update_hook
from evenstride.runtime.loss.step_state import StepEvent
from evenstride.runtime.synchronisation.synchroniser import Synchroniser
from evenstride.runtime.timing.rank_clock import RankClock


class OptimizerHooks:
    """Hears of every step that an optimizer takes, or a gradient scaler leaves out.

    Args:
        clock: gets the marks of a synchronisation that happens here.
        batch: in hand.
        watched: the models that are trained.
        backward: commits the step.
        sync: takes the place of the engine's averaging; ``None`` where the engine does it.
    """

    def __init__(
        self,
        clock: RankClock,
        batch: BatchInHand,
        watched: WatchedModels,
        backward: BackwardHooks,
        sync: Synchroniser | None,
    ) -> None:
        self._clock, self._batch, self._watched = clock, batch, watched
        self._backward, self._sync = backward, sync
        self._syncing = False  # whether the synchronisation has begun, and not come through

    def listen(self) -> tuple[RemovableHandle, ...]:
        """Be told of every step of this process, until the handles are removed."""
        return (
            register_optimizer_step_pre_hook(self.before_step),
            register_optimizer_step_post_hook(self.after_step),
            # For the steps that a gradient scaler leaves out.
            register_scaler_update_hook(self.after_step),
        )

    def before_step(self, optimizer: Optimizer, args: Any = (), named: Any = None) -> None:
        """Synchronise, where that is due at the optimizer's step, and refuse a part of a gradient.

        Raises:
            UsageError: the batch in hand is not the last of its step.
        """
        sync, draw = self._sync, self._batch.draw
        if self._batch.synced and sync is None:
            return
        # Torch reports every optimizer of the process, also those of models that are not watched.
        ours = {id(p) for p in self._watched.parameters}
        if not any(id(p) in ours for group in optimizer.param_groups for p in group["params"]):
            return
        if not self._batch.synced:
            raise usage_errors.stepped_in_midst(draw and draw.step)
        if sync is not None and draw is not None:  # else it is torch's, to make a state
            # A closure runs backward passes of its own inside the step, after the exchange.
            if any(given is not None for given in (*args[1:], *(named or {}).values())):
                raise usage_errors.stepped_by_closure()
            self._synchronise(sync, optimizer)

    def after_step(self, optimizer: Any = None, *_: Any) -> None:
        """Note that an optimizer has stepped; without one, that a scaler has ended a step."""
        sync = self._sync
        left_out = optimizer is None and self._batch.failed and not self._syncing
        if sync is not None and left_out and not hasattr(sync, "takes_left_out"):
            raise usage_errors.left_out()
        if sync is not None and (self._syncing or left_out):
            sync.after_step(optimizer)
            self._syncing = False
            if not self._batch.committed:
                self._backward.synchronised()
        scaler = optimizer is None
        self._batch.happened(StepEvent.SCALER_UPDATES if scaler else StepEvent.OPTIMIZER_STEPS)

    def check_stepped(self) -> None:
        """Raise if the step in hand was to be synchronised at an optimizer's step that never came.

        Raises:
            UsageError: so it was.
        """
        if self._sync is not None and self._batch.failed and not self._syncing:
            step = -1 if self._batch.draw is None else self._batch.draw.step
            if self._watched.models:
                raise usage_errors.not_stepped(step)
            raise usage_errors.unwatched()

    def _synchronise(self, sync: Synchroniser, optimizer: Optimizer) -> None:
        self._syncing = True
        if self._batch.committed:  # another optimizer in the same step
            with self._clock.waiting():
                sync.before_step(optimizer)
            return
        self._clock.timer.gradients_ready()  # what came since then, such as clipping, is work
        sync.before_step(optimizer)
