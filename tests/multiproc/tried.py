"""A script that saves and restores: ``tried.py FOLDER [FILE]``.

It says where it starts, trains two epochs of eight steps, and saves every two steps. With FILE it
also saves the weights there itself after each epoch, and loads them first if they are there.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import evenstride


def main(folder: str, file: Path | None) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    stride = evenstride.Stride(global_batch=32, seed=0)
    rows = torch.randn(256, 8, generator=torch.Generator().manual_seed(0))
    loader = stride.loader(TensorDataset(rows, rows[:, :2].argmax(1)))
    net = nn.Linear(8, 2)
    model = stride.watch(DistributedDataParallel(net))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    checkpoint = evenstride.Checkpointer(
        folder, stride, model=model, optimizer=optimizer, every=2, keep=2
    )
    checkpoint.restore()
    if file is not None and file.exists():
        net.load_state_dict(torch.load(file))
    print(f"starts at {stride.state_dict()['position'] + 256 * stride.epoch}", flush=True)
    for _ in range(stride.epoch, 2):
        for x, y in loader:
            stride.scale(F.cross_entropy(model(x), y)).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            checkpoint.step()
        if file is not None and dist.get_rank() == 0:
            torch.save(net.state_dict(), file)  # a measurement may end the program in epoch 2
    checkpoint.close()
    stride.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]) if len(sys.argv) > 2 else None)
