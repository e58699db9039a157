"""Training in whole micro-batches of each rank's own size."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import evenstride
from tests.multiproc.loops import burn
from tests.multiproc.training import net, rows

QUANTA = (8, 12)


def train(rank: int, batch: int, policy: str) -> list[list[int]]:
    """Return the sizes of this rank's micro-batches in each step of two epochs."""
    stride = evenstride.Stride(global_batch=batch, policy=policy, quantum=QUANTA[rank])
    loader = stride.loader(rows(batch * 12), max_micro_batch=QUANTA[rank])
    model = stride.watch(DistributedDataParallel(net()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    steps: list[list[int]] = [[]]
    for _ in range(stride.epoch, 2):
        for _, x, y in loader:
            burn(64, 2 * len(x) * (1 + 3 * rank))  # so that an adaptive policy has something to do
            with stride.accumulate(model):
                loss = nn.functional.mse_loss(model(x), y)
                stride.scale(loss).backward()  # type: ignore[no-untyped-call]
            steps[-1].append(stride.samples)
            if stride.synced:
                optimizer.step()
                optimizer.zero_grad()
                steps.append([])
    stride.close()
    return steps[:-1]
