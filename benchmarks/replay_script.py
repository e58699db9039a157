"""Training script of `replay.py`, restarted after every loss, and the checks of its result.

``replay_script.py FOLDER SEGMENT`` trains as ``FOLDER/asked.json`` specifies. Each rank records the
samples of each step before it trains them. The leader records saves and, at the end, the weights. A
segment is the time from one start of the workers to their end.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from functools import cache
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import evenstride
from evenstride.core.sampling.permutation import Permutation
from evenstride.errors import LimitError
from evenstride.lab.processes.cpu_limits import CgroupLimits, cgroup_candidates
from evenstride.sim.scenario.recordings import Machines
from evenstride.testing.faults.fault_injection import WORKER_VARIABLE, Injector

# A script has only its own folder on the path.
sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.spot_replay import SpotJob, Way

SAMPLES, BATCH, CHANNELS, PIXELS = 480, 48, 12, 12
PER_EPOCH = SAMPLES // BATCH
GROUP_TIMEOUT_S, GO_S = 60.0, 60.0
SIZES, TRIES = (2, 6, 12, 24), 5  # batch sizes of a calibration, and repeats of each
WARM_UP, STRETCH = 25, 40  # steps of a calibration


@dataclass(frozen=True, slots=True)
class Asked:
    """The job of the workers.

    Args:
        steps: Steps of the whole run.
        every: Argument of `Checkpointer`; ``None`` for no checkpoints.
        kept: Folder of the checkpoints.
        work: How often each worker computes a batch, if there are no CPU limits.
        calibrate: Whether to measure instead of training to the end.
    """

    steps: int
    every: int | str | None
    kept: str
    work: dict[str, int]
    calibrate: bool = False

    def write(self, folder: Path) -> None:
        """Write the job to the file that the workers read."""
        (folder / "asked.json").write_text(json.dumps(asdict(self)))


@dataclass(frozen=True, slots=True)
class Segment:
    """The outcome of one start of the workers.

    Args:
        number: Number of the segment, from 0.
        members: Names of the workers.
        restart_s: Seconds from their start until they could train; ``None`` if they never could.
        first_step: Committed steps at the start.
        last_step: Committed steps at the end.
        ended_by: ``loss``, ``join``, ``window`` or ``end``.
    """

    number: int
    members: tuple[str, ...]
    restart_s: float | None
    first_step: int
    last_step: int
    ended_by: str

    def __str__(self) -> str:
        """Return the segment as one line."""
        steps = f"steps {self.first_step} to {self.last_step}"
        trained = "no training" if self.restart_s is None else steps
        return f"{' '.join(self.members)}: {trained}, ended by {self.ended_by}"


def rows(samples: int = SAMPLES) -> TensorDataset:
    """Return rows of (id, image, target), the same in every process."""
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(samples, 1, PIXELS, PIXELS, generator=generator, dtype=torch.float64)
    y = torch.randn(samples, 1, generator=generator, dtype=torch.float64)
    return TensorDataset(torch.arange(samples), x, y)


def net() -> nn.Module:
    """Return a small model, the same in every process. A sample takes about 0.5 ms."""
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Conv2d(1, CHANNELS, 3, padding=1),
        nn.Tanh(),
        nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1),
        nn.Tanh(),
        nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(CHANNELS * PIXELS**2, 1),
    ).double()


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer with state, which a checkpoint must restore too."""
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def weights(model: nn.Module) -> list[float]:
    """Return all parameters as one list of numbers."""
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()]).tolist()


