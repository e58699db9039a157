"""A script that is trained while its configuration is searched for: ``searched.py FOLDER MODE``.

Every rank notes which samples it trained in which step. It ends a few epochs after the
configuration is known, and prints how many epochs it was given. Modes other than ``whole`` leave
something out that a search needs.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import evenstride

SAMPLES, FEATURES, MOST_EPOCHS = 96, 5, 20_000
BOUNDS, RATE = (8, 32), 0.05
THEN = 20  # epochs once the configuration is known, so that its steps can be measured


def rows() -> TensorDataset:
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(SAMPLES, FEATURES, generator=generator, dtype=torch.float64)
    target = x.sum(1, keepdim=True).tanh()
    return TensorDataset(torch.arange(SAMPLES), x, target)


def net() -> nn.Module:
    torch.manual_seed(3)
    layers = (nn.Linear(FEATURES, 4), nn.Tanh(), nn.Linear(4, 1))
    return nn.Sequential(*layers).double()


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(model(x), y)


def known(folder: Path) -> bool:
    """Return whether the search has come to its end."""
    reported = folder / "online.json"
    return reported.exists() and json.loads(reported.read_text())["chosen"] is not None


def main(folder: Path, mode: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    fixed = mode == "fixed"
    stride = evenstride.Stride(8) if fixed else evenstride.Stride("auto", bounds=BOUNDS)
    loader = stride.loader(rows())
    plain = net()
    model = stride.watch(DistributedDataParallel(plain))
    optimizer = torch.optim.SGD(plain.parameters(), lr=RATE, momentum=0.9)
    checkpoint = None
    if mode != "unsaved":
        checkpoint = evenstride.Checkpointer(
            folder / "saved", stride, model=model, optimizer=optimizer, every=10_000
        )
        if mode != "anew":
            checkpoint.restore()
    notes = (folder / f"notes-{os.getpid()}.jsonl").open("a")
    since = 0
    while since < THEN and stride.epoch < MOST_EPOCHS:
        for ids, x, y in loader:
            epoch = stride.epoch
            stride.scale(loss_of(model, x, y)).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            trained = ids.tolist() if stride.samples else []
            at = [stride.step, epoch, stride.global_batch, dist.get_world_size(), trained]
            notes.write(json.dumps(at) + "\n")
            notes.flush()
            if mode == "failing" and dist.get_world_size() > 1:
                raise RuntimeError("this script fails with several workers")
            if checkpoint is not None:
                checkpoint.step()
        since += stride.mean(float(dist.get_rank() == 0 and known(folder)), 1) > 0
    if dist.get_rank() == 0:
        weights = [value.tolist() for value in plain.state_dict().values()]
        (folder / "end.json").write_text(json.dumps(weights))
    if checkpoint is not None:
        checkpoint.save()
        checkpoint.close()
    stride.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    print("epochs", os.environ["EVENSTRIDE_EPOCHS"], flush=True)
    main(Path(sys.argv[1]), sys.argv[2])
