"""The weighting of one rank, apart from everything else of it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from evenstride.core.sampling.draw import Draw
from evenstride.runtime.engines.watched_models import WatchedModels
from evenstride.runtime.loading.micro_batch_limits import MicroBatchLimits
from evenstride.runtime.loss.batch_in_hand import BatchInHand
from evenstride.runtime.loss.training_step import TrainingStep, WeightExchange
from evenstride.runtime.timing.device_timer import RankClock
from evenstride.runtime.timing.step_timer import StepTimer


class Rank:
    """One rank's weighting, without any other rank."""

    def __init__(self, world_size: int = 1) -> None:
        self.committed: list[Draw] = []
        self.clock, watched = RankClock(StepTimer([])), WatchedModels()
        self.batch = BatchInHand(watched)
        self.exchange = WeightExchange(lambda: None, self.clock)
        self.step = TrainingStep(
            world_size,
            self.clock,
            watched,
            self.batch,
            MicroBatchLimits(),
            self.committed.append,
            self.exchange,
        )
        self.scaling = self.step.scaling
        self.model = nn.Linear(1, 1)

    def take(self, samples: int, window: int, weight: float | None = None, **draw: Any) -> Draw:
        """Take a batch in hand."""
        fields = {"step": 7, "share": samples, "first": True, "last": True, **draw}
        batch = Draw(window=window, samples=samples, **fields)
        self.step.begin(batch, weight)
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
