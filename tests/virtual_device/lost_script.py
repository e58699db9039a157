"""A training script on virtual devices in which one rank is lost, and its collectives never end.

lost_script.py FATE HOW STEP
"""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import evenstride
from tests.faults.script import meet
from tests.virtual_device import device_module as virtual

VICTIM = 1
WATCHDOG_S = 600.0  # NCCL's default: until then, nothing else ends a process that hangs
_LOST_AFTER_S = 1.0


def main(fate: str, how: str, last: int) -> None:
    """Train; rank `VICTIM` meets its fate before the forward pass of step ``last``."""
    torch.set_num_threads(1)
    virtual.install()
    virtual.costs(op_us=1.0, launch_us=1.0, queue_depth=10_000_000)
    dist.init_process_group(virtual.BACKENDS, timeout=timedelta(seconds=WATCHDOG_S))
    stride = evenstride.Stride(global_batch=12)
    # A host that runs ahead must not launch the whole epoch before it hears of the loss.
    loader = stride.loader(TensorDataset(torch.randn(1_200_000, 4)))
    try:
        _train(fate, how, last, stride, loader)
    except evenstride.WorkerLost:
        stride.close()
        print("closed", flush=True)
        os._exit(0)  # how the interpreter ends is Gloo's business: it still waits for the lost rank


def _train(fate: str, how: str, last: int, stride: evenstride.Stride, loader: Any) -> None:
    net: Any = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).to(virtual.DEVICE)
    if how == "fsdp2":
        mesh = DeviceMesh.from_group(dist.group.WORLD, virtual.TYPE)  # type: ignore[arg-type]
        for part in (net[0], net[2], net):
            fully_shard(part, mesh=mesh)
        model = stride.watch(net)
    else:
        model = stride.watch(DistributedDataParallel(net))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    for (x,) in loader:
        if stride.step == last:
            virtual.hang_if_lost(_LOST_AFTER_S)  # not before: a rank may be slow to start
            if dist.get_rank() == VICTIM:
                meet(fate)
        step = stride.step
        loss = model(x.to(virtual.DEVICE, non_blocking=True)).square().mean()
        stride.scale(loss).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        print(f"launched {step}", flush=True)
        if how != "runs ahead":
            loss.item()
            print(f"read {step}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
