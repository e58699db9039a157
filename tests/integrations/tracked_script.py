"""A training script with trackers; what it does with them is its first argument.

Usage: tracked_script.py HOW STATE, under torchrun. STATE is a file: a state in it is loaded, and
the state of the end is saved in it. With ``until``, training continues until STATE exists.
"""

from __future__ import annotations

import os
import sys
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psutil
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

import evenstride
from tests.multiproc.training import net, rows

EPOCHS, STEPS = 2, 60


def main(how: str, state: Path) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    own = _begun(how) if rank == 0 else None
    stride = evenstride.Stride(global_batch=12)
    if how == "wandb-late" and rank == 0:
        own = _begun("wandb")
    if state.exists():
        stride.load_state_dict(torch.load(state))
    module = net()
    model = stride.watch(DistributedDataParallel(module))
    loader = stride.loader(rows(12 * STEPS))
    # A gradient that stays large has a known noise scale.
    optimizer = torch.optim.SGD(module.parameters(), lr=0.0 if how == "until" else 0.01)
    for epoch in count() if how == "until" else range(EPOCHS):
        for _, x, y in loader:
            loss = F.mse_loss(model(x), y)
            stride.scale(loss).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            if own is not None and stride.step % 10 == 0:
                own({"theirs": float(stride.step)}, stride.step)
        stride.mean(1.0, 2, name="loss")
        if how == "until" and stride.mean(float(state.exists()), 1.0):
            break
        if how == "wandb-dies" and rank == 0 and epoch == 0:
            _kill_service()
    saved = stride.state_dict()
    stride.close()
    if own is not None:
        own({"after": 1.0}, 1000)
        _end(how)
    if rank == 0 and how != "until":
        torch.save(saved, state)
    print(f"[rank {rank}] trained to step {stride.step}", flush=True)
    dist.destroy_process_group()


def refused(rank: int, sinks: str, variables: dict[str, str]) -> str:
    """Return why `Stride` refuses sinks in an environment."""
    with patch.dict(os.environ, variables):
        try:
            evenstride.Stride(global_batch=12, sinks=sinks).close()
        except evenstride.ConfigError as error:
            return str(error)
    return ""


def _begun(how: str) -> Any:
    """Return how the script itself logs, if it does."""
    if how == "wandb":
        import wandb

        run = wandb.init(project="theirs", settings=wandb.Settings(silent=True, console="off"))
        assert run is wandb.run
        return lambda values, step: wandb.log(values, step=step)
    if how == "mlflow":
        import mlflow

        mlflow.set_experiment("theirs")
        mlflow.start_run()
        return lambda values, step: mlflow.log_metrics(values, step=step)
    return None


def _end(how: str) -> None:
    if how == "mlflow":
        import mlflow

        assert mlflow.active_run() is not None, "the script's run has not ended"
        mlflow.end_run("KILLED")  # an end that only the script knows


def _kill_service() -> None:
    """Kill the process to which W&B's library hands its data."""
    (service,) = (one for one in psutil.Process().children() if one.name() == "wandb-core")
    service.kill()
    service.wait(20)


if __name__ == "__main__":
    os.environ.setdefault("WANDB_DISABLE_GIT", "true")
    main(sys.argv[1], Path(sys.argv[2]))
