"""A training script that is started again after every loss, and what its end must look like.

``elastic_script.py FOLDER EPOCHS EVERY``: each rank notes which samples it is about to train in
which step of which generation; the leader writes the weights at the end.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import evenstride
from evenstride.runtime.checkpoint import Checkpointer
from evenstride.testing.faults.fault_injection import ORDERS_VARIABLE, Injector, Orders
from evenstride.testing.faults.fault_plan import END, Generation

SAMPLES, BATCH, FEATURES = 160, 12, 5
PER_EPOCH = -(-SAMPLES // BATCH)
# The short one is for a hung rank; in other runs it would end a rank that is only slow.
GROUP_TIMEOUT_S, HUNG_S = 60.0, 8.0
# By the number of workers: unequal, as far as there is more than one.
SPLITS = {1: "12", 2: "7,5", 3: "6,4,2", 4: "5,3,3,1"}


def rows() -> TensorDataset:
    """Return (id, features, target) rows, the same everywhere."""
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(SAMPLES, FEATURES, generator=generator, dtype=torch.float64)
    y = torch.randn(SAMPLES, 1, generator=generator, dtype=torch.float64)
    return TensorDataset(torch.arange(SAMPLES), x, y)


def net() -> nn.Module:
    """Return a small model, the same everywhere."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(FEATURES, 7), nn.Tanh(), nn.Linear(7, 1)).double()


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer with a state of its own, which a checkpoint must bring back too.

    At five times this rate training is chaotic after 200 epochs: rounding grows to any size.
    """
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def weights(model: nn.Module) -> list[float]:
    """Return all parameters as one list of numbers."""
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()]).tolist()


def alone(epochs: int) -> list[float]:
    """Return the weights of one process, in plain PyTorch, without faults."""
    from tests.order import epoch_order

    torch.set_num_threads(1)
    model, (_, x, y) = net(), rows().tensors
    optimizer = optimizer_of(model)
    for epoch in range(epochs):
        order = torch.from_numpy(epoch_order(0, epoch, SAMPLES, shuffle=True))
        for start in range(0, SAMPLES, BATCH):
            batch = order[start : start + BATCH]
            F.mse_loss(model(x[batch]), y[batch]).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
    return weights(model)


def audit(folder: Path, generations: list[Generation]) -> dict[int, tuple[int, list[int]]]:
    """Return (epoch, samples) of each committed step, from the last generation that trained it.

    What an earlier generation trained beyond the checkpoint that a later one began with is no
    part of the trajectory.
    """
    steps: dict[int, tuple[int, list[int]]] = {}
    for generation in generations:
        for step in [step for step in steps if step > generation.first_step]:
            del steps[step]
        for path in folder.glob(f"audit-{generation.number}-*.jsonl"):
            for line in path.read_text().splitlines():
                step, epoch, ids = json.loads(line)
                known = steps.setdefault(step, (epoch, []))
                assert known[0] == epoch
                known[1].extend(ids)
    return steps


def check_the_end(
    folder: Path, generations: list[Generation], epochs: int, most: float = 1e-12
) -> float:
    """Check the weights, and that each sample was trained once per epoch.

    Args:
        folder: of the run.
        generations: of the run.
        epochs: that it was to train.
        most: how far the weights may be off; sums in another order round otherwise, and that
            adds up over the steps.

    Returns:
        How far the weights are from those of a run without faults: ``||w - w*|| / ||w*||``.
    """
    assert generations[-1].ended_by == END
    assert generations[-1].last_step == epochs * PER_EPOCH
    actual = torch.tensor(reported(folder)["weights"], dtype=torch.float64)
    expected = torch.tensor(alone(epochs), dtype=torch.float64)
    trajectory = audit(folder, generations)
    assert sorted(trajectory) == list(range(1, epochs * PER_EPOCH + 1))
    for epoch in range(epochs):
        trained = [trajectory[epoch * PER_EPOCH + step] for step in range(1, PER_EPOCH + 1)]
        assert all(of_epoch == epoch for of_epoch, _ in trained)
        counted = Counter(index for _, ids in trained for index in ids)
        assert counted == Counter(range(SAMPLES)), f"epoch {epoch}"
    error = float((actual - expected).norm() / expected.norm())
    assert error < most, f"the weights are off by {error:.1e}"
    return error


def reported(folder: Path) -> dict[str, Any]:
    """Return what the leader wrote at the end."""
    plain: dict[str, Any] = json.loads((folder / "end.json").read_text())
    return plain


def damage(folder: Path) -> None:
    """Flip one bit in the middle of the newest complete checkpoint."""
    newest = max(manifest.parent for manifest in folder.glob("*/manifest.json"))
    largest = max(newest.iterdir(), key=lambda path: path.stat().st_size)
    data = bytearray(largest.read_bytes())
    data[len(data) // 2] ^= 1
    largest.write_bytes(data)


def settle(checkpoint: Checkpointer) -> None:
    """Wait until all ranks have saved what is being saved: then a fault always costs the same."""
    checkpoint.wait()
    dist.barrier()


def main(folder: Path, epochs: int, every: int) -> None:
    """Train to the end, or until a fault comes."""
    torch.set_num_threads(1)
    orders = Orders.from_json(Path(os.environ[ORDERS_VARIABLE]).read_text())
    hangs = any(fault.kind == "stop" for fault in orders.plan.faults)
    timeout = timedelta(seconds=HUNG_S if hangs else GROUP_TIMEOUT_S)
    dist.init_process_group("gloo", timeout=timeout)
    rank, size = dist.get_rank(), dist.get_world_size()
    stride = evenstride.Stride(BATCH, policy=f"static:{SPLITS[size]}")
    loader = stride.loader(rows())
    model = stride.watch(DistributedDataParallel(net()))
    optimizer = optimizer_of(model)
    kept = folder / "checkpoints"
    checkpoint = Checkpointer(kept, stride, model=model, optimizer=optimizer, every=every)
    injector = Injector.from_environment(lambda: damage(kept))
    checkpoint.restore()
    injector.begins(stride.step)
    noted = (folder / f"audit-{injector.generation}-{rank}.jsonl").open("a")
    for epoch in range(stride.epoch, epochs):
        for ids, x, y in loader:
            line = [stride.step + 1, epoch, ids.tolist() if stride.samples else []]
            print(json.dumps(line), file=noted, flush=True)
            stride.scale(F.mse_loss(model(x), y)).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            if injector.eventful(stride.step):
                settle(checkpoint)
            injector.saves(stride.step, kept)
            checkpoint.step()
            if injector.eventful(stride.step) or injector.counts(stride.step):
                settle(checkpoint)
            injector.committed(stride.step)
    checkpoint.close()
    writes: list[Any] = [None] * size
    dist.all_gather_object(writes, injector.writes)
    if rank == 0:
        end = {"weights": weights(model), "writes": writes}
        (folder / "end.json").write_text(json.dumps(end))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
