"""Measure the cost of asynchronous saves to a training run.

    python benchmarks/saving.py [--parameters 5e7] [--adam] [--every 30s] [--rounds 6] [--json]

Ranks of one thread each train a model of fully connected layers with DDP. A round has a block
without checkpoints, one with `Checkpointer(every=...)`, and another one without:

* A block with checkpoints lasts from one save to the next, so that all costs of a save count: the
  copy, the writing during training, and others. Its step time is divided by the mean of the two
  blocks around it, so that a steady drift cancels.
* The ratio of the two blocks without checkpoints is the control (A/A).

The benchmark prints medians over the rounds with 95 % bootstrap intervals. The first save also
allocates the buffer and checks the state, so it is printed separately. The result is "met" if the
upper end of the interval is at most 2 %, and "over" if its lower end is above 2 %. Otherwise, or if
the interval of the control exceeds 2 %, it is "unresolved". The benchmark also prints processor
time of all threads of a rank, because other programs disturb it less.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from itertools import pairwise
from math import sqrt
from pathlib import Path
from statistics import fmean, median
from tempfile import TemporaryDirectory
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import evenstride
from evenstride.errors import ConfigError
from evenstride.runtime.checkpoint.format.manifest import CHUNK_BYTES, Digest
from evenstride.runtime.checkpoint.save.preparing import parse_every
from evenstride.testing import run_ranks

TARGET = 0.02  # of the step time
DEPTH, ROWS, LARGEST_BATCH = 3, 1024, 256
FEWEST_ROUNDS = 3  # with seven saves
PARTS = ("first copy", "later copy", "digest", "write", "fsync")


@dataclass(frozen=True, slots=True)
class Asked:
    """Settings of the measurement.

    Args:
        parameters: Approximate number of parameters.
        adam: Whether to use AdamW, with two state values per parameter, or else SGD with momentum,
            with one.
        every_s: Seconds between saves.
        step_s: Wanted step time.
        folder: Folder of the checkpoints.
    """

    parameters: int
    adam: bool
    ranks: int
    every_s: float
    rounds: int
    step_s: float
    folder: str

    @property
    def limit_s(self) -> float:
        """Deadline of the whole measurement, several times its expected length."""
        return 300.0 + 2.5 * 3.0 * self.every_s * (self.rounds + 1)


@dataclass(frozen=True, slots=True)
class Block:
    """Some steps, with mean step time and processor time (all threads) on this rank."""

    steps: int
    step_s: float
    processor_s: float


@dataclass(frozen=True, slots=True)
class Held:
    """Training time that a save took: the copy, and waiting for the previous save."""

    copied_s: float
    blocked_s: float


class Training:
    """The training of a rank, with and without checkpoints."""

    def __init__(self, asked: Asked) -> None:
        torch.manual_seed(0)
        width = width_for(asked.parameters)
        layers = [layer for _ in range(DEPTH) for layer in (nn.Linear(width, width), nn.ReLU())]
        self.model: nn.Module = DistributedDataParallel(nn.Sequential(*layers))
        self.optimizer: torch.optim.Optimizer = (
            torch.optim.AdamW(self.model.parameters(), lr=1e-5)
            if asked.adam
            else torch.optim.SGD(self.model.parameters(), lr=1e-5, momentum=0.9)
        )
        self.batch = batch_for(asked.step_s, [(n, self._timed(n, width)) for n in (4, 32)])
        # An equal split, so that saves cause no decisions.
        self.stride = evenstride.Stride(self.batch * asked.ranks, policy="uniform")
        self.model = self.stride.watch(self.model)
        self._batches = self._forever(self.stride.loader(TensorDataset(torch.randn(ROWS, width))))
        self.checkpoint = evenstride.Checkpointer(
            asked.folder,
            self.stride,
            model=self.model,
            optimizer=self.optimizer,
            every=timedelta(seconds=asked.every_s),
            notices="off",
        )

    def _timed(self, batch: int, width: int) -> float:
        """Return the step time of a batch in seconds, the same on all ranks."""
        x, times_s = torch.randn(batch, width), []
        for _ in range(4):
            begun_s = time.perf_counter()
            self._finish(self.model(x).square().mean())
            times_s.append(time.perf_counter() - begun_s)
        return agreed(min(times_s))

    @staticmethod
    def _forever(loader: Any) -> Iterator[Tensor]:
        while True:
            for (x,) in loader:
                yield x

    def step(self) -> None:
        self._finish(self.stride.scale(self.model(next(self._batches)).square().mean()))

    def _finish(self, loss: Tensor) -> None:
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.optimizer.zero_grad()

    def plain(self, steps: int) -> Block:
        dist.barrier()
        begun_s, processor_s = time.perf_counter(), time.process_time()
        for _ in range(steps):
            self.step()
        took_s, used_s = time.perf_counter() - begun_s, time.process_time() - processor_s
        return Block(steps, took_s / steps, used_s / steps)

    def saving(self) -> tuple[Block, list[Held]]:
        """Train from one save to the next. Return the block and the saves."""
        dist.barrier()
        marks: list[tuple[int, float, float]] = []
        held: list[Held] = []
        steps = 0
        while len(marks) < 2:
            self.step()
            steps += 1
            mark = steps, time.perf_counter(), time.process_time()
            if (saved := self.call(self.checkpoint.step)) is not None:
                marks.append(mark)
                held.append(saved)
        self.checkpoint.wait()
        count, took_s, used_s = (last - first for first, last in zip(*marks, strict=True))
        return Block(int(count), took_s / count, used_s / count), held

    def call(self, save: Callable[[], object]) -> Held | None:
        """Call ``checkpoint.step()`` or ``save()``. Return the time that it took if it saved."""
        before = self.checkpoint.report()
        save()
        after = self.checkpoint.report()
        took_s = {name: after[name] - before[name] for name in ("copied_s", "blocked_s")}
        return Held(**took_s) if took_s["copied_s"] > 0.0 else None


def width_for(parameters: float) -> int:
    """Return the width of layers at which the model has about ``parameters``."""
    return max(1, round(sqrt(parameters / DEPTH)))


def batch_for(step_s: float, times_s: Sequence[tuple[int, float]]) -> int:
    """Return a rank's batch at which a step takes ``step_s``, from a line through two sizes."""
    (small, small_s), (large, large_s) = times_s
    per_sample_s = max((large_s - small_s) / (large - small), 1e-9)
    return int(min(max(1.0, small + (step_s - small_s) / per_sample_s), LARGEST_BATCH))


