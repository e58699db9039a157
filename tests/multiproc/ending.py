"""Runs that end in several ways, and what each rank trained in them."""

from __future__ import annotations

import gc
import hashlib
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

import evenstride
from evenstride.runtime.engines.watched_models import WatchedModels
from tests.multiproc.training import net, rows


def ended(rank: int, folder: Path, first: int, steps: int) -> None:
    """Train some steps; one rank closes before the others do."""
    stride = evenstride.Stride(24, trace=folder)
    loader = stride.loader(rows(24 * steps))
    model = stride.watch(DistributedDataParallel(net()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _, x, y in loader:
        stride.scale(F.mse_loss(model(x), y)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    if rank != first:
        dist.barrier()
    stride.close()
    if rank == first:
        dist.barrier()


def released_last(rank: int) -> bool:
    """Close a run that has the last reference to its model, while a thread of the process works.

    Returns:
        Whether the thread was done when the model was freed.
    """
    stride = evenstride.Stride(24)
    model = stride.watch(DistributedDataParallel(net()))
    done, found = threading.Event(), list[bool]()
    weakref.finalize(model, lambda: found.append(done.is_set()))

    def work() -> None:
        for _ in range(20):  # without the interpreter lock, as the threads of a process group
            hashlib.sha256(bytes(10**7))
        done.set()

    threading.Thread(target=work).start()
    del model
    stride.close()
    gc.collect()
    return found == [True]


def released_at_once(rank: int, times: int) -> None:
    """Release models that are the last owners of their process groups, right after a collective."""
    for _ in range(times):
        group = dist.new_group()
        model = DistributedDataParallel(net(), process_group=group)
        for _ in range(2):
            model(rows(4)[:][1]).sum().backward()
        watched = WatchedModels()
        watched.add(model)
        dist.destroy_process_group(group)
        del model, group
        watched.clear()


Step = Callable[[Any], float]


def _generator(loader: Iterable[Any], step: Step) -> None:
    def endless() -> Iterator[Any]:
        while True:
            yield from loader

    for batch in endless():
        step(batch)


def _next(loader: Iterable[Any], step: Step) -> None:
    batches = iter(loader)
    while True:
        try:
            batch = next(batches)
        except StopIteration:
            batches = iter(loader)
            batch = next(batches)
        step(batch)


def _nested(loader: Iterable[Any], step: Step) -> None:
    def an_epoch() -> float:
        for batch in loader:
            last = step(batch)
        return last  # unbound after an empty pass

    while True:
        an_epoch()


LOOPS = {"generator": _generator, "next": _next, "nested": _nested}


def limited(rank: int, loop: str, variable: str, value: str) -> tuple[int | str | None, int]:
    """Train in a loop that has no end of its own; return its exit code and its steps."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(variable, value)
        stride = evenstride.Stride(24)
        loader = stride.loader(rows(24 * 4))
    model = stride.watch(DistributedDataParallel(net()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step(batch: Any) -> float:
        _, x, y = batch
        loss = F.mse_loss(model(x), y)
        stride.scale(loss).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    try:
        LOOPS[loop](loader, step)
    except SystemExit as ended:
        return ended.code, stride.step
    finally:
        stride.close()
    return "no end", stride.step


def fetched_ahead(rank: int, scaled: bool) -> str:
    """Fetch the next batch before the backward pass of the one in hand; return the error."""
    stride = evenstride.Stride(24)
    model = stride.watch(DistributedDataParallel(net()))
    batches = iter(stride.loader(rows(24 * 4)))
    _, x, y = next(batches)
    loss = F.mse_loss(model(x), y)
    if scaled:
        loss = stride.scale(loss)
    try:
        next(batches)
    except evenstride.EvenstrideError as error:
        return str(error)
    finally:
        stride.close()
    return ""
