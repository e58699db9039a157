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
from evenstride.runtime.engines.forward_timing import engine_of, reforward
from evenstride.runtime.engines.fsdp import is_sharded
from evenstride.runtime.loading.micro_batches import Retry
from evenstride.runtime.loss.loss_scaling import LossScaling
from evenstride.runtime.loss.no_sync import syncs_late
from evenstride.runtime.memory.memory_meter import is_out_of_memory

logger = logging.getLogger("evenstride")


@contextlib.contextmanager
def guarded(scaling: LossScaling, rank: int) -> Iterator[None]:
    """Swallow an out-of-memory error of a forward pass, and have its samples come again.

    Raises:
        OutOfMemory: the step cannot be repeated; the message says why.
    """
    scaling.enter_guard()
    try:
        yield
        scaling.went_through()
    except Exception as error:
        draw = scaling.draw
        if draw is None or not is_out_of_memory(error):
            raise
        obstacle = _obstacle(scaling, draw)
        if obstacle is not None:
            raise OutOfMemory(_refusal(scaling, rank, draw, obstacle)) from error
        # Locals of the frames it went through hold activations, and more of them in cycles.
        traceback.clear_frames(error.__traceback__)
        _begin_again(scaling, draw, rank)
    finally:
        scaling.leave_guard()
    if scaling.retry:
        gc.collect()
        if scaling.timer.on_device:
            torch.cuda.empty_cache()


def _begin_again(scaling: LossScaling, draw: Draw, rank: int) -> None:
    fits, backward = -(-draw.samples // 2), scaling.backward_began
    logger.warning(
        "rank %d ran out of memory in the %s pass of step %d with %d samples; they come again in "
        "batches of at most %d, and so do all others of this rank from now on",
        rank,
        "backward" if backward else "forward",
        draw.step,
        draw.samples,
        fits,
    )
    for model in scaling.models:
        reforward(model)
    scaling.give_up(Retry.STEP if backward else Retry.BATCH, fits)


def _obstacle(scaling: LossScaling, draw: Draw) -> str | None:
    """Return why the samples of the batch in hand cannot come again, if they cannot."""
    if scaling.backward_began and draw.last:
        return (
            "in its backward pass, when gradients may be on their way to other ranks, so that the "
            "step cannot be repeated"
        )
    if scaling.backward_began and not scaling.clean:
        return (
            "in its backward pass, and there were gradients from before the step, which cannot be "
            "told from its own (call optimizer.zero_grad() after every step)"
        )
    if not scaling.accumulated:
        return (
            "and smaller batches are possible inside `with stride.accumulate(model):` only, within "
            "the guard"
        )
    if draw.samples < 2:
        return "and fewer samples than one there are not"
    return _obstacle_of_models(scaling, draw)


def _obstacle_of_models(scaling: LossScaling, draw: Draw) -> str | None:
    held = {id(engine_of(model)) for model in scaling.accumulated}
    watched = {id(engine_of(model)) for model in scaling.models}
    if held < watched:
        return "and not all watched models are given to `with stride.accumulate(model):`"
    if held != watched:
        return "and its model is not watched (model = stride.watch(model)), so it cannot be reset"
    if any(map(is_sharded, scaling.models)):
        return (
            "and its model is sharded, so the other ranks of its shard group run the same "
            "collectives in every layer and would wait for it"
        )
    if scaling.fit.even:
        return "and its batch norm takes statistics over all ranks, which would wait for it in vain"
    if draw.last and not all(map(syncs_late, scaling.accumulated)):
        return (
            "which is its step's last, and with a static graph or torch.compile it cannot be told "
            "how far the engine has come"
        )
    if scaling.by_argument:
        return "and its weight is given to scale(), which needs one batch per step (use weight_fn)"
    return None


def _refusal(scaling: LossScaling, rank: int, draw: Draw, obstacle: str) -> str:
    less = max(draw.samples // 2, 1)
    micro = f"loader(max_micro_batch={less}) with `with stride.accumulate(model):`, or "
    if scaling.fit.even:  # which needs equally many on all ranks
        micro = ""
    return (
        f"rank {rank} ran out of memory in step {draw.step} with a batch of {draw.samples} "
        f"samples, {obstacle}; give this rank (others may differ) smaller batches: {micro}"
        f"Stride(max_share={less})"
    )