def agreed(value: float) -> float:
    """Return the value of rank 0, on every rank."""
    box = torch.tensor([value], dtype=torch.float64)
    dist.broadcast(box, 0)
    return float(box)


def measure(rank: int, asked: Asked) -> dict[str, Any]:
    """Run all rounds and return the measurements of this rank."""
    training = Training(asked)
    training.plain(3)
    steps = max(3, round(asked.every_s / agreed(training.plain(5).step_s)))
    first = training.call(training.checkpoint.save)
    later: list[Held] = []
    rounds: list[tuple[Block, Block, Block]] = []
    for number in range(asked.rounds):
        before = training.plain(steps)
        block, held = training.saving()
        rounds.append((before, block, training.plain(steps)))
        later += held
        if rank == 0:
            times = " ".join(f"{one.step_s:.4f}" for one in rounds[-1])
            copies = " ".join(f"{one.copied_s:.3f}" for one in held)
            print(f"round {number + 1}: steps of {times} s, copies {copies} s", file=sys.stderr)
    training.checkpoint.close()
    training.stride.close()
    report = training.checkpoint.report()
    return {
        "batch": training.batch,
        "parameters": sum(p.numel() for p in training.model.parameters()),
        "first": first,
        "later": later,
        "rounds": rounds,
        "report": report,
        "parts_s": parts(Path(asked.folder), int(report["written_bytes"] / report["saved"])),
    }


