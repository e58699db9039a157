"""The time budget of a bench, the devices of its ranks, and their process group."""

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

from evenstride.runtime.engines.device_support import (
    RankDevice,
    card_of,
    check_backends,
    own_device,
    read_device,
    require,
)
from evenstride.runtime.engines.process_groups import take_down_group
from evenstride.runtime.failures.peers import myself

ValueT = TypeVar("ValueT")


@dataclass(frozen=True, slots=True)
class BenchBudget:
    """The time budget of a bench."""

    timing_s: float = 15.0  # for the check of busy times
    waiting_s: float = 10.0  # for rank 0 with and without waits in turns
    balance_s: float = 30.0  # for the equal and the adaptive split in turns
    # For plain training and evenstride in turns.
    overhead_s: float = 35.0
    step_s: float = 0.03  # target time of a step with the equal split
    block_s: float = 0.6  # target time of a block of steps
    group_timeout_s: float = 60.0  # of collective calls
    deadline_s: float = 360.0  # after which the process ends itself

    @classmethod
    def of(cls, seconds: float) -> BenchBudget:
        """Return the budget for measurements of about ``seconds`` in total.

        A small budget has shorter blocks, and a very small one shorter steps, so that there are
        several blocks.
        """
        usual = cls()
        whole_s = usual.timing_s + usual.waiting_s + usual.balance_s + usual.overhead_s
        part = seconds / whole_s
        return cls(
            timing_s=usual.timing_s * part,
            waiting_s=usual.waiting_s * part,
            balance_s=usual.balance_s * part,
            overhead_s=usual.overhead_s * part,
            step_s=usual.step_s * min(max(3.0 * part, 0.1), 1.0),
            block_s=usual.block_s * min(part, 1.0),
            deadline_s=180.0 + 2.0 * seconds,
        )

    @property
    def block_steps(self) -> int:
        return max(4, round(self.block_s / self.step_s))


@dataclass(frozen=True, slots=True)
class BenchRank:
    """One rank of the bench."""

    rank: int  # of this process
    device: torch.device  # of this rank
    devices: tuple[RankDevice, ...]  # of all ranks, in rank order
    group: dist.ProcessGroup | None  # for the all-reduce of gradients; ``None`` for one process
    backend: str  # of that group; empty without one

    @property
    def world_size(self) -> int:
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
        """Return the time after all ranks have made this call; collective."""
        if self.group is not None:
            self.gathered(None)  # through the CPU, so that no device is busy with it
        return self.now_s()

    def now_s(self) -> float:
        """Return the time at which the device has finished all its work."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def computed_s(self) -> float:
        """Return the time at which the current stream has finished all its work."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
        return time.perf_counter()

    def averaged(self, net: nn.Module) -> nn.Module:
        """Return the net on this rank's device, under DDP if there are other ranks."""
        net = net.to(self.device)
        return net if self.group is None else DistributedDataParallel(net, process_group=self.group)


@contextlib.contextmanager
def take_place(world_size: int, plan: BenchBudget) -> Iterator[BenchRank]:
    """Set up this rank and its process group, and take both down afterwards; collective.

    If each rank has its own CUDA device, they average gradients through NCCL, otherwise through
    Gloo. An existing process group is used, and not destroyed.
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
        if nccl_serves([identity for _, identity in shown]):
            group = dist.new_group(backend="nccl", timeout=timeout)
        assert group is not None, "the default group exists once torch.distributed is initialised"
        configs = [dist.get_backend_config(group)] * len(devices)
        check_backends([one.kind for one in devices], configs)
        yield BenchRank(dist.get_rank(), device, devices, group, dist.get_backend(group))
    finally:
        if ours:
            take_down_group()


def _identity(device: torch.device) -> str:
    """Return a unique name of a CUDA device; an empty string for a processor."""
    if device.type != "cuda":
        return ""
    return card_of(device) or f"{myself(0).host} {device.index}"


def nccl_serves(identities: list[str]) -> bool:
    """Return whether every rank has its own CUDA device, which NCCL requires."""
    apart = "" not in identities and len(set(identities)) == len(identities)
    return apart and dist.is_nccl_available()
