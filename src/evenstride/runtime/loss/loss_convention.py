"""Look at a run's first loss: is it the mean that `scale` takes it for?

`scale` weighs a mean over the local samples. A sum, a mean over class weights or a loss divided by
a count over all ranks raises no error, but its gradients are not those of one process. So the first
loss is read from its autograd graph. What is surely wrong is refused on every rank alike; what may
be wrong is a warning. Later losses are not looked at, but for a divisor that may be a constant:
that shows when the batch has another size.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from evenstride.core.sampling.draw import Draw
from evenstride.errors import ScaleError
from evenstride.runtime.coordination.agreement import Plain
from evenstride.runtime.loss.batch_in_hand import BatchInHand
from evenstride.runtime.loss.loss_graph import LossGraph, Reduction, nodes_of

logger = logging.getLogger("evenstride")

Agree = Callable[[str, Callable[[], Plain], Callable[[list[Plain]], Plain]], Plain]
"""Returns what the leader makes of what all ranks show; see `agreement.agree`."""


class Scaled(NamedTuple):
    """A loss as it was given to `scale`.

    Args:
        loss: the loss.
        draw: of its batch.
        weight: of the batch, from either source; ``None`` if samples are counted.
        reduction: as given.
    """

    loss: Tensor
    draw: Draw
    weight: float | Tensor | None
    reduction: str


class Convention:
    """Checks the first loss of a run on one rank.

    Args:
        world_size: ranks the engine averages over.
        rank: this rank.
        agree: to refuse alike; ``None`` where ranks have no step in common, and none is refused.
        batch: in hand.
    """

    def __init__(self, world_size: int, rank: int, agree: Agree | None, batch: BatchInHand) -> None:
        self._world_size, self._rank, self._agree, self._batch = world_size, rank, agree, batch
        self._hooks: list[RemovableHandle] = []
        self._outputs: set[Any] = set()
        self._first: Draw | None = None  # the batch whose loss was looked at
        self._losses = 0  # that were scaled in it
        self._gradient: Tensor | None = None  # that came into the scaled loss
        self._divisors: dict[float, int] = {}  # of a sum, with the samples they went with

    def watch(self, model: nn.Module) -> None:
        """Get to know the model's outputs, until the first loss."""

        def ran(_module: Any, _args: Any, outputs: object) -> None:
            if not torch.compiler.is_compiling() and self._batch.draw is not None:
                self._outputs.update(nodes_of(outputs))

        self._hooks.append(model.register_forward_hook(ran))

    def see(self, given: Scaled) -> Self | None:
        """Look at a loss; return what is to look at the next one, if any.

        Raises:
            ScaleError: it is surely no mean over the batch, on some rank; raised on every rank.
        """
        if not self._hooks:
            return None  # no model has asked for it
        if self._first is None:
            self._see_first(given)
            return self
        if given.draw is self._first:
            self._losses += 1
            return self
        self._judge_gradient()
        if not self._divisors or self._saw_another_size(given):
            return None
        return self

    def follow(self, scaled: Tensor) -> None:
        """Look at the gradient that comes into the first scaled loss."""
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
        self._outputs.clear()
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
        """Warn if a sum is divided by the same number though the batch has another size."""
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
                    "%s. scale() accounts for that number: if it is meant, call "
                    "stride.scale(loss).backward() without the division.",
                    count,
                    what,
                )
                return


class Complaint(NamedTuple):
    """What is wrong with a loss.

    Args:
        text: says it, and what to do.
        sure: whether it cannot be meant.
    """

    text: str
    sure: bool


def complaint(reduction: Reduction, given: Scaled) -> Complaint | None:
    """Return what is wrong with a term of a loss, if anything is."""
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
            "are not ignored, and samples differ in how many they have. Batches with more of them "
            "must count for more: call stride.scale(loss, weight=(target != ignore_index).sum()), "
            "or give the loader a weight_fn.",
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
    'the loss is a sum over the batch (reduction="sum"), and scale() takes a mean over the local '
    'samples. Use reduction="mean", or call stride.scale(loss, reduction="sum") to train on the '
    "sum over the global batch."
)
_MEAN = (
    'scale(loss, reduction="sum") takes a loss that adds up over the ranks, and this one is a mean '
    "over the local samples. Leave the argument out."
)
_BY_CLASS = (
    "the loss is a mean over class weights (weight= of cross_entropy), whose sum differs from "
    "batch to batch. Batches that weigh more must count for more: call "
    "stride.scale(loss, weight=class_weights[target].sum()), or give the loader a weight_fn."
)
_REMEDY = (
    "If it is a count over this rank's batch, pass it as stride.scale(loss, weight=...). If it is "
    'a count over all ranks, call stride.scale(loss, reduction="sum"). Otherwise use a mean.'
)


def _divided(divisor: float, given: Scaled) -> str:
    what = ", which is the global batch" if divisor == given.draw.window else ""
    return (
        f"the loss is a sum divided by {divisor:g}{what}, and this rank's batch has "
        f"{given.draw.samples} samples, so it is not a mean over the local samples. {_REMEDY}"
    )


def _constant(divisor: float, given: Scaled) -> str:
    return (
        f"the loss is a sum divided by {divisor:g} for any batch size, and this rank's batch has "
        f"{given.draw.samples} samples now. Shares change: divide by len(batch) instead, or use "
        'reduction="mean".'
    )


def _divisors(reduction: Reduction) -> list[float]:
    """Return what a sum was divided by, step by step."""
    if reduction.kind != "sum":
        return []
    divisors = [1 / constant for constant in reduction.constants]
    return [float(f"{divisor:.9g}") for divisor in divisors if divisor >= 2]


def _fits(divisor: float, reduction: Reduction, given: Scaled) -> bool:
    """Return whether a sum over the batch divided by this may be a mean over samples."""
    samples, window = given.draw.samples, given.draw.window
    times = divisor / samples
    whole = round(times) >= 1 and math.isclose(times, round(times), rel_tol=1e-6)
    of_all = samples != window and math.isclose(divisor, window, rel_tol=1e-6)
    return whole and (not of_all or reduction.elements == window)


def _judge(shown: list[Plain]) -> Plain:
    """Refuse what some rank is sure of; warn of what some rank is not sure of."""
    texts = [mine["text"] for mine in shown if mine["text"]]
    for mine in shown:
        if mine["sure"] and len(shown) > 1:
            raise ScaleError(mine["text"])
    if texts:
        logger.warning("%s", texts[0])
    return {}
