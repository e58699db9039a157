"""Measure evenstride's own processor time per step on the virtual device.

    python -m tests.virtual_device.own_time [--rounds 6]

Two ranks train stacks of small layers with DistributedDataParallel or FSDP2. A plain loop, the same
loop again as the control (A/A), and a loop with evenstride alternate in blocks of steps. Columns:

* plain step: Processor time of a rank's process in a step without evenstride.
* wall: Time of a step on the wall, in which two ranks wait for each other.
* own time: Time of evenstride's hooks, loader and threads per step, without the next two columns.
* waits, marks: Marked waits inside the layers, and the processor time that their marks take, in a
  step that has marks.
* one in, share: Steps from one with marks to the next, and the fraction of the time on the wall
  that marks thus take. evenstride chooses the steps so that it is about 0.3 % at most.
* ratio, A/A: Processor time with evenstride over that of a plain step, and of two plain loops.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import evenstride
from evenstride.runtime.engines.fsdp_stalls import StallMarks
from evenstride.testing import RankPool
from tests.inside import session
from tests.multiproc.loops import KeptSteps
from tests.virtual_device import device_module as virtual
from tests.virtual_device.extension import built
from tests.virtual_device.timed import start

ENGINES, BLOCKS = ("DDP", "FSDP2"), (2, 8, 32)
BATCH, WIDTH = 8, 64
# The first 50 steps of FSDP2 all have marks; those before the tenth are slow.
COLD_STEPS, STEPS_OF_BLOCK, SLOW_STEPS = 60, 20, 10
_LIMIT_S = 600.0


@dataclass(frozen=True, slots=True)
class Found:
    """Figures of one rank."""

    plain_s: float  # processor time of a plain step
    wall_s: float  # time of a step on the wall
    waits: float  # marked waits inside the layers, in a step that has marks
    marks_s: float  # processor time that these marks take, in such a step
    apart: float  # steps from one with marks to the next, once the first 50 are over
    share: float  # processor time of all marks since then, as a fraction of the time on the wall
    own_s: float  # time of everything else of evenstride, per step
    ratio: float  # of processor times per step with evenstride and without, median of the rounds
    control: float  # the same of two plain loops


class StepMarks(NamedTuple):
    """The marks of a step."""

    waits: int  # marked
    took_s: float  # processor time


class MarkTime:
    """The processor time of marks around waits inside the layers, step by step."""

    def __init__(self) -> None:
        self.took_s: list[float] = []  # of each call of `StallMarks.mark` in the step in progress
        self.found = 0  # of these, the number that found waits
        self._mark = StallMarks.mark

    def mark(self, marks: StallMarks, find_waits: Callable[[], list[Any] | None]) -> None:
        """Mark waits, as `StallMarks.mark`."""

        def counted() -> list[Any] | None:
            waits = find_waits()
            self.found += bool(waits)
            return waits

        began_s = time.thread_time()
        self._mark(marks, counted)
        self.took_s.append(time.thread_time() - began_s)

    def taken(self) -> StepMarks:
        """Return what the marks of a step took, and begin with the next step."""
        taken = StepMarks(self.found, sum(self.took_s))
        self.took_s, self.found = [], 0
        return taken


class Loop:
    """A training that continues from block to block."""

    def __init__(
        self, engine: str, blocks: int, group: Any, mark_time: MarkTime | None = None
    ) -> None:
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(blocks)]
        net: Any = nn.Sequential(*layers).to(virtual.DEVICE)
        if engine == "FSDP2":
            mesh = DeviceMesh.from_group(group, virtual.TYPE)
            for layer in (*layers, net):
                fully_shard(layer, mesh=mesh)
            self._model: nn.Module = net
        else:
            self._model = DistributedDataParallel(net, process_group=group)
        data = TensorDataset(torch.randn(4096, WIDTH))
        self.stride: evenstride.Stride | None = None
        loader: Any = DataLoader(data, BATCH, shuffle=True)
        self._mark_time = mark_time
        if mark_time is not None:
            batch = BATCH * dist.get_world_size(group)
            self.stride = evenstride.Stride(
                global_batch=batch, policy="uniform", process_group=group
            )
            timer = session(self.stride).state.clock.timer
            self.records = KeptSteps(timer.finished)
            timer.report_to(self.records)
            self.marks: list[StepMarks] = []  # by step
            self._model, loader = self.stride.watch(self._model), self.stride.loader(data)
        self._optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        self._batches = _forever(loader)

    def block(self, steps: int) -> list[float]:
        """Train some steps and return the processor time of each, in seconds."""
        took_s, began_s = [], time.process_time()
        for _ in range(steps):
            (x,) = next(self._batches)
            loss = self._model(x.to(virtual.DEVICE, non_blocking=True)).square().mean()
            if self.stride is not None:
                loss = self.stride.scale(loss)
            loss.backward()
            self._optimizer.step()
            self._optimizer.zero_grad()
            loss.item()
            now_s = time.process_time()
            took_s.append(now_s - began_s)
            began_s = now_s
            if self._mark_time is not None:
                self.marks.append(self._mark_time.taken())
        return took_s

    def own_s(self) -> float:
        """Return evenstride's own time so far, without that of marks inside the layers."""
        assert self.stride is not None
        summary = self.stride.summary()
        return summary.overhead_s * summary.step


