"""Training with a CUDA device on the first rank, and a CPU on the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import evenstride
from evenstride.runtime.timing.step_timer import StepRecord
from tests.inside import session
from tests.multiproc.training import flat, net, rows

WIDTH, DEPTH = 2048, 6


def mixed(rank: int, batch: int, policy: str) -> dict[str, Any]:
    """Return all gradients of an epoch, and what the summary says; rank 0 is on CUDA."""
    stride = evenstride.Stride(global_batch=batch, policy=policy)
    loader = stride.loader(rows(batch * 6))
    device = torch.device("cuda" if rank == 0 else "cpu")
    module = net().to(device)
    model = stride.watch(DistributedDataParallel(module, bucket_cap_mb=100), drift_check=2)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    gradients = []
    for _, x, y in loader:
        loss = nn.functional.mse_loss(model(x.to(device)), y.to(device))
        stride.scale(loss).backward()  # type: ignore[no-untyped-call]
        gradients.append([float(g) for g in flat(module)])
        optimizer.step()
        optimizer.zero_grad()
    summary = stride.summary()
    stride.close()
    return {"gradients": gradients, "checks": summary.drift_checks, "shares": stride.shares}


def measured(stride: evenstride.Stride, train: Callable[[Any], None]) -> list[StepRecord]:
    """Train an epoch of a deep model on CUDA; return the steps as they were timed."""
    records: list[StepRecord] = []
    loader = stride.loader(rows(64 * 24, torch.float32), seeded=False)
    session(stride).state.clock.timer.report_to(records)
    for _, x, _ in loader:
        train(x)
    stride.close()
    return [record for record in records if record.step >= 4]


def deep_net() -> nn.Module:
    """Return a model whose kernels take much longer than their launches."""
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH)]
    return nn.Sequential(nn.Linear(5, WIDTH), *layers, nn.Linear(WIDTH, 1)).cuda()
