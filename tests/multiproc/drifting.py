"""Ranks whose optimizers round differently, as those of different devices do."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import evenstride
from evenstride.errors import EvenstrideError
from tests.multiproc.training import net, rows, weights


def train(rank: int, how: dict[str, Any]) -> dict[str, Any]:
    """Train some steps, the second rank a last digit off after each; return weights and counts.

    Keys of ``how``: every (steps between comparisons), off (whether the digit is changed),
    compress (how gradients travel).
    """
    stride = evenstride.Stride(global_batch=12, policy="static:5,7")
    loader, module = stride.loader(rows(12 * 11, torch.float32)), transposed(net(torch.float32))
    ddp = DistributedDataParallel(module, bucket_cap_mb=100)
    model = stride.watch(ddp, drift_check=how["every"], compress=how.get("compress"))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    for _, x, y in loader:
        loss = nn.functional.mse_loss(model(x), y)
        stride.scale(loss).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        if how["off"] and rank == 1:
            up_and_down(module)
    summary = stride.summary()
    stride.close()
    return {
        "weights": weights(module),
        "checks": summary.drift_checks,
        "drifts": summary.drifts,
        "reported": str(stride.summary()),
    }


def transposed(module: nn.Module) -> nn.Module:
    """Return the module, its first weight now not contiguous."""
    first = next(module.parameters())
    first.data = first.data.t().contiguous().t()
    return module


def up_and_down(module: nn.Module) -> None:
    """Change one weight by a last digit up, and another down."""
    with torch.no_grad():
        first = next(module.parameters())
        first[0, 0] = torch.nextafter(first[0, 0], torch.tensor(9.0))
        first[0, 1] = torch.nextafter(first[0, 1], torch.tensor(-9.0))


def refused(rank: int, every: list[int]) -> str:
    """Return what `watch` says to settings that differ or cannot be."""
    stride = evenstride.Stride(global_batch=12)
    try:
        stride.watch(DistributedDataParallel(net()), drift_check=every[rank])
    except EvenstrideError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        stride.close()
        dist.barrier()
    return ""
