"""Training from shards that are read in a row."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate, chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import evenstride
from tests.multiproc.loops import burn
from tests.multiproc.training import flat, net, rows

BATCH, LENGTHS = 24, (40, 0, 73, 11, 90, 36)
LENGTH = sum(LENGTHS)
_STARTS = (0, *accumulate(LENGTHS))


def read(shard: int, skip: int) -> Iterator[tuple[Tensor, ...]]:
    """Yield a shard's samples; a random number is drawn for each, as augmentation would."""
    data = rows(LENGTH)
    for index in range(_STARTS[shard] + skip, _STARTS[shard + 1]):
        yield (*data[index], torch.rand(()))


def train(rank: int, plan: dict[str, Any]) -> dict[str, Any]:
    """Train as ``plan`` says; return samples and gradient of every step, and the state.

    The plan's keys: policy, epochs, workers (of each rank's loader), micro, and stop (steps after
    which the run ends). Also breaks (steps after which the loop is left and entered again), state,
    and early (whether the state is loaded before the loader exists).
    """
    stride = evenstride.Stride(global_batch=BATCH, policy=plan["policy"])
    if plan.get("early"):
        stride.load_state_dict(plan["state"])
        assert stride.state_dict() == plan["state"], "nothing has been trained since"
    workers = plan.get("workers", (0,) * 8)[rank]
    loader = stride.loader(
        evenstride.Shards(LENGTHS, read), num_workers=workers, max_micro_batch=plan.get("micro")
    )
    if plan.get("state") is not None and not plan.get("early"):
        stride.load_state_dict(plan["state"])
    module = net()
    model = stride.watch(DistributedDataParallel(module))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    steps: list[dict[str, Any]] = [{"ids": [], "drawn": []}]
    while stride.epoch < plan["epochs"] and len(steps) <= plan.get("stop", 10**6):
        for ids, x, y, drawn in loader:
            burn(64, 30 * len(x) * (1 + 3 * rank))  # so that an adaptive policy has something to do
            with stride.accumulate(model):
                loss = nn.functional.mse_loss(model(x), y)
                stride.scale(loss).backward()  # type: ignore[no-untyped-call]
            if stride.samples:
                steps[-1]["ids"] += ids.tolist()
                steps[-1]["drawn"] += drawn.tolist()
            if stride.synced:
                steps[-1] |= {"gradient": flat(module), "epoch": stride.epoch}
                optimizer.step()
                optimizer.zero_grad()
                steps.append({"ids": [], "drawn": []})
                if len(steps) - 1 in plan.get("breaks", ()) or len(steps) > plan.get("stop", 10**6):
                    break
    reported = {"steps": steps[:-1], "state": stride.state_dict(), "summary": str(stride.summary())}
    stride.close()
    return reported


def evaluated(rank: int) -> list[int]:
    """Return the samples that an evaluation of shards gives this rank."""
    stride = evenstride.Stride(global_batch=BATCH, policy="static:10,14")
    loader = stride.loader(evenstride.Shards(LENGTHS, read), train=False)
    seen = [ids.tolist() for ids, *_ in loader]
    stride.close()
    return list(chain.from_iterable(seen))
