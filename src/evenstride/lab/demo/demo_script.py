"""The training script of the demo's workers, which run under CPU limits.

The task is to classify handwritten digits, or Fashion-MNIST, with a small convolutional network.
Every rank creates the same arms, each with its own policy, and trains them block by block.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset, default_collate

from evenstride.core.arrays import Shares
from evenstride.lab.comparison.comparison_result import best_split
from evenstride.lab.comparison.paired_ratios import middle_mean
from evenstride.lab.demo.demo_schedule import NEWS, REPORT, Block, DemoSchedule, RankReport, Report
from evenstride.lab.demo.fashion_mnist import check_data, read_images
from evenstride.lab.doctor.checkup import reduce_s
from evenstride.runtime.engines.process_groups import take_down_group
from evenstride.runtime.stride import Stride

LEARNING_RATE = 0.02
MOMENTUM = 0.9
_FEWEST_STEPS = 3
_FIRST_STEPS = 4  # of a fixed split, whose first steps are slow
_SIZES = 3  # batch sizes at which a worker is calibrated


@dataclass(frozen=True, slots=True)
class DemoTask:
    """A data set, and the network that learns it."""

    name: str
    train: TensorDataset  # sample id, input and label of each sample
    test: TensorDataset  # held-out samples
    # Creates the network, with the same weights in each call; its outputs are logits.
    net: Callable[[], nn.Module]

    def in_whole_batches(self, global_batch: int) -> DemoTask:
        """Return the task without the samples after the last whole batch of an epoch.

        Then all steps have the same number of samples, and their times can be compared.
        """
        whole = len(self.train) // global_batch * global_batch
        return replace(self, train=TensorDataset(*self.train[:whole]))


def load_task(folder: Path | None) -> DemoTask:
    """Return the digits of scikit-learn, or Fashion-MNIST from its four files in ``folder``."""
    check_data(folder)
    if folder is None:
        return _digits()
    train, test = (_fashion(folder, part) for part in ("train", "test"))
    return DemoTask("Fashion-MNIST", _numbered(*train), _numbered(*test), partial(small_net, 4))


def _digits() -> DemoTask:
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    pixels = torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8) / 8.0 - 1.0
    classes = torch.tensor(labels)
    held_out = torch.arange(len(classes)) % 6 == 5
    train = _numbered(pixels[~held_out], classes[~held_out])
    test = _numbered(pixels[held_out], classes[held_out])
    return DemoTask("digits", train, test, partial(small_net, 1))


def _fashion(folder: Path, part: str) -> tuple[Tensor, Tensor]:
    images, labels = read_images(folder, part)
    pixels = torch.from_numpy(images.astype(np.float32)).unsqueeze(1) / 127.5 - 1.0
    return pixels, torch.from_numpy(labels.astype(np.int64))


def _numbered(images: Tensor, labels: Tensor) -> TensorDataset:
    return TensorDataset(torch.arange(len(labels)), images, labels)


def small_net(stride: int, seed: int = 0, width: int = 128) -> nn.Module:
    """Return a network of three convolutions; the seed determines its weights.

    It uses group norm rather than batch norm, which would mix samples, so that a split would change
    the result. It is wide for such small images, because a step must last many periods of the CPU
    limits.

    Args:
        stride: of the first layer. A larger one makes larger images as cheap as small ones.
        seed: of the weights.
        width: channels of the last layers.
    """
    generator_state = torch.get_rng_state()
    torch.manual_seed(seed)
    net = nn.Sequential(
        nn.Conv2d(1, width // 2, 3, stride=stride, padding=1),
        nn.GroupNorm(4, width // 2),
        nn.ReLU(),
        nn.Conv2d(width // 2, width, 3, padding=1),
        nn.GroupNorm(8, width),
        nn.ReLU(),
        nn.Conv2d(width, width, 3, padding=1),
        nn.GroupNorm(8, width),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(4 * width, 10),
    )
    torch.set_rng_state(generator_state)
    return net


class Bench:
    """Trains its own model on this rank, on batches of any size.

    ``alone`` is a process group of this rank only. With it, a step includes the work of DDP other
    than communication.
    """

    def __init__(self, task: DemoTask, alone: dist.ProcessGroup | None = None) -> None:
        self._data = task.train
        self._net = task.net()
        if alone is not None:
            self._net = DistributedDataParallel(self._net, process_group=alone)
        self._optimizer = torch.optim.SGD(
            self._net.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM
        )

    def measure(self, size: int, seconds: float) -> float:
        """Return the mean time of a step of ``size`` samples; collective.

        It is the mean because the steps of a limited worker last whole periods of its limit.
        """
        return mean(self.steps_s(size, seconds))

    def steps_s(self, size: int, seconds: float) -> list[float]:
        """Return the times of some steps of ``size`` samples; collective.

        Every rank computes for the whole time, so that all are measured under the same load.
        """
        dist.barrier()
        self._step(size)
        ends_s = [time.perf_counter()]
        while len(ends_s) <= _FEWEST_STEPS or ends_s[-1] < ends_s[0] + seconds:
            self._step(size)
            ends_s.append(time.perf_counter())
        return [after - before for before, after in pairwise(ends_s)]

    def curve(self, sizes: Sequence[int], seconds: float) -> dict[int, float]:
        """Return the mean step time at each size; collective, so all ranks need the same count."""
        return {size: self.measure(size, seconds) for size in sizes}

    def communication_s(self, repeats: int = 15) -> float:
        """Return the median time of an all-reduce of this model's gradients; collective."""
        return reduce_s(sum(p.numel() for p in self._net.parameters()), repeats)

    def _step(self, size: int) -> None:
        chosen = torch.randint(len(self._data), (size,)).tolist()
        _, images, labels = default_collate([self._data[index] for index in chosen])
        loss = F.cross_entropy(self._net(images), labels)
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        self._optimizer.zero_grad()