@cache
def alone(steps: int) -> list[float]:
    """Return the weights of one undisturbed process in plain PyTorch."""
    torch.set_num_threads(1)
    model, (_, x, y) = net(), rows().tensors
    optimizer = optimizer_of(model)
    for step in range(steps):
        epoch, place = divmod(step, PER_EPOCH)
        batch = torch.from_numpy(
            Permutation(SAMPLES, 0, epoch).at(np.arange(place * BATCH, (place + 1) * BATCH))
        )
        F.mse_loss(model(x[batch]), y[batch]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


def audit(folder: Path, begun: Sequence[Segment], steps: int) -> None:
    """Assert that the committed trajectory has each sample once per epoch.

    Steps of a segment after the step at which the next one began are not part of it.
    """
    trained: dict[int, list[int]] = {}
    for segment in begun:
        trained = {step: ids for step, ids in trained.items() if step <= segment.first_step}
        for path in folder.glob(f"audit-{segment.number}-*.jsonl"):
            for line in path.read_text().splitlines():
                step, ids = json.loads(line)
                trained.setdefault(step, []).extend(ids)
    assert sorted(trained) == list(range(1, steps + 1)), "steps are missing in the trajectory"
    for epoch in range(-(-steps // PER_EPOCH)):
        last = min((epoch + 1) * PER_EPOCH, steps)
        ids = [index for step in range(epoch * PER_EPOCH, last) for index in trained[step + 1]]
        counted = Counter(ids)
        whole = last == (epoch + 1) * PER_EPOCH
        assert set(counted.values()) == {1}, f"epoch {epoch} has samples twice"
        assert not whole or len(counted) == SAMPLES, f"epoch {epoch} lacks samples"


def error_of(actual: Sequence[float], steps: int) -> float:
    """Return ``||w - w*|| / ||w*||``, the error against the weights of an undisturbed run."""
    expected = torch.tensor(alone(steps), dtype=torch.float64)
    return float((torch.tensor(actual, dtype=torch.float64) - expected).norm() / expected.norm())


class Run:
    """The training of one worker in a segment."""

    def __init__(self, folder: Path, segment: int) -> None:
        self.folder, self.segment = folder, segment
        self.asked = Asked(**json.loads((folder / "asked.json").read_text()))
        self.rank, self.name = dist.get_rank(), os.environ[WORKER_VARIABLE]
        self._again = self.asked.work.get(self.name, 1) - 1
        self._net = net()
        self.stride = evenstride.Stride(BATCH)
        self._loader = self.stride.loader(rows())
        self.model = self.stride.watch(DistributedDataParallel(self._net))
        self.optimizer = optimizer_of(self.model)
        self.checkpoint: evenstride.Checkpointer | None = None
        if self.asked.every is not None:
            self.checkpoint = evenstride.Checkpointer(
                self.asked.kept,
                self.stride,
                model=self.model,
                optimizer=self.optimizer,
                every=self.asked.every,
                notices="off",
            )
            self.checkpoint.restore()
        self._audit = (folder / f"audit-{segment}-{self.rank}.jsonl").open("a")
        self._saves = (folder / f"saves-{segment}-{self.rank}.jsonl").open("a")
        self._copied_s = 0.0

    def begin(self) -> Injector:
        """Announce that training can begin, and wait until the limit of this machine is set."""
        injector = Injector.from_environment(lambda: None)
        injector.begins(self.stride.step)
        (self.folder / f"ready-{self.segment}-{self.name}").touch()
        go, until_s = self.folder / f"go-{self.segment}-{self.name}", time.monotonic() + GO_S
        while not go.exists():
            if time.monotonic() > until_s:
                raise TimeoutError(f"{self.name} was not released within {GO_S:.0f} s")
            time.sleep(0.005)
        return injector

    def train(self, steps: int, committed: Callable[[int], object]) -> None:
        """Train until ``steps`` steps are committed. May be called again."""
        while self.stride.step < steps:
            for ids, x, y in self._loader:
                taken = ids.tolist() if self.stride.samples else []
                print(json.dumps([self.stride.step + 1, taken]), file=self._audit, flush=True)
                self.work(x, y)
                self.optimizer.step()
                self.optimizer.zero_grad()
                if self.checkpoint is not None:
                    self.checkpoint.step()
                    self._note_save(self.checkpoint)
                committed(self.stride.step)
                if self.stride.step >= steps:
                    break

    def work(self, x: Tensor, y: Tensor) -> None:
        """Compute the gradient of a batch, several times on a slow machine."""
        for _ in range(self._again):
            torch.autograd.grad(F.mse_loss(self._net(x), y), list(self._net.parameters()))
        self.stride.scale(F.mse_loss(self.model(x), y)).backward()  # type: ignore[no-untyped-call]

    def _note_save(self, checkpoint: evenstride.Checkpointer) -> None:
        cost = checkpoint.report()
        if cost["copied_s"] > self._copied_s:
            self._copied_s = cost["copied_s"]
            print(json.dumps(cost), file=self._saves, flush=True)


def curve(again: int) -> list[tuple[int, float]]:
    """Return pairs (samples, seconds) of this machine's busy time."""
    model, (_, x, y) = net(), rows(max(SIZES)).tensors
    parameters = list(model.parameters())
    found = []
    for size in SIZES:
        times_s = []
        for _ in range(TRIES + 1):  # the first one is cold
            begun_s = time.perf_counter()
            for _ in range(again + 1):
                torch.autograd.grad(F.mse_loss(model(x[:size]), y[:size]), parameters)
            times_s.append(time.perf_counter() - begun_s)
        found.append((size, fmean(times_s[1:])))
    return found


def calibrate(run: Run) -> dict[str, Any]:
    """Return the times of steps and saves when all machines train without losses."""
    injector = run.begin()
    mine = curve(run.asked.work.get(run.name, 1) - 1)
    checkpoint, run.checkpoint = run.checkpoint, None
    times_s = []
    for stretch in ("warm-up", "plain", "saving", "plain"):
        run.checkpoint = checkpoint if stretch == "saving" else None
        begun_s, first = time.perf_counter(), run.stride.step
        run.train(first + (WARM_UP if stretch == "warm-up" else STRETCH), injector.committed)
        if checkpoint is not None:
            checkpoint.wait()
        times_s.append((time.perf_counter() - begun_s) / (run.stride.step - first))
    report = {} if checkpoint is None else checkpoint.report()
    return {
        "curve": mine,
        "step_s": fmean((times_s[1], times_s[3])),
        "saving_step_s": times_s[2],
        "saves": report.get("saved", 0),
        "copied_s": report.get("copied_s", 0.0),
    }


def costs_of(curves: Sequence[Sequence[tuple[int, float]]]) -> tuple[list[float], list[float]]:
    """Return the fixed time and the time per sample of each machine, by least squares."""
    fixed_s, per_sample_s = [], []
    for one in curves:
        sizes, times_s = np.array(one, dtype=np.float64).T
        slope, start = np.polyfit(sizes, times_s, 1)
        slope = max(float(slope), 1e-9)
        fixed_s.append(max(float(start), 0.0))
        per_sample_s.append(slope)
    return fixed_s, per_sample_s


def save_of(found: Sequence[dict[str, Any]]) -> float:
    """Return the training time that a save costs: the copy, and the time of its thread."""
    saves = found[0]["saves"]
    if not saves:
        return 0.0
    slower_s = median(float(one["saving_step_s"] - one["step_s"]) for one in found)
    copied_s = max(float(one["copied_s"]) for one in found)
    return float(max(slower_s * STRETCH, copied_s) / saves)


def job_of(found: Sequence[dict[str, Any]]) -> SpotJob:
    """Return the simulator's job of one step, from the calibration of all machines.

    Time of a step beyond the busy time of the slowest machine is added to every fixed time.
    """
    fixed_s, per_sample_s = costs_of([one["curve"] for one in found])
    job = SpotJob(1, BATCH, tuple(fixed_s), tuple(per_sample_s), len(found), save_s=save_of(found))
    step_s = median(float(one["step_s"]) for one in found)
    more_s = max(step_s - job.step_s(np.arange(len(found))), 0.0)
    return replace(job, fixed_s=tuple(own_s + more_s for own_s in fixed_s))


def begun(segments: Sequence[Segment]) -> list[Segment]:
    """Return the segments that started training."""
    return [one for one in segments if one.restart_s is not None]


def steps_again(begun: Sequence[Segment]) -> int:
    """Return the number of steps that were trained again."""
    return sum(max(one.last_step - after.first_step, 0) for one, after in pairwise(begun))


def saves_s_of(folder: Path, number: int) -> list[float]:
    """Return the training time of the leader that each save of a segment took, in seconds."""
    path = folder / f"saves-{number}-0.jsonl"
    notes = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    sums = [0.0, *(note["copied_s"] + note["blocked_s"] for note in notes)]
    return [after - before for before, after in pairwise(sums)]


def name_of(slot: int) -> str:
    """Return the name of the machine in a slot."""
    return f"m{slot}"


def members_of(window: Machines, tick: int, way: Way) -> list[int]:
    """Return the machines that train from a tick on, empty if there are too few."""
    row = window.who[min(tick, len(window.who) - 1)]
    here: list[int] = row[row >= 0].tolist()
    return here if way.elastic or len(here) == len(row) else []


def held_s(window: Machines, until_s: float) -> float:
    """Return the machine-seconds of all machines that were up, as counted by the simulator."""
    up = (window.who >= 0).sum(axis=1)
    part = np.clip(until_s - np.arange(len(up)) * window.gap_s, 0.0, window.gap_s)
    return float((up * part).sum())


def total_of(outcome: dict[str, Any], steps: int) -> str:
    """Return the time of a way, or its progress if it did not finish."""
    part = outcome["committed"] / (steps * BATCH)
    return f"{outcome['total_s']:.1f}" if outcome["finished"] else f"unfinished ({part:.0%} done)"


def limits_of(speeds: Sequence[float]) -> tuple[CgroupLimits | None, dict[str, int]]:
    """Return CPU limits by control groups or, without the right to set them, extra work."""
    for files in cgroup_candidates():
        with suppress(LimitError):
            limits = CgroupLimits(files, len(speeds))
            for slot, speed in enumerate(speeds):
                limits.set_speed(slot, speed)
            return limits, {}
    return None, {name_of(n): round(max(speeds) / speed) for n, speed in enumerate(speeds)}


def main(folder: Path, segment: int) -> None:
    """Train until the end, or until this process is killed."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=GROUP_TIMEOUT_S))
    run = Run(folder, segment)
    end: dict[str, Any]
    if run.asked.calibrate:
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, calibrate(run))
        end = {"found": found}
    else:
        run.train(run.asked.steps, run.begin().committed)
        end = {"weights": weights(run.model), "ended_s": time.monotonic()}
    if run.rank == 0:
        place = folder / "end.json"
        place.with_suffix(".new").write_text(json.dumps(end))
        place.with_suffix(".new").rename(place)
    if run.checkpoint is not None:
        run.checkpoint.close()
    run.stride.close()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
