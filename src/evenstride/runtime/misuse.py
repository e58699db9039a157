"""What a training loop may do wrong with a batch's loss and gradients: errors, and warnings."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from torch import Tensor

from evenstride.errors import ScaleError, StepInFlight, UsageError

if TYPE_CHECKING:
    from evenstride.runtime.settings import Settings

logger = logging.getLogger("evenstride")


def not_one_number(loss: object) -> ScaleError:
    """Return the error of a loss that is not one number."""
    what, fix = type(loss).__name__, "give it what the model made of the batch, without .item()"
    if isinstance(loss, Tensor):
        what, fix = f"tensor of shape {tuple(loss.shape)}", "call it with loss.mean()"
    return ScaleError(
        f"scale() got a {what}; it takes a tensor of one element, the mean loss over the samples "
        f"of this rank's batch; {fix}"
    )


def unscaled(step: int) -> ScaleError:
    """Return the error of a batch whose loss was never scaled."""
    return ScaleError(
        f"the batch of step {step} was never scaled, so its gradient would be "
        "wrong for unequal shares; call stride.scale(loss).backward() for every batch"
    )


def no_backward(step: int) -> ScaleError:
    """Return the error of a batch whose backward pass never ran."""
    return ScaleError(
        f"the loss of step {step} was scaled, but its backward pass never ran on "
        "this rank, and the other ranks would wait for it; run backward() for every batch "
        "(also for those you would rather skip: scale the loss by 0)"
    )


def outside_loop() -> ScaleError:
    """Return the error of a loss that is scaled outside the loop."""
    return ScaleError(
        "scale() was called outside the training loop; call it once per loss inside "
        "`for batch in loader:`"
    )


def drawn_elsewhere() -> UsageError:
    """Return the error of batches that another loader draws than the one that knows the steps."""
    return UsageError(
        "batches of the training loader were asked for by another loader than the one that "
        "stride.loader() returned, so a framework has made it anew and would deal its batches out "
        "a second time; leave it out of Accelerate's prepare(), give Lightning "
        "use_distributed_sampler=False, and iterate over what stride.loader() returned"
    )


def scaled_twice(step: int) -> ScaleError:
    """Return the error of a loss that is scaled again."""
    return ScaleError(
        f"a loss of step {step} was scaled twice; call stride.scale once per loss, "
        "and scale the sum rather than its scaled parts"
    )


def not_accumulated() -> ScaleError:
    """Return the error of a micro-batch outside of `accumulate`."""
    return ScaleError(
        "this loader cuts shares into micro-batches, so ranks run different numbers of "
        "backward passes; put forward, scale and backward inside "
        "`with stride.accumulate(model):`"
    )


def weight_of_a_piece() -> ScaleError:
    """Return the error of a weight that is given with a micro-batch."""
    return ScaleError(
        "scale(weight=...) needs one batch per rank and step; with micro-batches (also "
        "those of a batch that did not fit into memory) or a weight_fn give the loader a "
        "weight_fn instead, and call scale(loss) alone"
    )


def gradients_gone(step: int) -> UsageError:
    """Return the error of gradients that were dropped between two micro-batches."""
    return UsageError(
        f"the gradients of step {step} are gone between two of its micro-batches, "
        "which the loader also makes where a batch would not fit into memory; call "
        "optimizer.zero_grad() under `if stride.synced:`, after optimizer.step()"
    )


def stepped_in_midst(step: int | None) -> UsageError:
    """Return the error of an optimizer that steps between two micro-batches."""
    return UsageError(
        f"optimizer.step() was called in the middle of step {step},"
        " between two of its micro-batches; put it under `if stride.synced:`"
    )


def stepped_by_closure() -> UsageError:
    """Return the error of an optimizer that runs its own forward and backward passes."""
    return UsageError(
        "optimizer.step() was given a closure, and this mode of synchronisation exchanges once per "
        "step, after its one backward pass; use an optimizer that needs no closure"
    )


def left_out() -> UsageError:
    """Return the error of a step that a gradient scaler leaves out on one rank alone."""
    return UsageError(
        "a gradient scaler found a gradient that is not finite and left its step out; in this mode "
        "of synchronisation each rank sees its own gradients, so others did not, and would wait; "
        'train in bfloat16 without a scaler, or with sync="bsp"'
    )


def in_flight(step: int) -> StepInFlight:
    """Return the error of a position that is asked for in the midst of a step."""
    return StepInFlight(
        f"step {step} is between its backward pass and its optimizer step, so model and position "
        "do not belong together; call state_dict() after optimizer.step()"
    )


def unwatched() -> UsageError:
    """Return the error of a model that this mode of synchronisation does not know."""
    return UsageError(
        "no model was given to stride.watch(), and this mode of synchronisation trains those that "
        "were; call model = stride.watch(model) before the loop"
    )


def tell_of_unwatched(rank: int) -> None:
    """Warn that the model is not known, so that waits of its engine are not."""
    logger.warning(
        "rank %d trains a model that stride.watch() was not given, so its waits for other ranks "
        "may be taken for work; call model = stride.watch(model) before the loop",
        rank,
    )


def tell_if_overruled(settings: Settings, environment: int | None) -> None:
    """Warn if the environment has a global batch, and the script another one, which counts.

    Args:
        settings: as they are.
        environment: ``EVENSTRIDE_GLOBAL_BATCH``; 0 and ``None`` ask for no number.
    """
    if environment and settings.bounds is None and environment != settings.global_batch:
        logger.warning(
            "EVENSTRIDE_GLOBAL_BATCH is %d, and the script says global_batch=%d, which counts; "
            'write global_batch="auto" and its bounds to have it set from outside',
            environment,
            settings.global_batch,
        )


def tell_of_models(step: int) -> None:
    """Warn that the run ends in the midst of a round of local steps."""
    logger.warning(
        "the run ends after step %d, in the midst of a round of local steps, so that each rank has "
        "a model of its own, and none is the average; train to the end of an epoch, set the limit "
        "of steps by EVENSTRIDE_MAX_STEPS, or save with a Checkpointer before close(), which "
        "averages them",
        step,
    )


def tell_of_late_gradient() -> None:
    """Warn that the run ends before the gradient of its last step was applied."""
    logger.warning(
        "the run ends while the gradient of its last step is on its way, which is never applied; "
        "train to the end of an epoch, set the limit of steps by EVENSTRIDE_MAX_STEPS, or save "
        "with a Checkpointer before close(), which applies it"
    )


def not_stepped(step: int) -> UsageError:
    """Return the error of a step whose optimizer step never came, where it is what synchronises."""
    return UsageError(
        f"the next batch was asked for, and no optimizer has stepped in step {step}, which is "
        "when this mode of synchronisation exchanges; call optimizer.step() after each step's "
        "last backward pass"
    )
