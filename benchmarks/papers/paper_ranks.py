"""One rank of a group of cells, which trains them in turn, with a calibration between any two.

    paper_ranks.py FOLDER

Rank 0 writes the result of each cell to the news at once. A disturbed cell is repeated once.
"""

from __future__ import annotations

import json
import os
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

# A script has only its own folder on the path.
sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.papers.cells import (
    CURVE,
    DRIFT,
    FIXED,
    JOBS,
    REGRESSION,
    PaperCell,
    PaperCluster,
    PaperJob,
)
from benchmarks.papers.experiment import DATA, NEWS, PLAN, CellPlan
from benchmarks.real_controller_ranks import gathered
from examples.fashion_resnet import Block, conv

from evenstride.lab.comparison.comparison_result import Curve, achieved_speeds, best_split, drift
from evenstride.lab.comparison.paired_ratios import middle_mean
from evenstride.lab.demo.demo_script import sizes_for
from evenstride.runtime.engines.process_groups import take_down_group
from evenstride.runtime.stride import Stride
from evenstride.trace.read import read_records

# A machine whose speed varies by 10 % within half a second needs longer probes to show a drift.
SIZE_S, PROBE_S, BLOCK_S = 0.5, 2.0, 0.1
SIZES = (1, 4, 16, 64, 128, 256, 512, 1024)


def resnet() -> nn.Module:
    """Return a residual net of three blocks with group norm, so that no sample changes another."""
    blocks = (Block(24, 24, 1), Block(24, 48, 2), Block(48, 48, 2))
    return nn.Sequential(
        *(conv(1, 24, 2), nn.ReLU(), *blocks),
        *(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(4 * 48, 10)),
    )


