"""A run in which one rank computes on the CPU, and the other on a virtual device."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import evenstride
from tests.inside import session
from tests.multiproc.loops import KeptSteps
from tests.multiproc.training import flat, net, rows
from tests.virtual_device import device_module as virtual
from tests.virtual_device.timed import start

BATCH, STEPS, WARM = 30, 16, 4
FORWARD_MS, BACKWARD_MS = (1.0, 0.5), (2.0, 0.7)  # for each sample, on the CPU and on the device


def train(rank: int, policy: str) -> dict[str, Any]:
    """Return all gradients, and busy and waiting times of the later steps in milliseconds.

    Rank 0 computes on the CPU, rank 1 on the device.
    """
    start(rank)
    group = dist.new_group(backend=virtual.MIXED)
    stride = evenstride.Stride(global_batch=BATCH, policy=policy, process_group=group)
    timer = session(stride).state.clock.timer
    timer.now = lambda: virtual.host_ms() / 1e3  # the CPU's time is as virtual as the device's
    records = KeptSteps(timer.finished)
    timer.report_to(records)
    loader = stride.loader(rows(BATCH * STEPS))
    device = torch.device("cpu") if rank == 0 else virtual.DEVICE
    module = net().to(device)
    model = stride.watch(DistributedDataParallel(module, process_group=group))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    gradients = []
    for _, x, y in loader:
        work_ms = len(x) * FORWARD_MS[rank], len(x) * BACKWARD_MS[rank]
        out = virtual.worked(model(x.to(device)), *work_ms)
        stride.scale(nn.functional.mse_loss(out, y.to(device))).backward()  # type: ignore[no-untyped-call]
        gradients.append(flat(module))
        optimizer.step()
        optimizer.zero_grad()
    stride.close()
    # Waits for a decision take real time, which a step in virtual time cannot be freed from.
    counted = [r for r in records if r.modelled and r.step > WARM and not r.control_wait_s]
    times = [(1e3 * r.busy_s, 1e3 * r.wait_s) for r in counted]
    return {"gradients": gradients, "times": times}


def refused_by_gloo(rank: int) -> str:
    """Return the error of plain Gloo on a tensor of the device."""
    del rank
    virtual.install()
    group = dist.new_group(backend="cpu:gloo,virtual:gloo")
    try:
        dist.all_reduce(torch.ones(1, device=virtual.DEVICE), group=group)
    except RuntimeError as error:
        return str(error)
    return ""
