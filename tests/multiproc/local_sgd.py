"""What ranks run that train on their own between averages, and one process that does the same."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

import evenstride
from evenstride.core.sync_modes.mode_specs import LocalSgd, sync_from_spec
from evenstride.runtime.synchronisation.local_sgd import LocalTraining
from evenstride.runtime.synchronisation.weighted_average import summed
from tests.multiproc.loops import burn
from tests.multiproc.training import cost_of, net, rows, weights

Ids = list[list[int]]
"""Samples of each step."""


@dataclass(frozen=True, slots=True)
class Run:
    """One run.

    Args:
        sync: mode of synchronisation.
        policy: of the split.
        shares: of the ranks, by step, in turn; empty to leave them to the policy.
        optimizer: name of a `torch.optim` class.
        momentum: of SGD.
        wrapped: whether the model is in DistributedDataParallel.
        epochs: of ``length`` samples, in global batches of 30.
        length: samples of an epoch.
        micro: most samples at once.
        costs: whether samples are distributed by cost.
        infinite: step and rank whose loss is infinite, which a gradient scaler leaves out.
        uneven: whether later ranks are made slower.
        thrice: whether the second of two ranks takes three times as long for `dbs`.
        broken: what is broken on purpose: ``weights`` or ``factor``.
    """

    sync: str
    policy: str = "static:7,23"
    shares: tuple[tuple[int, ...], ...] = ()
    optimizer: str = "SGD"
    momentum: float = 0.0
    wrapped: bool = True
    epochs: int = 3
    length: int = 200
    micro: int | None = None
    costs: bool = False
    infinite: tuple[int, int] | None = None
    uneven: bool = False
    thrice: bool = False
    broken: str = ""

    @property
    def steps(self) -> int:
        """Steps of an epoch."""
        return -(-self.length // 30)


def optimizer_of(run: Run, module: nn.Module) -> Optimizer:
    """Return a run's optimizer."""
    if run.optimizer == "SGD":
        return torch.optim.SGD(
            module.parameters(), lr=0.1, momentum=run.momentum, weight_decay=0.01
        )
    optimizer: Optimizer = getattr(torch.optim, run.optimizer)(module.parameters(), lr=0.01)
    return optimizer


@contextmanager
def changed(run: Run) -> Iterator[None]:
    """Break what is to be broken, and prescribe the shares."""
    with pytest.MonkeyPatch.context() as patch:
        if run.broken == "weights":
            alike = 1 / torch.distributed.get_world_size()
            patch.setattr(
                "evenstride.runtime.synchronisation.weighted_average.summed",
                lambda tensors, _, group: summed(tensors, alike, group),
            )
        if run.broken == "factor":
            patch.setattr(
                "evenstride.runtime.synchronisation.local_sgd.LocalTraining.factor",
                _whole(LocalTraining.factor),
            )
        if run.thrice:
            patch.setattr("evenstride.core.policies.dbs.Means.mean_s", np.array([1.0, 3.0]))
        if run.shares:
            by_step = run.shares
            patch.setattr(
                "evenstride.runtime.coordination.draw_barrier.DrawBarrier.draw",
                lambda _, step: by_step[step % len(by_step)],
            )
        yield


def _whole(factor: Any) -> Any:
    def plain(self: Any, draw: Any) -> float:
        return 1.0 if factor(self, draw) else 0.0

    return plain


def train(rank: int, run: Run) -> tuple[Ids, list[list[float]]]:
    """Return the ids of every step on this rank, and the weights after it."""
    with changed(run):
        return _train(rank, run)


def _train(rank: int, run: Run) -> tuple[Ids, list[list[float]]]:
    stride = evenstride.Stride(global_batch=30, policy=run.policy, sync=run.sync)
    costs = cost_of if run.costs else None
    loader = stride.loader(rows(run.length), max_micro_batch=run.micro, cost_fn=costs)
    module = net()
    if rank and not run.wrapped:  # whose weights count is rank 0's
        nn.init.zeros_(next(module.parameters()))
    model = stride.watch(DistributedDataParallel(module) if run.wrapped else module)
    optimizer = optimizer_of(run, module)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=run.infinite is not None)
    ids, seen, mine = list[list[int]](), list[list[float]](), list[int]()
    while stride.epoch < run.epochs:
        for batch, x, y in loader:
            burn(64, 40 * rank * run.uneven)
            with stride.accumulate(model):
                loss = F.mse_loss(model(x), y)
                if run.infinite == (len(seen), rank):
                    loss = loss / torch.zeros(())
                scaler.scale(stride.scale(loss)).backward()  # type: ignore[no-untyped-call]
            mine += batch.tolist() if stride.samples else []
            if stride.synced:
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
                ids.append(mine)
                seen.append(weights(module))
                mine = []
    stride.close()
    return ids, seen


class Ranks:
    """The ranks of a run in one process, in plain PyTorch.

    Args:
        run: what they do.
        count: of them.
    """

    def __init__(self, run: Run, count: int) -> None:
        mode = sync_from_spec(run.sync)
        assert isinstance(mode, LocalSgd)
        self.run, self.mode, self.data = run, mode, rows(run.length)
        self.nets = [net() for _ in range(count)]
        self.optimizers = [optimizer_of(run, module) for module in self.nets]
        self.start = net()  # the weights at the round's start
        self.outer = torch.optim.SGD(
            self.start.parameters(),
            lr=mode.outer_rate,
            momentum=mode.outer_momentum,
            nesterov=mode.outer_momentum > 0,
        )

    def train(self, ids: list[Ids]) -> tuple[list[list[list[float]]], list[int]]:
        """Return every rank's weights after every step, and the steps that end rounds.

        Args:
            ids: by rank and step.
        """
        seen: list[list[list[float]]] = [[] for _ in ids]
        ends, in_round, samples = list[int](), 0, [0] * len(ids)
        for step in range(len(ids[0])):
            by_rank = [mine[step] for mine in ids]
            if step < self.mode.after:
                self._together(by_rank)
            else:
                in_round += 1
                self._alone(by_rank)
                samples = [n + len(mine) for n, mine in zip(samples, by_rank, strict=True)]
                if in_round == self.mode.every or (step + 1) % self.run.steps == 0:
                    self._average(samples)
                    ends.append(step)
                    in_round, samples = 0, [0] * len(ids)
            for rank, module in enumerate(self.nets):
                seen[rank].append(weights(module))
        return seen, ends

    def _gradient(self, module: nn.Module, ids: list[int]) -> None:
        _, x, y = self.data[ids]
        F.mse_loss(module(x), y).backward()  # type: ignore[no-untyped-call]

    def _together(self, by_rank: Ids) -> None:
        union = [index for mine in by_rank for index in mine]
        for module, optimizer in zip(self.nets, self.optimizers, strict=True):
            if union:
                self._gradient(module, union)
                optimizer.step()
                optimizer.zero_grad()
        self.start.load_state_dict(self.nets[0].state_dict())

    def _alone(self, by_rank: Ids) -> None:
        for module, optimizer, mine in zip(self.nets, self.optimizers, by_rank, strict=True):
            if mine:
                self._gradient(module, mine)
                optimizer.step()
                optimizer.zero_grad()

    def _average(self, samples: list[int]) -> None:
        of_ranks = zip(*(module.parameters() for module in self.nets), strict=True)
        for start, ends in zip(self.start.parameters(), of_ranks, strict=True):
            mean = sum(
                n / sum(samples) * end.detach() for n, end in zip(samples, ends, strict=True)
            )
            start.grad = start.detach() - mean
        self.outer.step()
        for module in self.nets:
            module.load_state_dict(self.start.state_dict())
