"""Ranks whose memory really ends, by a limit of their address space."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import evenstride
from tests.multiproc.training import FEATURES, flat, rows
from tests.order import epoch_order

BATCH, STEPS, WIDTH = 480, 4, 20_000
SHARES = (80, 400)
# What rank 1 may take beyond what it has; its share would take three times as much.
SPARE_BYTES = 60 * 2**20


def wide_net() -> nn.Module:
    """Return a model whose activations take 320 kB per sample, the same everywhere."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        return nn.Sequential(nn.Linear(FEATURES, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1)).double()


@contextlib.contextmanager
def spare(room_bytes: int) -> Iterator[None]:
    """Let this process take no more address space than it has and some."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    has = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (has + room_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def train(rank: int) -> dict[str, Any]:
    """Train on the data; return all gradients, and the sizes of the batches that came."""
    stride = evenstride.Stride(global_batch=BATCH, policy=f"static:{SHARES[0]},{SHARES[1]}")
    loader, module = stride.loader(rows(BATCH * STEPS)), wide_net()
    model = stride.watch(DistributedDataParallel(module, bucket_cap_mb=1))
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-4)
    gradients: list[list[float]] = []
    sizes: list[list[int]] = [[]]
    with contextlib.ExitStack() as limit:
        for _, x, y in loader:
            if stride.step == 1 and rank == 1 and len(sizes[-1]) == 0:
                limit.enter_context(spare(SPARE_BYTES))  # all threads and buffers are there by now
            with stride.guard(), stride.accumulate(model):
                loss = nn.functional.mse_loss(model(x), y)
                stride.scale(loss).backward()  # type: ignore[no-untyped-call]
            sizes[-1].append(stride.samples)
            if stride.synced:
                gradients.append(flat(module)[:1000])
                optimizer.step()
                optimizer.zero_grad()
                sizes.append([])
    stride.close()
    return {"gradients": gradients, "sizes": sizes[:-1]}


def alone(batch: int = BATCH, steps: int = STEPS) -> list[list[float]]:
    """Return the gradients of one process on the union batches, in plain PyTorch."""
    module, data = wide_net(), rows(batch * steps)
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-4)
    order, gradients = epoch_order(0, 0, batch * steps, shuffle=True).tolist(), []
    for step in range(steps):
        _, x, y = data[order[step * batch : (step + 1) * batch]]
        nn.functional.mse_loss(module(x), y).backward()  # type: ignore[no-untyped-call]
        gradients.append(flat(module)[:1000])
        optimizer.step()
        optimizer.zero_grad()
    return gradients
