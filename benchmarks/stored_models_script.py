"""Training script of `stored_models.py`: a net of `forecast_work.py`, of any width, to a loss.

    stored_models_script.py NET WIDTH [--batch 128] [--until LOSS] [--data FOLDER]

It evaluates four times per epoch, and ends when the last two losses are low enough.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import evenstride

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.forecast_work import OPTIMIZERS, WORKLOADS, Letters

BASE, SAMPLES, HELD_OUT, EVALUATIONS, MOST_EPOCHS = 128, 6000, 600, 4, 30


def net_of(name: str, width: int, letters: int) -> nn.Module:
    """Return a net of `forecast_work.py`, with other widths."""
    if name == "text":
        return Letters(letters, width)
    return nn.Sequential(
        *(nn.Conv2d(1, width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(width, 2 * width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(2 * width * 49, 10)),
    )


def evaluated(net: nn.Module, stride: evenstride.Stride, data: tuple[torch.Tensor, ...]) -> float:
    """Return the mean held-out loss, and record it."""
    x, y = data
    with torch.no_grad():
        total = float(F.cross_entropy(net(x), y, reduction="sum"))
    return float(stride.mean(total, y.numel(), name="loss"))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("net", choices=sorted(WORKLOADS))
    parser.add_argument("width", type=int)
    parser.add_argument("--batch", type=int, default=BASE)
    parser.add_argument("--until", type=float, default=0.0)
    parser.add_argument("--data", default=os.environ.get("EVENSTRIDE_DATA", "../shared/data"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    task = WORKLOADS[args.net](Path(args.data))
    _, x, y = task.train.tensors
    net = net_of(args.net, args.width, int(x.max()) + 1)
    optimizer = OPTIMIZERS[args.net](net, (args.batch / BASE) ** 0.5)
    stride = evenstride.Stride(args.batch, seed=0)
    model = stride.watch(net)
    loader = stride.loader(TensorDataset(x[:SAMPLES], y[:SAMPLES]))
    held_out = tuple(one[:HELD_OUT] for one in task.test.tensors[1:])
    steps = -(-SAMPLES // args.batch)
    marks = {round(steps * part / EVALUATIONS) for part in range(1, EVALUATIONS + 1)}
    losses = [evaluated(net, stride, held_out)]
    while stride.epoch < MOST_EPOCHS and max(losses[-2:]) > args.until:
        for step, (inputs, labels) in enumerate(loader, start=1):
            loss = stride.scale(F.cross_entropy(model(inputs), labels))
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            if step in marks:
                losses.append(evaluated(net, stride, held_out))
    stride.close()


if __name__ == "__main__":
    main()
