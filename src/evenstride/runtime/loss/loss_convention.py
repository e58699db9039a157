"""Checks that the first loss of a run is the mean that `scale` expects.

`scale` weights a mean over the local samples. A sum, a mean over class weights or a loss divided by
a count over all ranks raises no error, but its gradients are not those of one process. A loss that
is certainly wrong is refused on every rank; a doubtful one causes a warning. Later losses are not
checked, except for a divisor that may be a constant, which shows when the batch size changes.

The autograd graph of the loss shows its reduction: `NllLossBackward0` has the reduction, targets
and class weights, and `DivBackward0` has the divisor. Reading it costs no forward pass. Saved
tensors that hooks have packed (activation checkpointing) stay packed and are not used.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from evenstride.core.sampling.draw import Draw
from evenstride.errors import ScaleError
from evenstride.runtime.coordination.agreement import Plain
from evenstride.runtime.loss.batch_in_hand import BatchInHand

logger = logging.getLogger("evenstride")
_MOST_NODES = 2000
# Nodes that pass a loss on unchanged, up to shape, sign and addition to other losses.
_NAMES = """
View ReshapeAlias UnsafeView Squeeze Unsqueeze ToCopy Clone Alias Neg Add Sub Stack Cat Select
Unbind _DDPSink
"""
_PASSES = frozenset(_NAMES.split())
# Nodes between a model's output and a sum that keep the samples of a batch separate.
_NAMES_BY_SAMPLE = """
Abs Pow Sub Add Mul Div Neg Exp Log Log1P Sigmoid Tanh Relu Softplus LogSigmoid Sqrt Clamp ClampMin
ClampMax Square ToCopy View Squeeze Unsqueeze LogSoftmax Softmax Gather Where MaskedFill Alias Clone

Index MaskedSelect NllLoss NllLoss2D MseLoss L1Loss SmoothL1Loss HuberLoss BinaryCrossEntropy
BinaryCrossEntropyWithLogits Xlogy
"""
_BY_SAMPLE = frozenset(_NAMES_BY_SAMPLE.split())
_REDUCTIONS = {0: "", 1: "mean", 2: "sum"}
_LIKELIHOODS = ("NllLoss", "NllLoss2D")

Agree = Callable[[str, Callable[[], Plain], Callable[[list[Plain]], Plain]], Plain]
"""Returns the leader's verdict on what all ranks show; see `agreement.agree`."""


@dataclass(frozen=True, slots=True)
class Reduction:
    """How one term of a loss was reduced to a number."""

    kind: str  # ``mean`` or ``sum``
    elements: int  # number of reduced elements.
    # Factors that were applied afterwards, in order; a division by 4 is 0.25.
    constants: tuple[float, ...]
    clear: bool  # whether it certainly is over the batch, sample by sample
    targets: TargetWeighting | None = None  # of a likelihood


class TargetWeighting(NamedTuple):
    """How a mean over targets is weighted."""

    counted: int  # targets that are not ignored
    unequal: bool  # whether samples differ in their number of counted targets
    by_class: bool  # whether classes have unequal weights


_Term = tuple[Any, tuple[float, ...]]
"""A node on the way from the loss, and the factors of its value."""