def _forever(loader: Any) -> Iterator[Any]:
    while True:
        yield from loader


def measure(rank: int, engine: str, blocks: int, rounds: int) -> Found:
    """Return the figures of this rank."""
    torch.set_num_threads(1)
    group, mark_time = start(rank), MarkTime()
    plain, again = Loop(engine, blocks, group), Loop(engine, blocks, group)
    with patch.object(StallMarks, "mark", lambda marks, find: mark_time.mark(marks, find)):
        ours = Loop(engine, blocks, group, mark_time)
        ours.block(COLD_STEPS)
        for loop in (plain, again):
            loop.block(SLOW_STEPS)
        times: list[list[float]] = []
        own_s, wall_s = list[float](), list[float]()
        for _ in range(rounds):
            before = [median(loop.block(STEPS_OF_BLOCK)) for loop in (plain, again)]
            began_s, own_before_s = time.perf_counter(), ours.own_s()
            times.append([*before, median(ours.block(STEPS_OF_BLOCK))])
            wall_s.append((time.perf_counter() - began_s) / STEPS_OF_BLOCK)
            own_s.append((ours.own_s() - own_before_s) / STEPS_OF_BLOCK)
    assert ours.stride is not None
    ours.stride.close()
    return _found(ours, times, own_s, wall_s)


def _found(ours: Loop, times: list[list[float]], own_s: list[float], wall_s: list[float]) -> Found:
    # A step without marks cannot be modelled, if its engine waits inside the layers.
    marked = {record.step for record in ours.records if record.modelled}
    steps = range(len(ours.marks))
    marks = [ours.marks[step] for step in steps if step in marked and step >= SLOW_STEPS]
    later = [step for step in steps if step >= COLD_STEPS]
    return Found(
        plain_s=median(min(plain, again) for plain, again, _ in times),
        wall_s=median(wall_s),
        waits=median(one.waits for one in marks),
        marks_s=median(one.took_s for one in marks),
        apart=len(later) / max(len([step for step in later if step in marked]), 1),
        share=sum(ours.marks[step].took_s for step in later) / (STEPS_OF_BLOCK * sum(wall_s)),
        own_s=median(own_s),
        ratio=median(2 * with_s / (plain + again) for plain, again, with_s in times),
        control=median(again / plain for plain, again, _ in times),
    )


def row(engine: str, blocks: int, found: list[Found]) -> str:
    """Return a row of the table, of the rank with the larger own time."""
    worst = max(found, key=lambda one: one.own_s + one.marks_s)
    return (
        f"| {engine} | {blocks} | {1e3 * worst.plain_s:.1f} ms | {1e3 * worst.wall_s:.1f} ms "
        f"| {1e6 * worst.own_s:.0f} us "
        f"| {worst.waits:.0f} | {1e6 * worst.marks_s:.0f} us | {worst.apart:.1f} "
        f"| {worst.share:.2%} | {worst.ratio:.3f} | {worst.control:.3f} |"
    )


HEAD = """\
| engine | blocks | plain step | wall | own time | waits | marks | one in | share | ratio | A/A |
|---|---|---|---|---|---|---|---|---|---|---|"""


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=6)
    rounds = parser.parse_args().rounds
    built()
    print(HEAD)
    with RankPool() as pool:
        for engine in ENGINES:
            for blocks in BLOCKS:
                found = pool.run(measure, 2, engine, blocks, rounds, timeout_s=_LIMIT_S)
                print(row(engine, blocks, found), flush=True)


if __name__ == "__main__":
    main()
