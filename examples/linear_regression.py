"""Linear regression on a table, with the same result for any number of workers.

    python examples/linear_regression.py --table power-plant.txt.gz
    torchrun --nproc-per-node 2 examples/linear_regression.py --table power-plant.txt.gz
    torchrun --nproc-per-node 3 examples/linear_regression.py --table power-plant.txt.gz

On the power plant data set of UCI, all three print the same line:

    RMSE 4.557547726 after 760 steps; least squares reaches 4.557126017

Each step trains the same 256 rows for any split, and its gradient is their exact mean. The table
consists of white-space separated numbers with the target in the last column. It may be gzipped.
"""

import argparse
import os
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import evenstride

DEFAULT = Path(os.environ.get("EVENSTRIDE_DATA", "data"), "uci-regression", "power-plant.txt.gz")


def read_table(path: Path) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Return the standardised features and target, and the standard deviation of the target."""
    if not path.is_file():
        raise SystemExit(
            f"{path} is missing; pass --table FILE, a table of numbers with the target last"
        )
    table = torch.from_numpy(np.loadtxt(path))
    std = table.std(0)
    table = (table - table.mean(0)) / std
    return table[:, :-1], table[:, -1:], std[-1].item()


def main(table: Path, epochs: int) -> None:
    features, target, std = read_table(table)
    if "WORLD_SIZE" in os.environ:  # set by torchrun; without it, this is the only worker
        dist.init_process_group()
    net = nn.Linear(features.shape[1], 1, dtype=torch.float64)
    nn.init.zeros_(net.weight)
    nn.init.zeros_(net.bias)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)

    dataset = TensorDataset(features, target)
    stride = evenstride.Stride(global_batch=256)
    loader = stride.loader(dataset)
    model = stride.watch(DistributedDataParallel(net) if dist.is_initialized() else net)

    for _ in range(stride.epoch, epochs):
        for x, y in loader:
            stride.scale(F.mse_loss(model(x), y)).backward()
            optimizer.step()
            optimizer.zero_grad()

    squares, rows = 0.0, 0
    with torch.no_grad():
        for x, y in stride.loader(dataset, train=False):  # each row once across all workers
            squares += F.mse_loss(net(x), y, reduction="sum").item()
            rows += len(x)
    rmse = std * stride.mean(squares, rows) ** 0.5

    if not dist.is_initialized() or dist.get_rank() == 0:
        best = torch.linalg.lstsq(features, target).solution
        least = std * F.mse_loss(features @ best, target).item() ** 0.5
        print(f"RMSE {rmse:.9f} after {stride.step} steps; least squares reaches {least:.9f}")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--table", type=Path, default=DEFAULT, help="numbers, the target last")
    parser.add_argument("--epochs", type=int, default=20)
    main(**vars(parser.parse_args()))
