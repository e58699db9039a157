"""Measure the overhead of evenstride on equal workers, compared with plain DDP.

    python benchmarks/overhead.py [--seconds 40] [--step-ms 11] [--out results.json]

Two ranks of one thread each train a convolutional network and a perceptron, each with batches that
are loaded in the training process and with two loader processes. The benchmark prints:

* own time: Time of evenstride's code on the training thread, plus processor time of its threads,
  per step. As a ratio, it is divided by the time of a plain step of ``Linear(1, 1)`` (forward,
  backward, SGD), which runs on the same thread between the steps. The budget is 0.5 in rounds in
  which the split stayed, and 1.0 in those in which it moved; the higher of both ranks counts. The
  part on the training thread is given, too: the rest are exchanges, whose number varies.
  Blocks without and with a trace alternate. The processor time of writing the trace is also
  measured directly, because the noise of the two own times is larger.
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
BUDGETS = {"settled": 0.5, "moving": 1.0}  # in plain steps of `Linear(1, 1)`
BLOCK_S = 0.6
TINY_EVERY = 5  # steps between two plain steps of `Linear(1, 1)`
OURS = ("evenstride", "traced")
CASES = tuple((model, workers) for model in ("conv", "perceptron") for workers in (0, 2))


@dataclass
class Result:
    """The figures of one case; times in seconds per step."""

    model: str
    num_workers: int
    step_s: float
    tiny_s: float  # of a plain step of `Linear(1, 1)`
    own_s: float
    traced_s: float
    trace_s: float
    own_ratio: dict[str, float | None]  # of own time to ``tiny_s``, by kind of round
    training_ratio: dict[str, float | None]  # the same without evenstride's threads
    rounds: dict[str, int]
    within_budget: bool
    ratio: float
    ratio_interval: tuple[float, float]
    control: float
    control_interval: tuple[float, float]
    pairs: int
    verdict: str


def network(model: str, width: int) -> nn.Module:
    """Return a network whose time grows with the square of its width."""
    if model == "perceptron":
        wide = (nn.Linear(8 * width, 8 * width), nn.ReLU(), nn.Linear(8 * width, 8 * width))
        return nn.Sequential(
            nn.Flatten(), nn.Linear(64, 8 * width), *wide, nn.Linear(8 * width, 10)
        )
    return nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(width, width, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(4 * width, 10),
    )


class TinyStep:
    """A plain step of ``Linear(1, 1)``: forward, backward and SGD."""

    def __init__(self) -> None:
        self._net, self._x = nn.Linear(1, 1), torch.ones(1, 1)
        self._optimizer = torch.optim.SGD(self._net.parameters(), lr=0.01)
        self.taken_s: list[float] = []

    def run(self) -> float:
        """Train one step and return the time that it took, in seconds."""
        started_s = time.perf_counter()
        self._net(self._x).mean().backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.taken_s.append(time.perf_counter() - started_s)
        return self.taken_s[-1]


class Arm:
    """A training that continues from block to block."""

    def __init__(
        self, name: str, model: str, width: int, num_workers: int, folder: str = ""
    ) -> None:
        torch.manual_seed(0)
        data = TensorDataset(torch.randn(4096, 1, 8, 8), torch.randint(10, (4096,)))
        net = network(model, width)
        self.model: nn.Module = DistributedDataParallel(net)
        self.optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        self.tiny, self._steps = TinyStep(), 0
        self.stride: evenstride.Stride | None = None
        if name in OURS:
            trace = str(Path(folder) / "trace.jsonl") if name == "traced" else None
            batch = BATCH * dist.get_world_size()
            self.stride = evenstride.Stride(global_batch=batch, trace=trace)
            self.model = self.stride.watch(self.model)
            self.loader: Any = self.stride.loader(data, num_workers=num_workers)
        else:
            sampler: DistributedSampler[Any] = DistributedSampler(data)
            self.loader = DataLoader(data, BATCH, sampler=sampler, num_workers=num_workers)
        self.batches = self._forever()

    def _forever(self) -> Iterator[Any]:
        while True:
            yield from self.loader

    def block(self, steps: int) -> float:
        """Train some steps and return the mean step time in seconds, without tiny steps."""
        dist.barrier()
        started_s, tiny_s = time.perf_counter(), 0.0
        for _ in range(steps):
            x, y = next(self.batches)
            loss = F.cross_entropy(self.model(x), y)
            if self.stride is not None:
                loss = self.stride.scale(loss)
            loss.backward()  # type: ignore[no-untyped-call]
            self.optimizer.step()
            self.optimizer.zero_grad()
            self._steps += 1
            if self._steps % TINY_EVERY == 0:
                tiny_s += self.tiny.run()
        return (time.perf_counter() - started_s - tiny_s) / steps

    @property
    def changes(self) -> int:
        """Changes of the split so far; complete on rank 0."""
        return 0 if self.stride is None else self.stride.summary().changes

    def close(self) -> None:
        """End the threads and files of evenstride."""
        if self.stride is not None:
            self.stride.close()


def width_for(model: str, step_s: float) -> int:
    """Return the width at which a plain step takes about ``step_s`` on this machine."""
    width = 64
    for _ in range(3):
        now_s = Arm("plain", model, width, 0).block(12)
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


def measure(
    _rank: int, model: str, num_workers: int, step_s: float, seconds: float, folder: str
) -> dict[str, Any]:
    """Run blocks for about ``seconds`` and return the figures of this rank."""
    leader_outputs.TraceWriter = _Timed  # type: ignore[attr-defined]
    width = width_for(model, step_s)
    arms = {
        name: Arm(name, model, width, num_workers, folder) for name in ("plain", "again", *OURS)
    }
    steps = max(10, round(BLOCK_S / step_s))
    for arm in arms.values():
        arm.block(3 * steps)
    ours, times = arms["evenstride"], dict[str, list[float]]((name, []) for name in arms)
    own = dict[str, list[float]]((name, []) for name in (*OURS, "threads"))
    tiny_s = list[float]()
    moved, shuffler = list[bool](), random.Random(0)
    for _ in range(round(seconds / (len(arms) * BLOCK_S))):
        order = list(arms)
        shuffler.shuffle(order)
        before_s = {name: own_time(arms[name]) for name in OURS}
        threads_s = threads_time(ours)
        changes = ours.changes
        ours.tiny.taken_s.clear()
        for name in order:
            times[name].append(arms[name].block(steps))
        # Over the whole round, because control threads also work between blocks of their arm.
        for name in OURS:
            own[name].append((own_time(arms[name]) - before_s[name]) / steps)
        own["threads"].append((threads_time(ours) - threads_s) / steps)
        tiny_s.append(mean(ours.tiny.taken_s))
        moved.append(ours.changes > changes)
    traced = arms["traced"].stride
    assert traced is not None
    trace_s = _Timed.taken_s / traced.summary().step
    for arm in arms.values():
        arm.close()
    return {"times": times, "own": own, "tiny": tiny_s, "moved": moved, "trace_s": trace_s}


def own_time(arm: Arm) -> float:
    """Return the total own time of an arm so far, in seconds."""
    assert arm.stride is not None
    summary = arm.stride.summary()
    return summary.overhead_s * summary.step


def threads_time(arm: Arm) -> float:
    """Return the part of an arm's own time that its threads took, in seconds."""
    assert arm.stride is not None
    return arm.stride._session.ties.link.cpu_s


