"""A training script in which one rank meets its fate at a given step.

script.py FATE RANK STEP GROUP_TIMEOUT_S
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


def meet(fate: str) -> None:
    """Die, hang, fail or leave."""
    match fate:
        case "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "raises":
            raise ValueError("the data of this rank is broken")
        case "leaves":
            sys.exit(0)
        case "spins":
            while True:
                pass


def run_short(_: torch.Tensor) -> None:
    """Run out of memory in the backward pass."""
    raise torch.OutOfMemoryError


def main(fate: str, victim: int, step: int, timeout_s: float) -> None:
    """Train until the end of the world."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo", timeout=timedelta(seconds=timeout_s))
    stride = evenstride.Stride(global_batch=12)
    loader = stride.loader(TensorDataset(torch.randn(6000, 4)))
    model = stride.watch(DistributedDataParallel(nn.Linear(4, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for (x,) in loader:
        if fate == "stays" and stride.step == step and dist.get_rank() == victim:
            break
        with stride.guard(), stride.accumulate(model):
            out = model(x)
            if stride.step == step and dist.get_rank() == victim:
                if fate == "runs short":
                    out.register_hook(run_short)
                else:
                    meet(fate)
            stride.scale(out.square().mean()).backward()  # type: ignore[no-untyped-call]
        if stride.synced:
            optimizer.step()
            optimizer.zero_grad()
    if fate == "stays" and dist.get_rank() == victim:
        signal.pause()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]))
