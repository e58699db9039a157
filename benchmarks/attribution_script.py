"""Training script of `attribution.py`: DDP ranks record when their own gradients are ready.

    attribution_script.py BATCH

A rank's gradients are ready when its last parameter has a local gradient, before any rank waits for
another. This measurement is independent of evenstride. All ranks of a machine share one clock.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import evenstride

SIDE = 28


class Stamps:
    """Times at which the last local gradient of each step was ready, by the machine's clock.

    Args:
        net: Network to watch.
    """

    def __init__(self, net: nn.Module) -> None:
        self.ready_s: list[float] = []
        self._latest_s = 0.0
        for parameter in net.parameters():
            parameter.register_post_accumulate_grad_hook(self._ready)  # type: ignore[no-untyped-call]

    def _ready(self, _: Tensor) -> None:
        self._latest_s = time.perf_counter()

    def step(self) -> None:
        """Record the time of the finished step."""
        self.ready_s.append(self._latest_s)


def main() -> None:
    """Train as many steps as the lab allows, and write the recorded times to a file."""
    batch = int(sys.argv[1])
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    # Much computation and few weights, because communication needs the processor too.
    net = nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(32 * SIDE * SIDE // 16, 10)),
    )
    stamps = Stamps(net)
    # One pass for the whole run, because the first step of a pass is not modelled.
    steps = int(os.environ.get("EVENSTRIDE_MAX_STEPS") or 100)
    images = torch.randn(batch, 1, SIDE, SIDE).repeat(steps, 1, 1, 1)
    stride = evenstride.Stride(global_batch=batch)
    loader = stride.loader(TensorDataset(images, images.flatten(1)[:, :10].argmax(1)))
    model = stride.watch(DistributedDataParallel(net))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    for x, y in loader:
        stride.scale(F.cross_entropy(model(x), y)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        stamps.step()
    folder = Path(os.environ["EVENSTRIDE_TRACE"]).parent
    (folder / f"ready-{dist.get_rank()}.json").write_text(json.dumps(stamps.ready_s))
    stride.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
