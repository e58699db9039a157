"""Worker script of `fidelity.py`: blocks of training steps between calibrations, in one run.

Every rank follows the same schedule. A calibration measures steps at three sizes without waiting
for other ranks, and the time of the all-reduce. Then follow some steps under one policy, another
calibration, some steps under the other policy, and so on. So changes of the machine over some
seconds affect both sides of the comparison.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import TensorDataset

from evenstride.lab.demo.demo_script import Bench, DemoArm, choose_batch, load_task, sizes_for
from evenstride.runtime.engines.process_groups import take_down_group

STEP_S = 0.15  # of a balanced step: many periods of the CPU limits
_REPEATS = 15


def gathered(value: Any) -> list[Any]:
    """Return the values of all ranks, on every rank."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def measured(schedule: dict[str, Any]) -> dict[str, Any]:
    """Run a schedule and return the measurements of all ranks.

    Args:
        schedule: ``policies``, ``cold_steps`` before the first block of each, ``rounds``, ``steps``
            of a block, and ``size_s``, the measuring time per size in seconds.
    """
    task, rank = load_task(None), dist.get_rank()
    groups = [dist.new_group([one]) for one in range(dist.get_world_size())]
    bench = Bench(task, groups[rank])
    rates = gathered(16 / bench.measure(16, schedule["size_s"]))
    batch = choose_batch(rates, STEP_S, len(task.train) // 2)
    sizes = sizes_for(rates[rank], rates, batch)
    bench.measure(sizes[-1], schedule["size_s"])  # lets the allocator's heap grow first
    whole = len(task.train) // batch * batch  # so that all steps of an epoch have the same size
    task = replace(task, train=TensorDataset(*task.train[:whole]))
    arms = [DemoArm(policy, task, batch, None) for policy in schedule["policies"]]
    for arm in arms:
        arm.run(schedule["cold_steps"])
    calibrations, blocks = [_calibration(bench, sizes, schedule["size_s"])], []
    for _ in range(schedule["rounds"]):
        for arm in arms:
            blocks.append(arm.run(schedule["steps"]).step_s)
            calibrations.append(_calibration(bench, sizes, schedule["size_s"]))
    for arm in arms:
        arm.stride.close()
    return {"batch": batch, "blocks": blocks, "calibrations": calibrations}


def _calibration(bench: Bench, sizes: list[int], size_s: float) -> dict[str, Any]:
    """Return the step times of every rank at its sizes in seconds, and that of the all-reduce."""
    mine = [(size, bench.steps_s(size, size_s)) for size in sizes]
    return {"steps_s": gathered(mine), "communication_s": bench.communication_s(_REPEATS)}


def main() -> None:
    """Run one rank. The arguments are the files of the schedule and of the measurements."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    schedule, report = map(Path, sys.argv[1:])
    found = measured(json.loads(schedule.read_text()))
    if dist.get_rank() == 0:
        report.write_text(json.dumps(found))
    take_down_group()


if __name__ == "__main__":
    main()
