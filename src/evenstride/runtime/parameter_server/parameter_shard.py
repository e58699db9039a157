"""What one parameter server holds: its part of the parameters, and their optimizers.

No communication here; `server` calls it for the workers.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

Settings = list[dict[str, Any]]
"""Of an optimizer's groups, such as the learning rate; without their parameters."""


def part_of(optimizer: Optimizer, mine: Sequence[nn.Parameter]) -> Optimizer:
    """Return an optimizer of copies, on the CPU, of a few parameters, with their state.

    It is meant to be sent: its class must be one that the server can import, too. Groups that have
    none of the parameters stay, without any, so that settings go by position.
    """
    copies = {id(p): nn.Parameter(p.detach().cpu().clone(), p.requires_grad) for p in mine}
    part = copy.copy(optimizer)
    part.param_groups = [
        {**group, "params": [copies[id(p)] for p in group["params"] if id(p) in copies]}
        for group in optimizer.param_groups
    ]
    part.state = defaultdict(dict)
    for parameter in mine:
        if parameter in optimizer.state:
            part.state[copies[id(parameter)]] = _at_home(optimizer.state[parameter])
    return part


def _at_home(state: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value.detach().cpu().clone() if isinstance(value, Tensor) else value
        for name, value in state.items()
    }


def parameters_of(optimizer: Optimizer) -> list[nn.Parameter]:
    """Return an optimizer's parameters in the order in which gradients and weights are sent."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def settings_of(optimizer: Optimizer) -> Settings:
    """Return the settings of an optimizer's groups, as a scheduler may have changed them."""
    return [
        {name: value for name, value in group.items() if name != "params"}
        for group in optimizer.param_groups
    ]


class Shard:
    """Some of the parameters, stepped by optimizers that were sent by whoever came first."""

    def __init__(self) -> None:
        self._optimizers: dict[int, Optimizer] = {}
        self._keys: dict[int, Sequence[int]] = {}
        self.version = 0  # updates so far

    def begin(self, number: int, optimizer: Optimizer, keys: Sequence[int]) -> None:
        """Take over an optimizer with its parameters, unless there is one of that number.

        Args:
            number: of the optimizer.
            optimizer: it.
            keys: of its parameters, by which workers that have no optimizer yet know them.
        """
        if number not in self._optimizers:
            self._optimizers[number], self._keys[number] = optimizer, keys

    def step(
        self, number: int, settings: Settings, gradients: Sequence[Tensor | None], scale: float = 1
    ) -> list[Tensor]:
        """Step one optimizer and return its parameters' weights, which later steps overwrite.

        Args:
            number: of the optimizer.
            settings: of its groups from now on.
            gradients: of its parameters; ``None`` for one that had no part in the loss.
            scale: by which the learning rates are multiplied, in this step only. Gradients stay
                as they are: many optimizers make the same step of a smaller one.
        """
        optimizer = self._optimizers[number]
        for group, values in zip(optimizer.param_groups, settings, strict=True):
            group.update(values)
            if scale != 1 and "lr" in values:
                group["lr"] = values["lr"] * scale
        for parameter, gradient in zip(parameters_of(optimizer), gradients, strict=True):
            parameter.grad = gradient
        optimizer.step()
        optimizer.zero_grad()
        self.version += 1
        return self.weights(number)

    def weights(self, number: int) -> list[Tensor]:
        """Return the weights of an optimizer's parameters; they share memory with them."""
        return [p.detach() for p in parameters_of(self._optimizers[number])]

    def all_weights(self) -> dict[int, Tensor]:
        """Return all weights by their keys, those of the latest optimizer; they share memory."""
        return {
            key: weights
            for number, keys in self._keys.items()
            for key, weights in zip(keys, self.weights(number), strict=True)
        }

    def all_states(self) -> dict[int, dict[str, Any]]:
        """Return what optimizers remember of the parameters by their keys; see `all_weights`."""
        return {
            key: dict(optimizer.state.get(parameter, {}))
            for number, optimizer in self._optimizers.items()
            for key, parameter in zip(self._keys[number], parameters_of(optimizer), strict=True)
        }


def mean_of(parts: Sequence[Sequence[Tensor | None]]) -> list[Tensor | None]:
    """Return the mean of the workers' gradients, added up in the order in which they are given.

    Each is scaled by ``W * n_k / N`` already, so this is the mean over all samples. ``None``
    counts as zero where another worker has a gradient.

    Args:
        parts: one list per worker, of as many gradients each.
    """
    return [
        _mean([g for g in each if g is not None], len(parts)) for each in zip(*parts, strict=True)
    ]


def _mean(gradients: list[Tensor], workers: int) -> Tensor | None:
    if not gradients:
        return None
    total = gradients[0].clone()
    for gradient in gradients[1:]:
        total += gradient
    return torch.div(total, workers, out=total)
