"""Training with batch norm on ranks with unequal shares."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import evenstride
from evenstride.errors import EvenstrideError
from tests.multiproc.training import FEATURES, flat, rows
from tests.order import epoch_order

BATCH, LENGTH = 16, 58  # the last step has 10 samples


def normed_net() -> nn.Module:
    """Return a model with batch norm, the same everywhere."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(6)
        layers = (nn.Linear(FEATURES, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 1))
        return nn.Sequential(*layers).double()


def train(_rank: int, policy: str, options: dict[str, Any]) -> dict[str, Any]:
    """Train an epoch; return gradients and buffers of every step, or the error, and warnings."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("evenstride").addHandler(handler)
    stride = evenstride.Stride(global_batch=BATCH, policy=policy)
    try:
        module = normed_net()
        if options.get("norm_first"):
            module = stride.sync_batch_norm(module)
        loader = stride.loader(
            rows(options.get("length", LENGTH)),
            max_micro_batch=options.get("micro"),
            drop_last=options.get("drop_last", False),
            cost_fn=(lambda index: 1.0 + index) if options.get("costs") else None,
        )
        if options.get("shared", True) and not options.get("norm_first"):
            module = stride.sync_batch_norm(module)
        steps = _train(stride, loader, module)
    except (EvenstrideError, RuntimeError) as error:
        return {"error": f"{type(error).__name__}: {error}", "step": stride.step, "said": said}
    finally:
        stride.close()
        logging.getLogger("evenstride").removeHandler(handler)
    return {"steps": steps, "said": said}


def _train(stride: evenstride.Stride, loader: Any, module: nn.Module) -> list[Any]:
    model, steps = stride.watch(DistributedDataParallel(module)), []
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    for _, x, y in loader:
        with stride.accumulate(model):
            loss = nn.functional.mse_loss(model(x), y)
            stride.scale(loss).backward()  # type: ignore[no-untyped-call]
        if stride.synced:
            steps.append((flat(module), _buffers(module)))
            optimizer.step()
            optimizer.zero_grad()
    return steps


def _buffers(module: nn.Module) -> list[float]:
    return torch.cat([b.double().reshape(-1) for b in module.buffers()]).tolist()


def alone() -> list[Any]:
    """Return the same of one process on the union batches, in plain PyTorch."""
    module, data, steps = normed_net(), rows(LENGTH), []
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    order = epoch_order(0, 0, LENGTH, shuffle=True).tolist()
    for start in range(0, LENGTH, BATCH):
        _, x, y = data[order[start : start + BATCH]]
        nn.functional.mse_loss(module(x), y).backward()  # type: ignore[no-untyped-call]
        steps.append((flat(module), _buffers(module)))
        optimizer.step()
        optimizer.zero_grad()
    return steps
