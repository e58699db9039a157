"""Errors and warnings about mistakes in a training script: arguments, losses and gradients.

A function named after a mistake returns its error. One that begins with ``tell`` logs a warning.
A warning that names a line of the script finds the line on the call stack.
"""

from __future__ import annotations

import ast
import inspect
import linecache
import logging
import operator
import re
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import torch
from torch import Tensor

from evenstride.errors import ConfigError, ScaleError, StepInFlight, UsageError

logger = logging.getLogger("evenstride")

_OURS = (str(Path(__file__).parents[1]), str(Path(torch.__file__).parent))
_LIBRARIES = (*_OURS, *(sysconfig.get_paths()[name] for name in ("stdlib", "purelib", "platlib")))


def check_whole(name: str, value: object, least: int | None = None) -> None:
    """Raise a `ConfigError` unless a value is an integer, and at least ``least``."""
    whole = isinstance(value, int) and not isinstance(value, bool)
    if not whole or (least is not None and isinstance(value, int) and value < least):
        range_of = "" if least is None else f" of at least {least}"
        raise ConfigError(f"{name} is {value!r}; it must be a whole number{range_of}")


def refuse_for_evaluation(**asked: object) -> None:
    """Raise if an evaluation loader got options of a training loader."""
    named = [name for name, value in asked.items() if value is not None and value is not False]
    if named:
        raise ConfigError(
            f"{', '.join(named)} cannot be used with train=False: evaluation reads each sample "
            "once, and counts are given to stride.mean(); leave it out"
        )


def endless_evaluation() -> ConfigError:
    return ConfigError(
        "a batch function has no end, so it cannot be evaluated as a data set; evaluate some "
        "batches of it without a loader, or pass a data set or evenstride.Stream"
    )


def refuse_for_training(global_batch: int | None) -> None:
    """Raise if a training loader got a global batch of its own."""
    if global_batch is not None:
        raise ConfigError(
            "loader(global_batch=...) is for evaluation (train=False); training uses the "
            "global batch of the Stride"
        )


def whole(value: Any) -> Any:
    """Return the value as an int if it is an integer of any type; else return it unchanged."""
    try:
        return value if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return value


def by_epoch(partition: str | None, cost_fn: object) -> bool | None:
    """Return whether `Stride.loader` splits the data set once per epoch; check ``partition``."""
    if partition is None:
        return None
    if partition not in ("step", "epoch"):
        raise ConfigError(
            f"partition is {partition!r}; it must be 'step' (the samples of each step are split), "
            "'epoch' (each rank keeps one part of the data set for an epoch), or None (as the "
            "policy wants)"
        )
    if partition == "epoch" and cost_fn is not None:
        raise ConfigError(
            "partition='epoch' splits the data set by numbers of samples, so it cannot be "
            "combined with cost_fn; leave one of them out"
        )
    return partition == "epoch"


def not_one_number(loss: object) -> ScaleError:
    what, fix = type(loss).__name__, "pass the tensor that the loss function returns, not .item()"
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
    return ScaleError(
        f"the next batch was fetched, but the batch of step {step} was never scaled, so its "
        "gradient would be wrong for unequal shares. Call stride.scale(loss).backward() for every "
        f"batch. {_FETCHED_AHEAD}. A CUDA graph of the whole step cannot be replayed: its weight "
        "is that of the captured batch."
    )


def no_backward(step: int) -> ScaleError:
    return ScaleError(
        f"the next batch was fetched, but the backward pass of step {step} never ran on this rank, "
        "and the other ranks would wait for it. Run backward() for every batch. To skip a batch, "
        f"scale its loss by 0. {_FETCHED_AHEAD}."
    )


def compiled_backward() -> UsageError:
    return UsageError(
        "the backward pass runs under compiled autograd, which drops the callbacks that report "
        "when a gradient is ready; call loss.backward() outside the compiled function, or leave "
        "torch._dynamo.config.compiled_autograd off. torch.compile of the model itself works"
    )


def captured() -> UsageError:
    return UsageError(
        "scale() was called while a CUDA graph is captured. A replayed graph repeats the weight of "
        "the captured batch and never calls scale() again; capture the network alone "
        "(torch.cuda.make_graphed_callables, with a fixed policy such as uniform) and call "
        "stride.scale(loss).backward() outside the graph"
    )


def outside_loop() -> ScaleError:
    return ScaleError(
        "scale() was called outside the training loop; call it once per loss inside "
        "`for batch in loader:`"
    )