def parts(folder: Path, size_bytes: int) -> dict[str, tuple[float, float]]:
    """Return (processor seconds, seconds) of each part of a save of ``size_bytes``."""
    data = torch.ones(max(1, size_bytes), dtype=torch.uint8)
    place = folder / f"part-{dist.get_rank()}"
    marks = [(time.thread_time(), time.perf_counter())]

    def lap() -> None:
        marks.append((time.thread_time(), time.perf_counter()))

    copy = torch.empty_like(data).copy_(data)
    lap()
    copy.copy_(data)
    lap()
    view, digest = copy.numpy().data, Digest()
    chunks = [view[start : start + CHUNK_BYTES] for start in range(0, len(view), CHUNK_BYTES)]
    for chunk in chunks:
        digest.update(chunk)
    lap()
    with place.open("wb", buffering=0) as file:
        for chunk in chunks:
            file.write(chunk)
        lap()
        os.fsync(file.fileno())
        lap()
    place.unlink()
    took_s = [(used - u, now - n) for (u, n), (used, now) in pairwise(marks)]
    return dict(zip(PARTS, took_s, strict=True))


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % bootstrap interval of the median."""
    dice = random.Random(0)
    medians = sorted(median(dice.choices(values, k=len(values))) for _ in range(4000))
    return medians[100], medians[-101]


def verdict(cost: tuple[float, float], control: tuple[float, float]) -> str:
    """Compare an interval of the cost with the target, unless the control exceeds the target."""
    low, high = cost if max(map(abs, control)) <= TARGET else (0.0, 1.0)
    return "met" if high <= TARGET else "over" if low > TARGET else "unresolved"


def judge(ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the figures: step times of rank 0, and copies of the slowest rank."""
    rounds: list[tuple[Block, Block, Block]] = ranks[0]["rounds"]
    costs = [b.step_s / fmean((a.step_s, c.step_s)) - 1.0 for a, b, c in rounds]
    controls = [c.step_s / a.step_s - 1.0 for a, _, c in rounds]
    used_s = [
        (b.processor_s - fmean((a.processor_s, c.processor_s))) * b.steps
        for one in ranks
        for a, b, c in one["rounds"]
    ]
    later: list[tuple[Held, ...]] = list(zip(*(one["later"] for one in ranks), strict=True))
    copied_s = [max(held.copied_s for held in same) for same in later]
    saves = ranks[0]["report"]["saved"]
    return {
        "step_s": median(s for a, _, c in rounds for s in (a.step_s, c.step_s)),
        "processor_step_s": median(a.processor_s for one in ranks for a, _, _ in one["rounds"]),
        "interval_steps": median(b.steps for _, b, _ in rounds),
        "cost": median(costs),
        "cost_interval": interval(costs),
        "control": median(controls),
        "control_interval": interval(controls),
        "processor_save_s": median(used_s),
        "processor_save_interval_s": interval(used_s),
        "verdict": verdict(interval(costs), interval(controls)),
        "rounds": len(rounds),
        "saves": int(saves),
        "failed": int(ranks[0]["report"]["failed"]),
        "first_copied_s": max(one["first"].copied_s for one in ranks),
        "copied_s": median(copied_s),
        "most_copied_s": max(copied_s),
        "blocked_s": sum(max(held.blocked_s for held in same) for same in later),
        "thread_s": max(one["report"]["save_s"] for one in ranks) / saves,
        "checkpoint_bytes": round(sum(one["report"]["written_bytes"] for one in ranks) / saves),
        "parts_s": {name: max(one["parts_s"][name] for one in ranks) for name in PARTS},
        "parameters": ranks[0]["parameters"],
        "batch": ranks[0]["batch"],
    }


