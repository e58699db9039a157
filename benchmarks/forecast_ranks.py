"""Worker script of `forecast.py`, started by the lab as ``forecast_ranks.py SCHEDULE REPORT``.

A schedule is one of two jobs:

- *trainings*: Train to a loss on held-out data at each batch with each seed. Report the number of
  epochs and the gradient noise.
- *steps*: Train some steps at each batch. Calibrate all workers before and after, at sizes that no
  batch has.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.forecast_work import OPTIMIZERS, WORKLOADS, held_out_loss

from evenstride import Stride
from evenstride.core.gradients.noise_scale import NoiseEstimate
from evenstride.lab.demo.demo_script import Bench, DemoArm, DemoTask
from evenstride.runtime.engines.process_groups import take_down_group
from evenstride.trace.read import read_noise, trace_path

LOOKS = 12  # evaluations on held-out data per epoch
SMOOTHED = {"images": 4, "text": 1}  # evaluations whose mean must reach the target
BASE = 128  # batch of the optimizers' learning rates, which scale with its square root
NOISE_EVERY = 4
_NETWORK_SPACE = 0x40000000  # CLONE_NEWNET


def trainings(schedule: dict[str, Any], task: DemoTask, folder: Path) -> list[dict[str, Any]]:
    """Run the trainings of a schedule and return their outcomes."""
    found = []
    for batch in schedule["batches"]:
        for seed in schedule["seeds"]:
            trace = folder / f"{batch}-{seed}"
            ended = train(task, batch, seed, schedule, trace)
            if dist.get_rank() == 0:
                found.append({"batch": batch, "seed": seed, **ended, "noise": noise(trace)})
    return found


def train(
    task: DemoTask, batch: int, seed: int, schedule: dict[str, Any], trace: Path
) -> dict[str, Any]:
    """Train to the target. Return the epochs and the losses of all evaluations."""
    torch.manual_seed(seed)
    net = task.net()
    stride = Stride(batch, policy="uniform", seed=seed, trace=trace, noise_every=NOISE_EVERY)
    loader = stride.loader(task.train, seeded=False)
    model = stride.watch(DistributedDataParallel(net))
    optimizer = OPTIMIZERS[task.name](net, (batch / BASE) ** 0.5)
    every = max(len(loader) // LOOKS, 1)
    looks: list[tuple[float, float]] = []
    while stride.epoch < schedule["most_epochs"]:
        for _, x, y in loader:
            stride.scale(F.cross_entropy(model(x), y)).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            if stride.step % every:
                continue
            looks.append((stride.step / len(loader), _loss(net, task)))
            smooth = smoothed(looks, SMOOTHED[task.name])
            if smooth and smooth[-1][1] <= schedule["target"]:
                stride.close()
                return {"epochs": _crossed(smooth, schedule["target"]), "looks": looks}
    stride.close()
    return {"epochs": None, "looks": looks}


def _loss(net: torch.nn.Module, task: DemoTask) -> float:
    """Return the mean loss over the held-out data, split over the ranks. A collective call."""
    mine = slice(dist.get_rank(), None, dist.get_world_size())
    both = torch.tensor(held_out_loss(net, task, mine), dtype=torch.float64)
    dist.all_reduce(both)
    return float(both[0] / both[1])


def smoothed(looks: list[tuple[float, float]], count: int) -> list[tuple[float, float]]:
    """Return the means of ``count`` successive evaluations, empty if there are fewer."""
    return [
        (fmean(at for at, _ in some), fmean(loss for _, loss in some))
        for some in (looks[end - count : end] for end in range(count, len(looks) + 1))
    ]


def _crossed(looks: list[tuple[float, float]], target: float) -> float:
    """Return the epochs at which the loss reached the target, between the last two evaluations."""
    if len(looks) < 2:
        return looks[-1][0]
    (before, high), (after, low) = looks[-2:]
    return before + (after - before) * (high - target) / (high - low)


def noise(trace: Path) -> float | None:
    """Return the noise scale in samples, over all measured steps of a training."""
    estimate = NoiseEstimate()
    for _, norms in read_noise(trace_path(trace)):
        estimate = estimate.after(norms, memory=1e9)
    if not estimate.steps or estimate.signal <= 0:
        return None
    return estimate.noise / estimate.signal


def steps(schedule: dict[str, Any], task: DemoTask) -> dict[str, Any]:
    """Train blocks of steps between calibrations. Return the measurements of all ranks."""
    world, rank = dist.get_world_size(), dist.get_rank()
    groups = [dist.new_group([one]) for one in range(world)]
    bench = Bench(task, groups[rank])
    part = schedule["speeds"][rank] / sum(schedule["speeds"])
    sizes = [max(round(batch * part), at + 1) for at, batch in enumerate(schedule["sizes_of"])]
    bench.measure(sizes[-1], schedule["size_s"])  # lets the allocator's heap grow first

    arms = [DemoArm("adaptive", _whole(task, batch), batch, None) for batch in schedule["batches"]]
    for arm in arms:
        arm.run(schedule["cold_steps"])
    calibrations, blocks = [_calibration(bench, sizes, schedule["size_s"])], []
    for number, arm in enumerate(arms * schedule["rounds"], start=1):
        block = arm.run(schedule["steps"])
        blocks.append({"steps_s": block.step_s, "shares": block.shares})
        if number % schedule["blocks_between"] == 0:
            calibrations.append(_calibration(bench, sizes, schedule["size_s"]))
    for arm in arms:
        arm.stride.close()
    parameters = sum(p.numel() for p in task.net().parameters())
    return {
        "workload": task.name,
        "workers": world,
        "batches": schedule["batches"],
        "gradient_bytes": 4 * parameters,
        "blocks": blocks,
        "blocks_between": schedule["blocks_between"],
        "calibrations": calibrations,
    }


def _whole(task: DemoTask, batch: int) -> DemoTask:
    """Return a task of whole batches, so that all steps of an epoch have the same size."""
    whole = len(task.train) // batch * batch
    return replace(task, train=TensorDataset(*task.train[:whole]))


def _calibration(bench: Bench, sizes: list[int], size_s: float) -> dict[str, Any]:
    """Return the step times of every rank at its sizes in seconds."""
    mine = [(size, bench.steps_s(size, size_s)) for size in sizes]
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    return {"steps_s": every}


def enter(space: str, meeting: str) -> None:
    """Enter a network namespace, with the rendezvous of the ranks at an address in it."""
    with Path("/var/run/netns", space).open() as handle:
        if ctypes.CDLL(None, use_errno=True).setns(handle.fileno(), _NETWORK_SPACE):
            raise OSError(ctypes.get_errno(), f"cannot enter {space}")
    os.environ.update(MASTER_ADDR=meeting, MASTER_PORT="29555", TORCHELASTIC_USE_AGENT_STORE="")


def main() -> None:
    """Run one rank."""
    plan, report = map(Path, sys.argv[1:])
    schedule = json.loads(plan.read_text())
    torch.set_num_threads(1)
    if schedule["spaces"]:
        enter(schedule["spaces"][int(os.environ["RANK"])], schedule["meeting"])
    dist.init_process_group("gloo")
    task = WORKLOADS[schedule["workload"]](Path(schedule["data"]))
    if schedule["job"] == "trainings":
        found: Any = trainings(schedule, task, report.parent)
    else:
        found = steps(schedule, task)
    if dist.get_rank() == 0:
        report.write_text(json.dumps(found))
    take_down_group()


if __name__ == "__main__":
    main()