def drawn_elsewhere() -> UsageError:
    return UsageError(
        "another loader than the one that stride.loader() returned asked for training batches. A "
        "framework has built the loader again and would split its batches a second time. With "
        "Accelerate, use evenstride.integrations.accelerate.EvenAccelerator (and its method "
        "skip_first_batches). With Lightning, use an EvenStrategy. Otherwise, iterate over what "
        "stride.loader() returned"
    )


def evaluated_elsewhere() -> UsageError:
    return UsageError(
        "another loader than the one that stride.loader(train=False) returned asked for its "
        "batches. A framework has built the loader again and would split its batches a second "
        "time, so most samples would not be evaluated. With Accelerate, use "
        "evenstride.integrations.accelerate.EvenAccelerator. With Lightning, use an EvenStrategy. "
        "Otherwise, iterate over what stride.loader() returned"
    )


def tell_of_missed_batches(count: int) -> None:
    """Warn that a loop counts the steps of an evaluation, and so leaves batches out."""
    logger.warning(
        "an evaluation stopped after %d batches, the number of its steps. max_micro_batch or "
        "max_share splits this rank's data into more batches, so the others were not evaluated. "
        "In a loop that counts batches, leave these options out",
        count,
    )


def scaled_twice(step: int) -> ScaleError:
    return ScaleError(
        f"a loss of step {step} was scaled twice; call stride.scale once per loss, "
        "and scale the sum of losses, not its scaled terms"
    )


def not_accumulated() -> ScaleError:
    return ScaleError(
        "this loader splits shares into micro-batches, so ranks run different numbers of "
        "backward passes; put forward, scale and backward inside "
        "`with stride.accumulate(model):`"
    )


def weight_of_a_piece() -> ScaleError:
    return ScaleError(
        "scale(weight=...) needs one batch per rank and step, and this step has micro-batches "
        "(a batch that did not fit into memory is split, too) or a weight_fn; give the loader a "
        "weight_fn instead, and call scale(loss) alone"
    )


def unknown_reduction(reduction: object) -> ScaleError:
    return ScaleError(
        f'scale(reduction={reduction!r}) is unknown; use "mean" for a mean over the local samples, '
        'or "sum" for a loss that adds up over the ranks'
    )


def sum_with_weight() -> ScaleError:
    return ScaleError(
        'scale(reduction="sum") takes a loss that adds up over the ranks, so it takes no weight; '
        "leave out weight= and the loader's weight_fn, or use a mean"
    )


def sum_without_steps() -> ScaleError:
    return ScaleError(
        'scale(reduction="sum") adds up the losses of all ranks in a step, but in this mode of '
        'synchronisation workers have no step in common; use a mean, or sync="bsp"'
    )


def gradients_gone(step: int) -> UsageError:
    return UsageError(
        f"the gradients of step {step} are gone between two of its micro-batches. (The loader "
        "also makes micro-batches of a batch that does not fit into memory.) Call "
        "optimizer.zero_grad() under `if stride.synced:`, after optimizer.step()"
    )


def stepped_in_midst(step: int | None) -> UsageError:
    return UsageError(
        f"optimizer.step() was called in the middle of step {step},"
        " between two of its micro-batches; put it under `if stride.synced:`"
    )


def stepped_by_closure() -> UsageError:
    return UsageError(
        "optimizer.step() got a closure, but this mode of synchronisation exchanges once per "
        "step, after the single backward pass; use an optimizer that needs no closure"
    )


def left_out() -> UsageError:
    return UsageError(
        "a gradient scaler found an infinite or NaN gradient and skipped its step. In this mode "
        "of synchronisation each rank sees its own gradients only, so the other ranks did not "
        'skip and would wait; train in bfloat16 without a scaler, or with sync="bsp"'
    )


def in_flight(step: int) -> StepInFlight:
    return StepInFlight(
        f"step {step} is between its backward pass and its optimizer step, so model and position "
        "do not match; call state_dict() after optimizer.step()"
    )


_BY_HAND = 'If the script averages gradients itself, create the Stride with engine="none"'


def bare(name: str, world_size: int) -> ConfigError:
    return ConfigError(
        f"watch() got a bare {name}, and nothing averages its gradients over the {world_size} "
        "ranks, so each rank would train a model of its own. Give watch() the wrapper: "
        f"model = stride.watch(DistributedDataParallel(net)), or FSDP2. {_BY_HAND}"
    )


