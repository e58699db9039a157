"""A DDP training loop; numbered comments mark the four lines that evenstride adds or replaces.

Start it with two workers, or with three of unequal speed on one machine:

    torchrun --nproc-per-node 2 examples/ddp.py
    evenstride lab --speeds 1,0.5,0.25 -- examples/ddp.py
"""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import evenstride


def main(samples: int, epochs: int) -> None:
    dist.init_process_group()
    torch.manual_seed(0)
    rows = torch.randn(samples, 64)
    dataset = TensorDataset(rows, rows[:, :10].argmax(1))  # class: the largest of ten numbers
    net = nn.Sequential(
        nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10)
    )
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)

    stride = evenstride.Stride(global_batch=4096)  # 1: samples per step, over all workers
    loader = stride.loader(dataset)  # 2: instead of DataLoader and DistributedSampler
    model = stride.watch(DistributedDataParallel(net))  # 3: the same model, now timed

    for epoch in range(stride.epoch, epochs):
        total, trained = 0.0, 0
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            stride.scale(loss).backward()  # 4: the exact gradient for any split
            optimizer.step()
            optimizer.zero_grad()
            total += loss.item() * stride.samples
            trained += stride.samples
        mean = stride.mean(total, trained)  # over the samples of all workers
        if dist.get_rank() == 0:
            print(f"epoch {epoch + 1}: loss {mean:.3f}")

    if dist.get_rank() == 0:
        print(stride.summary())
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--samples", type=int, default=65536)
    parser.add_argument("--epochs", type=int, default=10)
    main(**vars(parser.parse_args()))