def choose_batch(rates: Sequence[float], step_s: float, most: int) -> int:
    """Return a global batch whose balanced step takes about ``step_s`` seconds."""
    wanted = step_s * sum(rates)
    fewest = 12 * len(rates)  # one sample more or less must not change a share much
    return int(min(max(round(wanted / 8) * 8, fewest), most))


def sizes_for(rate: float, rates: Sequence[float], global_batch: int) -> list[int]:
    """Return the batch sizes at which to calibrate a worker: around its share and the equal share.

    There are always three. To measure a size is a collective call, so a worker whose share equals
    the equal share must make as many calls as the others.
    """
    share = global_batch * rate / sum(rates)
    equal = global_batch / len(rates)
    wanted = (0.6 * share, share, equal, 1.5 * share, share + 1, share + 2, share + 3)
    sizes = dict.fromkeys(max(1, round(size)) for size in wanted)
    return sorted(list(sizes)[:_SIZES])


class DemoArm:
    """A model with its own optimizer and `Stride`; every rank creates the same arms."""

    def __init__(self, policy: str, task: DemoTask, global_batch: int, trace: Path | None) -> None:
        self.policy = policy
        self.stride = Stride(global_batch, policy=policy, seed=1, trace=trace)
        self.loader = self.stride.loader(task.train)
        self.test = self.stride.loader(task.test, train=False)
        self.net = task.net()
        self.model = self.stride.watch(DistributedDataParallel(self.net))
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)
        self._ready_s = 0.0  # when the last gradient of the step was computed
        for parameter in self.net.parameters():
            parameter.register_post_accumulate_grad_hook(self._mark)  # type: ignore[no-untyped-call]

    def run(self, steps: int, *, cold: bool = False) -> Block:
        block = Block(self.policy, cold=cold)
        dist.barrier()
        while len(block.losses) < steps:
            self._some_steps(block, steps)
        block.shares = self.stride.shares
        return block

    def _mark(self, _: Tensor) -> None:
        self._ready_s = time.perf_counter()

    def accuracy(self) -> float:
        """Return the fraction of test samples that the model classifies correctly; collective."""
        self.net.eval()
        right, seen = 0, 0
        with torch.no_grad():
            for _, images, labels in self.test:
                right += int((self.net(images).argmax(1) == labels).sum())
                seen += len(labels)
        self.net.train()
        mean = self.stride.mean(right, seen)
        assert isinstance(mean, float), "a mean of numbers is a number"
        return mean

    def _some_steps(self, block: Block, steps: int) -> None:
        """Train to the end of the block or of the epoch, whichever comes first.

        The busy time of a step leaves out the time from the last gradient to the end of the
        backward pass, in which DDP waits for the other ranks.
        """
        before_s = None
        for ids, images, labels in self.loader:
            losses = F.cross_entropy(self.model(images), labels)
            self.stride.scale(losses).backward()  # type: ignore[no-untyped-call]
            waited_s = time.perf_counter() - self._ready_s
            self.optimizer.step()
            self.optimizer.zero_grad()
            block.losses.append(float(losses.detach()) * self.stride.samples)
            block.counts.append(self.stride.samples)
            block.ids.append((self.stride.epoch, ids.tolist() if self.stride.samples else []))
            now_s = time.perf_counter()
            if before_s is not None:
                block.step_s.append(now_s - before_s)
                block.work.append((self.stride.samples, now_s - before_s - waited_s))
            before_s = now_s
            if len(block.losses) == steps:
                break


