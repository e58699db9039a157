"""A training script for `forecast.py`: one of two workloads, until a loss on held-out data.

forecast_script.py FOLDER DATA WORKLOAD SEED BATCH TARGET MOST_EPOCHS

Every rank looks at the held-out data now and then, by itself; that time does not count. Rank 0
writes ``end.json``. With TARGET 0 it only trains, for as many steps as ``EVENSTRIDE_MAX_STEPS``
says, or as a calibration asks.
"""

from __future__ import annotations

import gzip
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset, TensorDataset

import evenstride
from evenstride.lab.demo.fashion import read_images

LOOKS = 10  # at the held-out data, in an epoch
RATE = 0.05  # at a batch of 128, and in proportion to the root of it elsewhere
BASE = 128


@dataclass(frozen=True, slots=True)
class Workload:
    """What is trained: data, held-out data, and a network whose last axis is the classes."""

    train: Dataset[tuple[Tensor, ...]]
    held_out: tuple[Tensor, Tensor]
    net: nn.Module


def images(data: Path) -> Workload:
    """Return a small convolutional network on Fashion-MNIST."""

    def part(name: str, most: int) -> tuple[Tensor, Tensor]:
        pixels, labels = read_images(data / "fashion-mnist", name)
        scaled = torch.from_numpy(pixels[:most].copy()).view(-1, 1, 28, 28).float() / 255
        return (scaled - 0.286) / 0.353, torch.from_numpy(labels[:most].astype("int64"))

    net = nn.Sequential(
        *(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(16 * 7 * 7, 10)),
    )
    return Workload(TensorDataset(*part("train", 20_000)), part("test", 1500), net)


def text(data: Path) -> Workload:
    """Return a network that tells the next letter of Emma from the sixteen before it."""
    letters = gzip.decompress((data / "gutenberg" / "austen-emma.txt.gz").read_bytes())
    known = sorted(set(letters))
    told = torch.tensor([known.index(letter) for letter in letters[:110_000]])
    windows = told.unfold(0, 17, 4)
    order = torch.randperm(len(windows), generator=torch.Generator().manual_seed(0))
    before, following = windows[order, :16].clone(), windows[order, 16].clone()
    net = nn.Sequential(
        *(nn.Embedding(len(known), 24), nn.Flatten(), nn.Linear(16 * 24, 192), nn.ReLU()),
        nn.Linear(192, len(known)),
    )
    train = TensorDataset(before[:24_000], following[:24_000])
    return Workload(train, (before[24_000:26_000], following[24_000:26_000]), net)


def loss_on(net: nn.Module, held_out: tuple[Tensor, Tensor]) -> float:
    """Return the mean loss on held-out data."""
    with torch.no_grad():
        return float(F.cross_entropy(net(held_out[0]), held_out[1]))


def main() -> None:
    """Train until the target, and note how it went."""
    folder, data, name = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    seed, batch, target, most = (
        *map(int, sys.argv[4:6]),
        float(sys.argv[6]),
        int(sys.argv[7]),
    )
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(seed)
    work = {"images": images, "text": text}[name](data)
    stride = evenstride.Stride(global_batch=batch, seed=seed)
    loader = stride.loader(work.train, seeded=False)
    model = stride.watch(DistributedDataParallel(work.net))
    rate = RATE * (batch / BASE) ** 0.5
    optimizer = torch.optim.SGD(work.net.parameters(), lr=rate, momentum=0.9)
    every = max(len(loader) // LOOKS, 1)
    spent_s, begun_s, losses, reached = 0.0, time.perf_counter(), list[float](), 0
    while not reached and stride.epoch < most:
        for x, y in loader:
            stride.scale(F.cross_entropy(model(x), y)).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            if target and stride.step % every == 0:
                spent_s += time.perf_counter() - begun_s
                losses.append(loss_on(work.net, work.held_out))
                begun_s = time.perf_counter()
                if losses[-1] <= target:
                    reached = stride.step
                    break
        if not target:
            break
    if dist.get_rank() == 0:
        end = {"steps": reached, "time_s": spent_s, "losses": losses, "per_epoch": len(loader)}
        (folder / "end.json").write_text(json.dumps(end))
    dist.barrier()
    stride.close()


if __name__ == "__main__":
    main()
