"""What a rank does in `test_profiled`: train with ``torch.profiler`` on, and mark its own steps."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils.data import TensorDataset

import evenstride

STEPS = 30
WIDTH = 768
MARK = "step"


def profiled(rank: int, folder: str) -> None:
    """Train some steps unevenly, and export what the profiler saw of them.

    A mark lasts from the batch's arrival until the gradients are averaged, which is where
    evenstride commits the step.
    """
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Linear(64, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
    )
    stride = evenstride.Stride(global_batch=512, policy="static:128,384", trace=Path(folder))
    loader = stride.loader(TensorDataset(torch.randn(512 * STEPS, 64)))
    model = stride.watch(DistributedDataParallel(net))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        for (x,) in loader:
            with record_function(MARK):
                stride.scale(model(x).square().mean()).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
    dist.barrier()
    stride.close()
    seen.export_chrome_trace(str(Path(folder) / f"profile{rank}.json"))