def interval(ratios: list[float]) -> tuple[float, float]:
    """Return the 95 % bootstrap interval of the median."""
    dice = random.Random(0)
    medians = sorted(median(dice.choices(ratios, k=len(ratios))) for _ in range(4000))
    return medians[100], medians[-100]


def own_ratios(ranks: list[dict[str, Any]], *, threads: bool = True) -> dict[str, list[float]]:
    """Return own time in tiny steps of each round, of the rank that has more, by kind of round."""
    found: dict[str, list[float]] = {kind: [] for kind in BUDGETS}
    for number, moved in enumerate(ranks[0]["moved"]):
        of_ranks = [
            (mine["own"]["evenstride"][number] - (0 if threads else mine["own"]["threads"][number]))
            / mine["tiny"][number]
            for mine in ranks
        ]
        found["moving" if moved else "settled"].append(max(of_ranks))
    return found


def medians(found: dict[str, list[float]]) -> dict[str, float | None]:
    """Return the median of each kind of round; ``None`` without any."""
    return {kind: median(ratios) if ratios else None for kind, ratios in found.items()}


def judge(model: str, num_workers: int, ranks: list[dict[str, Any]]) -> Result:
    """Return the figures of one case."""
    times, rounds = ranks[0]["times"], own_ratios(ranks)
    ratios = [b / a for a, b in zip(times["plain"], times["evenstride"], strict=True)]
    controls = [b / a for a, b in zip(times["plain"], times["again"], strict=True)]
    low, high = interval(ratios)
    own_s, traced_s = (max(mean(mine["own"][name]) for mine in ranks) for name in OURS)
    own_ratio = medians(rounds)
    met = high - median(controls) < 0.01
    return Result(
        model=model,
        num_workers=num_workers,
        step_s=median(times["plain"]),
        tiny_s=median(ranks[0]["tiny"]),
        own_s=own_s,
        traced_s=traced_s,
        trace_s=ranks[0]["trace_s"],
        own_ratio=own_ratio,
        training_ratio=medians(own_ratios(ranks, threads=False)),
        rounds={kind: len(found) for kind, found in rounds.items()},
        within_budget=all(
            ratio is None or ratio <= BUDGETS[kind] for kind, ratio in own_ratio.items()
        ),
        ratio=median(ratios),
        ratio_interval=(low, high),
        control=median(controls),
        control_interval=interval(controls),
        pairs=len(ratios),
        verdict="met" if met else "unresolved",
    )


