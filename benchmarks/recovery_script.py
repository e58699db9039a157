"""Training script of `recovery.py`, restarted after every loss: ``recovery_script.py FOLDER WAY``.

``evenstride`` trains with a `Stride` and a `Checkpointer`. ``plain`` trains as usual without them:
with a `DistributedSampler`, the mean over equal batches, and ``torch.save`` on rank 0. After a
restart, its position in the epoch is the number of steps. Each rank records the time and the
samples of each committed step.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import time
import uuid
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

SAMPLES, BATCH, RANKS, FEATURES, EVERY = 5760, 96, 3, 256, 10


def rows() -> TensorDataset:
    """Return rows of (id, features, target), the same in every process."""
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(SAMPLES, FEATURES, generator=generator)
    return TensorDataset(torch.arange(SAMPLES), x, x[:, :1].tanh())


def net() -> nn.Module:
    """Return a model whose step takes some tens of milliseconds."""
    torch.manual_seed(3)
    layers = (nn.Linear(FEATURES, 768), nn.ReLU(), nn.Linear(768, 768), nn.ReLU())
    return nn.Sequential(*layers, nn.Linear(768, 1))


class Notes:
    """Writes the time and the samples of each committed step of this rank."""

    def __init__(self, folder: Path) -> None:
        ids = [uuid.uuid4().hex if dist.get_rank() == 0 else ""]
        dist.broadcast_object_list(ids)
        self.generation, self._rank = ids[0], dist.get_rank()
        name = f"{self.generation[:8]}-{self._rank}.jsonl"
        self._file = (folder / name).open("a")

    def step(self, step: int, epoch: int, ids: Tensor) -> None:
        """Record a committed step."""
        line = {
            "at": time.time(),
            "generation": self.generation,
            "world": dist.get_world_size(),
            "step": step,
            "epoch": epoch,
            "ids": ids.tolist(),
        }
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()


def note_stage(folder: Path, stage: str, at: float | None = None) -> None:
    """Record the time at which this process reached a stage."""
    line = {"stage": stage, "at": time.time() if at is None else at}
    with (folder / f"{os.uname().nodename}-stages.json").open("a") as file:
        file.write(json.dumps(line) + "\n")


def train_plain(folder: Path, notes: Notes) -> None:
    """Train with plain PyTorch."""
    data = rows()
    sampler: DistributedSampler[Any] = DistributedSampler(data, seed=0)
    loader = DataLoader(data, batch_size=BATCH // RANKS, sampler=sampler)
    model = DistributedDataParallel(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    path, step, first, skip = folder / "plain.pt", 0, 0, 0
    if path.exists():
        saved: dict[str, Any] = torch.load(path, weights_only=True)
        model.module.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        step, first, skip = saved["step"], saved["epoch"], saved["skip"]
    for epoch in range(first, 1_000_000):
        sampler.set_epoch(epoch)
        for number, (ids, x, y) in enumerate(loader):
            if epoch == first and number < skip:
                continue
            F.mse_loss(model(x), y).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            notes.step(step, epoch, ids)
            if step % EVERY == 0 and dist.get_rank() == 0:
                state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
                place = {"step": step, "epoch": epoch, "skip": number + 1}
                torch.save({**state, **place}, path.with_suffix(".new"))
                path.with_suffix(".new").replace(path)


def train_evenstride(folder: Path, notes: Notes) -> None:
    """Train with evenstride."""
    import evenstride

    stride = evenstride.Stride(global_batch=BATCH)
    loader = stride.loader(rows())
    model = stride.watch(DistributedDataParallel(net()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    checkpoint = evenstride.Checkpointer(
        folder / "checkpoints", stride, model=model, optimizer=optimizer, every=EVERY
    )
    checkpoint.restore()
    for epoch in range(stride.epoch, 1_000_000):
        for ids, x, y in loader:
            stride.scale(F.mse_loss(model(x), y)).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            notes.step(stride.step, epoch, ids if stride.samples else ids[:0])
            checkpoint.step()


def main(folder: Path, way: str) -> None:
    """Train until the machine ends."""
    note_stage(folder, "started", psutil.Process().create_time())
    note_stage(folder, "imported")
    atexit.register(note_stage, folder, "ended")  # registered first, so called last
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    note_stage(folder, "joined")
    notes = Notes(folder)
    try:
        (train_evenstride if way == "evenstride" else train_plain)(folder, notes)
    finally:
        note_stage(folder, "noticed")


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main(Path(sys.argv[1]), sys.argv[2])
