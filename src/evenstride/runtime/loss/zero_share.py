"""A backward pass that drives the collectives and contributes exactly nothing.

A rank with a share of 0 still has to take part in the gradient's collectives. It runs one
sample whose loss is weighted 0. But ``0 * inf`` is not 0: a loss or an activation that is not
finite would poison every rank. So whatever is not finite is replaced by 0 on its way into the
parameters, before the engine reduces it. What is finite came out as 0 already, or belongs to a
term the user adds beside the scaled loss, such as a penalty on the weights, and is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle


def zero_loss(loss: Tensor) -> Tensor:
    """Return a loss of exactly 0, whatever ``loss`` is, that still reaches its whole graph."""
    return torch.nan_to_num(loss, nan=0.0, posinf=0.0, neginf=0.0) * 0.0


def silence(loss: Tensor, models: Iterable[nn.Module]) -> list[RemovableHandle]:
    """Let no backward pass add anything that is not finite to the gradients.

    Args:
        loss: the scaled loss, whose graph is walked for the leaves it reaches (activation
            checkpointing hides leaves from that walk).
        models: the watched models, all of whose parameters are meant as well.

    Returns:
        Handles to remove once the step's backward passes are over.
    """
    reached = [*_leaves(loss), *(p for model in models for p in model.parameters())]
    silenced = {id(p): p for p in reached if p.requires_grad}.values()
    return [p.register_hook(_finite) for p in silenced]  # type: ignore[no-untyped-call]


class ZeroShares:
    """Keeps what a rank without samples computes out of the gradients, until its next batch.

    Args:
        models: the watched ones; more may come.
        ended: called after each batch that was silenced.
    """

    def __init__(
        self, models: Sequence[nn.Module], ended: Callable[[], None] = lambda: None
    ) -> None:
        self._models, self._ended = models, ended
        self._silenced: list[RemovableHandle] = []

    def silent(self, loss: Tensor) -> Tensor:
        """Return a loss of 0 whose backward pass adds exact zeros until `end`."""
        silent = zero_loss(loss)
        if silent.requires_grad:
            # Until the next batch: a step may have several losses, whatever their order.
            self._silenced += silence(silent, self._models)
        return silent

    def end(self) -> None:
        """Let backward passes add what they compute again."""
        if self._silenced:
            for handle in self._silenced:
                handle.remove()
            self._silenced.clear()
            self._ended()


def _finite(gradient: Tensor) -> Tensor:
    return torch.nan_to_num(gradient, nan=0.0, posinf=0.0, neginf=0.0)


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
