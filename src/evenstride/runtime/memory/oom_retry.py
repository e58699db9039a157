"""Recovery from running out of memory: the same samples come again, in smaller micro-batches.

During a forward pass nothing has left this rank, so the other ranks need not know. The loader
yields the samples of the batch again as several micro-batches, whose gradients add up to the same
sum.

In a backward pass that synchronises, some gradients may already be on their way to other ranks. The
step cannot be repeated then, and the error says how to make the batch fit. A backward pass whose
synchronisation is postponed has sent nothing. Its gradients are dropped, and all samples of the
step come again. `MicroBatchLimits.parts` runs new sizes in such passes first.
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


# Steps before a batch that fitted proves something: optimizers create their states in the first.
_STEPS_TO_WARM = 2


class MemoryGuard:
    """Repeats a batch in smaller ones if it does not fit into memory."""

    def __init__(self, step: TrainingStep, rank: int) -> None:
        self._step, self._rank = step, rank

    @contextlib.contextmanager
    def guard(self) -> Iterator[None]:
        """Repeat a batch that does not fit; raise `OutOfMemory` if it cannot be repeated."""
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
                # Locals of the frames hold activations, and reference cycles hold more of them.
                traceback.clear_frames(error.__traceback__)
                self._begin_again(draw)
        if batch.retry:
            gc.collect()
            if self._step.clock.timer.on_device:
                torch.get_device_module(self._step.clock.device).empty_cache()

    def _went_through(self) -> None:
        """Note that the current batch fitted, in a loop that could have repeated it."""
        step, draw = self._step, self._step.batch.draw
        if step.accumulation.held and draw is not None and not step.scaling.by_argument:
            step.limits.fitted(draw.samples, warm=step.backward.commits >= _STEPS_TO_WARM)

    def _begin_again(self, draw: Draw) -> None:
        step, fits = self._step, -(-draw.samples // 2)
        backward = step.batch.backward_began
        logger.warning(
            "rank %d ran out of memory in the %s pass of step %d with %d samples. They come again "
            "in batches of at most %d samples, which now limits all batches of this rank",
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
            # All samples of the step come again, so gradients of its earlier passes must go.
            step.watched.drop_gradients()
        step.clock.timer.spoil()
        if step.noise is not None:
            step.noise.gave_up()


def _obstacle(step: TrainingStep, draw: Draw) -> str | None:
    """Return why the samples of the current batch cannot come again, or ``None`` if they can."""
    if step.batch.backward_began and draw.last:
        return (
            "its backward pass synchronises, so gradients may already be on their way to other "
            "ranks"
        )
    if step.batch.backward_began and not step.batch.clean:
        return (
            "there were gradients from before the step, which cannot be separated from those of "
            "the backward pass (call optimizer.zero_grad() after every step)"
        )
    if not step.accumulation.held:
        return (
            "smaller batches are possible only inside `with stride.accumulate(model):` within the "
            "guard"
        )
    if draw.samples < 2:
        return "a batch of one sample cannot be split further"
    return _obstacle_of_models(step, draw)


def _obstacle_of_models(step: TrainingStep, draw: Draw) -> str | None:
    accumulated = step.accumulation.held
    held = {id(engine_of(model)) for model in accumulated}
    watched = {id(engine_of(model)) for model in step.watched.models}
    if held < watched:
        return "not all watched models are given to `with stride.accumulate(model):`"
    if held != watched:
        return "its model is not watched (model = stride.watch(model)), so it cannot be reset"
    if any(map(is_sharded, step.watched.models)):
        return (
            "its model is sharded, so the other ranks of its shard group run the same collectives "
            "in every layer and would wait for it"
        )
    if step.limits.even:
        return "its batch norm takes statistics over all ranks, which would wait for it in vain"
    if draw.last and not all(map(syncs_late, accumulated)):
        return (
            "it is the last of its step, and with a static graph or torch.compile the state of "
            "the engine is unknown"
        )
    if step.scaling.by_argument:
        return "its weight is given to scale(), which needs one batch per step (use weight_fn)"
    return None


def _refusal(rank: int, draw: Draw, obstacle: str, *, even: bool) -> str:
    less = max(draw.samples // 2, 1)
    micro = f"loader(max_micro_batch={less}) with `with stride.accumulate(model):`, or "
    if even:  # all ranks need the same number of batches
        micro = ""
    return (
        f"rank {rank} ran out of memory in step {draw.step} with a batch of {draw.samples} "
        f"samples, which cannot be repeated: {obstacle}. Give this rank smaller batches (other "
        f"ranks may differ): {micro}Stride(max_share={less})"
    )
