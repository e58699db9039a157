"""Running out of memory in a forward pass: the same samples come again, in smaller batches.

In the forward pass nothing has left this rank yet, so the others need not know: the loader yields
the samples of the batch again as several micro-batches, whose gradients add up to the same sum.
In a backward pass that synchronises, gradients may be on their way to the other ranks already, and
which of them is not known, so the step cannot be finished; the error says how to make it fit. One
whose synchronisation is held back has sent nothing: the gradients are dropped, and all of the
step's samples come again. `MicroBatchLimits.parts` makes new sizes run in such passes first.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import traceback
from collections.abc import Iterator

import torch

from evenstride.core.sampling.draw import Draw
from evenstride.errors import OutOfMemory
from evenstride.runtime.engines.ddp import reforward
from evenstride.runtime.engines.watched_models import engine_of, is_sharded
from evenstride.runtime.loss.batch_in_hand import Retry
from evenstride.runtime.loss.no_sync import syncs_late
from evenstride.runtime.loss.training_step import TrainingStep
from evenstride.runtime.memory.memory_meter import is_out_of_memory

logger = logging.getLogger("evenstride")


# Steps after which what ran proves something: optimizers make their states in the first.
_STEPS_TO_WARM = 2


class MemoryGuard:
    """Lets a batch come again in smaller ones where it does not fit into memory."""

    def __init__(self, step: TrainingStep, rank: int) -> None:
        self._step, self._rank = step, rank

    @contextlib.contextmanager
    def guard(self) -> Iterator[None]:
        """Have a batch come again that does not fit; `OutOfMemory` if it cannot."""
        batch = self._step.batch
        with self._step.accumulation.guarded():
            try:
                yield
                self._went_through()
            except Exception as error:
                draw = batch.draw
                if draw is None or not is_out_of_memory(error):
                    raise
                obstacle = _obstacle(self._step, draw)
                if obstacle is not None:
                    even = self._step.limits.even
                    raise OutOfMemory(_refusal(self._rank, draw, obstacle, even=even)) from error
                # Locals of the frames it went through hold activations, and more of them in cycles.
                traceback.clear_frames(error.__traceback__)
                self._begin_again(draw)
        if batch.retry:
            gc.collect()
            if self._step.clock.timer.on_device:
                torch.cuda.empty_cache()

    def _went_through(self) -> None:
        """Note that the batch in hand fitted, in a loop that could have repeated it."""
        step, draw = self._step, self._step.batch.draw
        if step.accumulation.held and draw is not None and not step.scaling.by_argument:
            step.limits.fitted(draw.samples, warm=step.backward.commits >= _STEPS_TO_WARM)

    def _begin_again(self, draw: Draw) -> None:
        step, fits = self._step, -(-draw.samples // 2)
        backward = step.batch.backward_began
        logger.warning(
            "rank %d ran out of memory in the %s pass of step %d with %d samples; they come again "
            "in batches of at most %d, and so do all others of this rank from now on",
            self._rank,
            "backward" if backward else "forward",
            draw.step,
            draw.samples,
            fits,
        )
        for model in step.watched.models:
            reforward(model)
        step.batch.give_up(Retry.STEP if backward else Retry.BATCH)
        step.limits.exceeded(fits)
        if backward:
            # All samples of the step come again, so nothing of its earlier passes may stay.
            step.watched.drop_gradients()
        step.clock.timer.spoil()
        if step.noise is not None:
            step.noise.gave_up()


def _obstacle(step: TrainingStep, draw: Draw) -> str | None:
    """Return why the samples of the batch in hand cannot come again, if they cannot."""
    if step.batch.backward_began and draw.last:
        return (
            "in its backward pass, when gradients may be on their way to other ranks, so that the "
            "step cannot be repeated"
        )
    if step.batch.backward_began and not step.batch.clean:
        return (
            "in its backward pass, and there were gradients from before the step, which cannot be "
            "told from its own (call optimizer.zero_grad() after every step)"
        )
    if not step.accumulation.held:
        return (
            "and smaller batches are possible inside `with stride.accumulate(model):` only, within "
            "the guard"
        )
    if draw.samples < 2:
        return "and fewer samples than one there are not"
    return _obstacle_of_models(step, draw)


def _obstacle_of_models(step: TrainingStep, draw: Draw) -> str | None:
    accumulated = step.accumulation.held
    held = {id(engine_of(model)) for model in accumulated}
    watched = {id(engine_of(model)) for model in step.watched.models}
    if held < watched:
        return "and not all watched models are given to `with stride.accumulate(model):`"
    if held != watched:
        return "and its model is not watched (model = stride.watch(model)), so it cannot be reset"
    if any(map(is_sharded, step.watched.models)):
        return (
            "and its model is sharded, so the other ranks of its shard group run the same "
            "collectives in every layer and would wait for it"
        )
    if step.limits.even:
        return "and its batch norm takes statistics over all ranks, which would wait for it in vain"
    if draw.last and not all(map(syncs_late, accumulated)):
        return (
            "which is its step's last, and with a static graph or torch.compile it cannot be told "
            "how far the engine has come"
        )
    if step.scaling.by_argument:
        return "and its weight is given to scale(), which needs one batch per step (use weight_fn)"
    return None


def _refusal(rank: int, draw: Draw, obstacle: str, *, even: bool) -> str:
    less = max(draw.samples // 2, 1)
    micro = f"loader(max_micro_batch={less}) with `with stride.accumulate(model):`, or "
    if even:  # which needs equally many on all ranks
        micro = ""
    return (
        f"rank {rank} ran out of memory in step {draw.step} with a batch of {draw.samples} "
        f"samples, {obstacle}; give this rank (others may differ) smaller batches: {micro}"
        f"Stride(max_share={less})"
    )