@dataclass(frozen=True, slots=True)
class LossGraph:
    """The graph of a loss, down to the outputs of its models."""

    loss: Tensor  # of one element
    outputs: set[Any]  # nodes that made the models' outputs; empty if unknown
    samples: int  # in the batch

    def reductions(self) -> list[Reduction]:
        """Return the reductions that the loss is a sum of; none if the graph is too large."""
        found: list[Reduction] = []
        waiting: list[_Term] = [(self.loss.grad_fn, ())]
        for _ in range(_MOST_NODES):
            if not waiting:
                return found
            node, constants = waiting.pop()
            if node is None:
                continue
            name = _name(node)
            if name in _PASSES or name in ("Mul", "Div"):
                waiting += _below(node, name, constants)
            elif name in ("Sum", "Mean") and math.prod(_sizes(node)) < self.samples:
                waiting += _below_a_few(node, name, constants)
            elif reduction := self._reduction(node, name, constants):
                found.append(reduction)
        return []

    def _reduction(self, node: Any, name: str, constants: tuple[float, ...]) -> Reduction | None:
        if name in ("Sum", "Mean"):
            clear = bool(self.outputs) and self._by_sample(node)
            return Reduction(name.lower(), math.prod(_sizes(node)), constants, clear)
        kind = _REDUCTIONS.get(getattr(node, "_saved_reduction", 0), "")
        target = saved(node, "target") if kind else None
        if target is None:
            return None
        likelihood = name in _LIKELIHOODS
        clear = likelihood or (bool(self.outputs) and self._by_sample(node))
        targets = self._targets(node, target) if likelihood else None
        return Reduction(kind, target.numel(), constants, clear, targets)

    def _targets(self, node: Any, target: Tensor) -> TargetWeighting:
        # Autograd saves a negative index as an unsigned number.
        ignored = node._saved_ignore_index
        counts = target.ne(ignored - 2**64 if ignored >= 2**63 else ignored)
        rows, rest = divmod(target.numel(), self.samples)
        of_samples = (
            counts.reshape(self.samples, rows).sum(1) if rows and not rest else counts.sum(0)
        )
        weight = saved(node, "weight")
        return TargetWeighting(
            int(counts.sum()),
            bool(rest) or bool((of_samples != of_samples.flatten()[0]).any()),
            weight is not None and bool((weight != weight[0]).any()),
        )

    def _by_sample(self, node: Any) -> bool:
        """Return whether a reduction's input came sample by sample from a model's output."""
        waiting, seen = [following for following, _ in node.next_functions], set[Any]()
        reached = False
        while waiting and len(seen) < _MOST_NODES:
            node = waiting.pop()
            if node in self.outputs:
                reached = True
            elif node is not None and node not in seen and _name(node) != "AccumulateGrad":
                seen.add(node)
                name = _name(node)
                over_rows = name in ("Sum", "Mean") and 0 not in _dims(node)
                if name not in _BY_SAMPLE and not over_rows:
                    return False
                waiting += [following for following, _ in node.next_functions]
        return reached and not waiting


def _below(node: Any, name: str, constants: tuple[float, ...]) -> list[_Term]:
    """Return the terms of a loss that is a sum, or the term below a constant factor."""
    sides = [following for following, _ in node.next_functions]
    if name in _PASSES:
        return [(side, constants) for side in sides]
    if len(sides) == 2 and sides[0] is None:  # a constant times or divided by the loss
        value, side = _number(saved(node, "self")), sides[1]
    else:
        value, side = _number(saved(node, "other")), sides[0]
    varies = len(sides) == 2 and None not in sides
    if varies or not value or (name == "Div" and side is not sides[0]):
        return []
    return [(side, (*constants, 1 / value if name == "Div" else value))]


def _below_a_few(node: Any, name: str, constants: tuple[float, ...]) -> list[_Term]:
    """Return the terms of a sum or mean over less than a batch, such as stacked losses."""
    count = math.prod(_sizes(node))
    part = (1 / count,) if name == "Mean" and count > 1 else ()
    return [(following, (*constants, *part)) for following, _ in node.next_functions]


def saved(node: Any, name: str) -> Any:
    """Return a saved value of a node; `None` if missing, or packed by hooks."""
    raw = getattr(node, f"_raw_saved_{name}", None)
    if raw is not None and getattr(raw, "unpack_hook", None) is not None:
        return None
    return getattr(node, f"_saved_{name}", None)


def nodes_of(outputs: object) -> Iterable[Any]:
    if isinstance(outputs, Tensor):
        return [outputs.grad_fn] if outputs.grad_fn is not None else []
    tensors = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor)]
    return [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]


def _name(node: Any) -> str:
    name: str = node.name().rpartition(":")[2]
    return name.rstrip("0123456789").removesuffix("Backward")


def _sizes(node: Any) -> tuple[int, ...]:
    return tuple(getattr(node, "_saved_self_sym_sizes", ()))


def _dims(node: Any) -> set[int]:
    """Return the dimensions of a sum or mean; the first one if it is over all."""
    dims, sizes = getattr(node, "_saved_dim", ()), _sizes(node)
    wrapped = (dim - 2**64 if dim >= 2**63 else dim for dim in dims)
    return {dim % max(len(sizes), 1) for dim in wrapped} or {0}


def _number(value: object) -> float | None:
    """Return a constant; `None` for other objects and for tensors of several elements."""
    if isinstance(value, Tensor):
        return float(value.detach()) if value.numel() == 1 else None
    return float(value) if isinstance(value, (int, float)) else None


class Scaled(NamedTuple):
    """A loss as it was given to `scale`."""

    loss: Tensor
    draw: Draw
    # Of the batch, from either source; ``None`` if samples are counted.
    weight: float | Tensor | None
    reduction: str


