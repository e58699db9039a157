"""Programs that train FSDP2 models on virtual devices."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

import evenstride
from evenstride.runtime.engines import fsdp_stalls
from evenstride.runtime.engines.fsdp import parameter_groups
from tests.inside import session
from tests.multiproc.loops import KeptSteps
from tests.multiproc.training import rows
from tests.virtual_device import device_module as virtual
from tests.virtual_device.timed import STEPS, WARM, start, untraced

BLOCKS, WIDTH = 4, 8
LATENCY_MS = 1.0


class Block(nn.Module):
    """A layer with known work for each sample, or for the whole batch."""

    def __init__(self, width: int, times: tuple[float, float], again: bool, each: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(width, WIDTH)
        self._times, self._again, self._each = times, again, each

    def forward(self, x: Tensor) -> Tensor:
        """Run the layer."""
        if self._again:
            y: Tensor = checkpoint(self._run, x, use_reentrant=False)
            return y
        return self._run(x)

    def _run(self, x: Tensor) -> Tensor:
        times = [time * (len(x) if self._each else 1) for time in self._times]
        # No view, as FSDP asks, and saved, so that checkpointing repeats the work.
        return virtual.worked(self.layer(x), *times).tanh()


class LossModel(nn.Module):
    """Blocks in a row that end in a loss."""

    def __init__(self, blocks: Sequence[Block]) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(blocks), nn.Linear(WIDTH, 1)
        self.gathers = False  # whether the model gathers each block by itself

    def forward(self, x: Tensor) -> Tensor:
        """Return a mean over the samples."""
        for block in self.blocks:
            if self.gathers:
                block.unshard()  # type: ignore[operator]
            x = block(x)
        loss: Tensor = self.head(x).float().square().mean()
        return loss


def sharded(how: str, times: tuple[float, float], mesh: DeviceMesh, each: bool = False) -> Any:
    """Return a model whose blocks work for these times in all, in forward and backward."""
    torch.manual_seed(3)
    blocks = _blocks(how, (times[0] / BLOCKS, times[1] / BLOCKS), each)
    model = LossModel(blocks).to(virtual.DEVICE)
    options: dict[str, Any] = {"mesh": mesh, "reshard_after_forward": how != "kept gathered"}
    if how == "mixed precision":
        options["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    if how == "parameters on the host":
        options["offload_policy"] = CPUOffloadPolicy()
    for block in blocks:
        fully_shard(block, **options)
    root: Any = fully_shard(model, **options)
    _steer(root, how, list(blocks))
    return root


def _steer(root: Any, how: str, blocks: list[Any]) -> None:
    """Set when the model gathers, and who ends its backward pass."""
    root.gathers = how == "gathered by hand"
    if how == "ended by hand":
        root.set_manual_backward_finalization(True)
    if how == "prefetched":
        for before, after in pairwise(blocks):
            before.set_modules_to_forward_prefetch([after])
            after.set_modules_to_backward_prefetch([before])
    if how == "gathered ahead":
        for block in blocks:
            for group in parameter_groups(block):
                group.unshard_async_op = True


def _blocks(how: str, times: tuple[float, float], each: bool) -> list[Block]:
    again = "checkpointed" in how
    blocks = [Block(WIDTH if place else 5, times, again, each) for place in range(BLOCKS)]
    if how == "compiled blocks":
        for block in blocks:
            block.compile(backend="aot_eager")
    return blocks


def islands(rank: int, names: tuple[str, str] = ("copy", "shard")) -> DeviceMesh:
    """Return a mesh of two by two ranks, such as two that share one copy of the parameters."""
    ranks = torch.arange(4).view(2, 2)
    mine: list[Any] = []
    for lines in (ranks.T, ranks):
        groups = [dist.new_group(line, backend=virtual.BACKENDS) for line in lines.tolist()]
        mine += [one for one, line in zip(groups, lines, strict=True) if rank in line]
    return DeviceMesh.from_group(mine, virtual.TYPE, ranks, mesh_dim_names=names)


def timed(
    rank: int, how: str, forward_ms: list[float], backward_ms: list[float], marked: bool = True
) -> list[tuple[float, float]]:
    """Return busy and waiting time of each modelled step after the first, in milliseconds.

    With ``marked=False``, the waits inside the layers are not marked.
    """
    with ExitStack() as stack:
        if not marked:
            stack.enter_context(patch.object(fsdp_stalls.StallMarks, "watch", lambda *_: None))
        if how == "compiled blocks":
            stack.enter_context(untraced())
        group = start(rank)
        virtual.link(latency_us=1000.0 * LATENCY_MS)
        mesh = islands(rank) if how == "HSDP" else DeviceMesh.from_group(group, virtual.TYPE)
        stride = evenstride.Stride(
            global_batch=8,
            policy="uniform",
            process_group=group,
            shard_group=mesh["shard"].get_group() if how == "HSDP" else None,
        )
        parts = 2 if how == "micro-batches" else 1
        times = forward_ms[rank] / parts, backward_ms[rank] / parts
        model = stride.watch(sharded(how, times, mesh))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        records = KeptSteps(session(stride).state.clock.timer.finished)
        session(stride).state.clock.timer.report_to(records)
        size = 8 // len(forward_ms) // parts
        for _, x, _ in stride.loader(rows(8 * STEPS, torch.float32), max_micro_batch=size):
            with stride.accumulate(model):
                loss = model(x.to(virtual.DEVICE, non_blocking=True))
                stride.scale(loss).backward()  # type: ignore[no-untyped-call]
            if how == "ended by hand":
                model.finalize_backward()
            if stride.synced:
                optimizer.step()
                optimizer.zero_grad()
        stride.close()
        return [(1e3 * r.busy_s, 1e3 * r.wait_s) for r in records if r.modelled and r.step > WARM]


def balanced(rank: int, speeds: list[float], batch: int, steps: int) -> list[int]:
    """Return this rank's batch in every step of an adaptive run: 0.3 ms for each sample."""
    group = start(rank, speeds)
    stride = evenstride.Stride(global_batch=batch, process_group=group)
    mesh = DeviceMesh.from_group(group, virtual.TYPE)
    model = stride.watch(sharded("", (0.1, 0.2), mesh, each=True))
    sizes = []
    for _, x, _ in stride.loader(rows(batch * steps, torch.float32)):
        sizes.append(len(x) if stride.samples else 0)
        loss = model(x.to(virtual.DEVICE, non_blocking=True))
        stride.scale(loss).backward()  # type: ignore[no-untyped-call]
        model.zero_grad()
    stride.close()
    return sizes


def gradients(rank: int, on_device: bool) -> list[list[float]]:
    """Return this rank's shards of the gradients of three steps, on the device or the CPU."""
    group = start(rank)
    kind = virtual.TYPE if on_device else "cpu"
    module = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()
    with torch.no_grad():
        for place, parameter in enumerate(module.parameters()):
            parameter.copy_(torch.linspace(-1, 1 + place, parameter.numel()).view_as(parameter))
    module.to(kind)
    mesh = DeviceMesh.from_group(group if on_device else dist.new_group(), kind)
    for layer in (module[0], module[2], module):
        fully_shard(layer, mesh=mesh)
    seen = []
    for step in range(3):
        generator = torch.Generator().manual_seed(10 * step + rank)
        x = torch.randn(4, 5, generator=generator, dtype=torch.float64).to(kind)
        module(x).square().mean().backward()
        shards: list[Any] = [parameter.grad for parameter in module.parameters()]
        seen += [[float(one) for one in shard.to_local().flatten()] for shard in shards]
    return seen
