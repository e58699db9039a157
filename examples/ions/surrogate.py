"""Train a network on density profiles while the simulations that produce them still run.

    torchrun --nproc-per-node 2 -m examples.ions.surrogate FOLDER

FOLDER is a bag (see bag.py). At the start of each epoch, rank 0 lists the finished simulations and
broadcasts the list. The epoch trains each of them once, for any split. Every eighth simulation is
held out. You can kill the training at any time and start it again with more or fewer ranks. It
continues inside the epoch, with the list of that epoch.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from examples.ions.bag import RANGES, Bag
from examples.ions.files import replace_whole
from examples.ions.network import (
    DROPOUT,
    RATE,
    Scale,
    predict,
    profile_errors,
    surrogate,
    targets,
)
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import evenstride
from evenstride import Checkpointer

HELD_OUT = 8  # one in this many simulations is never trained
SALT = 1  # column of the salt concentration in a point
SCALE = Scale(tuple(low for low, _ in RANGES), tuple(high for _, high in RANGES))


def is_held_out(job: int) -> bool:
    """Return whether a simulation is reserved for evaluation."""
    return job % HELD_OUT == HELD_OUT - 1


class Results:
    """Finished simulations as tensors. Each file is read once."""

    def __init__(self, bag: Bag) -> None:
        self.bag = bag
        self._known: dict[int, tuple[Tensor, Tensor]] = {}

    def tensors(self, jobs: list[int]) -> tuple[Tensor, Tensor]:
        """Return scaled inputs ``(n, 3)`` and targets ``(n, 2 * bins)`` per M of salt."""
        for job in jobs:
            if job not in self._known:
                result = self.bag.result(job)
                point = torch.tensor([result["point"]])
                profiles = targets(result["density_molar"][None], point[:, SALT])
                self._known[job] = SCALE(point)[0], profiles[0]
        rows = [self._known[job] for job in jobs]
        inputs, outputs = zip(*rows, strict=True)
        return torch.stack(inputs), torch.stack(outputs)

    def error(self, net: nn.Module) -> float | None:
        """Return the mean relative error on the finished held-out profiles.

        It includes the noise of the simulations. ``None`` if no held-out simulation is finished.
        """
        jobs = [job for job in self.bag.finished() if is_held_out(job)]
        if not jobs:
            return None
        points, profiles = self.tensors(jobs)
        errors = profile_errors(predict(net, points), profiles.unflatten(-1, (2, -1)))
        return float(errors.mean())


class Feed:
    """The simulations that an epoch trains. Each rank has the same list.

    Args:
        bag: Bag of the simulations.
        stride: Stride of the run.
        least: Simulations to wait for before the first epoch, or all if the bag has fewer.
    """

    def __init__(self, bag: Bag, stride: evenstride.Stride, least: int) -> None:
        self.bag, self.results = bag, Results(bag)
        self.jobs: list[int] = []
        self.full_epochs = 0
        self._all = sum(not is_held_out(n) for n in range(len(bag.design.points)))
        self._stride, self._least = stride, min(least, self._all)
        self._loader: Any = None

    @property
    def full(self) -> bool:
        """Whether the list holds all simulations that will be trained."""
        return len(self.jobs) == self._all

    def loader(self) -> Any:
        """Return the loader of the current epoch. A collective call before each epoch."""
        if self.jobs and self._loader is None:  # restored: the list of the saved epoch
            self._make(self.jobs)
        if self._stride.state_dict()["position"] == 0:
            jobs = self._agreed()
            if jobs != self.jobs:
                self._make(jobs)
        return self._loader

    def end_epoch(self) -> None:
        """Count the epoch if it covered all simulations."""
        self.full_epochs += self.full

    def state_dict(self) -> dict[str, Any]:
        """Return the list of the epoch, without which a position in it has no meaning."""
        return {"jobs": self.jobs, "full_epochs": self.full_epochs}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the list of a saved epoch."""
        self.jobs, self.full_epochs = state["jobs"], state["full_epochs"]

    def _make(self, jobs: list[int]) -> None:
        self._loader = None  # drop the previous one first: a Stride allows one training loader
        self.jobs = jobs
        self._loader = self._stride.loader(TensorDataset(*self.results.tensors(jobs)))

    def _agreed(self) -> list[int]:
        """Return the list of rank 0, because other ranks could find more a moment later."""
        if not dist.is_initialized():
            return self.found()
        lists = [self.found() if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(lists, src=0)
        assert lists[0] is not None, "rank 0 broadcasts a list"
        return lists[0]

    def found(self) -> list[int]:
        """Wait for the first simulations to finish, and return those that can be trained."""
        while True:
            jobs = [job for job in self.bag.finished() if not is_held_out(job)]
            if len(jobs) >= self._least:
                return jobs
            time.sleep(0.2)


def train(bag: Bag, args: argparse.Namespace) -> None:
    """Train until all simulations are finished, and for ``args.epochs_after`` epochs after that."""
    torch.manual_seed(args.seed)
    leader = not dist.is_initialized() or dist.get_rank() == 0
    net = surrogate(len(RANGES), bag.design.settings.bins, args.dropout)
    optimizer = torch.optim.Adam(net.parameters(), lr=RATE)

    stride = evenstride.Stride(global_batch=args.global_batch, seed=args.seed)
    model = stride.watch(DistributedDataParallel(net) if dist.is_initialized() else net)
    feed = Feed(bag, stride, args.least)
    checkpoint = Checkpointer(
        bag.folder / "train",
        stride,
        model=model,
        optimizer=optimizer,
        every=args.save_every,
        extra={"feed": feed},
    )
    # Warns that it cannot compare the data, because there is no loader yet. The list of simulations
    # that the loader needs is part of the checkpoint, and a loader with another list is refused.
    checkpoint.restore()

    loss, logged = torch.zeros(()), -1
    while feed.full_epochs < args.epochs_after:
        before = stride.step
        # A variable would keep this pass's loader alive during the next pass.
        for x, y in feed.loader():
            loss = F.mse_loss(model(x), y)
            stride.scale(loss).backward()
            optimizer.step()
            optimizer.zero_grad()
            checkpoint.step()
        if stride.step == before:  # EVENSTRIDE_MAX_STEPS, which `evenstride lab` sets, ended it
            break
        feed.end_epoch()
        if leader and len(feed.jobs) != logged:
            _log(feed, net, stride, loss)
            logged = len(feed.jobs)
    checkpoint.save()
    checkpoint.close()
    if leader:
        _log(feed, net, stride, loss)
        replace_whole(bag.folder / "surrogate.pt", net.state_dict())
        print(stride.summary())


def _log(feed: Feed, net: nn.Module, stride: evenstride.Stride, loss: Tensor) -> None:
    """Print and store the number of trained simulations and the held-out error."""
    error = feed.results.error(net)
    state = stride.state_dict()
    line = {
        "at_s": round(feed.bag.clock(), 3),
        "epoch": state["epoch"],
        "step": state["step"],
        "simulations": len(feed.jobs),
        "loss": loss.item(),
        "held_out": error,
    }
    with (feed.bag.folder / "growth.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")
    held_out = "none yet" if error is None else f"{error:.1%}"
    print(
        f"epoch {line['epoch']}, step {line['step']}: {len(feed.jobs)} simulations, "
        f"held-out error {held_out}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="folder of a bag")
    parser.add_argument("--global-batch", type=int, default=16)
    parser.add_argument("--epochs-after", type=int, default=500, help="epochs over all simulations")
    parser.add_argument("--least", type=int, default=4, help="finished simulations to wait for")
    parser.add_argument("--dropout", type=float, default=DROPOUT, help="with 0, restarts are exact")
    parser.add_argument("--save-every", type=int, default=200, help="steps between checkpoints")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if "WORLD_SIZE" in os.environ:  # set by torchrun; without it, this is the only rank
        dist.init_process_group("gloo")
    try:
        train(Bag(args.folder), args)
    except KeyboardInterrupt:  # the last checkpoint remains
        raise SystemExit(130) from None
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


if __name__ == "__main__":
    main()