class Convention:
    """Checks the first loss of a run on one rank."""

    # Without `agree`, ranks have no common step in which to refuse a loss, so none is refused.
    def __init__(self, world_size: int, rank: int, agree: Agree | None, batch: BatchInHand) -> None:
        self._world_size, self._rank, self._agree, self._batch = world_size, rank, agree, batch
        self._hooks: list[RemovableHandle] = []
        self._outputs: set[Any] = set()
        self._first: Draw | None = None  # the batch whose loss was checked
        self._losses = 0  # scaled in that batch
        self._gradient: Tensor | None = None  # of the scaled loss
        self._divisors: dict[float, int] = {}  # of a sum, with the batch size at that time

    def watch(self, model: nn.Module) -> None:
        """Record the model's outputs, until the first loss."""

        def ran(_module: Any, _args: Any, outputs: object) -> None:
            # Only outputs of the training loop, not those of an evaluation before it.
            if not torch.compiler.is_compiling() and self._batch.draw is not None:
                self._outputs.update(nodes_of(outputs))

        self._hooks.append(model.register_forward_hook(ran))

    def see(self, given: Scaled) -> Self | None:
        """Check a loss, maybe refuse it on all ranks; return the check for the next, if any."""
        if not self._hooks:
            return None  # no model wants a check
        if self._first is None:
            if given.draw.last:
                self._see_first(given)
            # Ranks differ in their number of micro-batches. They agree in the one that each has,
            # in which a forward pass may communicate, too.
            self._outputs.clear()
            return self
        if given.draw is self._first:
            self._losses += 1
            return self
        self._judge_gradient()
        if not self._divisors or self._saw_another_size(given):
            return None
        return self

    def follow(self, scaled: Tensor) -> None:
        """Record the gradient of the first scaled loss."""
        # With several losses their gradients do not show by what the script divided.
        if self._losses == 1 and self._gradient is None and scaled.requires_grad:

            def came(gradient: Tensor) -> None:
                if self._gradient is None:
                    self._gradient = gradient.detach()

            scaled.register_hook(came)  # type: ignore[no-untyped-call]

    def _see_first(self, given: Scaled) -> None:
        self._first, self._losses = given.draw, 1
        for hook in self._hooks:
            hook.remove()
        found = self._complaint(given) if given.draw.samples > 1 else None
        shown = {"sure": found is not None and found.sure, "text": found.text if found else ""}
        if self._agree is None:
            _judge([shown])
        else:
            self._agree("scale()", lambda: shown, _judge)

    def _complaint(self, given: Scaled) -> Complaint | None:
        samples = given.draw.samples
        reductions = LossGraph(given.loss, self._outputs, samples).reductions()
        complaints = [c for r in reductions if r.clear and (c := complaint(r, given))]
        if not complaints and given.reduction == "mean" and given.weight is None:
            self._divisors = {d: samples for r in reductions for d in _divisors(r)}
        return max(complaints, key=lambda c: c.sure, default=None)

    def _saw_another_size(self, given: Scaled) -> bool:
        """Warn if a sum is divided by the same number although the batch size has changed."""
        samples = given.draw.samples
        if samples < 2 or samples in self._divisors.values():
            return False
        for reduction in LossGraph(given.loss, set(), samples).reductions():
            divisors = _divisors(reduction)
            kept = [divisor for divisor in divisors if divisor in self._divisors]
            if kept and not any(_fits(d, reduction, given) for d in divisors if d not in kept):
                logger.warning("step %d: %s", given.draw.step, _constant(max(kept), given))
                break
        return True

    def _judge_gradient(self) -> None:
        """Warn if the only scaled loss of the first batch was divided before its backward pass."""
        gradient, self._gradient, draw = self._gradient, None, self._first
        if gradient is None or self._losses != 1 or self._rank or draw is None:
            return
        value = float(gradient)
        pieces = math.ceil(draw.share / draw.samples) if draw.samples else 1
        counts = {"ranks": self._world_size, "micro-batches": pieces}
        for what, count in counts.items():
            if count > 1 and math.isclose(value * count, 1.0, rel_tol=1e-3):
                logger.warning(
                    "the scaled loss was divided by %d before backward(), which is the number of "
                    "%s. scale() already accounts for that number: call "
                    "stride.scale(loss).backward() without the division.",
                    count,
                    what,
                )
                return


