"""HSDP runs whose islands are balanced as one worker each, and requests that cannot be."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import evenstride
from tests.multiproc.loops import PrescribedTimes, burn
from tests.multiproc.refusals import raised
from tests.multiproc.sharded import RATE, Layout, Net, flat, sharded
from tests.multiproc.training import Loop, rows

WORK = 7  # matrix products per sample; some 0.5 ms.
PAIRS = Layout(mesh=(2, 2))
LENGTH = 290  # of data that keeps to its rank


@dataclass(frozen=True)
class Balanced:
    """What one rank saw of a run on islands.

    Args:
        gradients: reduced, of every step.
        shares: of all ranks, at every step.
        workers: name and share of each in the summary; rank 0's only.
        reported: what its log said of shard groups.
    """

    gradients: list[list[float]]
    shares: list[tuple[int, ...]]
    workers: list[tuple[str, int]]
    reported: list[str]


def mesh_of(*ranks: int) -> DeviceMesh:
    """Return a mesh of the ranks, islands first if there are two dimensions."""
    return init_device_mesh("cpu", ranks, mesh_dim_names=("island", "shard")[-len(ranks) :])


def balanced(rank: int, loop: Loop, layout: Layout, slow: tuple[int, ...]) -> Balanced:
    """Train on islands, the ranks in ``slow`` with four times the time for each sample."""
    reported = _LogTexts()
    logging.getLogger("evenstride").addHandler(reported)
    group = mesh_of(*layout.mesh)["shard"].get_group()
    stride = evenstride.Stride(global_batch=loop.batch, policy=loop.policy, shard_group=group)
    PrescribedTimes(stride, 0.004 if rank in slow else 0.001)
    try:
        gradients, shares = _train(stride, loop, layout)
        workers = [(worker.name, worker.share) for worker in stride.summary().workers]
        return Balanced(gradients, shares, workers, reported.sentences)
    finally:
        stride.close()
        logging.getLogger("evenstride").removeHandler(reported)


def _train(
    stride: evenstride.Stride, loop: Loop, layout: Layout
) -> tuple[list[list[float]], list[tuple[int, ...]]]:
    loader = stride.loader(rows(loop.length))
    model = stride.watch(sharded(Net(layout, torch.float64), layout))
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    gradients: list[list[float]] = []
    shares: list[tuple[int, ...]] = []
    while True:
        for _, x, y in loader:
            stride.scale(nn.functional.mse_loss(model(x), y)).backward()  # type: ignore[no-untyped-call]
            gradients.append(flat(model))
            optimizer.step()
            optimizer.zero_grad()
            shares.append(stride.shares)
            if len(gradients) == loop.steps:
                return gradients, shares


def kept(rank: int, how: str) -> list[list[int]]:
    """Train two epochs of data that keeps to its rank; return this rank's samples of each."""
    group = mesh_of(2, 2)["shard"].get_group()
    stride = evenstride.Stride(global_batch=40, policy="adaptive", shard_group=group)
    data = rows(LENGTH)
    if how == "shards":
        starts = (0, 50, 80)
        read = partial(_rest_of, data, (*starts, LENGTH))
        loader = stride.loader(evenstride.Shards((50, 30, LENGTH - 80), read))
    else:
        loader = stride.loader(data, partition="epoch")
    model = stride.watch(sharded(Net(PAIRS, torch.float64), PAIRS))
    epochs: list[list[int]] = [[], []]
    while stride.epoch < 2:
        epoch = stride.epoch
        for ids, x, y in loader:
            burn(128, WORK * (1 + 3 * (rank > 1)) * len(x))
            stride.scale(nn.functional.mse_loss(model(x), y)).backward()  # type: ignore[no-untyped-call]
            model.zero_grad()
            epochs[epoch] += ids.tolist() if stride.samples else []
    stride.close()
    return epochs


def _rest_of(data: Any, starts: tuple[int, ...], shard: int, skip: int) -> Iterator[Any]:
    return (data[index] for index in range(starts[shard] + skip, starts[shard + 1]))


class _LogTexts(logging.Handler):
    """Keeps the log's lines about shard groups."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.sentences: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a sentence."""
        if "shard group" in record.getMessage():
            self.sentences.append(record.getMessage())


def groups(rank: int, name: str) -> tuple[str, str]:
    """Make a Stride of four ranks with shard groups that are no islands."""
    mesh = mesh_of(2, 2)
    shard, across = mesh["shard"].get_group(), mesh["island"].get_group()
    alone = dist.new_group([rank], use_local_synchronization=True)
    most = dist.new_group([0, 1, 2])
    pair = dist.new_group([0, 1])
    asked: dict[str, Any] = {
        "none on one rank": None if rank == 3 else shard,
        "other ones": shard if rank < 2 else across,
        "of two sizes": most if rank < 3 else alone,
        "another rank's": pair,
        "a mesh": mesh,
    }
    strides: list[evenstride.Stride] = []
    answer = raised(lambda: strides.append(evenstride.Stride(8, shard_group=asked[name])))
    for stride in strides:
        stride.close()
    return answer


def outside(rank: int) -> tuple[str, str]:
    """Make a Stride of two ranks whose replicas are sharded over other ones, too."""
    mesh = mesh_of(2, 2)
    shard, across = mesh["shard"].get_group(), mesh["island"].get_group()
    strides: list[evenstride.Stride] = []
    answer = raised(
        lambda: strides.append(evenstride.Stride(8, process_group=across, shard_group=shard))
    )
    for stride in strides:
        stride.close()
    return answer


def watched(rank: int, mesh: tuple[int, ...], given: str | None) -> tuple[str, str]:
    """Watch a model on a mesh, with one of its dimensions as shard groups; no mesh means DDP."""
    layout = mesh_of(*(mesh or (2, 2)))
    group = None if given is None else layout[given].get_group()
    stride = evenstride.Stride(8, shard_group=group)
    model: Any = nn.Linear(3, 1)
    model = fully_shard(model, mesh=layout) if mesh else DistributedDataParallel(model)
    answer = raised(lambda: stride.watch(model))
    stride.close()
    return answer
