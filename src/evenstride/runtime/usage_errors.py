"""What a training loop may do wrong with a batch's loss and gradients: errors, and warnings."""

from __future__ import annotations

import logging
from typing import NoReturn

from torch import Tensor

from evenstride.errors import ConfigError, ScaleError, StepInFlight, UsageError
from evenstride.runtime.call_sites import line_with, range_behind

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


_FETCHED_AHEAD = (
    "If the script fetches batches ahead (a prefetcher, or next(iterator) before backward()), "
    "fetch the next batch after backward(); loader(num_workers=, prefetch_factor=) loads ahead"
)


def unscaled(step: int) -> ScaleError:
    """Return the error of a batch whose loss was never scaled."""
    return ScaleError(
        f"the next batch was fetched, but the batch of step {step} was never scaled, so its "
        "gradient would be wrong for unequal shares. Call stride.scale(loss).backward() for every "
        f"batch. {_FETCHED_AHEAD}. A CUDA graph of the whole step cannot be replayed: its weight "
        "is that of the captured batch."
    )


def no_backward(step: int) -> ScaleError:
    """Return the error of a batch whose backward pass never ran."""
    return ScaleError(
        f"the next batch was fetched, but the backward pass of step {step} never ran on this rank, "
        "and the other ranks would wait for it. Run backward() for every batch, also for those "
        f"you would rather skip (scale their loss by 0). {_FETCHED_AHEAD}."
    )


def compiled_backward() -> UsageError:
    """Return the error of a backward pass that is compiled."""
    return UsageError(
        "the backward pass runs under compiled autograd, which drops the callbacks that tell when "
        "a gradient is ready; call loss.backward() outside the compiled function, or leave "
        "torch._dynamo.config.compiled_autograd off. torch.compile of the model itself works"
    )


