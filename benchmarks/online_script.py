"""Training script of `online.py`: a small convolutional network on Fashion-MNIST.

    online_script.py FOLDER DATA EPOCHS

It takes the batch from the environment and trains ``EPOCHS`` epochs with any batch. It maps its
data into memory, so that a new process need not read them first.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import evenstride
from evenstride.core.convergence.batch_efficiency import square_root
from evenstride.lab.demo.fashion_mnist import read_images

RATE, BASE, BOUNDS = 0.02, 64, (16, 4096)
NAMES = ("images", "labels")


def mapped(data: Path) -> TensorDataset:
    """Return the arrays that `prepare` wrote, mapped into memory."""
    return TensorDataset(
        *(torch.from_numpy(np.load(data / f"{name}.npy", mmap_mode="c")) for name in NAMES)
    )


def prepare(source: Path, data: Path) -> None:
    """Write the data set as arrays."""
    pixels, labels = read_images(source / "fashion-mnist", "train")
    images = (pixels.astype("float32")[:, None] / 255 - 0.286) / 0.353
    for name, array in zip(NAMES, (images, labels.astype("int64")), strict=True):
        np.save(data / f"{name}.npy", array)


def net() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(32 * 7 * 7, 10)),
    )


def main(folder: Path, data: Path, epochs: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    stride = evenstride.Stride("auto", bounds=BOUNDS, seed=0)
    loader = stride.loader(mapped(data), seeded=False)
    plain = net()
    model = stride.watch(DistributedDataParallel(plain))
    optimizer = torch.optim.SGD(plain.parameters(), lr=RATE, momentum=0.9)
    checkpoint = evenstride.Checkpointer(
        folder, stride, model=model, optimizer=optimizer, every="10min", notices="off"
    )
    checkpoint.restore()
    for group in optimizer.param_groups:
        group["lr"] = square_root(RATE, BASE, stride.global_batch)
    while stride.epoch < epochs:
        for x, y in loader:
            stride.scale(F.cross_entropy(model(x), y)).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            checkpoint.step()
    checkpoint.close()
    stride.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
