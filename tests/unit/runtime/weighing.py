"""The weighting of one rank, apart from everything else of it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from evenstride.core.sampling.draw import Draw
from evenstride.runtime.loss.loss_scaling import LossScaling
from evenstride.runtime.loss.token_weights import WeightExchange
from evenstride.runtime.timing.step_timer import StepTimer


class Rank:
    """One rank's weighting, without any other rank."""

    def __init__(self, world_size: int = 1) -> None:
        self.committed: list[Draw] = []
        timer = StepTimer([])
        exchange = WeightExchange(None, timer.waiting)
        self.exchange = exchange
        self.scaling = LossScaling(world_size, timer, self.committed.append, lambda: exchange)
        self.model = nn.Linear(1, 1)

    def take(self, samples: int, window: int, weight: float | None = None, **draw: Any) -> Draw:
        """Take a batch in hand."""
        fields = {"step": 7, "share": samples, "first": True, "last": True, **draw}
        batch = Draw(window=window, samples=samples, **fields)
        self.scaling.begin(batch, weight)
        return batch

    def loss(self, value: float = 1.0) -> Tensor:
        """Return a loss whose gradient with respect to the bias is ``value``."""
        loss: Tensor = self.model(torch.zeros(1, 1)).sum() * value
        return loss

    def gradient(self, weight: float | None = None, value: float = 1.0) -> float:
        """Return the bias's gradient of one scaled loss."""
        self.model.zero_grad()
        self.scaling.scale(self.loss(value), weight).backward()  # type: ignore[no-untyped-call]
        assert self.model.bias.grad is not None
        return float(self.model.bias.grad)
