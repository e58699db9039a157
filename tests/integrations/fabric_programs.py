"""Loops of Lightning Fabric as ranks of one process group: what each came to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from lightning.fabric import Fabric
from torch.utils.data import DataLoader, WeightedRandomSampler

from evenstride.integrations.lightning import EvenFabricStrategy
from tests.integrations.lightning_programs import (
    BATCH,
    EPOCHS,
    RATE,
    SAMPLES,
    UNEQUAL,
    error_of,
    evaluation,
    launched,
    loader,
)
from tests.multiproc.training import flat, net, rows, weights


class Loop:
    """A training loop as users write it, that also notes what it is given.

    With ``saved``, it continues from a file, which it loads before the data.
    """

    def __init__(
        self,
        strategy: EvenFabricStrategy,
        devices: int = 2,
        *,
        train: Any = None,
        saved: Path | None = None,
    ) -> None:
        # Fabric's usual precision leaves the model's own, which is float64.
        self.fabric = Fabric(accelerator="cpu", devices=devices, strategy=strategy)
        self.fabric.launch()
        self.net = net()
        self.model, self.optimizer = self.fabric.setup(
            self.net, torch.optim.SGD(self.net.parameters(), lr=RATE)
        )
        if saved is not None:
            self.fabric.load(saved, self.state)
        self.loader, self.evaluation = self.fabric.setup_dataloaders(
            loader() if train is None else train, evaluation()
        )
        self.seen: list[list[int]] = []
        self.gradients: list[list[float]] = []

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer}

    def backward(self, batch: Any, parts: int = 1) -> None:
        ids, x, y = batch
        self.seen.append(ids.tolist())
        self.fabric.backward(F.mse_loss(self.model(x), y) / parts)

    def step(self) -> None:
        self.gradients.append(flat(self.net))
        self.optimizer.step()
        self.optimizer.zero_grad()

    def outcome(self) -> dict[str, Any]:
        evaluated = [ids.tolist() for ids, _, _ in self.evaluation]
        stride = self.fabric.strategy.stride
        stride.close()
        return {
            "seen": self.seen,
            "gradients": self.gradients,
            "weights": weights(self.net),
            "evaluated": evaluated,
        }


def plainly(loop: Loop, epochs: int = EPOCHS) -> dict[str, Any]:
    """Train without accumulation."""
    for _ in range(epochs):
        for batch in loop.loader:
            loop.backward(batch)
            loop.step()
    return loop.outcome()


def accumulated(loop: Loop, parts: int) -> dict[str, Any]:
    """Accumulate a number of batches, as the loop counts them."""
    for _ in range(EPOCHS):
        for index, batch in enumerate(loop.loader, 1):
            last = index % parts == 0 or index == len(loop.loader)
            with loop.fabric.no_backward_sync(loop.model, enabled=not last):
                loop.backward(batch, parts)
            if last:
                loop.step()
    return loop.outcome()


def in_pieces(loop: Loop) -> dict[str, Any]:
    """Accumulate a number of micro-batches that differs between ranks."""
    stride = loop.fabric.strategy.stride
    for _ in range(EPOCHS):
        for batch in loop.loader:
            with loop.fabric.no_backward_sync(loop.model, enabled=not stride.synced):
                loop.backward(batch)
            if stride.synced:
                loop.step()
    return loop.outcome()


def exact(rank: int, folder: str) -> dict[str, Any]:
    """Train with unequal shares, and continue from what was saved."""
    with launched(rank):
        found = {
            "plain": plainly(Loop(EvenFabricStrategy(policy=UNEQUAL))),
            "accumulated": accumulated(Loop(EvenFabricStrategy(policy=UNEQUAL)), 2),
            "pieces": in_pieces(
                Loop(EvenFabricStrategy(24, policy="static:18,6", max_micro_batch=4))
            ),
        }
        loop = Loop(EvenFabricStrategy(policy=UNEQUAL))
        for batch in loop.loader:
            loop.backward(batch)
            loop.step()
            if len(loop.gradients) == 4:
                loop.fabric.save(Path(folder, "saved"), loop.state)
                loop.fabric.save(Path(folder, "weights"), {"model": loop.model})
                break
        return found | {"cut": loop.outcome(), "keys": list(torch.load(Path(folder, "weights")))}


def resumed(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    """Continue with another number of processes."""
    with launched(rank, world_size):
        path = Path(folder, "saved")
        early = Loop(EvenFabricStrategy(policy="uniform"), world_size, saved=path)
        loop = Loop(EvenFabricStrategy(2 * BATCH, policy="uniform"), world_size)
        loop.fabric.load(path, loop.state)
        return {"early": continued(early), "late": continued(loop)}


def continued(loop: Loop) -> dict[str, Any]:
    stride: Any = loop.fabric.strategy.stride
    return {"epoch": stride.epoch, "step": stride.step} | plainly(loop, EPOCHS - stride.epoch)


FACTS: dict[str, tuple[str, ...]] = {
    "sampler": ("WeightedRandomSampler", "Subset"),
    "two training loaders": ("shuffle=False",),
    "no training loader": ("setup_dataloaders",),
    "not accumulated": ("accumulate",),
    "counted micro-batches": ("enabled=not fabric.strategy.stride.synced",),
}


def refusals(rank: int) -> dict[str, str]:
    """Ask for what does not work; return the errors."""

    strategies: list[EvenFabricStrategy] = []

    def with_loader(train: Any, **options: Any) -> Loop:
        strategies.append(EvenFabricStrategy(policy=UNEQUAL, **options))
        return Loop(strategies[-1], train=train)

    def counted() -> None:
        loop = with_loader(loader(), max_micro_batch=1)
        batches = iter(loop.loader)
        loop.backward(next(batches))

    def by_number() -> None:
        loop = with_loader(loader(), max_micro_batch=1)
        batches = iter(loop.loader)
        next(batches)
        with loop.fabric.no_backward_sync(loop.model, enabled=False):
            pass

    def twice() -> None:
        loop = with_loader(loader())
        loop.fabric.setup_dataloaders(loader())

    def without() -> None:
        fabric = Fabric(accelerator="cpu", devices=2, strategy=EvenFabricStrategy())
        fabric.launch()
        fabric.backward(torch.zeros((), requires_grad=True))

    weighted = WeightedRandomSampler([1.0] * SAMPLES, SAMPLES)
    given = DataLoader(rows(SAMPLES), batch_size=BATCH, sampler=weighted)
    with launched(rank):
        found = {
            "sampler": error_of(lambda: with_loader(given)),
            "two training loaders": error_of(twice),
            "no training loader": error_of(without),
            "not accumulated": error_of(counted),
            "counted micro-batches": error_of(by_number),
        }
        for strategy in strategies:
            if strategy.stride is not None:
                strategy.stride.close()
        return found
