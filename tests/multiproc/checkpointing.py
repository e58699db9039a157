"""Runs that save, stop, and go on elsewhere: what each rank does."""

from __future__ import annotations

import logging
import os
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import evenstride
from evenstride.errors import ConfigError
from evenstride.runtime.checkpoint import Checkpointer, CheckpointError, Restored

ROWS, BATCH, FEATURES = 120, 24, 5


@dataclass(frozen=True)
class Run:
    """One run of some ranks; plain data, so that it can be sent to a rank.

    Args:
        folder: of the checkpoints.
        steps: to train.
        engine: ``ddp``, ``fsdp``, ``hsdp``, or ``plain`` with one rank.
        every: steps from save to save.
        keep: checkpoints that stay.
        seed: of the run.
        rows: of the data set.
        batch: samples per step.
        allow: given to ``restore``.
        denied: a rank whose disk is full, and how many of its writes work before that.
        unreadable: a rank that cannot read, and the ending of the files that it cannot read.
        wide: features inside.
        odd: of another model that is saved, too: its width on each rank.
        ask: a step at which the leader asks for a save.
    """

    folder: str
    steps: int = 6
    engine: str = "ddp"
    every: int | str = 4
    keep: int = 2
    seed: int = 0
    rows: int = ROWS
    batch: int = BATCH
    allow: tuple[str, ...] = ()
    denied: tuple[int, int] | None = None
    unreadable: tuple[int, str] | None = None
    wide: int = 7
    odd: tuple[int, ...] = ()
    ask: int | None = None


@dataclass(frozen=True)
class Seen:
    """What one rank saw: the weights after each step, and how it began and ended."""

    restored: int | None
    weights: list[list[float]]
    epoch: int
    drawn: list[float]
    report: dict[str, float]
    error: str
    reported: list[str]


class Net(nn.Module):
    """A model with buffers, tied weights, and a parameter that is never trained."""

    def __init__(self, wide: int) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.inner = nn.Linear(FEATURES, wide)
        self.outer = nn.Linear(wide, 1)
        self.unused = nn.Parameter(torch.ones(3))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        """Return one number per row."""
        assert isinstance(self.seen, Tensor)
        self.seen += 1
        result: Tensor = self.outer(self.inner(x).tanh()) * 1.0
        return result


def data(rows: int = ROWS) -> TensorDataset:
    """Return the same rows everywhere."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(rows, FEATURES, generator=generator, dtype=torch.float64)
    return TensorDataset(x, x.sum(1, keepdim=True).sin())


def mesh_of(engine: str) -> DeviceMesh | None:
    """Return the mesh that a model is sharded over; collective."""
    world_size = dist.get_world_size()
    if engine == "fsdp":
        return init_device_mesh("cpu", (world_size,), mesh_dim_names=("s",))
    if engine == "hsdp":
        return init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("r", "s"))
    return None


def wrapped(net: nn.Module, run: Run, mesh: DeviceMesh | None) -> Any:
    """Return the model in its engine."""
    if run.engine == "plain":
        return net
    if run.engine == "ddp":
        return DistributedDataParallel(net, find_unused_parameters=True)
    assert isinstance(net, Net)
    assert mesh is not None
    fully_shard(net.inner, mesh=mesh)
    return fully_shard(net, mesh=mesh)


def weights(model: nn.Module) -> list[float]:
    """Return all parameters, whole; collective where sharded."""
    whole = [p.detach() for p in model.parameters()]
    full = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in whole]
    return torch.cat([p.reshape(-1).double() for p in full]).tolist()


class Messages(logging.Handler):
    """Keeps warnings and errors."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.reported: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a message."""
        self.reported.append(record.getMessage())


def go(rank: int, run: Run) -> Seen:
    """Restore the checkpoint, train on, and report."""
    messages = Messages()
    logging.getLogger("evenstride").addHandler(messages)
    mesh = mesh_of(run.engine)
    islands = mesh["s"].get_group() if mesh is not None and run.engine == "hsdp" else None
    stride = evenstride.Stride(global_batch=run.batch, seed=run.seed, shard_group=islands)
    try:
        return _go(rank, run, stride, mesh, messages)
    finally:
        stride.close()
        logging.getLogger("evenstride").removeHandler(messages)


