"""The training script of the demo's workers; the lab runs it under limits."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from evenstride.core.allocation.min_max import equal_finish
from evenstride.core.arrays import Shares
from evenstride.core.fleet import Fleet, Worker, as_shares
from evenstride.core.time_model.observation import median
from evenstride.lab.comparison.worker_curves import true_model
from evenstride.lab.demo.curve_probe import Bench, choose_batch, sizes_for
from evenstride.lab.demo.demo_arm import DemoArm
from evenstride.lab.demo.demo_schedule import NEWS, REPORT, Block, DemoSchedule, RankReport, Report
from evenstride.lab.demo.demo_task import load_task
from evenstride.runtime.engines.process_groups import take_down_group


class Demo:
    """One rank of the demo; all ranks call the same methods in the same order."""

    def __init__(self, plan: DemoSchedule) -> None:
        self.plan, self.rank = plan, dist.get_rank()
        self.task = load_task(plan.data)
        self.blocks: list[Block] = []
        self._news = (plan.folder / NEWS).open("a") if self.rank == 0 else None

    def run(self) -> Report:
        """Calibrate, train block by block, calibrate again, and gather what all have measured.

        Both policies train the same samples for two blocks, which is what the losses are about;
        the adaptive one's first block is cold, so it runs a third for its speed.
        """
        self.tell("calibrating")
        bench = Bench(self.task)
        rates = self.gathered(16 / bench.measure(16, 0.5 * self.plan.size_s))
        batch = choose_batch(rates, self.plan.step_s, len(self.task.train) // 2)
        sizes = sizes_for(rates[self.rank], rates, batch)
        bench.measure(sizes[-1], self.plan.size_s)  # the allocator's heap has to grow first
        before = bench.curve(sizes, self.plan.size_s)
        communication_s = bench.communication_s()
        adaptive, uniform = (self.arm(policy, batch) for policy in ("adaptive", "uniform"))
        split = best_split(self.gathered(before), batch)
        self.block(adaptive)
        self.block(uniform)
        self.block(adaptive)
        accuracy = {"adaptive": adaptive.accuracy()}
        split = self.fixed_blocks(split, batch)
        self.block(uniform)
        accuracy["uniform"] = uniform.accuracy()
        self.block(adaptive)
        self.fixed_blocks(split, batch)
        self.tell("calibrating again")
        after = bench.curve(sizes, self.plan.size_s)
        ranks = self.gathered(RankReport(before, after, self.blocks, accuracy))
        changes = adaptive.stride.summary().changes
        for arm in (uniform, adaptive):
            arm.stride.close()
        return Report(batch, communication_s, len(self.task.train), changes, ranks)

    def arm(self, policy: str, batch: int) -> DemoArm:
        """Return a new arm; the two policies that are compared leave a trace."""
        name = f"{policy}.jsonl"
        trace = self.plan.folder / name if ":" not in policy else None
        return DemoArm(policy, self.task, batch, trace)

    def block(self, arm: DemoArm) -> Block:
        block = arm.run(self.plan.block_steps)
        self.blocks.append(block)
        step_s = median(tuple(block.step_s))
        self.tell("block", policy=arm.policy, step_s=step_s, shares=block.shares)
        return block

    def fixed_blocks(self, split: Shares, batch: int) -> Shares:
        """Run the best fixed split known and one next to it; return the faster one.

        A local search around the calibrated optimum: the faster of two is where the next pair
        starts.
        """
        tried: dict[Shares, float] = {}
        for candidate in (split, self.neighbour(split)):
            arm = self.arm("static:" + ",".join(map(str, candidate)), batch)
            tried[candidate] = self.agreed(median(tuple(self.block(arm).step_s)))
            arm.stride.close()
        return min(tried, key=lambda shares: tried[shares])

    def neighbour(self, split: Shares) -> Shares:
        """Return a split next to ``split``, towards what the adaptive arm has settled on."""
        adaptive = next(b for b in reversed(self.blocks) if b.policy == "adaptive").shares
        if adaptive != split:
            return adaptive
        longest, shortest = split.index(max(split)), split.index(min(split))
        step = max(1, round(0.02 * sum(split)))
        moved = list(split)
        moved[longest] -= step
        moved[shortest] += step
        return tuple(moved)

    def gathered(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(values, value)
        return values

    def agreed(self, value: float) -> float:
        return float(self.gathered(value)[0])

    def tell(self, what: str, **values: Any) -> None:
        if self._news is not None:
            self._news.write(json.dumps({"what": what, **values}) + "\n")
            self._news.flush()


def best_split(curves: list[dict[int, float]], batch: int) -> Shares:
    """Return the best integer split for the calibrated curves."""
    fleet = Fleet(tuple(Worker(str(rank)) for rank in range(len(curves))), batch)
    return as_shares(equal_finish(true_model(curves), fleet.lower, fleet.upper, batch))


def main() -> None:
    """Run one rank of the demo planned in the file named by the first argument."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    plan = DemoSchedule.load(Path(sys.argv[1]))
    demo = Demo(plan)
    report = demo.run()
    if demo.rank == 0:
        report.save(plan.folder / REPORT)
    take_down_group()


if __name__ == "__main__":
    main()
