"""Training script of `modes.py`: Fashion-MNIST to a test accuracy, in any synchronisation mode.

    modes_script.py FOLDER DATA SEED ACCURACY MOST_EPOCHS SAMPLES BATCH RATE

It tests after each epoch. The time of tests does not count. Rank 0 writes ``end.json``.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import evenstride
from evenstride.lab.demo.fashion_mnist import read_images

TESTED = 4096


def fashion(folder: Path, part: str, most: int) -> TensorDataset:
    """Return normalised images of one channel, and labels."""
    images, labels = read_images(folder, part)
    pixels = torch.from_numpy(images[:most].copy()).view(-1, 1, 28, 28).float() / 255
    return TensorDataset((pixels - 0.286) / 0.353, torch.from_numpy(labels[:most].astype("int64")))


def net(seed: int) -> nn.Module:
    """Return a small convolutional network, with much computation and few weights."""
    torch.manual_seed(seed)
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(32 * 7 * 7, 10)),
    )


def accuracy(model: nn.Module, stride: evenstride.Stride, test: TensorDataset) -> float:
    """Return the fraction of test images that are classified correctly, over all ranks."""
    right = count = 0
    model.eval()
    with torch.no_grad():
        for x, y in stride.loader(test, train=False, seeded=False):
            right += int((model(x).argmax(1) == y).sum())
            count += len(y)
    model.train()
    return float(stride.mean(float(right), count))


def main() -> None:
    """Train, test after each epoch, and write the outcome."""
    folder, data = map(Path, sys.argv[1:3])
    seed, target, most_epochs = int(sys.argv[3]), float(sys.argv[4]), int(sys.argv[5])
    samples, batch, rate = int(sys.argv[6]), int(sys.argv[7]), float(sys.argv[8])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train, test = fashion(data, "train", samples), fashion(data, "test", TESTED)
    stride = evenstride.Stride(global_batch=batch, seed=seed)
    loader = stride.loader(train, seeded=False)
    module = net(seed)
    model = stride.watch(DistributedDataParallel(module))
    optimizer = torch.optim.SGD(module.parameters(), lr=rate)
    spent_s, seen = 0.0, [accuracy(module, stride, test)]
    epochs_s: list[float] = []
    while seen[-1] < target and stride.epoch < most_epochs:
        begun_s = time.perf_counter()
        for x, y in loader:
            stride.scale(F.cross_entropy(model(x), y)).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
        epochs_s.append(time.perf_counter() - begun_s)
        spent_s += epochs_s[-1]
        seen.append(accuracy(module, stride, test))
    if dist.get_rank() == 0:
        summary = stride.summary().to_dict()
        end = {
            "reached": seen[-1] >= target,
            "time_s": spent_s,
            "epochs_s": epochs_s,
            "accuracy": seen,
            "updates": stride.step,
            "staleness": summary["staleness"],
            "shares": [worker["share"] for worker in summary["workers"]],
        }
        (folder / "end.json").write_text(json.dumps(end))
    dist.barrier()
    stride.close()


if __name__ == "__main__":
    main()
