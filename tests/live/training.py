"""A worker of live mode that records what it did, and can be made to die or to drop a step."""

from __future__ import annotations

import json
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

SAMPLES, FEATURES, BATCH = 101, 6, 12
STEPS = -(-SAMPLES // BATCH)  # of an epoch, the last of them short


@dataclass(frozen=True)
class Plan:
    """What one worker does.

    Args:
        name: of the worker.
        lighthouse: its address.
        out: folder it writes to.
        epochs: to train.
        step: at which something happens; -1 for none.
        what: happens then. ``dies`` before its backward pass, or ``dies late`` between backward
            pass and vote. ``drops`` the step alone. ``fails`` before its backward pass, so that the
            others wait for it. ``dies meeting`` when three workers connect. ``restores`` its state
            within an epoch.
        policy: of the shares.
        micro: most samples of a batch.
        processes: of its loader.
    """

    name: str
    lighthouse: str
    out: str
    epochs: int = 3
    step: int = -1
    what: str = ""
    policy: str = "adaptive"
    micro: int | None = None
    processes: int = 0


class Numbered(Dataset[tuple[int, Tensor, Tensor]]):
    """Samples that tell their number."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(3)
        self.x = torch.randn(SAMPLES, FEATURES, dtype=torch.float64, generator=generator)
        self.y = self.x.sin().sum(1, keepdim=True)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[int, Tensor, Tensor]:
        return index, self.x[index], self.y[index]


def network() -> nn.Module:
    """Return the model that all train, with the same weights each time."""
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, 1)).double()


class Diary:
    """Lines that outlive the process that writes them."""

    def __init__(self, folder: Path, name: str) -> None:
        self._file = (folder / f"{name}.{os.getpid()}.jsonl").open("a", buffering=1)
        self._name = name

    def write(self, **values: Any) -> None:
        """Write one line, and see it through."""
        self._file.write(json.dumps({"worker": self._name, "at_s": time.time(), **values}) + "\n")
        self._file.flush()


class Trainee:
    """A worker's parts, as the plan says."""

    def __init__(self, plan: Plan) -> None:
        from evenstride.integrations.torchft import LiveStride

        torch.set_num_threads(1)
        self.plan, self.folder = plan, Path(plan.out)
        self.diary = Diary(self.folder, plan.name)
        self.stride = LiveStride(
            BATCH,
            seed=5,
            policy=plan.policy,
            name=plan.name,
            lighthouse=plan.lighthouse,
            host="localhost",
            timeout_s=20.0,
            quorum_timeout_s=40.0,
        )
        self.loader = self.stride.loader(
            Numbered(), max_micro_batch=plan.micro, num_workers=plan.processes
        )
        self.model = self.stride.watch(network())
        self.optimizer = self.stride.optimizer(
            torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        )
        self.diary.write(kind="begun")

    def train(self, until: int | None = None) -> None:
        """Train to the end of the last epoch, or until so many steps are kept."""
        stride = self.stride
        while stride.epoch < self.plan.epochs:
            for ids, x, y in self.loader:
                at = {"step": stride.step, "generation": stride.generation}
                counted = ids.tolist() if stride.samples else []
                parts = {"workers": stride.workers, "shares": stride.shares}
                self.diary.write(kind="drew", ids=counted, **parts, **at)
                self._batch(x, y)
                if stride.synced:
                    self.diary.write(kind="voted", kept=stride.committed, **at)
                if stride.step == until:
                    return

    def end(self) -> None:
        """Write what came of it, and leave."""
        weights = {name: value.tolist() for name, value in self.model.state_dict().items()}
        momenta = [state["momentum_buffer"].tolist() for state in self.optimizer.state.values()]
        file = self.folder / f"{self.plan.name}.weights.json"
        file.write_text(json.dumps([weights, momenta]))
        self.stride.close()

    def _batch(self, x: Tensor, y: Tensor) -> None:
        plan, stride = self.plan, self.stride
        _befall(plan, stride, "dies")
        _fail(plan, stride, "fails")
        with stride.accumulate(self.model):
            loss = stride.scale(F.mse_loss(self.model(x), y))
            loss.backward()  # type: ignore[no-untyped-call]
        if stride.synced:
            _befall(plan, stride, "dies late")
            _fail(plan, stride, "drops")
            self.optimizer.step()
            self.optimizer.zero_grad()


def train(plan: Plan, together: Any = None) -> None:
    """Train as the plan says, and write the log and the weights.

    Args:
        plan: of this worker.
        together: a barrier of those who are to be in the first quorum; ``None`` for who is not.
    """
    trainee = Trainee(plan)
    if plan.what == "dies meeting":
        _die_meeting(trainee.stride)
    if together is not None:
        together.wait()  # all are known to the Lighthouse now, which waits for them
    if plan.what == "restores":
        trainee = _restored(trainee)
    trainee.train()
    trainee.end()


def _restored(before: Trainee) -> Trainee:
    """Return a worker that goes on from what another one has saved."""
    before.train(until=before.plan.step)
    names = ("model", "optimizer", "stride")
    states = {name: getattr(before, name).state_dict() for name in names}
    before.end()
    after = Trainee(before.plan)
    for name, state in states.items():
        getattr(after, name).load_state_dict(state)
    return after


def _die_meeting(stride: Any) -> None:
    """Let this worker die as soon as it meets two others."""
    quorums = stride._run.quorums
    gather = quorums.gather

    def fatal(text: str) -> list[str]:
        if quorums._latest.world_size == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        texts: list[str] = gather(text)
        return texts

    quorums.gather = fatal


def _befall(plan: Plan, stride: Any, what: str) -> None:
    if (stride.step, what) == (plan.step, plan.what):
        os.kill(os.getpid(), signal.SIGKILL)


def _fail(plan: Plan, stride: Any, what: str) -> None:
    """Let this worker drop the step, the first time it trains it."""
    if (stride.step, what, stride.generation) == (plan.step, plan.what, 0):
        stride._run.quorums.manager.report_error(RuntimeError("as planned"))


def reference(epochs: int) -> tuple[list[list[int]], dict[str, Tensor]]:
    """Return the samples of each step, and the weights, of one process on whole batches."""
    from evenstride.core.sampling.permutation import Permutation

    data, model = Numbered(), network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    steps = []
    for epoch in range(epochs):
        order = Permutation(SAMPLES, 5, epoch).at(torch.arange(SAMPLES).numpy()).tolist()
        for start in range(0, SAMPLES, BATCH):
            ids = order[start : start + BATCH]
            steps.append(ids)
            F.mse_loss(model(data.x[ids]), data.y[ids]).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
    return steps, model.state_dict()
