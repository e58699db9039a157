"""One rank of `real_controller.py`: trains blocks of steps under each policy in turn.

    real_controller_ranks.py FOLDER

The script decides which speeds apply from which step on, because it knows its steps. It tells the
benchmark, which sets the CPU limits about 20 times a second.
"""

from __future__ import annotations

import gc
import json
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from evenstride.core.arrays import IntArray, Shares
from evenstride.core.fleet import as_shares
from evenstride.lab.comparison.comparison_result import Curve, drift, true_model
from evenstride.lab.comparison.paired_ratios import middle_mean
from evenstride.lab.demo.demo_schedule import Filed
from evenstride.lab.demo.demo_script import Bench, DemoArm, DemoTask, choose_batch, sizes_for
from evenstride.lab.processes.speeds import Speeds
from evenstride.runtime.engines.process_groups import take_down_group

NEWS, PLAN, REPORT = "news.jsonl", "plan.json", "report.json"
UNIFORM, FIXED, ADAPTIVE = ARMS = ("uniform", "best fixed", "adaptive")
SAMPLES, WIDTH = 250_000, 512
SHAPES = 64
"""Compiled shapes that torch keeps. By default, it runs a model eagerly after eight of them."""


@dataclass(frozen=True, slots=True)
class RealCase(Filed):
    """What happens to the workers, and how long they train.

    Args:
        name: Name of the case.
        phases: First step in a block, and the speeds of the workers from that step on.
        steps: Steps of a block.
        step_s: Wanted step time of equal workers at the first speeds.
        rounds: Rounds, in which each arm trains a block, that must not be disturbed.
        seconds: No round begins that would end after this time.
        compiled: Whether each block starts again with a model that is compiled for each shape.
        busy: Whether another process takes CPU time at random.
        drift: Largest change of a worker's speed in a round that is not disturbed.
        size_s: Seconds per batch size in a calibration.
    """

    name: str
    phases: tuple[tuple[int, Speeds], ...]
    steps: int
    step_s: float
    rounds: int
    seconds: float
    compiled: bool = False
    busy: bool = False
    drift: float = 0.1
    size_s: float = 0.6

    @property
    def speeds(self) -> Speeds:
        """Speeds at the start of a block."""
        return self.phases[0][1]

    def spans(self) -> Iterator[tuple[int, Speeds]]:
        """Yield the number of steps of each phase, and its speeds."""
        firsts = [first for first, _ in self.phases] + [self.steps]
        for (first, after), (_, speeds) in zip(pairwise(firsts), self.phases, strict=True):
            yield after - first, speeds


def best_fixed(case: RealCase, curves: Sequence[Curve], batch: int) -> Shares:
    """Return the fixed split with the shortest block, if speeds scale the calibrated times.

    It is found among all splits, so the time grows with the batch to the power of the number of
    workers less one.
    """
    model, splits = true_model(curves), all_splits(batch, len(curves))
    times_s = model.fixed_s + model.per_sample_s * splits
    block_s = np.zeros(len(splits))
    for steps, speeds in case.spans():
        slower = np.array(case.speeds) / np.array(speeds)
        block_s += steps * (times_s * slower).max(axis=1)
    return as_shares(splits[block_s.argmin()])


def all_splits(batch: int, workers: int) -> IntArray:
    """Return all splits in which each worker has a sample; shape (splits, workers)."""
    given = np.indices((batch - 1,) * (workers - 1)).reshape(workers - 1, -1).T + 1
    last = batch - given.sum(axis=1, keepdims=True)
    splits: IntArray = np.hstack([given, last])[last[:, 0] > 0]
    return splits


def rows_net() -> nn.Module:
    """Return a network with much computation, few weights and few kernels to compile."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Flatten(1, 2),
        nn.Linear(8, WIDTH, bias=False),
        nn.ReLU(),
        nn.Linear(WIDTH, WIDTH, bias=False),
        nn.Flatten(),
        nn.Linear(8 * WIDTH, 10, bias=False),
    )


def compiled_net() -> nn.Module:
    """Return the network, which is compiled for each shape, and forget what was compiled before."""
    torch._dynamo.reset()
    torch._dynamo.config.recompile_limit = SHAPES
    net: nn.Module = torch.compile(rows_net(), dynamic=False)  # type: ignore[assignment]
    return net


def random_task() -> DemoTask:
    """Return random samples to train on, and the network."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(SAMPLES, 1, 8, 8, generator=generator)
    labels = torch.randint(10, (SAMPLES,), generator=generator)
    data = TensorDataset(torch.arange(SAMPLES), images, labels)
    return DemoTask("random", data, data, rows_net)


