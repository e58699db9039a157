"""Measure the overhead of evenstride on equal workers, compared with plain DDP.

    python benchmarks/overhead.py [--seconds 40] [--out results.json]

Two ranks of one thread each train a small convolutional network. The benchmark prints:

* own time: Time of evenstride's code on the training thread, plus processor time of its threads,
  per step. The budget is 0.25 ms at a step of 50 ms and 0.1 ms at a step of 5 ms. Blocks without
  and with a trace alternate. The processor time of writing the trace is also measured directly,
  because the noise of the two own times is larger.
* wall clock: Ratio of neighbouring blocks of evenstride and plain DDP in random order, with a 95 %
  bootstrap interval. Plain DDP against itself is the control (A/A). The result is "met" if the
  upper end of the interval minus the median of the control is below 1 %, and else "unresolved".
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import evenstride
from evenstride.runtime.coordination import leader_outputs
from evenstride.testing import run_ranks
from evenstride.trace.codec import TraceWriter

BATCH = 32  # per rank
BUDGET_S = {50: 0.25e-3, 5: 0.1e-3}
BLOCK_S = 0.6
OURS = ("evenstride", "traced")


@dataclass
class Result:
    """The figures of one step time, in seconds per step."""

    step_s: float
    own_s: float
    traced_s: float
    trace_s: float
    budget_s: float
    within_budget: bool
    ratio: float
    ratio_interval: tuple[float, float]
    control: float
    control_interval: tuple[float, float]
    pairs: int
    verdict: str


class Arm:
    """A training that continues from block to block."""

    def __init__(self, name: str, width: int, folder: str = "") -> None:
        torch.manual_seed(0)
        data = TensorDataset(torch.randn(4096, 1, 8, 8), torch.randint(10, (4096,)))
        net = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
            nn.Linear(4 * width, 10),
        )
        self.model: nn.Module = DistributedDataParallel(net)
        self.optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        self.stride: evenstride.Stride | None = None
        if name in OURS:
            trace = str(Path(folder) / "trace.jsonl") if name == "traced" else None
            batch = BATCH * dist.get_world_size()
            self.stride = evenstride.Stride(global_batch=batch, trace=trace)
            self.model = self.stride.watch(self.model)
            self.loader: Any = self.stride.loader(data)
        else:
            sampler: DistributedSampler[Any] = DistributedSampler(data)
            self.loader = DataLoader(data, BATCH, sampler=sampler)
        self.batches = self._forever()

    def _forever(self) -> Iterator[Any]:
        while True:
            yield from self.loader

    def block(self, steps: int) -> float:
        """Train some steps and return the mean step time in seconds."""
        dist.barrier()
        started_s = time.perf_counter()
        for _ in range(steps):
            x, y = next(self.batches)
            loss = F.cross_entropy(self.model(x), y)
            if self.stride is not None:
                loss = self.stride.scale(loss)
            loss.backward()  # type: ignore[no-untyped-call]
            self.optimizer.step()
            self.optimizer.zero_grad()
        return (time.perf_counter() - started_s) / steps

    def close(self) -> None:
        """End the threads and files of evenstride."""
        if self.stride is not None:
            self.stride.close()


def width_for(step_s: float) -> int:
    """Return the width at which a plain step takes about ``step_s`` on this machine."""
    width = 64
    for _ in range(3):
        now_s = Arm("plain", width).block(12)
        width = max(8, round(width * (step_s / now_s) ** 0.5))
        agreed = torch.tensor([width])
        dist.broadcast(agreed, 0)
        width = int(agreed)
    return width


class _Timed(TraceWriter):
    """Writes a trace and counts the processor time of its exchange records."""

    taken_s = 0.0

    def event(self, *what: Any, **more: Any) -> None:
        started_s = time.thread_time()
        super().event(*what, **more)
        _Timed.taken_s += time.thread_time() - started_s


def measure(_rank: int, milliseconds: int, seconds: float, folder: str) -> dict[str, Any]:
    """Run blocks for about ``seconds`` and return the figures of this rank."""
    leader_outputs.TraceWriter = _Timed  # type: ignore[attr-defined]
    width = width_for(milliseconds * 1e-3)
    arms = {name: Arm(name, width, folder) for name in ("plain", "again", *OURS)}
    steps = max(10, round(BLOCK_S / (milliseconds * 1e-3)))
    for arm in arms.values():
        arm.block(3 * steps)
    times: dict[str, list[float]] = {name: [] for name in arms}
    own: dict[str, list[float]] = {name: [] for name in OURS}
    shuffler = random.Random(0)
    for _ in range(round(seconds / (len(arms) * BLOCK_S))):
        order = list(arms)
        shuffler.shuffle(order)
        before_s = {name: own_time(arms[name]) for name in OURS}
        for name in order:
            times[name].append(arms[name].block(steps))
        # Over the whole round, because control threads also work between blocks of their arm.
        for name in OURS:
            own[name].append((own_time(arms[name]) - before_s[name]) / steps)
    traced = arms["traced"].stride
    assert traced is not None
    trace_s = _Timed.taken_s / traced.summary().step
    for name in OURS:
        arms[name].close()
    return {"times": times, "own": own, "trace_s": trace_s}


def own_time(arm: Arm) -> float:
    """Return the total own time of an arm so far, in seconds."""
    assert arm.stride is not None
    summary = arm.stride.summary()
    return summary.overhead_s * summary.step


def interval(ratios: list[float]) -> tuple[float, float]:
    """Return the 95 % bootstrap interval of the median."""
    dice = random.Random(0)
    medians = sorted(median(dice.choices(ratios, k=len(ratios))) for _ in range(4000))
    return medians[100], medians[-100]


def judge(milliseconds: int, ranks: list[dict[str, Any]]) -> Result:
    """Return the figures of one step time."""
    times = ranks[0]["times"]
    ratios = [b / a for a, b in zip(times["plain"], times["evenstride"], strict=True)]
    controls = [b / a for a, b in zip(times["plain"], times["again"], strict=True)]
    low, high = interval(ratios)
    own_s, traced_s = (max(mean(mine["own"][name]) for mine in ranks) for name in OURS)
    met = high - median(controls) < 0.01
    return Result(
        step_s=median(times["plain"]),
        own_s=own_s,
        traced_s=traced_s,
        trace_s=ranks[0]["trace_s"],
        budget_s=BUDGET_S[milliseconds],
        within_budget=own_s <= BUDGET_S[milliseconds],
        ratio=median(ratios),
        ratio_interval=(low, high),
        control=median(controls),
        control_interval=interval(controls),
        pairs=len(ratios),
        verdict="met" if met else "unresolved",
    )


def report(result: Result) -> None:
    """Print the figures of one step time."""
    kept = "kept" if result.within_budget else "EXCEEDED"
    print(f"--- a step of {result.step_s * 1e3:.1f} ms on two equal workers")
    print(f"own time   {result.own_s * 1e3:.3f} ms, budget {result.budget_s * 1e3:.2f} ms: {kept}")
    print(
        f"with trace {result.traced_s * 1e3:.3f} ms, of which rank 0 writes "
        f"{result.trace_s * 1e3:.4f} ms"
    )
    low, high = result.ratio_interval
    print(f"wall clock {result.ratio:.4f} of plain DDP, 95 % {low:.4f} to {high:.4f}")
    low, high = result.control_interval
    print(f"A/A        {result.control:.4f}, 95 % {low:.4f} to {high:.4f}, {result.pairs} pairs")
    print(f"under 1 %: {result.verdict}")


def main() -> None:
    """Measure both step times and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=90.0, help="per step time")
    parser.add_argument("--out", type=Path, help="file for the figures, as JSON")
    args = parser.parse_args()
    # Without these, glibc returns large blocks to the kernel at irregular steps.
    os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", "1000000000")
    os.environ.setdefault("MALLOC_TRIM_THRESHOLD_", "1000000000")
    results = {}
    for milliseconds in BUDGET_S:
        with tempfile.TemporaryDirectory() as folder:
            ranks = run_ranks(
                *(measure, 2, milliseconds, args.seconds, folder), timeout_s=args.seconds + 120
            )
        result = judge(milliseconds, ranks)
        results[f"{milliseconds} ms"] = asdict(result)
        report(result)
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        machine = {"machine": platform.platform(), "torch": torch.__version__}
        args.out.write_text(json.dumps({**machine, **results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