def captured() -> UsageError:
    """Return the error of a step that is captured as a CUDA graph."""
    return UsageError(
        "scale() was called while a CUDA graph is captured. A replayed graph repeats the weight of "
        "the captured batch and never calls scale() again; capture the network alone "
        "(torch.cuda.make_graphed_callables, with a fixed policy such as uniform) and call "
        "stride.scale(loss).backward() outside the graph"
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


def evaluated_elsewhere() -> UsageError:
    """Return the error of an evaluation loader that a framework has wrapped in another one."""
    return UsageError(
        "another loader than the one that stride.loader(train=False) returned asked for its "
        "batches. A framework has made the loader again and would deal its batches out a second "
        "time, so most samples would not be evaluated. Leave the loader out of Accelerate's "
        "prepare(), give Lightning use_distributed_sampler=False, and iterate over what "
        "stride.loader() returned"
    )


def tell_of_missed_batches(count: int) -> None:
    """Warn that a loop counts steps of an evaluation, and leaves batches out."""
    logger.warning(
        "an evaluation stopped after %d batches, the number of its steps, but max_micro_batch or "
        "max_share cuts this rank's data into more batches than that, so the rest was not "
        "evaluated. In a framework that counts batches, use "
        "evenstride.integrations.lightning.TrainerLoader(stride, loader)",
        count,
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


def unknown_reduction(reduction: object) -> ScaleError:
    """Return the error of a reduction that there is not."""
    return ScaleError(
        f'scale(reduction={reduction!r}) is unknown; use "mean" for a mean over the local samples, '
        'or "sum" for a loss that adds up over the ranks'
    )


def sum_with_weight() -> ScaleError:
    """Return the error of a weight for a loss that adds up over the ranks."""
    return ScaleError(
        'scale(reduction="sum") takes a loss that adds up over the ranks, which needs no weight; '
        "leave out weight= and the loader's weight_fn, or use a mean"
    )


def sum_without_steps() -> ScaleError:
    """Return the error of a loss that adds up over ranks which have no step in common."""
    return ScaleError(
        'scale(reduction="sum") adds up the losses of all ranks in a step, and in this mode of '
        'synchronisation workers have no step in common; use a mean, or sync="bsp"'
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


_BY_HAND = 'If the script averages gradients itself, create the Stride with engine="none"'


def bare(name: str, world_size: int) -> ConfigError:
    """Return the error of a watched module whose gradients nothing averages."""
    return ConfigError(
        f"watch() got a bare {name}, and nothing averages its gradients over the {world_size} "
        "ranks, so each rank would train a model of its own. Give watch() the wrapper: "
        f"model = stride.watch(DistributedDataParallel(net)), or FSDP2. {_BY_HAND}"
    )


def no_engine(world_size: int) -> ConfigError:
    """Return the error of a loop in which nothing averages gradients."""
    return ConfigError(
        f"the first step has run on {world_size} ranks, and nothing averages their gradients: "
        "stride.watch() was not called, and no DistributedDataParallel or FSDP2 module exists. "
        "No optimizer has stepped. Call model = stride.watch(DistributedDataParallel(net)) before "
        f"the loop. {_BY_HAND}"
    )


def engine_bypassed(engine: str) -> UsageError:
    """Return the error of a loop that calls the module inside its engine."""
    return UsageError(
        f"the first step's gradients differ between the ranks: the {engine} that stride.watch() "
        "was given did not run. No optimizer has stepped. Call the wrapper in the loop, not the "
        "module inside it"
    )


def unwatched() -> UsageError:
    """Return the error of a model that this mode of synchronisation does not know."""
    return UsageError(
        "no model was given to stride.watch(), and this mode of synchronisation trains those that "
        "were; call model = stride.watch(model) before the loop"
    )


def tell_of_unwatched() -> None:
    """Warn that the model is not known, so that waits of its engine are not."""
    logger.warning(
        "the model was not given to stride.watch(), so the time that its engine waits for other "
        "ranks may count as work; call model = stride.watch(model) before the loop"
    )


def tell_of_placeholder(step: int) -> None:
    """Warn that the script may count the placeholder of a rank without samples."""
    logger.warning(
        "this rank had no samples in step %d and ran one placeholder sample instead. The script "
        "never reads stride.samples, and len(batch) counts the placeholder as a sample. Use "
        "stride.samples (0 in such a step) for counts, sums and running means.",
        step,
    )


def tell_if_overruled(in_script: int, in_environment: int | None) -> None:
    """Warn if the environment has a global batch, and the script another one, which counts.

    Args:
        in_script: ``global_batch``, a number without bounds.
        in_environment: ``EVENSTRIDE_GLOBAL_BATCH``; 0 and ``None`` ask for no number.
    """
    if in_environment and in_environment != in_script:
        logger.warning(
            "EVENSTRIDE_GLOBAL_BATCH is %d, and the script says global_batch=%d, which counts; "
            'write global_batch="auto" and its bounds to have it set from outside',
            in_environment,
            in_script,
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


def tell_of_changed_gradients(step: int) -> None:
    """Warn that gradients were changed between two micro-batches."""
    logger.warning(
        "the gradients were changed between two micro-batches of step %d, where they are only a "
        "part of the step's gradient, on this rank alone. Clip, unscale and zero them under "
        "`if stride.synced:`. The line is probably %s",
        step,
        line_with("clip_grad", "unscale_", "zero_grad"),
    )


def tell_if_epochs_begin_anew(epoch: int) -> None:
    """Warn if the loop around the training loop does not know that the run was restored.

    Args:
        epoch: that training goes on in.
    """
    if epoch and (found := range_behind(epoch)) is not None:
        line, text = found
        logger.warning(
            "training goes on in epoch %d, but the loop over %s at %s does not begin there. If it "
            "counts all epochs, the run trains too many: write range(stride.epoch, epochs)",
            epoch,
            text,
            line,
        )


def end_program(rank: int, max_steps: int | None) -> NoReturn:
    """End the program, with exit code 0, because no further step is allowed.

    A pass without batches would break scripts that use the variables of their loop, and an endless
    generator over the loader would never end.

    Args:
        rank: of this process; rank 0 reports it.
        max_steps: ``EVENSTRIDE_MAX_STEPS``; ``None`` in a calibration, which has its own end.
    """
    if rank == 0 and max_steps is not None:
        logger.warning(
            "EVENSTRIDE_MAX_STEPS=%d is reached, so the loader has no further batch; the program "
            "ends here",
            max_steps,
        )
    raise SystemExit(0)


def not_stepped(step: int) -> UsageError:
    """Return the error of a step whose optimizer step never came, where it is what synchronises."""
    return UsageError(
        f"the next batch was asked for, and no optimizer has stepped in step {step}, which is "
        "when this mode of synchronisation exchanges; call optimizer.step() after each step's "
        "last backward pass"
    )