def not_averaged(parameter: str, world_size: int) -> ConfigError:
    return ConfigError(
        f"watch() got a model with the parameter {parameter}, which no engine averages over the "
        f"{world_size} ranks: DistributedDataParallel or FSDP2 ignores it or does not contain it. "
        "Put all trainable parameters into the wrapper. Experts that each rank has for itself "
        f"(expert parallelism) are not supported. {_BY_HAND}"
    )


def no_engine(world_size: int) -> ConfigError:
    return ConfigError(
        f"the first step has run on {world_size} ranks, and nothing averages their gradients: "
        "stride.watch() was not called, and no DistributedDataParallel or FSDP2 module exists. "
        "No optimizer has stepped. Call model = stride.watch(DistributedDataParallel(net)) before "
        f"the loop. {_BY_HAND}"
    )


def engine_bypassed(engine: str) -> UsageError:
    return UsageError(
        f"the first step's gradients differ between the ranks: the {engine} that stride.watch() "
        "was given did not run. No optimizer has stepped. Call the wrapper in the loop, not the "
        "module inside it"
    )


def unwatched() -> UsageError:
    return UsageError(
        "no model was given to stride.watch(), and this mode of synchronisation trains watched "
        "models only; call model = stride.watch(model) before the loop"
    )


def tell_of_unwatched() -> None:
    """Warn that waiting times of the engine are unknown, because the model is not watched."""
    logger.warning(
        "the model was not given to stride.watch(), so the time that its engine waits for other "
        "ranks may count as busy time; call model = stride.watch(model) before the loop"
    )


def tell_of_placeholder(step: int) -> None:
    """Warn that the script may count the placeholder sample of a rank with a share of 0."""
    logger.warning(
        "this rank had no samples in step %d and ran one placeholder sample instead. The script "
        "never reads stride.samples, and len(batch) counts the placeholder as a sample. Use "
        "stride.samples (0 in such a step) for counts, sums and running means.",
        step,
    )


def tell_if_overruled(in_script: int, in_environment: int | None) -> None:
    """Warn if script and environment name different global batches; the script's is used.

    In the environment, 0 and ``None`` stand for no number.
    """
    if in_environment and in_environment != in_script:
        logger.warning(
            "EVENSTRIDE_GLOBAL_BATCH is %d, but the script's global_batch=%d is used; to set it "
            'from outside, write global_batch="auto" and its bounds in the script',
            in_environment,
            in_script,
        )


def tell_of_models(step: int) -> None:
    """Warn that the run ends between two averages of local SGD."""
    logger.warning(
        "the run ends after step %d, between two averages of the local steps, so the models of the "
        "ranks differ. Train to the end of an epoch, set the number of steps with "
        "EVENSTRIDE_MAX_STEPS, or save with a Checkpointer before close(), which averages the "
        "models",
        step,
    )


def tell_of_late_gradient() -> None:
    """Warn that the gradient of the last step is never applied."""
    logger.warning(
        "the run ends before the gradient of its last step was applied, so it is lost. Train to "
        "the end of an epoch, set the number of steps with EVENSTRIDE_MAX_STEPS, or save with a "
        "Checkpointer before close(), which applies it",
    )


def tell_of_changed_gradients(step: int) -> None:
    """Warn that gradients were changed between two micro-batches of a step."""
    logger.warning(
        "the gradients were changed between two micro-batches of step %d. At that point they are "
        "only this rank's part of the step's gradient. Clip, unscale and zero them under "
        "`if stride.synced:`. The line is probably %s",
        step,
        line_with("clip_grad", "unscale_", "zero_grad"),
    )


def tell_if_epochs_restart(epoch: int) -> None:
    """Warn if the loop over epochs does not start at the epoch of the restored run."""
    if epoch and (found := range_behind(epoch)) is not None:
        line, text = found
        logger.warning(
            "training continues in epoch %d, but the loop over %s at %s does not start there. If "
            "it counts all epochs, the run trains too many: write range(stride.epoch, epochs)",
            epoch,
            text,
            line,
        )


