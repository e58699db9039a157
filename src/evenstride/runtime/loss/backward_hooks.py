"""Marks in a backward pass: where this rank's last gradient is ready, and where all ranks' are."""

from __future__ import annotations

import sys
from collections.abc import Callable

from torch import Tensor
from torch.autograd import Variable

from evenstride.core.sampling.draw import Draw
from evenstride.runtime import usage_errors
from evenstride.runtime.engines.reentrant_backward import InnerWaits
from evenstride.runtime.engines.watched_models import WatchedModels
from evenstride.runtime.loss.batch_in_hand import BatchInHand
from evenstride.runtime.loss.step_state import StepEvent
from evenstride.runtime.noise.noise_meter import NoiseMeter
from evenstride.runtime.timing.rank_clock import RankClock

# Micro-batches after which gradients are looked at: a loop that clips there does so each time.
_COMPARISONS = 2


class BackwardHooks:
    """Follows the backward passes of the batch in hand, and ends the step.

    Args:
        clock: gets the marks.
        batch: in hand.
        watched: the models that are trained.
        inner_waits: marks the waits in reentrant passes.
        noise: measures gradients; ``None`` where it is not asked for.
        commit: called when a step is synchronised.
        add_up: adds up all ranks' gradients before that, where no engine does.
        by_engine: whether gradients are averaged in the backward pass, not at the optimizer's step.
    """

    def __init__(
        self,
        clock: RankClock,
        batch: BatchInHand,
        watched: WatchedModels,
        inner_waits: InnerWaits,
        noise: NoiseMeter | None,
        commit: Callable[[Draw], None],
        add_up: Callable[[Draw], None] | None,
        *,
        by_engine: bool,
    ) -> None:
        self._clock, self._batch, self._watched = clock, batch, watched
        self._inner_waits, self._noise, self._commit = inner_waits, noise, commit
        self._add_up, self._by_engine = add_up, by_engine
        self.own_s = 0.0
        self.commits = 0
        """Steps that were committed."""
        self._queued = False  # whether the engine has our callback for the pass that runs
        self._gave = False  # whether the latest backward pass has left gradients
        self._comparisons = _COMPARISONS  # of gradients between micro-batches, still to come
        self._left: list[tuple[Tensor, int]] = []  # gradients and their versions, for the next

    def follow(self, scaled: Tensor) -> None:
        """Mark the backward pass of a scaled loss."""
        self._queued = False  # a backward pass that raised never came to the callback
        if scaled.requires_grad:
            scaled.register_hook(self._began)  # type: ignore[no-untyped-call]

    def check_gradients(self, draw: Draw) -> None:
        """Look at what an earlier micro-batch of the step has left.

        Raises:
            UsageError: its gradients are gone.
        """
        if self._gave and not draw.first and self._watched.without_gradients:
            raise usage_errors.gradients_gone(draw.step)
        if self._left:
            self._compare_gradients(draw)

    def synchronised(self) -> None:
        """Note that all ranks' gradients are averaged, which commits the step."""
        draw = self._batch.draw
        if self._add_up is not None and draw is not None:
            self._add_up(draw)
        started_s = self._clock.timer.now()
        self._clock.timer.synchronised()
        if draw is not None and not self._batch.committed:
            self._batch.happened(StepEvent.SYNCHRONISE)
            self._watched.recorded()
            self.commits += 1
            if self._noise is not None:
                self._noise.committed()
            self._commit(draw)
        self.own_s += self._clock.timer.now() - started_s

    def _began(self, _: Tensor) -> None:
        # Callbacks run in the order they are queued, after the whole graph: ours comes before the
        # engine's own wait for other ranks, and one queued from inside it comes after.
        if not self._queued and self._batch.draw is not None:
            if _in_compiled_autograd():
                raise usage_errors.compiled_backward()
            self._queued = True
            self._batch.happened(StepEvent.BACKWARD_BEGINS)
            self._inner_waits.backward_began()
            Variable._execution_engine.queue_callback(self._gradients_ready)
            if self._noise is not None:
                self._noise.backward_began()

    def _gradients_ready(self) -> None:
        started_s, self._queued = self._clock.timer.now(), False
        draw, watched = self._batch.draw, self._watched
        if draw is None:
            return
        self._batch.happened(StepEvent.GRADIENTS_READY)
        # FSDP2 keeps what is not reduced yet elsewhere, so there may be none.
        self._gave = any(p.grad is not None for p in watched.parameters)
        if draw.last and self._by_engine:  # else both happen at the optimizer's step
            self._clock.timer.gradients_ready()
            self._inner_waits.gradients_ready()
            Variable._execution_engine.queue_callback(self.synchronised)
        elif self._comparisons and not draw.last:
            given = [p.grad for p in watched.parameters if p.grad is not None]
            # Torch counts the changes in place of a tensor, which costs less than a copy.
            self._left = [(gradient, gradient._version) for gradient in given]
        self.own_s += self._clock.timer.now() - started_s

    def _compare_gradients(self, draw: Draw) -> None:
        """Warn if gradients were changed since the last micro-batch's backward pass."""
        changed = any(gradient._version != version for gradient, version in self._left)
        self._left = []
        if not draw.first:
            self._comparisons -= 1
            if changed:
                self._comparisons = 0
                usage_errors.tell_of_changed_gradients(draw.step)


def _in_compiled_autograd() -> bool:
    # By name, as importing it takes long and nearly no script needs it.
    compiled = sys.modules.get("torch._dynamo.compiled_autograd")
    return bool(getattr(compiled, "in_compiled_autograd_region", False)) or bool(
        getattr(compiled, "compiled_autograd_enabled", False)
    )
