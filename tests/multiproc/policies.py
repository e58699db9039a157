"""A run of several short epochs by a given policy."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

import evenstride
from tests.multiproc.training import net, rows


def trained(rank: int, folder: Path, epochs: int, steps: int, policy: str) -> None:
    """Train epochs of some steps each."""
    del rank
    stride = evenstride.Stride(16, policy=policy, trace=folder)
    loader = stride.loader(rows(16 * steps))
    model = stride.watch(DistributedDataParallel(net()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(epochs):
        for _, x, y in loader:
            stride.scale(F.mse_loss(model(x), y)).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
    stride.close()
