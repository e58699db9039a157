"""A training loop of one process that keeps a record of what it was given."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import evenstride


def numbered(length: int) -> TensorDataset:
    """Return rows of (id, value)."""
    return TensorDataset(torch.arange(length), torch.linspace(-1, 1, length).reshape(length, 1))


class Trainer:
    """A watched model with its optimizer."""

    def __init__(self, stride: evenstride.Stride) -> None:
        self.stride = stride
        self.model = stride.watch(nn.Linear(1, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)

    def loss(self, batch: Any) -> Tensor:
        """Return the mean loss over a batch."""
        loss: Tensor = self.model(batch[1]).square().mean()
        return loss

    def backward(self, batch: Any) -> None:
        """Run the backward pass of a batch."""
        self.stride.scale(self.loss(batch)).backward()  # type: ignore[no-untyped-call]

    def update(self) -> None:
        """Let the optimizer step."""
        self.optimizer.step()
        self.optimizer.zero_grad()

    def step(self, batch: Any) -> list[int]:
        """Train on a batch that is a whole step and return its ids."""
        self.backward(batch)
        self.update()
        ids: list[int] = batch[0].tolist()
        return ids

    def epoch(self, loader: DataLoader[Any], *, steps: int | None = None) -> list[list[int]]:
        """Train over the rest of an epoch, or some steps of it; return the ids of every step."""
        seen = []
        for batch in loader:
            seen.append(self.step(batch))
            if len(seen) == steps:
                break
        return seen
