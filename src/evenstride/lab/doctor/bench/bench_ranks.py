"""Where the ranks of a bench compute, and the process group they meet in."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from evenstride.lab.doctor.bench.bench_budget import BenchBudget
from evenstride.lab.doctor.checkup import own_device
from evenstride.runtime.engines.device_support import (
    RankDevice,
    check_backends,
    read_device,
    require,
)
from evenstride.runtime.engines.process_groups import take_down_group
from evenstride.runtime.failures.peers import myself

ValueT = TypeVar("ValueT")


@dataclass(frozen=True, slots=True)
class BenchRank:
    """One rank of the bench.

    Args:
        rank: of this process.
        device: it computes on.
        devices: facts about all ranks' devices, in rank order.
        group: the engine averages over; ``None`` for one process alone.
        backend: of that group; ``""`` without.
    """

    rank: int
    device: torch.device
    devices: tuple[RankDevice, ...]
    group: dist.ProcessGroup | None
    backend: str

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.devices)

    def gathered(self, value: ValueT) -> list[ValueT]:
        """Return every rank's value, on every rank; collective."""
        if self.group is None:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value)
        return values

    def agreed(self, value: ValueT) -> ValueT:
        """Return rank 0's value on every rank; collective."""
        return self.gathered(value)[0]

    def start_s(self) -> float:
        """Return a clock's reading when all ranks have come here; collective."""
        if self.group is not None:
            self.gathered(None)  # through the CPU, so that no device takes part
        return self.now_s()

    def now_s(self) -> float:
        """Return a clock's reading when the device has done everything asked of it."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def computed_s(self) -> float:
        """Return a clock's reading when the current stream has done everything asked of it."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
        return time.perf_counter()

    def averaged(self, net: nn.Module) -> nn.Module:
        """Return the net on this rank's device, its gradients averaged if there are others."""
        net = net.to(self.device)
        return net if self.group is None else DistributedDataParallel(net, process_group=self.group)


@contextlib.contextmanager
def take_place(world_size: int, plan: BenchBudget) -> Iterator[BenchRank]:
    """Find this rank's place, and leave nothing behind; collective.

    Ranks that each have a CUDA device of their own average through NCCL, all others through
    Gloo. A process group that is there already is used and left as it is.

    Raises:
        ConfigError: the installed torch has no code for some rank's card; raised on every rank.
    """
    device = own_device()
    facts = read_device(device)
    if world_size == 1:
        require([facts])
        yield BenchRank(0, device, (facts,), None, "")
        return
    timeout = timedelta(seconds=plan.group_timeout_s)
    ours = not dist.is_initialized()
    if ours:
        dist.init_process_group("gloo", timeout=timeout)
    try:
        shown: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(shown, (facts, _identity(device)))
        devices = tuple(one for one, _ in shown)
        require(devices)
        group = dist.group.WORLD
        if _nccl_serves([identity for _, identity in shown]):
            group = dist.new_group(backend="nccl", timeout=timeout)
        assert group is not None, "the default group exists once torch.distributed is initialised"
        check_backends([one.kind for one in devices], dist.get_backend_config(group))
        yield BenchRank(dist.get_rank(), device, devices, group, dist.get_backend(group))
    finally:
        if ours:
            take_down_group()


def _identity(device: torch.device) -> str:
    """Return what tells a CUDA device from all others; ``""`` for a processor."""
    if device.type != "cuda":
        return ""
    own = getattr(torch.cuda.get_device_properties(device), "uuid", device.index)
    return f"{myself(0).host} {own}"


def _nccl_serves(identities: list[str]) -> bool:
    """Return whether every rank has a CUDA device that is no other's, which NCCL asks for."""
    apart = "" not in identities and len(set(identities)) == len(identities)
    return apart and dist.is_nccl_available()
