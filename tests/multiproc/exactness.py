"""The exactness runs: what each rank does, and what one process does with the same samples."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

import evenstride
from tests.multiproc.training import (
    Loop,
    Sentences,
    Short,
    cost_of,
    flat,
    net,
    padded,
    rows,
    token_loss,
    token_net,
    tokens_in,
)
from tests.order import epoch_order

RATE = 0.05


def train(rank: int, loop: Loop) -> list[list[float]]:
    """Return the reduced gradient of every step, as this rank sees it."""
    with pytest.MonkeyPatch.context() as patch:
        if loop.broken:
            patch.setattr("evenstride.runtime.loss.training_step.loss_factor", lambda *_: 1.0)
        return _train(rank, loop)


def _train(rank: int, loop: Loop) -> list[list[float]]:
    quantum = 1 if loop.quanta is None else loop.quanta[rank]
    stride = evenstride.Stride(global_batch=loop.batch, policy=loop.policy, quantum=quantum)
    loader, module = _loader(stride, loop)
    fits = None if loop.fits is None else loop.fits[rank]
    whole = module if fits is None else Short(module, 10**6 if loop.late else fits)
    ddp = DistributedDataParallel(
        whole, static_graph=loop.static_graph, find_unused_parameters=loop.unused
    )
    model = stride.watch(ddp)
    if loop.hook == "fp16":
        model.register_comm_hook(None, fp16_compress_hook)
    optimizer = torch.optim.SGD(module.parameters(), lr=RATE)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=loop.scaler)
    gradients: list[list[float]] = []
    for _ in range(stride.epoch, 100):
        for batch in loader:
            with stride.guard(), stride.accumulate(model):
                loss = _loss(model, batch, loop)
                if loop.late and fits is not None and len(batch[0]) > fits:
                    raise torch.OutOfMemoryError
                if rank == loop.poison:
                    loss = loss / torch.zeros(())
                weight = tokens_in(batch) if loop.kind == "tokens-argument" else None
                scaler.scale(stride.scale(loss, weight)).backward()  # type: ignore[no-untyped-call]
            if stride.synced:
                scaler.unscale_(optimizer)
                if loop.clip is not None:
                    nn.utils.clip_grad_norm_(module.parameters(), loop.clip)
                gradients.append(flat(module))
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
                if len(gradients) == loop.steps:
                    stride.close()
                    return gradients
    raise AssertionError("unreachable")


def _loader(stride: evenstride.Stride, loop: Loop) -> tuple[Any, nn.Module]:
    if loop.kind == "rows":
        array = [cost_of(index) for index in range(loop.length)]
        costs = {None: None, "function": cost_of, "array": array}[loop.costs]
        data = rows(loop.length, loop.torch_dtype)
        loader = stride.loader(
            data, max_micro_batch=loop.micro, micro_batches=loop.pieces, cost_fn=costs
        )
        return loader, net(loop.torch_dtype)
    weight_fn = tokens_in if loop.kind == "tokens" else None
    loader = stride.loader(
        Sentences(loop.length),
        max_micro_batch=loop.micro,
        micro_batches=loop.pieces,
        weight_fn=weight_fn,
        collate_fn=padded,
    )
    return loader, token_net()


def _loss(model: nn.Module, batch: Any, loop: Loop) -> Tensor:
    if loop.kind != "rows":
        return token_loss(model, batch[1])
    _, x, y = batch
    loss: Tensor = nn.functional.mse_loss(model(x), y)
    return loss


def alone(loop: Loop, order: list[int] | None = None) -> list[list[float]]:
    """Return the gradients of one process on the union batches, in plain PyTorch.

    Args:
        loop: the run.
        order: order of the samples within a batch, to see what re-ordering the sum does.
    """
    module = net(loop.torch_dtype) if loop.kind == "rows" else token_net()
    optimizer = torch.optim.SGD(module.parameters(), lr=RATE)
    gradients: list[list[float]] = []
    epoch = 0
    while len(gradients) < loop.steps:
        positions = epoch_order(0, epoch, loop.length, shuffle=True).tolist()
        for start in range(0, loop.length, loop.batch):
            indices = positions[start : start + loop.batch]
            if order is not None:
                indices = [indices[k] for k in order if k < len(indices)]
            _union_loss(module, indices, loop).backward()  # type: ignore[no-untyped-call]
            if loop.clip is not None:
                nn.utils.clip_grad_norm_(module.parameters(), loop.clip)
            gradients.append(flat(module))
            optimizer.step()
            optimizer.zero_grad()
        epoch += 1
    return gradients[: loop.steps]


def _union_loss(module: nn.Module, indices: list[int], loop: Loop) -> Tensor:
    if loop.kind == "rows":
        data = rows(loop.length, loop.torch_dtype)
        return _loss(module, data[indices], loop)
    sentences = Sentences(loop.length)
    return token_loss(module, padded([sentences[index] for index in indices])[1])
