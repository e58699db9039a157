"""What the workers of all compared systems share: the work, the start and the records.

An adapter is a script with a function that trains without end. It calls `PeerJob.note` after each
step. The runner starts one process per worker, and ends them.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from evenstride.lab.demo.demo_script import LEARNING_RATE, MOMENTUM, load_task
from evenstride.runtime.launching.die_with_parent import die_with_parent

RUNNER_VARIABLE = "PEERS_RUNNER"
POLL_S = 0.01
KEPT_UPDATES = 4


@dataclass(frozen=True, slots=True)
class PeerPlan:
    """What the workers of a block train.

    Args:
        batch: Samples per update over all workers.
        sizes: Samples of each worker per step, where a user sets them by hand.
        by_hand: Whether ``sizes`` differ because the user said so.
        rows: Samples in an epoch; 0 for all.
        probe: Whether to keep gradients and the ids of samples.
        option: What the adapter makes of it.
    """

    batch: int
    sizes: tuple[int, ...]
    by_hand: bool = False
    rows: int = 0
    probe: bool = False
    option: str = ""


@dataclass(slots=True)
class PeerJob:
    """One worker's part of a block.

    Args:
        plan: The plan.
        folder: Where the records go.
        rank: Number of the worker.
        net: The model, with the same weights on all workers.
        data: Samples: id, image and label.
        updates: Number of updates of the weights so far.
    """

    plan: PeerPlan
    folder: Path
    rank: int
    net: nn.Module
    data: Any
    updates: int = 0
    _file: Any = field(default=None, repr=False)
    _weights: Any = field(default=None, repr=False)

    @classmethod
    def open(cls, folder: Path) -> PeerJob:
        """Return the job in a folder."""
        plan = PeerPlan(**json.loads((folder / "plan.json").read_text()))
        task, rank = load_task(None), int(os.environ["RANK"])
        data: Any = task.train
        if plan.rows:
            data = TensorDataset(*data[: plan.rows])
        job = cls(plan, folder, rank, task.net(), data)
        job._file = (folder / f"notes-{rank}.jsonl").open("a", buffering=1)
        return job

    @property
    def world(self) -> int:
        """Number of workers."""
        return len(self.plan.sizes)

    @property
    def size(self) -> int:
        """Samples of this worker per step, where a user sets them."""
        return self.plan.sizes[self.rank]

    def optimizer(self, params: Iterable[Any]) -> torch.optim.Optimizer:
        """Return the optimizer, which counts its updates."""
        optimizer = torch.optim.SGD(params, lr=LEARNING_RATE, momentum=MOMENTUM)
        optimizer.register_step_pre_hook(self._before_update)
        optimizer.register_step_post_hook(self._after_update)
        return optimizer

    def note(self, ids: Tensor, loss: Tensor) -> None:
        """Record a step that has ended."""
        record: dict[str, Any] = {
            "t": time.monotonic(),
            "n": len(ids),
            "loss": float(loss.detach()),
            "u": self.updates,
        }
        if self.plan.probe:
            record["ids"] = ids.tolist()
        self._file.write(json.dumps(record) + "\n")

    def meet(self) -> None:
        """Wait for all workers of the block."""
        (self.folder / f"met-{self.rank}").touch()
        while not all((self.folder / f"met-{rank}").exists() for rank in range(self.world)):
            time.sleep(POLL_S)

    def forget_updates(self) -> None:
        """Count the updates from here."""
        self.updates = 0

    def published(self, name: str, make: Callable[[], str]) -> str:
        """Return what rank 0 makes, such as an address, on every rank."""
        file = self.folder / name
        if self.rank == 0:
            written = file.with_suffix(".part")
            written.write_text(make())
            written.rename(file)
        while not file.exists():
            time.sleep(POLL_S)
        return file.read_text()

    def _before_update(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if self.plan.probe:
            self._weights = flat(p.detach() for p in params_of(optimizer))

    def _after_update(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self.updates += 1
        if self.plan.probe and self.updates <= KEPT_UPDATES:
            # Lightning computes the gradients within the step.
            kept = {"grads": flat(p.grad for p in params_of(optimizer)), "weights": self._weights}
            torch.save(kept, self.folder / f"update-{self.rank}-{self.updates}.pt")


def params_of(optimizer: torch.optim.Optimizer) -> list[Any]:
    """Return the parameters of an optimizer."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def flat(tensors: Iterable[Tensor]) -> Tensor:
    """Return a copy of all numbers."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def work(train: Callable[[PeerJob], None]) -> None:
    """Report to the runner, wait for the start, and train until the runner ends this process."""
    die_with_parent()
    if os.getppid() != int(os.environ[RUNNER_VARIABLE]):
        return  # the runner ended before the line above
    torch.set_num_threads(1)
    job = PeerJob.open(Path(sys.argv[1]))
    (job.folder / f"ready-{job.rank}").touch()
    while not (job.folder / "go").exists():
        time.sleep(POLL_S)
    train(job)
