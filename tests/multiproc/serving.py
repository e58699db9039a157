"""What ranks run that train over parameter servers, and how one process would do it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

import evenstride
from tests.multiproc.training import net, rows, weights


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a few epochs.

    Args:
        sync: mode of synchronisation.
        policy: of the split.
        optimizer: name of a `torch.optim` class.
        wrapped: whether the model is in DistributedDataParallel.
        epochs: of 70 samples, in global batches of 30: the last is incomplete.
        decay: by which the learning rate falls after each epoch.
        micro: most samples at once.
    """

    sync: str
    policy: str = "static:7,23"
    optimizer: str = "SGD"
    wrapped: bool = True
    epochs: int = 17
    decay: float = 0.9
    micro: int | None = None


def optimizer_of(name: str, module: torch.nn.Module) -> Optimizer:
    """Return an optimizer with two groups, of different settings."""
    first, *rest = list(module.parameters())
    groups = [{"params": [first], "lr": 0.02}, {"params": rest}]
    more: dict[str, Any] = {"momentum": 0.9, "weight_decay": 0.01} if name == "SGD" else {}
    optimizer: Optimizer = getattr(torch.optim, name)(groups, lr=0.01, **more)
    return optimizer


def train(rank: int, run: Run) -> list[list[float]]:
    """Return the weights after every step."""
    stride = evenstride.Stride(global_batch=30, policy=run.policy, sync=run.sync)
    loader = stride.loader(rows(70), max_micro_batch=run.micro)
    module = net()
    if rank:  # whose weights count is rank 0's
        torch.nn.init.zeros_(next(module.parameters()))
    model: torch.nn.Module = DistributedDataParallel(module) if run.wrapped else module
    model, optimizer = stride.watch(model), optimizer_of(run.optimizer, module)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, run.decay)
    seen = []
    for _ in range(run.epochs):
        for _, x, y in loader:
            with stride.accumulate(model):
                stride.scale(F.mse_loss(model(x), y)).backward()  # type: ignore[no-untyped-call]
            if stride.synced:
                optimizer.step()
                optimizer.zero_grad()
                seen.append(weights(module))
        scheduler.step()
    stride.close()
    return seen
