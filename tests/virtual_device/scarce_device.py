"""A run in which the memory of one rank's device ends."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import evenstride
from tests.inside import session
from tests.multiproc.loops import KeptSteps
from tests.multiproc.scarce import wide_net
from tests.multiproc.training import flat, rows
from tests.virtual_device import device_module as virtual
from tests.virtual_device.timed import start

BATCH, STEPS, SHARES = 48, 6, (8, 40)
# For rank 1 beyond what it has: its 40 samples would take three times as much.
SPARE_BYTES = 15 * 2**20
SHORT_FROM = 2  # the step from which it has no more


def train(rank: int) -> dict[str, Any]:
    """Return all gradients, the sizes of the batches that came, and what the steps count as."""
    group = start(rank)
    stride = evenstride.Stride(
        global_batch=BATCH, policy=f"static:{SHARES[0]},{SHARES[1]}", process_group=group
    )
    records = KeptSteps(session(stride).state.clock.timer.finished)
    session(stride).state.clock.timer.report_to(records)
    loader, module = stride.loader(rows(BATCH * STEPS)), wide_net().to(virtual.DEVICE)
    model = stride.watch(DistributedDataParallel(module, process_group=group, bucket_cap_mb=1))
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-4)
    gradients: list[list[float]] = []
    sizes: list[list[int]] = [[]]
    for _, x, y in loader:
        if stride.step == SHORT_FROM and rank == 1 and not sizes[-1]:
            virtual.limit_memory(torch.accelerator.memory_allocated() + SPARE_BYTES)
        with stride.guard(), stride.accumulate(model):
            loss = nn.functional.mse_loss(model(x.to(virtual.DEVICE)), y.to(virtual.DEVICE))
            stride.scale(loss).backward()  # type: ignore[no-untyped-call]
        sizes[-1].append(stride.samples)
        if stride.synced:
            gradients.append(flat(module)[:1000])
            optimizer.step()
            optimizer.zero_grad()
            sizes.append([])
    stride.close()
    modelled = [record.step for record in records if record.modelled]
    return {"gradients": gradients, "sizes": sizes[:-1], "modelled": modelled}


def room_mb(rank: int, cards: list[str]) -> float:
    """Return how many MB this rank may have, on a device whose card has 1,000 free."""
    group = start(rank)
    stride = evenstride.Stride(global_batch=8, policy="uniform", process_group=group)
    module = torch.get_device_module(virtual.DEVICE)
    card = SimpleNamespace(uuid=cards[rank])
    model = DistributedDataParallel(nn.Linear(5, 1).to(virtual.DEVICE), process_group=group)
    with patch.object(module, "get_device_properties", lambda _: card, create=True):
        stride.watch(model)
    for _, x, _ in stride.loader(rows(8 * 3, torch.float32)):
        loss = model(x.to(virtual.DEVICE)).square().mean()
        stride.scale(loss).backward()  # type: ignore[no-untyped-call]
    virtual.limit_memory(torch.accelerator.memory_allocated() + 1000 * 10**6)
    held = session(stride).state.peaks.take()
    assert held is not None
    assert held.limit_bytes is not None
    stride.close()
    return held.limit_bytes / 1e6