@dataclass(slots=True)
class CaseBlock:
    """A block of an arm as rank 0 measured it.

    Args:
        arm: Name of the arm.
        whole_s: Time of all steps, first steps and compilation included.
        steps_s: Time of each step.
        shares: Shares at the end.
        moves: Changes of the split in the block.
    """

    arm: str
    whole_s: float = 0.0
    steps_s: list[float] = field(default_factory=list)
    shares: Shares = ()
    moves: int = 0


@dataclass(slots=True)
class CaseRound:
    """A round: a block of each arm between two calibrations.

    Args:
        number: Its number; the cold round has -1.
        drift: Largest relative change of a worker's speed between the calibrations.
        blocks: The blocks in the order they ran.
    """

    number: int
    drift: float
    blocks: list[CaseBlock]

    @property
    def seconds(self) -> float:
        """Time of all blocks."""
        return sum(block.whole_s for block in self.blocks)


@dataclass(frozen=True, slots=True)
class CaseReport(Filed):
    """What rank 0 reports.

    Args:
        batch: Samples per step.
        fixed: The best fixed split.
        curves: Calibrated time in seconds by batch size, for each worker.
        cold: Blocks before the rounds; empty if each block starts again.
        rounds: All rounds, disturbed ones included.
    """

    batch: int
    fixed: Shares
    curves: list[dict[int, float]]
    cold: list[CaseBlock]
    rounds: list[CaseRound]


class StepWatch:
    """Notes the end of each step, and tells the benchmark when the speeds change."""

    def __init__(self, case: RealCase, news: Path | None) -> None:
        self._case, self._news = case, news
        self._due = list[tuple[int, Speeds]]()
        self.ends_s = list[float]()

    def begin(self) -> None:
        """Begin a block."""
        self._due, self.ends_s = list(self._case.phases[1:]), [time.perf_counter()]

    def mark(self) -> None:
        """Note the end of a step."""
        self.ends_s.append(time.perf_counter())
        if self._due and len(self.ends_s) > self._due[0][0]:
            self.tell("speeds", speeds=self._due.pop(0)[1])

    def tell(self, what: str, **values: Any) -> None:
        """Write a record for the benchmark; only rank 0 does."""
        if self._news is not None:
            with self._news.open("a") as file:
                file.write(json.dumps({"what": what, **values}) + "\n")


