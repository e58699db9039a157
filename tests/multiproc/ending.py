"""Runs that end in several ways, and what each rank trained in them."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

import evenstride
from tests.multiproc.training import net, rows


def ended(rank: int, folder: Path, first: int, steps: int) -> None:
    """Train some steps; one rank closes before the others do."""
    stride = evenstride.Stride(24, trace=folder)
    loader = stride.loader(rows(24 * steps))
    model = stride.watch(DistributedDataParallel(net()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _, x, y in loader:
        stride.scale(F.mse_loss(model(x), y)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    if rank != first:
        dist.barrier()
    stride.close()
    if rank == first:
        dist.barrier()