def report(result: Result) -> None:
    """Print the figures of one case."""
    kept = "kept" if result.within_budget else "EXCEEDED"
    loaders = f"{result.num_workers} loader processes" if result.num_workers else "no num_workers"
    print(f"--- {result.model}, {loaders}, a step of {result.step_s * 1e3:.1f} ms on two workers")
    for kind, ratio in result.own_ratio.items():
        of = f"of a plain step of Linear(1, 1), at most {BUDGETS[kind]}"
        said = "not seen" if ratio is None else f"{ratio:.2f} {of}"
        print(f"own time   {kind}: {said} ({result.rounds[kind]} rounds)")
        if (training := result.training_ratio[kind]) is not None:
            print(f"           of which {training:.2f} on the training thread")
    print(f"           {result.own_s * 1e3:.3f} ms, budget {kept}")
    print(
        f"with trace {result.traced_s * 1e3:.3f} ms, of which rank 0 writes "
        f"{result.trace_s * 1e3:.4f} ms"
    )
    low, high = result.ratio_interval
    print(f"wall clock {result.ratio:.4f} of plain DDP, 95 % {low:.4f} to {high:.4f}")
    low, high = result.control_interval
    print(f"A/A        {result.control:.4f}, 95 % {low:.4f} to {high:.4f}, {result.pairs} pairs")
    print(f"under 1 %: {result.verdict}", flush=True)


def main() -> None:
    """Measure all cases and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=90.0, help="per case")
    parser.add_argument("--step-ms", type=float, default=11.0, help="time of a plain step")
    parser.add_argument("--out", type=Path, help="file for the figures, as JSON")
    args = parser.parse_args()
    # Without these, glibc returns large blocks to the kernel at irregular steps.
    os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", "1000000000")
    os.environ.setdefault("MALLOC_TRIM_THRESHOLD_", "1000000000")
    results = {}
    for model, num_workers in CASES:
        with tempfile.TemporaryDirectory() as folder:
            case = (measure, 2, model, num_workers, args.step_ms * 1e-3, args.seconds, folder)
            ranks = run_ranks(*case, timeout_s=2 * args.seconds + 120)
        result = judge(model, num_workers, ranks)
        results[f"{model}, num_workers={num_workers}"] = asdict(result)
        report(result)
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        machine = {"machine": platform.platform(), "torch": torch.__version__}
        args.out.write_text(json.dumps({**machine, **results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