def lines(found: dict[str, Any]) -> list[str]:
    """Return the figures as text."""

    def shown(name: str) -> str:
        low, high = found[f"{name}_interval"]
        return f"{found[name]:+.2%}, 95 % {low:+.2%} to {high:+.2%}"

    used_s, (low_s, high_s) = found["processor_save_s"], found["processor_save_interval_s"]
    parts_s = ", ".join(
        f"{name} {s:.3f} of {all_s:.3f}" for name, (s, all_s) in found["parts_s"].items()
    )
    return [
        f"{found['parameters'] / 1e6:.1f} M parameters, {found['batch']} samples per rank, a step "
        f"of {found['step_s']:.3f} s; {found['checkpoint_bytes'] / 1e6:.0f} MB in a checkpoint, "
        f"one every {found['interval_steps']:.0f} steps; {found['filesystem']}",
        f"step time    {shown('cost')}, {found['rounds']} rounds",
        f"A/A          {shown('control')}",
        f"processor    {used_s:.2f} s of each rank per save, 95 % {low_s:.2f} to {high_s:.2f}; "
        f"{used_s / found['every_s']:.1%} of a core",
        f"blocked      first save {found['first_copied_s']:.3f} s; later saves "
        f"{found['copied_s']:.3f} s, at most {found['most_copied_s']:.3f} s; waited "
        f"{found['blocked_s']:.3f} s in total for previous saves",
        f"thread       {found['thread_s']:.2f} s per save; {found['saves']} saves, "
        f"{found['failed']} failed",
        f"alone        {parts_s} s are processor time",
        f"at most {TARGET:.0%}: {found['verdict']}",
    ]


def filesystem(folder: Path) -> str:
    """Return the file system of a folder, because ``tmpfs`` never writes to a disk."""
    place = folder.resolve()
    mounts = [m for m in psutil.disk_partitions(all=True) if place.is_relative_to(m.mountpoint)]
    return max(mounts, key=lambda m: len(m.mountpoint)).fstype if mounts else "unknown"


def parse(arguments: Sequence[str] | None) -> tuple[Asked, argparse.Namespace]:
    """Parse and check the command line. Without ``--folder``, the folder is empty."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--parameters", type=float, default=5e7)
    parser.add_argument("--adam", action="store_true", help="two state values per parameter")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--every", default="30s", help="time between saves: 30s, 5min")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--step-s", type=float, default=0.7, help="wanted step time in seconds")
    parser.add_argument("--folder", type=Path, help="of checkpoints (default: a temporary one)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    given = parser.parse_args(arguments)
    try:
        every_s = parse_every(given.every).interval_s
    except ConfigError as error:
        parser.error(str(error))
    if not every_s:
        parser.error(f"invalid --every {given.every}: expected a duration, such as 30s")
    if given.rounds < FEWEST_ROUNDS:
        parser.error(f"too few --rounds {given.rounds}: expected at least {FEWEST_ROUNDS}")
    if not (given.ranks >= 1 and given.parameters >= DEPTH and given.step_s > 0.0):
        parser.error(
            f"invalid --ranks {given.ranks}, --parameters {given.parameters:g} or --step-s "
            f"{given.step_s:g}: expected at least 1, at least {DEPTH}, and above 0"
        )
    size = round(given.parameters), given.adam, given.ranks
    return Asked(*size, every_s, given.rounds, given.step_s, ""), given


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print. Return the exit code, 1 if a save failed."""
    asked, given = parse(arguments)
    # Without these, glibc returns large blocks to the kernel at irregular steps.
    os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", "1000000000")
    os.environ.setdefault("MALLOC_TRIM_THRESHOLD_", "1000000000")
    if given.folder is not None:
        given.folder.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix="saving-", dir=given.folder) as folder:
        asked = Asked(**{**asdict(asked), "folder": folder})
        ranks = run_ranks(measure, asked.ranks, asked, timeout_s=asked.limit_s)
        found = asdict(asked) | judge(ranks) | {"filesystem": filesystem(Path(folder))}
    made = {"machine": platform.platform(), "torch": torch.__version__, "load": os.getloadavg()}
    plain = {**made, **found, "folder": str(given.folder or "")}
    print(json.dumps(plain) if given.json else "\n".join(lines(found)))
    return 1 if found["failed"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
