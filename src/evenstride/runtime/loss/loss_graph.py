"""Read from a loss's autograd graph how it was reduced: a mean or a sum, over what, times what.

The graph holds it all: `NllLossBackward0` the reduction, targets and class weights, `DivBackward0`
the divisor. Reading it costs no forward pass. Where saved tensors were packed by hooks (activation
checkpointing) they stay packed, and nothing is concluded.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils._pytree import tree_leaves

_MOST_NODES = 2000
# What hands a loss on unchanged, up to shape, sign and the other losses it is added to.
_NAMES = """
View ReshapeAlias UnsafeView Squeeze Unsqueeze ToCopy Clone Alias Neg Add Sub Stack Cat Select
Unbind _DDPSink
"""
_PASSES = frozenset(_NAMES.split())
# What leaves every sample of a batch to itself, between a model's output and a sum.
_NAMES_BY_SAMPLE = """
Abs Pow Sub Add Mul Div Neg Exp Log Log1P Sigmoid Tanh Relu Softplus LogSigmoid Sqrt Clamp ClampMin
ClampMax Square ToCopy View Squeeze Unsqueeze LogSoftmax Softmax Gather Where MaskedFill Alias Clone
Index MaskedSelect NllLoss NllLoss2D MseLoss L1Loss SmoothL1Loss HuberLoss BinaryCrossEntropy
BinaryCrossEntropyWithLogits Xlogy
"""
_BY_SAMPLE = frozenset(_NAMES_BY_SAMPLE.split())
_REDUCTIONS = {0: "", 1: "mean", 2: "sum"}
_LIKELIHOODS = ("NllLoss", "NllLoss2D")


@dataclass(frozen=True, slots=True)
class Reduction:
    """How one term of a loss was reduced to a number.

    Args:
        kind: ``mean`` or ``sum``.
        elements: numbers that it is over.
        constants: what it was multiplied by afterwards, in order; a division by 4 is 0.25.
        clear: whether it surely is over the batch, sample by sample.
        targets: of a likelihood; else `None`.
    """

    kind: str
    elements: int
    constants: tuple[float, ...]
    clear: bool
    targets: TargetWeighting | None = None


class TargetWeighting(NamedTuple):
    """What a mean over targets is weighted by.

    Args:
        counted: targets that are not ignored.
        unequal: whether samples differ in how many of those they have.
        by_class: whether classes have unequal weights.
    """

    counted: int
    unequal: bool
    by_class: bool


_Term = tuple[Any, tuple[float, ...]]
"""A node on the way from the loss, and what its value is multiplied by."""


@dataclass(frozen=True, slots=True)
class LossGraph:
    """The graph of a loss, above the outputs of the models it is of.

    Args:
        loss: of one element.
        outputs: the nodes that made the models' outputs; none if they are not known.
        samples: in the batch.
    """

    loss: Tensor
    outputs: set[Any]
    samples: int

    def reductions(self) -> list[Reduction]:
        """Return the reductions that the loss is a sum of; none if there is too much to read."""
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
    """Return what a loss is made of by adding, or by a constant factor."""
    sides = [following for following, _ in node.next_functions]
    if name in _PASSES:
        return [(side, constants) for side in sides]
    if len(sides) == 2 and sides[0] is None:  # a constant times the loss, or over it
        value, side = _number(saved(node, "self")), sides[1]
    else:
        value, side = _number(saved(node, "other")), sides[0]
    varies = len(sides) == 2 and None not in sides
    if varies or not value or (name == "Div" and side is not sides[0]):
        return []
    return [(side, (*constants, 1 / value if name == "Div" else value))]


def _below_a_few(node: Any, name: str, constants: tuple[float, ...]) -> list[_Term]:
    """Return what a sum or mean over less than a batch is of, such as losses that were stacked."""
    count = math.prod(_sizes(node))
    part = (1 / count,) if name == "Mean" and count > 1 else ()
    return [(following, (*constants, *part)) for following, _ in node.next_functions]


def saved(node: Any, name: str) -> Any:
    """Return what a node has saved by that name; `None` if nothing, or if hooks have packed it."""
    raw = getattr(node, f"_raw_saved_{name}", None)
    if raw is not None and getattr(raw, "unpack_hook", None) is not None:
        return None
    return getattr(node, f"_saved_{name}", None)


def nodes_of(outputs: object) -> Iterable[Any]:
    """Return the nodes that made the tensors in a model's output, whatever holds them."""
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
    """Return the dimensions that a sum or mean is over; the first one if it is over all."""
    dims, sizes = getattr(node, "_saved_dim", ()), _sizes(node)
    wrapped = (dim - 2**64 if dim >= 2**63 else dim for dim in dims)
    return {dim % max(len(sizes), 1) for dim in wrapped} or {0}


def _number(value: object) -> float | None:
    """Return a constant, or `None` if it is none, or one for each of several elements."""
    if isinstance(value, Tensor):
        return float(value.detach()) if value.numel() == 1 else None
    return float(value) if isinstance(value, (int, float)) else None
