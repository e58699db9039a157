"""Unusual but legitimate training on ranks of which one has a share of 0, or no batch at all."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import evenstride
from tests.multiproc.logs import logged
from tests.multiproc.training import flat, net, rows

BATCH, LENGTH = 8, 25  # the epoch's last step has one sample


def penalty(module: nn.Module) -> Tensor:
    """Return a term that depends on the weights alone."""
    return 0.1 * torch.stack([p.square().sum() for p in module.parameters()]).sum()


def penalised(_rank: int, inside: bool) -> list[list[float]]:
    """Return the gradients of an epoch with a penalty inside or outside of the scaled loss."""
    stride = evenstride.Stride(global_batch=BATCH, policy="uniform")
    loader, module = stride.loader(rows(LENGTH), shuffle=False), net()
    model = stride.watch(DistributedDataParallel(module))
    gradients = []
    for _, x, y in loader:
        loss = nn.functional.mse_loss(model(x), y)
        total = (
            stride.scale(loss + penalty(module)) if inside else stride.scale(loss) + penalty(module)
        )
        total.backward()  # type: ignore[no-untyped-call]
        gradients.append(flat(module))
        module.zero_grad()
    stride.close()
    return gradients


def penalised_alone() -> list[list[float]]:
    """Return the same of one process, without evenstride."""
    module, gradients = net(), []
    _, xs, ys = rows(LENGTH).tensors
    for start in range(0, LENGTH, BATCH):
        x, y = xs[start : start + BATCH], ys[start : start + BATCH]
        loss = nn.functional.mse_loss(module(x), y) + penalty(module)
        loss.backward()  # type: ignore[no-untyped-call]
        gradients.append(flat(module))
        module.zero_grad()
    return gradients


def two_models(rank: int, poisoned: bool) -> list[list[float]]:
    """Return both models' first gradients; their losses are scaled before either backward pass."""
    stride = evenstride.Stride(global_batch=BATCH, policy="static:8,0")
    loader, modules = stride.loader(rows(BATCH)), (net(), net())
    one, other = (stride.watch(DistributedDataParallel(module)) for module in modules)
    for _, x, y in loader:
        seen = torch.full_like(x, torch.inf) if rank == 1 and poisoned else x
        losses = [stride.scale(nn.functional.mse_loss(model(seen), y)) for model in (one, other)]
        for loss in losses:
            loss.backward()  # type: ignore[no-untyped-call]
    stride.close()
    return [flat(module) for module in modules]


def evaluated(_rank: int) -> float:
    """Return the mean over a set of one sample, by a model whose buffers DDP would broadcast."""
    stride = evenstride.Stride(global_batch=BATCH)
    module = nn.Sequential(nn.BatchNorm1d(5), nn.Linear(5, 1)).double()
    model = stride.watch(DistributedDataParallel(module))
    for _, x, y in stride.loader(rows(BATCH)):
        stride.scale(nn.functional.mse_loss(model(x), y)).backward()  # type: ignore[no-untyped-call]
    model.eval()
    total = count = 0
    with torch.no_grad():
        for _, x, _ in stride.loader(rows(1), train=False):
            count += len(model(x))
            total += len(x)
    mean = stride.mean(total, count)
    stride.close()
    return float(mean)


def in_subgroups(rank: int) -> Any:
    """Train with token weights in two groups of one job at the same time."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = groups[rank // 2]
    stride = evenstride.Stride(global_batch=BATCH, process_group=mine)
    loader = stride.loader(rows(BATCH), weight_fn=lambda batch: float(len(batch[0])))
    module = net()
    model = stride.watch(DistributedDataParallel(module, process_group=mine))
    for _, x, y in loader:
        stride.scale(nn.functional.mse_loss(model(x), y)).backward()  # type: ignore[no-untyped-call]
    stride.close()
    return flat(module)


def outsider(rank: int) -> str:
    """Return what a rank hears that is not in the group it makes a `Stride` for."""
    pair = dist.new_group([0, 1])
    try:
        evenstride.Stride(global_batch=BATCH, process_group=pair).close()
    except evenstride.errors.ConfigError as error:
        return str(error)
    return ""


def counted(_rank: int, reads: bool) -> list[str]:
    """Return what this rank warns of in two epochs whose tails leave ranks without samples."""
    stride = evenstride.Stride(global_batch=BATCH, policy="uniform")
    loader, module = stride.loader(rows(LENGTH)), net()
    model = stride.watch(DistributedDataParallel(module))
    seen = 0
    with logged() as log:
        for _ in range(2):
            for _, x, y in loader:
                stride.scale(nn.functional.mse_loss(model(x), y)).backward()  # type: ignore[no-untyped-call]
                seen += stride.samples if reads else len(x)
                module.zero_grad()
        stride.close()
    return [line for line in log if "placeholder" in line]
