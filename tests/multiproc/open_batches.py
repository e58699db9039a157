"""Runs whose global batch is chosen where an epoch ends, and one process on the same batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import evenstride
from evenstride.errors import EvenstrideError
from tests.multiproc.loops import PrescribedTimes

SAMPLES, FEATURES, RATE = 240, 5, 0.001
BOUNDS = (6, 48)


def rows(samples: int = SAMPLES) -> TensorDataset:
    """Return rows whose targets are mostly noise, so that a large batch is worth its samples."""
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(samples, FEATURES, generator=generator, dtype=torch.float64)
    y = x.sum(1, keepdim=True) + 5.0 * torch.randn(samples, 1, generator=generator).double()
    return TensorDataset(torch.arange(samples), x, y)


def net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(FEATURES, 7), nn.Tanh(), nn.Linear(7, 1)).double()


class Rank:
    """One rank of a run.

    Args:
        settings: of the `Stride`, other than batch and bounds.
        options: of its loader.
        folder: for checkpoints; none if ``None``.
        samples: of the data set.
    """

    def __init__(
        self,
        settings: dict[str, Any],
        options: dict[str, Any] | None = None,
        folder: Path | None = None,
        samples: int = SAMPLES,
    ) -> None:
        self.stride = evenstride.Stride("auto", bounds=BOUNDS, noise_every=1, seed=2, **settings)
        PrescribedTimes(self.stride, 1e-4, step_s=0.01)  # much of it does not grow with the batch
        self.loader = self.stride.loader(rows(samples), **(options or {}))
        self.net = net()
        grouped = dist.is_initialized() and dist.get_world_size() > 1
        model = DistributedDataParallel(self.net) if grouped else self.net
        self.model = self.stride.watch(model)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=RATE, momentum=0.9)
        self.seen: list[list[int]] = []
        self.ends: list[tuple[int, int, int]] = []
        self.checkpoint: evenstride.Checkpointer | None = None
        if folder is not None:
            self.checkpoint = evenstride.Checkpointer(
                folder,
                self.stride,
                model=self.model,
                optimizer=self.optimizer,
                notices="off",
                every=10_000,
            )
            self.checkpoint.restore()

    def step(self, ids: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> None:
        """Train one batch, whole or a part of one."""
        with self.stride.accumulate(self.model):
            loss = self.stride.scale(F.mse_loss(self.model(x), y))
            loss.backward()  # type: ignore[no-untyped-call]
        if self.stride.samples:
            self.seen[-1] += ids.tolist()
        if self.stride.synced:
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.seen.append([])

    def train(self, epochs: int, stop: int | None = None) -> None:
        """Train so many epochs in all, or up to a step.

        And further, until the batch has changed: on a machine that others use as well, the leader
        may hear of the steps late. The pool of ranks has a deadline.
        """
        self.seen.append([])
        while self.stride.epoch < epochs or len(self.stride.state_dict()["batches"]) == 1:
            epoch = self.stride.epoch
            for batch in self.loader:
                self.step(*batch)
                if self.stride.step == stop:
                    return
            self.ends.append((epoch, self.stride.step, self.stride.global_batch))

    def reported(self) -> dict[str, Any]:
        """Return what the rank saw; its run has ended then."""
        found = {
            "seen": self.seen[:-1],
            "ends": self.ends,
            "batches": self.stride.state_dict()["batches"],
            "batch": self.stride.global_batch,
            "step": self.stride.step,
            "summary": self.stride.summary().global_batch,
            "weights": [p.tolist() for p in self.net.parameters()],
        }
        if self.checkpoint is not None:
            self.checkpoint.save()
            self.checkpoint.close()
        self.stride.close()
        return found


def chosen(
    me: int,
    settings: dict[str, Any],
    options: dict[str, Any],
    epochs: int,
    folder: Path | None = None,
    stop: int | None = None,
    batch: int | None = None,
) -> dict[str, Any]:
    """Train, with a batch that is set or with one that is chosen, and return what was seen."""
    del me
    with pytest.MonkeyPatch.context() as patch:
        if batch is not None:
            patch.setenv("EVENSTRIDE_GLOBAL_BATCH", str(batch))
        rank = Rank(settings, options, folder)
    rank.train(epochs, stop)
    return rank.reported()


def left_early(me: int, who: tuple[int, ...], samples: int = SAMPLES) -> dict[str, Any]:
    """Train three epochs, of which some ranks leave the first right after its last step."""
    rank = Rank({}, samples=samples)
    rank.seen.append([])
    last = len(rank.loader)
    while rank.stride.epoch < 3:
        for batch in rank.loader:
            rank.step(*batch)
            if me in who and rank.stride.step == last:
                break
        rank.ends.append((rank.stride.epoch, rank.stride.step, rank.stride.global_batch))
    return rank.reported()


def restored(me: int) -> str:
    """Load a state of another batch, train an epoch, and return how many steps that took."""
    del me
    rank = Rank({})
    rank.stride.load_state_dict({**rank.stride.state_dict(), "global_batch": 24})
    rank.seen.append([])
    for batch in rank.loader:
        rank.step(*batch)
    rank.stride.close()
    return f"an epoch of {rank.stride.step} steps"


def ended_at_turn(me: int, who: int) -> str:
    """Let a rank end where the first epoch does; return what the others raise."""
    rank = Rank({})
    rank.seen.append([])
    last = len(rank.loader)
    try:
        for batch in rank.loader:
            rank.step(*batch)
            if me == who and rank.stride.step == last:
                return "left"
    except EvenstrideError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        rank.stride.close()
    return f"goes on with {rank.stride.global_batch}"


def looked(me: int) -> str:
    """Look at a batch on one rank, before the model is wrapped."""
    stride = evenstride.Stride("auto", bounds=BOUNDS)
    loader = stride.loader(rows())
    if me == 0:
        next(iter(loader))
    model = stride.watch(DistributedDataParallel(net()))
    for _, x, y in loader:
        stride.scale(F.mse_loss(model(x), y)).backward()  # type: ignore[no-untyped-call]
        model.zero_grad()
        if stride.step == 5:
            break
    stride.close()
    return "trained"


def alone_on(steps: list[list[int]], samples: int = SAMPLES) -> list[Any]:
    """Return the weights of one process in plain PyTorch, on the given samples of each step."""
    model, data = net(), rows(samples)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    for ids in steps:
        _, x, y = data[ids]
        F.mse_loss(model(x), y).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    return [p.tolist() for p in model.parameters()]
