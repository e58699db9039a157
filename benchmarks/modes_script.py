"""A training script for `modes.py`: Fashion-MNIST until a test accuracy, in any mode.

modes_script.py FOLDER DATA SEED ACCURACY MOST_EPOCHS BATCH RATE

Tests after each epoch, in which no time counts. Rank 0 writes ``end.json``.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import evenstride
from evenstride.lab.demo.fashion import read_images

TESTED = 4096


def fashion(folder: Path, part: str, most: int) -> TensorDataset:
    """Return images as rows of numbers, and labels."""
    images, labels = read_images(folder, part)
    rows = torch.from_numpy(images[:most].copy()).flatten(1).float()
    return TensorDataset(
        (rows / 255 - 0.286) / 0.353, torch.from_numpy(labels[:most].astype("int64"))
    )


def net(seed: int) -> nn.Module:
    """Return a network of three layers."""
    torch.manual_seed(seed)
    layers = (nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU())
    return nn.Sequential(*layers, nn.Linear(512, 10))


def let_go_of_servers() -> None:
    """Give the servers that this rank started processors of their own: only workers are slow."""
    cores = list(range(psutil.cpu_count() or 1))
    for server in psutil.Process().children():
        with contextlib.suppress(psutil.Error, OSError):
            server.cpu_affinity(cores)
            for root in ("/sys/fs/cgroup/cpu", "/sys/fs/cgroup"):
                procs = Path(root, "cgroup.procs")
                if procs.exists():
                    procs.write_text(str(server.pid))
                    break


def accuracy(model: nn.Module, stride: evenstride.Stride, test: TensorDataset) -> float:
    """Return the part of test images that are told right, over all ranks."""
    right = count = 0
    model.eval()
    with torch.no_grad():
        for x, y in stride.loader(test, train=False, seeded=False):
            right += int((model(x).argmax(1) == y).sum())
            count += len(y)
    model.train()
    return float(stride.mean(float(right), count))


def main() -> None:
    """Train, test after each epoch, and note how it went."""
    folder, data = map(Path, sys.argv[1:3])
    seed, most_epochs, batch = int(sys.argv[3]), int(sys.argv[5]), int(sys.argv[6])
    target, rate = float(sys.argv[4]), float(sys.argv[7])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train, test = fashion(data, "train", 60_000), fashion(data, "test", TESTED)
    stride = evenstride.Stride(global_batch=batch, seed=seed)
    loader = stride.loader(train, seeded=False)
    module = net(seed)
    model = stride.watch(DistributedDataParallel(module))
    let_go_of_servers()
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
        told = stride.summary().to_dict()
        end = {
            "reached": seen[-1] >= target,
            "time_s": spent_s,
            "epochs_s": epochs_s,
            "accuracy": seen,
            "updates": stride.step,
            "staleness": told["staleness"],
            "shares": [worker["share"] for worker in told["workers"]],
        }
        (folder / "end.json").write_text(json.dumps(end))
    dist.barrier()
    stride.close()


if __name__ == "__main__":
    main()
