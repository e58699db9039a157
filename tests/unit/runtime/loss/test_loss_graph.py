"""What a loss's graph tells of how it was reduced."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from evenstride.runtime.loss.loss_convention import LossGraph, Reduction, nodes_of

SAMPLES, CLASSES = 6, 8
MODEL = nn.Linear(3, CLASSES)
X, Y = torch.ones(SAMPLES, 3), torch.arange(SAMPLES) % CLASSES
OUTER = MODEL.weight @ MODEL.weight.T


def found(loss: Callable[[Tensor], Tensor], *, known: bool = True) -> list[Reduction]:
    """Return the reductions of a loss of the model's output."""
    out = MODEL(X)
    outputs = set(nodes_of({"logits": [out]})) if known else set()
    return LossGraph(loss(out), outputs, SAMPLES).reductions()


CLEAR: dict[str, tuple[Callable[[Tensor], Tensor], str, int, tuple[float, ...]]] = {
    "a mean": (lambda out: F.cross_entropy(out, Y), "mean", SAMPLES, ()),
    "a sum": (lambda out: F.cross_entropy(out, Y, reduction="sum"), "sum", SAMPLES, ()),
    "a sum and factors": (lambda out: -(out - 1).abs().sum() / 4 * 3, "sum", 48, (3.0, 0.25)),
    "a factor before it": (lambda out: 0.5 * out.square().mean(), "mean", 48, (0.5,)),
    "a tensor as divisor": (lambda out: out.sum() / torch.tensor(7), "sum", 48, (1 / 7,)),
    "another type": (lambda out: out.bfloat16().sum().float(), "sum", 48, ()),
    "another shape": (lambda out: out.exp().sum().reshape(1, 1).squeeze(), "sum", 48, ()),
    "rows first": (lambda out: out.square().mean(1).sum(), "sum", SAMPLES, ()),
    "chosen ones": (lambda out: -out.log_softmax(1).gather(1, Y[:, None]).sum(), "sum", 6, ()),
    "a loss of several": (lambda out: torch.stack([out.mean()]).sum(), "mean", 48, ()),
}
UNCLEAR: dict[str, Callable[[Tensor], Tensor]] = {
    "a penalty": lambda _: MODEL.weight.square().sum(),
    "a penalty of as many rows": lambda _: F.mse_loss(OUTER, OUTER.detach() + 1, reduction="sum"),
    "a mean over the batch first": lambda out: out.mean(0).square().sum(),
    "a product of the outputs": lambda out: (out @ out.T).sum(),
    "a norm": lambda out: out.norm(),
    "a learned factor": lambda out: out.sum() * MODEL.bias.mean(),
    "a factor of 0": lambda out: out.sum() * 0,
    "no graph": lambda _: torch.zeros(()),
}


@pytest.mark.parametrize("name", CLEAR)
def test_a_reduction_over_the_batch_is_read(name: str) -> None:
    loss, kind, elements, constants = CLEAR[name]

    (reduction,) = found(loss)

    assert (reduction.kind, reduction.elements, reduction.clear) == (kind, elements, True)
    assert reduction.constants == pytest.approx(constants)


@pytest.mark.parametrize("name", UNCLEAR)
def test_a_reduction_not_surely_over_the_batch_is_not_clear(name: str) -> None:
    assert not [reduction for reduction in found(UNCLEAR[name]) if reduction.clear]


def test_without_the_outputs_only_likelihoods_are_clear() -> None:
    entropy, squares = (
        found(loss, known=False)
        for loss in (lambda out: F.cross_entropy(out, Y), lambda out: out.square().sum())
    )

    assert [reduction.clear for reduction in (*entropy, *squares)] == [True, False]


def test_targets_that_are_ignored_and_class_weights_are_read() -> None:
    ignored = Y.clone()
    ignored[1] = -100
    weights = torch.arange(1.0, CLASSES + 1)

    (some,) = found(lambda out: F.cross_entropy(out, ignored))
    (weighed,) = found(lambda out: F.cross_entropy(out, Y, weight=weights))
    (images,) = found(lambda out: F.cross_entropy(out.reshape(3, CLASSES, 2), ignored.view(3, 2)))

    assert some.targets == (5, True, False)
    assert weighed.targets == (6, False, True)
    assert images.targets == (5, True, False)


def test_what_hooks_have_packed_stays_packed() -> None:
    unpacked = []

    def unpack(kept: Tensor) -> Tensor:
        unpacked.append(kept)
        return kept

    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, unpack):
        assert found(lambda out: F.cross_entropy(out, Y, reduction="sum") / 7) == []

    assert unpacked == []


def test_a_long_graph_is_given_up() -> None:
    def long(out: Tensor) -> Tensor:
        loss = out.sum()
        for _ in range(3000):
            loss = loss + 1
        return loss

    assert found(long) == []
