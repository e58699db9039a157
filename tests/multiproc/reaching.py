"""Runs of two ranks that train to a loss, which they measure or not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import evenstride

SAMPLES, WIDE = 640, 12


@dataclass(frozen=True)
class Run:
    """What one run does; plain data, so that it can be sent to a rank.

    Args:
        trace: file that the leader writes to.
        batch: global batch.
        epochs: to train.
        metric: name to record the evaluated loss under; ``None`` for none.
    """

    trace: str
    batch: int
    epochs: int
    metric: str | None = "loss"


def drawn(seed: int, samples: int) -> TensorDataset:
    """Return samples of a line with noise, the same everywhere."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, WIDE, generator=generator, dtype=torch.float64)
    noise = torch.randn(samples, 1, generator=generator, dtype=torch.float64)
    return TensorDataset(x, x.sum(dim=1, keepdim=True) + 0.5 * noise)


def to_loss(rank: int, run: Run) -> list[tuple[int, float]]:
    """Train; return the epochs and the evaluated loss after each."""
    del rank
    policy = f"static:{3 * run.batch // 8},{5 * run.batch // 8}"
    stride = evenstride.Stride(run.batch, noise_every=2, trace=run.trace, policy=policy)
    loader = stride.loader(drawn(1, SAMPLES))
    held_out = stride.loader(drawn(2, 160), train=False)
    module = nn.Linear(WIDE, 1, bias=False).double()
    nn.init.zeros_(module.weight)
    model = stride.watch(DistributedDataParallel(module))
    optimizer = torch.optim.SGD(module.parameters(), lr=2e-3 * run.batch / 16)
    seen = [(0, _evaluated(stride, model, held_out, run.metric))]
    for epoch in range(run.epochs):
        for x, y in loader:
            loss: Any = stride.scale(nn.functional.mse_loss(model(x), y))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        seen.append((epoch + 1, _evaluated(stride, model, held_out, run.metric)))
    stride.close()
    return seen


def _evaluated(stride: evenstride.Stride, model: nn.Module, data: Any, name: str | None) -> float:
    total, count = 0.0, 0
    model.eval()
    with torch.no_grad():
        for x, y in data:
            total += float(nn.functional.mse_loss(model(x), y, reduction="sum"))
            count += len(y)
    model.train()
    return stride.mean(total, count, name=name)