def cnn() -> nn.Module:
    """Return a net of two convolutions, with much computation and few weights."""
    return nn.Sequential(
        *(nn.Conv2d(1, 24, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(24, 32, 5, padding=2), nn.ReLU(), nn.MaxPool2d(4)),
        *(nn.Flatten(), nn.Linear(32 * 9, 10)),
    )


def line() -> nn.Module:
    """Return a linear function of four columns that starts at zero."""
    net = nn.Linear(4, 1)
    nn.init.zeros_(net.weight)
    nn.init.zeros_(net.bias)
    return net


NETS: dict[str, Callable[[], nn.Module]] = {
    "resnet": resnet,
    "cnn": cnn,
    "short-cnn": cnn,
    REGRESSION: line,
}


class PaperTask:
    """A job on its data."""

    def __init__(self, name: str, data: Path) -> None:
        self.name, self.regression = name, name == REGRESSION
        arrays = np.load(data)
        parts = [torch.from_numpy(arrays[part]) for part in ("x", "y", "test_x", "test_y")]
        self.train, self.test = TensorDataset(*parts[:2]), TensorDataset(*parts[2:])

    def net(self, seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return NETS[self.name]()

    def loss(self, outputs: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(outputs, y) if self.regression else F.cross_entropy(outputs, y)

    def score(self, net: nn.Module, stride: Stride) -> float:
        """Return the accuracy on test data, or the loss of a regression; collective."""
        total, count = 0.0, 0
        with torch.no_grad():
            for x, y in stride.loader(self.test, train=False, seeded=False):
                outputs = net(x)
                right = F.mse_loss(outputs, y, reduction="sum") if self.regression else None
                total += float((outputs.argmax(1) == y).sum() if right is None else right)
                count += len(y)
        mean = stride.mean(total, count)
        assert isinstance(mean, float)
        return mean


class PaperBench:
    """Measures steps of any size on this rank, without communication."""

    def __init__(self, task: PaperTask) -> None:
        self._task, self._net = task, task.net(0)
        self._optimizer = torch.optim.SGD(self._net.parameters(), lr=1e-6)

    def curve(self, sizes: Sequence[int], seconds: float) -> dict[int, float]:
        """Return the mean time in seconds by size; collective, with the same number of sizes."""
        return {size: self._step_s(size, seconds) for size in sizes}

    def _step_s(self, size: int, seconds: float) -> float:
        dist.barrier()
        self._step(size)
        until_s, blocks_s = time.perf_counter() + seconds, list[float]()
        while len(blocks_s) < 3 or time.perf_counter() < until_s:
            blocks_s.append(self._block_s(size))
        return middle_mean(blocks_s)

    def _block_s(self, size: int) -> float:
        """Return the mean time of a step over some periods of the CPU limit.

        Of steps shorter than a period, most meet no pause and some meet a whole one.
        """
        started_s, spent_s, steps = time.perf_counter(), 0.0, 0
        while spent_s < BLOCK_S:
            self._step(size)
            steps += 1
            spent_s = time.perf_counter() - started_s
        return spent_s / steps

    def _step(self, size: int) -> None:
        chosen = torch.randint(len(self._task.train), (size,))
        x, y = self._task.train[chosen]
        self._task.loss(self._net(x), y).backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        self._optimizer.zero_grad()


class PaperRun:
    """One rank of a group; all ranks call the same methods in the same order."""

    def __init__(self, plan: CellPlan, folder: Path) -> None:
        self.plan, self.folder, self.rank = plan, folder, dist.get_rank()
        self.cluster: PaperCluster = plan.cluster
        self.job: PaperJob = JOBS[plan.cells[0].job]
        self.task = PaperTask(plan.cells[0].job, folder / DATA)
        self.bench = PaperBench(self.task)
        self.batch, self.probed = self.job.batch, 1
        self.curves: list[Curve] = []
        self.done: list[PaperCell] = []

    def run(self) -> None:
        """Calibrate, and train the cells while there is time."""
        self.tell("pids", pids=gathered(os.getpid()))
        if self.plan.cells[0].policy == CURVE:
            self.measure_curves()
            return
        sizes = sizes_for(self.cluster.speeds[self.rank], self.cluster.speeds, self.batch)
        self.bench.curve(sizes[-1:], 0.0)  # the allocator's heap has to grow first
        self.probed = sizes[1]
        self.curves = gathered(self.bench.curve(sizes, SIZE_S))
        waiting, before = list(self.plan.cells), self.probe()
        # A group that started trains at least one cell.
        while waiting and gathered(not self.done or time.time() < self.plan.until_s)[0]:
            cell = waiting.pop(0)
            found = self.train(cell)
            after = self.probe()
            self.report(cell, before, after, **found)
            if drift(before, after) > DRIFT and cell not in self.done:
                waiting.append(cell)
            self.done.append(cell)
            before = after

    def measure_curves(self) -> None:
        """Report the time of a step by its size, for each worker."""
        for cell in self.plan.cells:
            before = self.probe()
            curves = gathered(self.bench.curve(SIZES, SIZE_S))
            self.report(cell, before, self.probe(), curves=curves)

    def probe(self) -> list[Curve]:
        """Return the time of a step of every worker at its speed; collective."""
        return gathered(self.bench.curve([self.probed], PROBE_S))

    def report(self, cell: PaperCell, before: Any, after: Any, **found: Any) -> None:
        """Tell the result of a cell."""
        speeds = achieved_speeds(self.curves, max(self.cluster.speeds)) if self.curves else ()
        changed = round(drift(before, after), 4)
        self.tell("cell", cell=cell, found={**found, "drift": changed, "achieved": speeds})

    def tell(self, what: str, **values: Any) -> None:
        """Write a record for the benchmark; only rank 0 does."""
        if self.rank == 0:
            with (self.folder / NEWS).open("a") as file:
                plain = {key: self.plan.plain(value) for key, value in values.items()}
                file.write(json.dumps({"what": what, **plain}) + "\n")

    def spec(self, cell: PaperCell) -> str:
        """Return the policy of a cell; the best fixed split follows from the calibration."""
        if cell.policy != FIXED:
            return cell.policy
        slower = [
            a / b for a, b in zip(self.cluster.speeds, self.cluster.mean_speeds(), strict=True)
        ]
        curves = [
            {size: s * factor for size, s in curve.items()}
            for curve, factor in zip(self.curves, slower, strict=True)
        ]
        return "static:" + ",".join(map(str, best_split(curves, self.batch)))

    def train(self, cell: PaperCell) -> dict[str, Any]:
        """Train a cell to its target, or its number of steps, and return what is stored."""
        trace = self.folder / f"trace-{len(self.done)}.jsonl"
        stride = Stride(
            self.batch, policy=self.spec(cell), sync=cell.sync, seed=cell.seed, trace=trace
        )
        loader = stride.loader(self.task.train, seeded=False)
        net = self.task.net(cell.seed)
        model = stride.watch(DistributedDataParallel(net))
        workers = 1 if cell.sync == "bsp" else len(self.cluster.speeds)
        optimizer = torch.optim.SGD(net.parameters(), lr=self.job.rate / workers)
        due, steps_s, scores, spent_s = (
            list(self.cluster.changes),
            list[float](),
            list[float](),
            0.0,
        )
        dist.barrier()
        while self.another(scores, len(steps_s)):
            epoch_s = begun_s = time.perf_counter()
            for x, y in loader:
                loss = self.task.loss(model(x), y)
                stride.scale(loss).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                optimizer.zero_grad()
                now_s = time.perf_counter()
                steps_s.append(now_s - begun_s)
                begun_s = now_s
                if due and len(steps_s) == due[0][0]:
                    self.tell("speeds", speeds=due.pop(0)[1])
            spent_s += time.perf_counter() - epoch_s
            if self.cluster.steps is None:
                scores.append(self.task.score(net, stride))
        if self.cluster.changes:
            self.tell("speeds", speeds=self.cluster.speeds)
        found = self.outcome(stride, spent_s, steps_s, scores)
        stride.close()
        return found | (self.traced(trace) if self.rank == 0 and cell.sync == "bsp" else {})

    def outcome(
        self, stride: Stride, spent_s: float, steps_s: Sequence[float], scores: Sequence[float]
    ) -> dict[str, Any]:
        """Return the figures of a training."""
        return {
            "time_s": round(spent_s, 3),  # with what ends an epoch, such as an exchange
            "steps_ms": [round(1e3 * one) for one in steps_s],
            "scores": [round(one, 4) for one in scores],
            "reached": bool(scores) and self.reached(scores[-1]),
            "epochs": stride.epoch,
            "moves": stride.summary().changes,
            "shares": stride.shares,
        }

    def reached(self, score: float) -> bool:
        return self.job.reached(score, regression=self.task.regression)

    def another(self, scores: Sequence[float], steps: int) -> bool:
        """Return whether to train another epoch."""
        if self.cluster.steps is not None:
            return steps < self.cluster.steps
        return len(scores) < self.job.most_epochs and not (scores and self.reached(scores[-1]))

    def traced(self, trace: Path) -> dict[str, Any]:
        """Return from a trace each worker's busy times in ms, and when the split changed."""
        busy: list[list[int]] = [[] for _ in self.cluster.speeds]
        held: list[list[int]] = [[] for _ in self.cluster.speeds]
        for record in read_records(trace):
            for seen in record.get("event", {}).get("observations", ()):
                busy[seen["worker"]] += [round(1e3 * one) for one in seen["busy_s"]]
                held[seen["worker"]] += [seen["share"]] * len(seen["busy_s"])
        splits = [list(split) for split in zip(*held, strict=False)]
        changed = [
            step
            for step in range(len(splits))
            if splits[step] != (splits[step - 1 : step] or [[]])[0]
        ]
        return {"busy_ms": busy, "splits": [[step, splits[step]] for step in changed]}


def main() -> None:
    """Run one rank."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    plan = CellPlan.load(folder / PLAN)
    dist.init_process_group("gloo")
    PaperRun(plan, folder).run()
    take_down_group()


if __name__ == "__main__":
    main()
