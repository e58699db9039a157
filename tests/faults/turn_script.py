"""A training script in which one rank meets its fate where an epoch ends, as all choose a batch.

turn_script.py FATE RANK
"""

from __future__ import annotations

import os
import signal
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import evenstride

SAMPLES, BOUNDS = 120, (6, 24)


def main(fate: str, victim: int) -> None:
    """Train until somebody meets its fate."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=3600))
    stride = evenstride.Stride("auto", bounds=BOUNDS)
    loader = stride.loader(TensorDataset(torch.randn(SAMPLES, 4)))
    model = stride.watch(DistributedDataParallel(nn.Linear(4, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    mine = dist.get_rank() == victim
    if fate == "restores" and mine:
        stride.load_state_dict({**stride.state_dict(), "global_batch": 12})
    while stride.epoch < 3:
        for (x,) in loader:
            stride.scale(model(x).square().mean()).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            if mine and stride.step == 2 * SAMPLES // BOUNDS[0]:
                if fate == "killed":
                    os.kill(os.getpid(), signal.SIGKILL)
                if fate == "stopped":
                    os.kill(os.getpid(), signal.SIGSTOP)
                if fate == "raises":
                    raise ValueError("the data of this rank is broken")
    stride.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
