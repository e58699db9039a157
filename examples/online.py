"""A training loop for `evenstride plan --online`, which changes the workers and the global batch.

The run continues from a checkpoint after each change. It can also be started by hand:

    evenstride plan --online --workers 1,2 --batches 128,512,2048 --epochs 60 -- examples/online.py
    torchrun --nproc-per-node 2 examples/online.py --folder runs/by-hand
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import evenstride
from evenstride.core.convergence import square_root

SMALLEST, LARGEST, RATE = 128, 2048, 0.02


def main(samples: int, epochs: int, folder: Path) -> None:
    dist.init_process_group()
    torch.manual_seed(0)
    rows = torch.randn(samples, 64)
    dataset = TensorDataset(rows, rows[:, :10].argmax(1))  # class: the largest of ten numbers
    net = nn.Sequential(nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 10))
    optimizer = torch.optim.SGD(net.parameters(), lr=RATE, momentum=0.9)

    stride = evenstride.Stride(global_batch="auto", bounds=(SMALLEST, LARGEST))
    loader = stride.loader(dataset)
    model = stride.watch(DistributedDataParallel(net))
    # The code above runs while the previous processes still train.
    checkpoint = evenstride.Checkpointer(folder, stride, model=model, optimizer=optimizer)
    checkpoint.restore()
    for group in optimizer.param_groups:  # the restored rate belongs to another global batch
        group["lr"] = square_root(RATE, SMALLEST, stride.global_batch)

    for epoch in range(stride.epoch, epochs):
        total, trained = 0.0, 0
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            stride.scale(loss).backward()
            optimizer.step()
            optimizer.zero_grad()
            total += loss.item() * stride.samples
            trained += stride.samples
            checkpoint.step()  # the next processes may take over here
        mean = stride.mean(total, trained)
        if dist.get_rank() == 0:
            size = f"{dist.get_world_size()} worker(s), batch {stride.global_batch}"
            print(f"epoch {epoch + 1}: loss {mean:.3f} ({size})")

    checkpoint.save()
    checkpoint.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--samples", type=int, default=65536)
    parser.add_argument("--epochs", type=int, default=int(os.environ.get("EVENSTRIDE_EPOCHS", 60)))
    parser.add_argument("--folder", type=Path, default=Path("runs/online"), help="of checkpoints")
    main(**vars(parser.parse_args()))
