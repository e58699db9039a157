"""Evaluation, dropped samples and recorded runs: what each rank does, and what it saw."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import evenstride
from tests.multiproc.loops import PrescribedTimes, burn
from tests.multiproc.training import net, rows


class Training:
    """A small model in training on one rank."""

    def __init__(self, stride: evenstride.Stride, rank: int) -> None:
        self.stride, self.rank = stride, rank
        self.module = net()
        self.model = stride.watch(DistributedDataParallel(self.module))
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=0.01)

    def step(self, batch: Any) -> list[int]:
        """Train on a (micro-)batch and return the ids that count."""
        ids, x, y = batch
        burn(96, 3 * self.rank * len(ids))  # so that an adaptive policy has something to do
        with self.stride.accumulate(self.model):
            loss = nn.functional.mse_loss(self.model(x), y)
            self.stride.scale(loss).backward()  # type: ignore[no-untyped-call]
        if self.stride.synced:
            self.optimizer.step()
            self.optimizer.zero_grad()
        counted: list[int] = ids.tolist() if self.stride.samples else []
        return counted


def one_pass(stride: evenstride.Stride, loader: Any) -> dict[str, Any]:
    """Evaluate once and return the ids of every batch, and the mean of all ids."""
    batches = [ids.tolist() for ids, *_ in loader]
    own = [index for ids in batches for index in ids]
    return {
        "batches": batches,
        "len": len(loader),
        "mean": stride.mean(float(sum(own)), len(own)),
    }


def evaluated(rank: int, plan: dict[str, Any]) -> list[dict[str, Any]]:
    """Return two passes over a data set of ``plan["length"]`` samples."""
    stride = evenstride.Stride(global_batch=plan["batch"], policy=plan["policy"])
    loader = stride.loader(
        rows(plan["length"]),
        train=False,
        global_batch=plan.get("eval_batch"),
        max_micro_batch=plan.get("micro"),
        num_workers=plan.get("num_workers", 0),
    )
    passes = [one_pass(stride, loader) for _ in range(2)]
    del loader
    stride.close()
    return passes


def evaluated_while_training(rank: int, epochs: int) -> dict[str, Any]:
    """Evaluate after every fourth step of a run whose shares change."""
    stride = evenstride.Stride(global_batch=24, policy="adaptive")
    PrescribedTimes(stride, 0.001 * (1 + rank))
    loader, validation = stride.loader(rows(120)), stride.loader(rows(50), train=False)
    training = Training(stride, rank)
    passes, trained, shares = [], [], set()
    for epoch in range(epochs):
        for batch in loader:
            trained += [(epoch, index) for index in training.step(batch)]
            shares.add(stride.shares)
            if stride.step % 4 == 0:
                passes.append(one_pass(stride, validation))
    stride.close()
    return {"passes": passes, "trained": trained, "shares": sorted(shares)}


def means(rank: int, totals: list[list[float]], counts: list[float]) -> tuple[Any, Any]:
    """Return the mean of one number and of several, as this rank hears it."""
    stride = evenstride.Stride(global_batch=4)
    several = stride.mean(torch.tensor(totals[rank], dtype=torch.float64), counts[rank])
    one = stride.mean(totals[rank][0], counts[rank])
    stride.close()
    return one, torch.as_tensor(several).tolist()


def dropped(rank: int, policy: str, length: int, epochs: int) -> dict[str, Any]:
    """Train with ``drop_last`` and return the ids of every epoch."""
    stride = evenstride.Stride(global_batch=24, policy=policy, seed=9)
    loader = stride.loader(rows(length), drop_last=True)
    training = Training(stride, rank)
    ids = [[index for batch in loader for index in training.step(batch)] for _ in range(epochs)]
    summary = stride.summary()
    stride.close()
    return {"ids": ids, "len": len(loader), "dropped": summary.samples_dropped}


def cut_up(rank: int, micro: list[int | None]) -> dict[str, int]:
    """Train an epoch in micro-batches of this rank's own size; return what was counted."""
    stride = evenstride.Stride(global_batch=24, policy="uniform")
    loader = stride.loader(rows(70), max_micro_batch=micro[rank])
    training, batches = Training(stride, rank), 0
    for batch in loader:
        training.step(batch)
        batches += 1
    stride.close()
    return {"len": len(loader), "batches": batches, "steps": stride.step}


def traced(rank: int, plan: dict[str, Any]) -> list[tuple[int, tuple[int, ...]]]:
    """Train with a trace; return the shares in force at every step, as this rank saw them."""
    stride = evenstride.Stride(global_batch=24, policy=plan["policy"], trace=plan["trace"])
    loader = stride.loader(
        rows(240),
        num_workers=plan.get("num_workers", 0),
        cold_prefetch=plan.get("cold_prefetch", False),
    )
    training, seen = Training(stride, rank), []
    for _ in range(plan["epochs"]):
        for batch in loader:
            training.step(batch)
            seen.append((stride.step - 1, stride.shares))
    del loader
    stride.close()
    return seen


def compiled(rank: int, trace: str, peeks: bool) -> None:
    """Train a compiled model; with ``peeks``, look at a batch before."""
    stride = evenstride.Stride(global_batch=24, trace=trace)
    loader = stride.loader(rows(240))
    training = Training(stride, rank)
    fast: Any = torch.compile(training.model, backend="eager")
    training.model = stride.watch(fast)
    if peeks:
        next(iter(loader))
    for batch in loader:
        training.step(batch)
    stride.close()