def end_program(rank: int, max_steps: int | None) -> NoReturn:
    """End the program with exit code 0, because no further step is allowed; rank 0 logs it.

    A pass without batches would break scripts that read their loop variables after the loop. An
    endless generator over the loader would never end. ``max_steps`` is ``None`` in a calibration,
    which ends by itself.
    """
    if rank == 0 and max_steps is not None:
        logger.warning(
            "EVENSTRIDE_MAX_STEPS=%d is reached, so the loader has no further batch; the program "
            "ends here",
            max_steps,
        )
    raise SystemExit(0)


def not_stepped(step: int) -> UsageError:
    return UsageError(
        f"the next batch was fetched, but no optimizer has stepped in step {step}. In this mode of "
        "synchronisation the ranks exchange at the optimizer's step; call optimizer.step() after "
        "the last backward pass of each step"
    )


def user_line() -> str:
    """Return file and line of the innermost call that is not in a library."""
    frames = list(_frames())
    frame = next((one for one in frames if not _of_library(one)), frames[0] if frames else None)
    return "an unknown line" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


def line_with(*patterns: str) -> str:
    """Return the first line of the calling function that matches a pattern, as ``FILE:LINE``.

    Patterns are tried in order. If no line matches, or the source is missing, returns the line of
    the call.
    """
    frame = next((one for one in _frames() if not _of_library(one)), None)
    if frame is None:
        return user_line()
    try:
        lines, first = inspect.getsourcelines(frame.f_code)
    except (OSError, TypeError):
        return user_line()
    first = max(first, 1)  # 0 for a module
    for pattern in patterns:
        for number, line in enumerate(lines, first):
            if re.search(pattern, line.partition("#")[0]):
                return f"{frame.f_code.co_filename}:{number}"
    return user_line()


def range_behind(epoch: int) -> tuple[str, str] | None:
    """Return line and text of the ``range`` that counts epochs, if it is behind the run's epoch.

    Only the innermost loop over a ``range`` around the training loop is examined. Returns ``None``
    if no such loop exists, its counter is not behind, or it takes `Stride.epoch` into account.
    """
    for frame in _frames():
        hands_through = bool(frame.f_code.co_flags & inspect.CO_GENERATOR)
        if _of_library(frame):
            if not hands_through:  # a framework that counts epochs by itself
                return None
            continue
        loop = _range_loop(frame)
        if loop is not None:
            counter = _value(frame, loop.target)
            behind = isinstance(counter, int) and counter < epoch
            if not behind or _knows_epoch(frame, loop.iter):
                return None
            return f"{frame.f_code.co_filename}:{loop.lineno}", ast.unparse(loop.iter)
        if hands_through:  # the consumer of this generator may count something else
            return None
    return None


def _frames() -> Iterator[FrameType]:
    """Yield the frames that are neither evenstride's nor torch's, innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if not frame.f_code.co_filename.startswith(_OURS):
            yield frame
        frame = frame.f_back


def _of_library(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith((*_LIBRARIES, "<frozen"))


def _tree(frame: FrameType) -> ast.Module:
    try:
        return ast.parse("".join(linecache.getlines(frame.f_code.co_filename)))
    except (SyntaxError, ValueError):
        return ast.parse("")


def _range_loop(frame: FrameType) -> ast.For | None:
    within = [
        node
        for node in ast.walk(_tree(frame))
        if isinstance(node, ast.For)
        and node.body[0].lineno <= frame.f_lineno <= (node.end_lineno or 0)
        and any(
            isinstance(part, ast.Call) and ast.unparse(part.func) in ("range", "trange")
            for part in ast.walk(node.iter)
        )
        and _same_function(frame, node)
    ]
    return max(within, key=lambda node: node.lineno, default=None)


def _same_function(frame: FrameType, node: ast.For) -> bool:
    return node.lineno >= frame.f_code.co_firstlineno


def _value(frame: FrameType, target: ast.expr) -> object:
    return frame.f_locals.get(target.id) if isinstance(target, ast.Name) else None


def _knows_epoch(frame: FrameType, expression: ast.expr) -> bool:
    """Return whether an expression has ``stride.epoch`` in it, or a name that was made from it."""
    if _has_epoch(expression):
        return True
    names = {node.id for node in ast.walk(expression) if isinstance(node, ast.Name)}
    made = [node for node in ast.walk(_tree(frame)) if isinstance(node, ast.Assign)]
    return any(
        isinstance(target, ast.Name) and target.id in names and _has_epoch(node.value)
        for node in made
        for target in node.targets
    )


def _has_epoch(expression: ast.expr) -> bool:
    return "stride.epoch" in ast.unparse(expression)
