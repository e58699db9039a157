"""The default training script for comparisons on real workers.

A network learns which of ten numbers is the largest. It applies one layer many times: much
computation for few weights, so that a step spends little time on the all-reduce. The batch is large
enough for steps of some tenths of a second on one or two cores.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from evenstride.runtime.engines.process_groups import take_down_group
from evenstride.runtime.stride import Stride

GLOBAL_BATCH, SAMPLES, EPOCHS = 2048, 65_536, 1_000
INPUTS, WIDTH, CLASSES, DEPTH = 64, 256, 10, 16


class ResidualNet(nn.Module):
    """A residual layer that is applied 16 times."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(INPUTS, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.again = nn.Linear(WIDTH, WIDTH)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the logits, shape ``(samples, 10)``, of rows of 64 numbers."""
        inner = self.first(rows)
        for _ in range(DEPTH):
            inner = inner + torch.relu(self.again(inner)) / DEPTH
        logits: torch.Tensor = self.last(inner)
        return logits


def main() -> None:
    """Run one rank until EVENSTRIDE_MAX_STEPS or the end of the last epoch."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    rows = torch.randn(SAMPLES, INPUTS)
    net = ResidualNet()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    stride = Stride(global_batch=GLOBAL_BATCH)
    loader = stride.loader(TensorDataset(rows, rows[:, :CLASSES].argmax(1)))
    model = stride.watch(DistributedDataParallel(net))
    try:
        for _ in range(stride.epoch, EPOCHS):
            for x, y in loader:
                loss = F.cross_entropy(model(x), y)
                stride.scale(loss).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                optimizer.zero_grad()
    finally:
        stride.close()
        take_down_group()


if __name__ == "__main__":
    main()