class Complaint(NamedTuple):
    """What is wrong with a loss."""

    text: str  # the problem, and the remedy
    sure: bool  # whether it cannot be intended


def complaint(reduction: Reduction, given: Scaled) -> Complaint | None:
    samples, bare = given.draw.samples, not reduction.constants
    if given.reduction == "sum":
        if reduction.kind == "mean" and bare:
            return Complaint(_MEAN, sure=True)
        return None
    if reduction.kind == "sum":
        if bare and reduction.elements % samples == 0:
            return Complaint(_SUM, sure=given.weight is None)
        divisor = 1 / math.prod(reduction.constants)
        fits = any(_fits(d, reduction, given) for d in (divisor, *_divisors(reduction)))
        if bare or fits or given.weight is not None:
            return None
        return Complaint(_divided(divisor, given), sure=False)
    return _of_mean(reduction, samples) if given.weight is None else None


def _of_mean(reduction: Reduction, samples: int) -> Complaint | None:
    targets = reduction.targets
    if targets is not None and targets.by_class:
        return Complaint(_BY_CLASS, sure=False)
    if targets is not None and targets.unequal:
        return Complaint(
            f"the loss is a mean over the {targets.counted} of {reduction.elements} targets that "
            "are not ignored, and samples differ in their number of such targets. Batches with "
            "more of them must count for more: call "
            "stride.scale(loss, weight=(target != ignore_index).sum()), or give the loader a "
            "weight_fn.",
            sure=False,
        )
    if reduction.elements > samples and reduction.elements % samples:
        return Complaint(
            f"the loss is a mean over {reduction.elements} elements of {samples} samples. Batches "
            "with more elements must count for more: call stride.scale(loss, weight=elements), or "
            "give the loader a weight_fn.",
            sure=False,
        )
    return None


_SUM = (
    'the loss is a sum over the batch (reduction="sum"), but scale() takes a mean over the local '
    'samples. Use reduction="mean", or call stride.scale(loss, reduction="sum") to train on the '
    "sum over the global batch."
)
_MEAN = (
    'scale(loss, reduction="sum") takes a loss that adds up over the ranks, but this one is a mean '
    "over the local samples. Leave the argument out."
)
_BY_CLASS = (
    "the loss is a mean over class weights (weight= of cross_entropy), whose sum differs from "
    "batch to batch. Batches with a larger sum must count for more: call "
    "stride.scale(loss, weight=class_weights[target].sum()), or give the loader a weight_fn."
)
_REMEDY = (
    "If it is a count over this rank's batch, pass it as stride.scale(loss, weight=...). If it is "
    'a count over all ranks, call stride.scale(loss, reduction="sum"). Otherwise use a mean.'
)


def _divided(divisor: float, given: Scaled) -> str:
    what = ", which is the global batch" if divisor == given.draw.window else ""
    return (
        f"the loss is a sum divided by {divisor:g}{what}, but this rank's batch has "
        f"{given.draw.samples} samples, so it is not a mean over the local samples. {_REMEDY}"
    )


def _constant(divisor: float, given: Scaled) -> str:
    return (
        f"the loss is a sum divided by {divisor:g} for any batch size, but this rank's batch now "
        f"has {given.draw.samples} samples. Shares change: divide by len(batch) instead, or use "
        'reduction="mean".'
    )


def _divisors(reduction: Reduction) -> list[float]:
    if reduction.kind != "sum":
        return []
    divisors = [1 / constant for constant in reduction.constants]
    return [float(f"{divisor:.9g}") for divisor in divisors if divisor >= 2]


def _fits(divisor: float, reduction: Reduction, given: Scaled) -> bool:
    """Return whether a sum over the batch divided by this number may be a mean over samples."""
    samples, window = given.draw.samples, given.draw.window
    times = divisor / samples
    whole = round(times) >= 1 and math.isclose(times, round(times), rel_tol=1e-6)
    of_all = samples != window and math.isclose(divisor, window, rel_tol=1e-6)
    return whole and (not of_all or reduction.elements == window)


def _judge(shown: list[Plain]) -> Plain:
    """Refuse a loss that some rank is sure about; warn of a loss that a rank doubts."""
    texts = [mine["text"] for mine in shown if mine["text"]]
    for mine in shown:
        if mine["sure"] and len(shown) > 1:
            raise ScaleError(mine["text"])
    if texts:
        logger.warning("%s", texts[0])
    return {}
