"""A training script that a launcher starts, and that notes where and what it trains.

    launched_script.py FOLDER

At ``EVENSTRIDE_TEST_LEAVE=STEP``, the leader tells the batch system to end the job soon, and all
train until it does so. A job that is started again finishes its epoch.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import count
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import evenstride

SAMPLES, BATCH = 96, 12


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(3)
    dist.init_process_group("gloo")
    x = torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(7))
    net = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    stride = evenstride.Stride(BATCH)
    model = stride.watch(DistributedDataParallel(net))
    loader = stride.loader(TensorDataset(x, x.sum(1, keepdim=True)), shuffle=True)
    attempt = int(os.environ.get("SLURM_RESTART_COUNT", "0"))
    leave = 0 if attempt else int(os.environ.get("EVENSTRIDE_TEST_LEAVE", "0"))
    with evenstride.Checkpointer(folder / "saved", stride, model=net, optimizer=optimizer) as saved:
        saved.restore()
        began = stride.step
        for _ in count() if leave else [stride.epoch]:
            for rows, targets in loader:
                loss = stride.scale(F.mse_loss(model(rows), targets))
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                optimizer.zero_grad()
                saved.step()
                if stride.step == leave and dist.get_rank() == 0:
                    about_to_end()
    note(folder, {"attempt": attempt, "began": began, "steps": stride.step})
    dist.destroy_process_group()


def about_to_end() -> None:
    """Send the batch script the signal that Slurm sends before the time limit."""
    job = os.environ["SLURM_JOB_ID"]
    subprocess.run(["scancel", "--batch", "--signal=USR1", job], check=True)


def note(folder: Path, what: dict[str, int]) -> None:
    variables = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "SLURMD_NODENAME")
    where = {name: os.environ.get(name) for name in (*variables, "EVENSTRIDE_EPOCHS")}
    text = json.dumps({**what, **where, "arguments": sys.argv[2:]})
    (folder / f"{what['attempt']}-{where['RANK']}.json").write_text(text)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
