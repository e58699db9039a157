"""A backward pass that drives the collectives and contributes exactly nothing.

A rank with a share of 0 still has to take part in the gradient's collectives. It runs one
sample whose loss is weighted 0. But ``0 * inf`` is not 0: a loss or an activation that is not
finite would poison every rank. So the gradients themselves are replaced by zeros on their way
into the parameters, before the engine reduces them.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle


def zero_loss(loss: Tensor) -> Tensor:
    """Return a loss of exactly 0, whatever ``loss`` is, that still reaches its whole graph."""
    return torch.nan_to_num(loss, nan=0.0, posinf=0.0, neginf=0.0) * 0.0


def silence(loss: Tensor, model: nn.Module | None) -> list[RemovableHandle]:
    """Make the next backward pass of ``loss`` add only zeros to the gradients.

    Args:
        loss: the scaled loss.
        model: the watched model; without one, the leaves of the loss's graph are found by
            walking it (activation checkpointing hides leaves from that walk).

    Returns:
        Handles to remove once the backward pass is over.
    """
    parameters = _leaves(loss) if model is None else model.parameters()
    silenced = [p for p in parameters if p.requires_grad]
    return [p.register_hook(torch.zeros_like) for p in silenced]  # type: ignore[no-untyped-call]


def _leaves(loss: Tensor) -> Iterable[Tensor]:
    seen: set[object] = set()
    waiting = [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            yield node.variable
        waiting.extend(following for following, _ in node.next_functions)
