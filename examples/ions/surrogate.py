"""A network that learns density profiles while the simulations that make them still run.

torchrun --nproc-per-node 2 -m examples.ions.surrogate FOLDER

FOLDER is a bag (see bag.py). At each beginning of an epoch rank 0 looks which simulations are
finished and tells the others; they are the data of that epoch, each trained once, however the
batches are split. Every eighth simulation is held out. Kill it when you like and start it again,
with more or fewer ranks: it goes on in mid-epoch, with the list that the epoch began with.
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

HELD_OUT = 8  # one in so many is never trained
SALT = 1  # column of a point
SCALE = Scale(tuple(low for low, _ in RANGES), tuple(high for _, high in RANGES))


def is_held_out(job: int) -> bool:
    """Return whether a simulation is kept for the judgement."""
    return job % HELD_OUT == HELD_OUT - 1


class Results:
    """Finished simulations, each read once."""

    def __init__(self, bag: Bag) -> None:
        self.bag = bag
        self._known: dict[int, tuple[Tensor, Tensor]] = {}

    def tensors(self, jobs: list[int]) -> tuple[Tensor, Tensor]:
        """Return scaled inputs ``(n, 3)`` and targets ``(n, 2 * bins)``, per M of salt."""
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
        """Return the mean error of the held-out profiles that are finished, a part of the mean.

        It contains the noise of the simulations themselves.
        """
        jobs = [job for job in self.bag.finished() if is_held_out(job)]
        if not jobs:
            return None
        points, profiles = self.tensors(jobs)
        errors = profile_errors(predict(net, points), profiles.unflatten(-1, (2, -1)))
        return float(errors.mean())


class Feed:
    """The simulations that an epoch trains; all ranks have the same list.

    Args:
        bag: where they come from.
        stride: of the run.
        least: simulations to wait for before the first epoch, if there will be so many.
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
        """Whether nothing more will come."""
        return len(self.jobs) == self._all

    def loader(self) -> Any:
        """Return the loader of the current epoch; every rank calls it before each epoch."""
        if self.jobs and self._loader is None:  # what was trained when the state was saved
            self._make(self.jobs)
        if self._stride.state_dict()["position"] == 0:
            jobs = self._agreed()
            if jobs != self.jobs:
                self._make(jobs)
        return self._loader

    def end_epoch(self) -> None:
        """Count an epoch over all simulations there will be."""
        self.full_epochs += self.full

    def state_dict(self) -> dict[str, Any]:
        """Return what the epoch trains: a position in it means nothing without."""
        return {"jobs": self.jobs, "full_epochs": self.full_epochs}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a saved epoch."""
        self.jobs, self.full_epochs = state["jobs"], state["full_epochs"]

    def _make(self, jobs: list[int]) -> None:
        self._loader = None  # the one before must be gone: a Stride has one training loader
        self.jobs = jobs
        self._loader = self._stride.loader(TensorDataset(*self.results.tensors(jobs)))

    def _agreed(self) -> list[int]:
        """Return what rank 0 finds: other ranks might look a moment later, and find more."""
        if not dist.is_initialized():
            return self.found()
        shown = [self.found() if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(shown, src=0)
        assert shown[0] is not None, "rank 0 always finds a list"
        return shown[0]

    def found(self) -> list[int]:
        while True:
            jobs = [job for job in self.bag.finished() if not is_held_out(job)]
            if len(jobs) >= self._least:
                return jobs
            time.sleep(0.2)


def train(bag: Bag, args: argparse.Namespace) -> None:
    """Train until all simulations are finished and have been trained for some epochs more."""
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
    # Warns that the data are not compared, as there is no loader yet. It must be so: which
    # simulations a loader needs is part of what is restored, and with others it is refused.
    checkpoint.restore()

    loss, told = torch.zeros(()), -1
    while feed.full_epochs < args.epochs_after:
        before = stride.step
        for x, y in feed.loader():  # without a name, which would keep it alive beside the next one
            loss = F.mse_loss(model(x), y)
            stride.scale(loss).backward()
            optimizer.step()
            optimizer.zero_grad()
            checkpoint.step()
        if stride.step == before:  # EVENSTRIDE_MAX_STEPS, as the lab sets it
            break
        feed.end_epoch()
        if leader and len(feed.jobs) != told:
            _tell(feed, net, stride, loss)
            told = len(feed.jobs)
    checkpoint.save()
    checkpoint.close()
    if leader:
        _tell(feed, net, stride, loss)
        replace_whole(bag.folder / "surrogate.pt", net.state_dict())
        print(stride.summary())


def _tell(feed: Feed, net: nn.Module, stride: evenstride.Stride, loss: Tensor) -> None:
    """Add a line to the record of how the data grew and the error shrank."""
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
        f"error on those held out {held_out}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="a bag")
    parser.add_argument("--global-batch", type=int, default=16)
    parser.add_argument("--epochs-after", type=int, default=500, help="over all simulations")
    parser.add_argument("--least", type=int, default=4, help="simulations to begin with")
    parser.add_argument("--dropout", type=float, default=DROPOUT, help="0: restarts are exact")
    parser.add_argument("--save-every", type=int, default=200, help="steps")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if "WORLD_SIZE" in os.environ:  # set by torchrun; plain python is a run with one rank
        dist.init_process_group("gloo")
    try:
        train(Bag(args.folder), args)
    except KeyboardInterrupt:  # the state is that of the last save
        raise SystemExit(130) from None
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


if __name__ == "__main__":
    main()