class Demo:
    """One rank of the demo; all ranks call the same methods in the same order."""

    def __init__(self, plan: DemoSchedule) -> None:
        self.plan, self.rank = plan, dist.get_rank()
        self.task = load_task(plan.data)
        self.blocks: list[Block] = []
        self._news = (plan.folder / NEWS).open("a") if self.rank == 0 else None

    def run(self) -> Report:
        """Calibrate, train all arms block by block, and gather the reports of all ranks.

        ``uniform`` and ``adaptive`` train the same samples. Fixed splits train only in the rounds.
        """
        self.tell("calibrating")
        bench = Bench(self.task)
        rates = self.gathered(16 / bench.measure(16, 0.5 * self.plan.size_s))
        batch = choose_batch(rates, self.plan.step_s, len(self.task.train) // 2)
        sizes = sizes_for(rates[self.rank], rates, batch)
        bench.measure(sizes[-1], self.plan.size_s)  # the allocator's heap has to grow first
        before = bench.curve(sizes, self.plan.size_s)
        self.task = self.task.in_whole_batches(batch)
        arms = [self.arm(policy, batch) for policy in ("uniform", "adaptive")]
        uniform, adaptive = arms
        for arm in arms:
            self.block(arm, self.plan.cold_steps, cold=True)
        best = best_split(self.gathered(before), batch)
        for split in dict.fromkeys((best, self.neighbour(best, adaptive.stride.shares))):
            arms.append(self.arm("static:" + ",".join(map(str, split)), batch))
            self.block(arms[-1], _FIRST_STEPS, cold=True)
        self.rounds(arms)
        accuracy = {arm.policy: arm.accuracy() for arm in (uniform, adaptive)}
        ranks = self.gathered(RankReport(before, self.blocks, accuracy))
        changes = adaptive.stride.summary().changes
        for arm in arms:
            arm.stride.close()
        return Report(batch, len(self.task.train), changes, ranks)

    def arm(self, policy: str, batch: int) -> DemoArm:
        """Return a new arm; ``uniform`` and ``adaptive`` write a trace."""
        trace = self.plan.folder / f"{policy}.jsonl" if ":" not in policy else None
        return DemoArm(policy, self.task, batch, trace)

    def rounds(self, arms: Sequence[DemoArm]) -> None:
        """Train a block of each arm per round; the order rotates, and is reversed every other time.

        So each arm is as often before another one as after it, and a drift of the machine cancels.
        """
        for number in range(self.plan.rounds):
            first = number // 2 % len(arms)
            order = [*arms[first:], *arms[:first]]
            done = {
                arm.policy: self.block(arm, self.plan.block_steps)
                for arm in (reversed(order) if number % 2 else order)
            }
            self.tell(
                "round",
                number=number + 1,
                of=self.plan.rounds,
                step_s=[middle_mean(done[arm.policy].step_s) for arm in arms],
                shares=done["adaptive"].shares,
            )

    def block(self, arm: DemoArm, steps: int, *, cold: bool = False) -> Block:
        block = arm.run(steps, cold=cold)
        self.blocks.append(block)
        if cold:
            step_s = middle_mean(block.step_s)
            self.tell("block", policy=arm.policy, step_s=step_s, shares=block.shares)
        return block

    @staticmethod
    def neighbour(split: Shares, adaptive: Shares) -> Shares:
        """Return the last split of ``adaptive`` or, if that is ``split``, one next to it."""
        if adaptive != split or len(split) == 1:
            return adaptive
        largest, *_, smallest = sorted(range(len(split)), key=lambda rank: -split[rank])
        step = max(1, round(0.02 * sum(split)))
        moved = list(split)
        moved[largest] -= step
        moved[smallest] += step
        return tuple(moved)

    def gathered(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(values, value)
        return values

    def tell(self, what: str, **values: Any) -> None:
        if self._news is not None:
            self._news.write(json.dumps({"what": what, **values}) + "\n")
            self._news.flush()


def main() -> None:
    """Run one rank of the demo; the first argument is the file of its schedule."""
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
