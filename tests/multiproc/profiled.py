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
from evenstride.trace.read import read_records

MOST_STEPS = 400
TOLD = 16
"""Steps that an exchange must have reported before training ends; when one comes is not fixed."""
LOOKS = 5  # steps between two looks for that
WIDTH = 768
MARK = "step"


def profiled(rank: int, folder: str) -> None:
    """Train unevenly until the trace tells of enough steps; export what the profiler saw of them.

    A mark lasts from the batch's arrival until the gradients are averaged, which is where
    evenstride commits the step.
    """
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Linear(64, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
    )
    stride = evenstride.Stride(global_batch=512, policy="static:128,384", trace=Path(folder))
    loader = stride.loader(TensorDataset(torch.randn(512 * MOST_STEPS, 64)))
    model = stride.watch(DistributedDataParallel(net))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        for step, (x,) in enumerate(loader, start=1):
            with record_function(MARK):
                # Within the step, so that what it takes is the step's and no pause between two.
                done = step % LOOKS == 0 and _enough(Path(folder))
                stride.scale(model(x).square().mean()).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            if done:
                break
    dist.barrier()
    stride.close()
    seen.export_chrome_trace(str(Path(folder) / f"profile{rank}.json"))


def _enough(run: Path) -> bool:
    """Return on every rank what the leader reads: whether exchanges have reported enough steps."""
    reported = [0]
    if dist.get_rank() == 0:
        events = [record["event"] for record in read_records(run) if record["kind"] == "event"]
        reported += [event["step"] for event in events if event["type"] == "Exchanged"]
    enough = torch.tensor(max(reported) >= TOLD)
    dist.broadcast(enough, 0)
    return bool(enough)