def refusal(rank: int, run: Run) -> str:
    """Return the error that `go` raises on this rank; a rank that fails would end the pool."""
    with pytest.raises(ConfigError) as raised:
        go(rank, run)
    return str(raised.value)


def _go(
    rank: int,
    run: Run,
    stride: evenstride.Stride,
    mesh: DeviceMesh | None,
    messages: Messages,
) -> Seen:
    loader = stride.loader(data(run.rows))
    model = stride.watch(wrapped(Net(run.wide).double(), run, mesh))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    checkpoint = Checkpointer(
        run.folder,
        stride,
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        every=run.every,
        keep=run.keep,
        extra={"odd": nn.Linear(1, run.odd[rank])} if run.odd else None,
    )
    torch.manual_seed(rank), np.random.seed(rank), random.seed(rank)
    if run.denied is not None and run.denied[0] == rank:
        _deny(checkpoint, run.denied[1])
    if run.unreadable is not None and run.unreadable[0] == rank:
        _blind(checkpoint, run.unreadable[1])
    try:
        restored = checkpoint.restore(run.allow)
    except CheckpointError as failure:
        seen_weights = [weights(model)]
        reported = f"{type(failure).__name__}: {failure}"
        return Seen(
            None, seen_weights, stride.epoch, [], checkpoint.report(), reported, messages.reported
        )
    except ConfigError:
        checkpoint.close()  # it would keep the model in this process of the pool
        raise
    parts = loader, model, optimizer, scheduler
    return _train(rank, run, stride, parts, checkpoint, restored, messages)


def _train(
    rank: int,
    run: Run,
    stride: evenstride.Stride,
    parts: tuple[Any, Any, Any, Any],
    checkpoint: Checkpointer,
    restored: Restored | None,
    messages: Messages,
) -> Seen:
    loader, model, optimizer, scheduler = parts
    drawn = [float(torch.rand(())), float(np.random.random()), random.random()]
    seen: list[list[float]] = []
    while len(seen) < run.steps:
        for x, y in loader:
            stride.scale(nn.functional.mse_loss(model(x), y)).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            if stride.step == run.ask and rank == 0:
                checkpoint._ties.saves.ask("a test")
            checkpoint.step()
            seen.append(weights(model))
            if len(seen) == run.steps:
                break
    error = ""
    try:
        checkpoint.close()
    except CheckpointError as failure:
        error = str(failure)
    step = None if restored is None else restored.step
    return Seen(step, seen, stride.epoch, drawn, checkpoint.report(), error, messages.reported)


def _deny(checkpoint: Checkpointer, after: int) -> None:
    """Let a rank's writes fail, as on a full disk, after some that work."""
    storage, left = checkpoint._is.storage, [after]
    write = storage.write

    def full(name: str, chunks: Any) -> None:
        if not left[0]:
            raise OSError(28, os.strerror(28), name)
        left[0] -= 1
        write(name, chunks)

    storage.write = full  # type: ignore[method-assign]


def _blind(checkpoint: Checkpointer, ending: str) -> None:
    """Let a rank's reads of some files fail, as on a disk that is breaking."""
    storage = checkpoint._is.storage
    read = storage.read

    def sick(name: str, start: int = 0, length: int | None = None) -> bytes:
        if name.endswith(ending):
            raise OSError(5, os.strerror(5), name)
        return read(name, start, length)

    storage.read = sick  # type: ignore[method-assign]


def alone(run: Run) -> list[list[float]]:
    """Return the weights after each step of one process, in plain PyTorch."""
    from tests.order import epoch_order

    model = Net(run.wide).double()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    rows, seen, epoch = data(run.rows), list[list[float]](), 0
    while len(seen) < run.steps:
        order = epoch_order(run.seed, epoch, run.rows, shuffle=True).tolist()
        for start in range(0, run.rows, run.batch):
            x, y = rows[order[start : start + run.batch]]
            nn.functional.mse_loss(model(x), y).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            seen.append(weights(model))
        epoch += 1
    return seen[: run.steps]


def checkpoints(folder: str | Path) -> Sequence[str]:
    """Return the names of what is in a folder of checkpoints."""
    return sorted(path.name for path in Path(folder).glob("step-*"))