class CaseRun:
    """One rank of a case; all ranks call the same methods in the same order."""

    def __init__(self, case: RealCase, folder: Path) -> None:
        self.case, self.folder, self.rank = case, folder, dist.get_rank()
        self.watch = StepWatch(case, folder / NEWS if self.rank == 0 else None)
        self.task = random_task()
        self.bench = Bench(self.task)
        self.probed = list[int]()
        self.begun_s = time.perf_counter()

    def run(self) -> CaseReport:
        """Calibrate, train all rounds, and return the report."""
        size_s = self.case.size_s
        self.bench.measure(32, size_s)  # the allocator's heap has to grow first
        rates = gathered(32 / self.bench.measure(32, size_s))
        most = SAMPLES // self.case.steps  # a block is within an epoch
        batch = choose_batch(rates, self.case.step_s, most) // len(rates) * len(rates)
        sizes = sizes_for(rates[self.rank], rates, batch)
        curves = gathered(self.bench.curve(sizes, size_s))
        self.probed = [batch // len(rates)]
        fixed = best_fixed(self.case, curves, batch)
        self.watch.tell("batch", batch=batch, fixed=fixed)
        policies = {UNIFORM: UNIFORM, FIXED: "static:" + ",".join(map(str, fixed))}
        policies[ADAPTIVE] = ADAPTIVE
        self.task = self.task.in_whole_batches(batch)
        if self.case.compiled:
            self.task = replace(self.task, net=compiled_net)
        cold, rounds = self.rounds(policies, batch)
        return CaseReport(batch, fixed, curves, cold, rounds)

    def rounds(
        self, policies: dict[str, str], batch: int
    ) -> tuple[list[CaseBlock], list[CaseRound]]:
        """Return the blocks of a cold round, and all rounds."""
        arms = dict[str, DemoArm]()
        cold = list[CaseBlock]()
        if not self.case.compiled:
            arms = {arm: self.arm(arm, policy, batch, 0) for arm, policy in policies.items()}
            cold = [self.block(arms[arm], arm, -1) for arm in ARMS]
        done, before = list[CaseRound](), self.probe()
        while self.another(done, cold):
            blocks, number = list[CaseBlock](), len(done)
            for arm in turn(number):
                one = arms.get(arm) or self.arm(arm, policies[arm], batch, number)
                blocks.append(self.block(one, arm, number))
                if self.case.compiled:
                    one.stride.close()
            after = self.probe()
            done.append(CaseRound(number, drift(before, after), blocks))
            self.watch.tell("round", number=number, drift=done[-1].drift)
            before = after
        for one in arms.values():
            one.stride.close()
        return cold, done

    def another(self, done: list[CaseRound], cold: list[CaseBlock]) -> bool:
        """Return whether another round is needed and fits; rank 0 decides for all."""
        undisturbed = sum(one.drift <= self.case.drift for one in done)
        longest_s = max((one.seconds for one in done), default=sum(b.whole_s for b in cold))
        left_s = self.case.seconds - (time.perf_counter() - self.begun_s)
        wanted = undisturbed < self.case.rounds and (left_s > 1.1 * longest_s or not done)
        return bool(gathered(wanted)[0])

    def arm(self, arm: str, policy: str, batch: int, number: int) -> DemoArm:
        """Return a new arm. `adaptive` writes a trace."""
        gc.collect()
        trace = self.folder / f"adaptive-{number}.jsonl" if arm == ADAPTIVE else None
        one = DemoArm(policy, self.task, batch, trace)
        one.optimizer.register_step_post_hook(lambda *_: self.watch.mark())
        return one

    def block(self, one: DemoArm, arm: str, number: int) -> CaseBlock:
        """Train a block and tell its figures."""
        changes = one.stride.summary().changes
        dist.barrier()
        self.watch.tell("begin", arm=arm, number=number)
        self.watch.begin()
        one.run(self.case.steps)
        self.watch.tell("end", speeds=self.case.speeds)
        ends_s = self.watch.ends_s
        block = CaseBlock(
            arm,
            ends_s[-1] - ends_s[0],
            [after - before for before, after in pairwise(ends_s)],
            one.stride.shares,
            one.stride.summary().changes - changes,
        )
        figures = {"whole_s": block.whole_s, "shares": block.shares, "moves": block.moves}
        self.watch.tell("block", arm=arm, number=number, **figures)
        return block

    def probe(self) -> list[Curve]:
        """Return the time of an equal step of every worker; collective."""
        gc.collect()  # what a compiler leaves takes a second
        (size,) = self.probed
        return gathered({size: middle_mean(self.bench.steps_s(size, self.case.size_s))})


def turn(number: int) -> Sequence[str]:
    """Return the arms in the order of a round.

    The order rotates and is reversed in every other round, so that a drift cancels.
    """
    first = number // 2 % len(ARMS)
    arms = [*ARMS[first:], *ARMS[:first]]
    return arms[::-1] if number % 2 else arms


def gathered(value: Any) -> list[Any]:
    """Return the values of all ranks, on every rank."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def compile_s() -> float:
    """Return how much longer a step at a new shape takes than the next one, in seconds."""
    took_s = list[float]()
    prepare_compiler()
    net = compiled_net()
    for _ in range(2):
        begun_s = time.perf_counter()
        one_step(net, 16)
        took_s.append(time.perf_counter() - begun_s)
    return took_s[0] - took_s[1]


def one_step(net: nn.Module, size: int) -> None:
    """Compute gradients for some random samples."""
    labels = torch.zeros(size, dtype=torch.long)
    loss = F.cross_entropy(net(torch.randn(size, 1, 8, 8)), labels)
    loss.backward()  # type: ignore[no-untyped-call]


def prepare_compiler() -> None:
    """Let torch keep what it finds out once, and nothing that it compiles from now on.

    So each compilation in a block costs what it costs a user the first time.
    """
    one_step(compiled_net(), 8)
    torch.compiler.config.force_disable_caches = True


def main() -> None:
    """Run one rank, or without a folder print the time of a compilation."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if len(sys.argv) == 1:
        print(compile_s())
        return
    folder = Path(sys.argv[1])
    case = RealCase.load(folder / PLAN)
    if case.compiled:
        prepare_compiler()
    dist.init_process_group("gloo")
    report = CaseRun(case, folder).run()
    if dist.get_rank() == 0:
        report.save(folder / REPORT)
    take_down_group()


if __name__ == "__main__":
    main()
