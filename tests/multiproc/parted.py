"""Training in which each rank keeps to a part of the data set for a whole epoch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import evenstride
from tests.multiproc.loops import PrescribedTimes
from tests.multiproc.training import flat, net, rows

BATCH, LENGTH = 24, 250


def train(rank: int, plan: dict[str, Any]) -> dict[str, Any]:
    """Train as ``plan`` says; return samples and gradient of every step, and the state.

    The plan's keys: policy, partition, epochs, workers (of the loader), stop (steps after which the
    run ends), breaks (steps after which the loop is left and entered again), state, times (mean
    step times that `dbs` has of the ranks).
    """
    if "times" not in plan:
        return _train(rank, plan)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("evenstride.core.policies.dbs.Means.mean_s", np.array(plan["times"]))
        return _train(rank, plan)


def _train(rank: int, plan: dict[str, Any]) -> dict[str, Any]:
    stride = evenstride.Stride(global_batch=BATCH, policy=plan["policy"])
    PrescribedTimes(stride, 0.001 * (1 + 3 * rank))  # so that an adaptive policy moves samples
    if plan.get("state") is not None:
        stride.load_state_dict(plan["state"])
    loader = stride.loader(
        rows(LENGTH),
        partition=plan.get("partition", "epoch"),
        num_workers=plan.get("workers", 0),
        max_micro_batch=7,
    )
    module = net()
    model = stride.watch(DistributedDataParallel(module))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    steps: list[dict[str, Any]] = [{"ids": []}]
    while stride.epoch < plan["epochs"] and len(steps) <= plan.get("stop", 10**6):
        for ids, x, y in loader:
            with stride.accumulate(model):
                loss = nn.functional.mse_loss(model(x), y)
                stride.scale(loss).backward()  # type: ignore[no-untyped-call]
            steps[-1]["ids"] += ids.tolist() if stride.samples else []
            if stride.synced:
                steps[-1] |= {"gradient": flat(module), "epoch": stride.epoch}
                optimizer.step()
                optimizer.zero_grad()
                steps.append({"ids": []})
                if len(steps) - 1 in plan.get("breaks", ()) or len(steps) > plan.get("stop", 10**6):
                    break
    state = stride.state_dict()
    stride.close()
    return {"steps": steps[:-1], "state": state}
