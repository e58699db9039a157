"""Programs that evenstride cannot train or time on virtual devices."""

from __future__ import annotations

import contextlib
import gc
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo import compiled_autograd
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import evenstride
from tests.multiproc.training import rows
from tests.virtual_device import device_module as virtual
from tests.virtual_device.sharded_device import islands
from tests.virtual_device.timed import start


def refusals(rank: int, names: list[str]) -> dict[str, str]:
    """Return the error of each program on four ranks, in two by two."""
    answers = {}
    for name in names:
        answers[name] = _refusal(rank, name)
        gc.collect()  # no mesh is left for the next one
    return answers


def _refusal(rank: int, name: str) -> str:
    whole = start(rank)
    mesh = islands(rank, ("dp", name)) if name in ("tp", "cp") else None
    own = whole if mesh is None else mesh["dp"].get_group()
    net = nn.Sequential(nn.Linear(5, 8), nn.Linear(8, 1)).to(virtual.DEVICE)
    try:
        # A rank that has no device, over the group that torch makes by default.
        with without_device() if name == "mixed" and rank == 1 else contextlib.nullcontext():
            stride = evenstride.Stride(global_batch=8, process_group=own)
    except evenstride.EvenstrideError as error:
        return str(error)
    try:
        with capturing() if name == "graph" else contextlib.nullcontext():
            stride.watch(_wrapped(name, net, mesh, own))
            _train(name, stride, net)
    except evenstride.EvenstrideError as error:
        return f"{error} (step {stride.step})"
    finally:
        stride.close()
    return ""


def _wrapped(name: str, net: nn.Module, mesh: Any, group: dist.ProcessGroup) -> Any:
    if name == "tp":
        plan: dict[str, Any] = {"0": ColwiseParallel()}
        parallelize_module(net, mesh["tp"], plan, src_data_rank=None)
        return fully_shard(net, mesh=mesh["dp"])
    if name == "ep":
        net[1].weight.allreduce = False  # type: ignore[index]
    return DistributedDataParallel(net, process_group=group)


def _train(name: str, stride: evenstride.Stride, net: nn.Module) -> None:
    for _, x, _ in stride.loader(rows(64, torch.float32)):
        loss = net(x.to(virtual.DEVICE)).square().mean()
        if name == "compiled autograd":
            with compiled_autograd._enable(lambda graph: graph):
                stride.scale(loss).backward()  # type: ignore[no-untyped-call]
        stride.scale(loss).backward()  # type: ignore[no-untyped-call]


@contextlib.contextmanager
def capturing() -> Any:
    """Say that the current stream is captured as a graph, which the device does not have."""
    with patch.object(torch.get_device_module(virtual.TYPE), "is_current_stream_capturing", _yes):
        yield


def _yes() -> bool:
    """Return true."""
    return True


@contextlib.contextmanager
def without_device() -> Any:
    """Play a machine without any accelerator."""
    module = torch.get_device_module(virtual.TYPE)
    with patch.object(module, "is_available", lambda: False):
        yield
