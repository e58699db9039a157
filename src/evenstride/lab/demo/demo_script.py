"""The training script of the demo's workers, with its task and its arms; the lab runs it limited.

The task is handwritten digits, or Fashion-MNIST, and a small convolutional net. Every rank makes
the same arms, each with a policy of its own, and trains them block by block.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
from evenstride.core.time_model.observation import median
from evenstride.lab.comparison.comparison_result import best_split
from evenstride.lab.demo.demo_schedule import NEWS, REPORT, Block, DemoSchedule, RankReport, Report
from evenstride.lab.demo.fashion_mnist import check_data, read_images
from evenstride.lab.doctor.checkup import reduce_s
from evenstride.runtime.engines.process_groups import take_down_group
from evenstride.runtime.stride import Stride

LEARNING_RATE = 0.02
MOMENTUM = 0.9
_FEWEST_STEPS = 3
_SIZES = 3  # of batches at which a worker is calibrated


@dataclass(frozen=True, slots=True)
class DemoTask:
    """What is learned: a data set, and how to make the net for it."""

    name: str  # for people
    train: TensorDataset  # (sample id, input, label) per sample
    test: TensorDataset  # the same, held out
    # Makes one, always the same; what it returns goes into a cross-entropy.
    net: Callable[[], nn.Module]


def load_task(folder: Path | None) -> DemoTask:
    """Return scikit-learn's digits, or Fashion-MNIST from its four files in ``folder``."""
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
    """Return a net of three convolutions, the same for the same seed.

    Group norm rather than batch norm: it does not mix samples, so that unequal batches change
    nothing. Wide for such small images, so that a step is long against a limit's period. Larger
    images cost no more with a larger ``stride`` of the first layer; ``width`` counts the channels
    of the last ones.
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
    """Trains a model of its own, alone, on batches of any size.

    With a group of this rank only, ``alone``, it also does what DDP does besides averaging.
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
        """Return the mean time of a step of ``size`` samples; all ranks measure together.

        The mean, because a limited worker's steps come in whole periods of its limit.
        """
        return mean(self.steps_s(size, seconds))

    def steps_s(self, size: int, seconds: float) -> list[float]:
        """Return the times of some steps of ``size`` samples; all ranks measure together.

        Every rank works for the whole time, so that all are loaded while any is measured.
        """
        dist.barrier()
        self._step(size)
        ends_s = [time.perf_counter()]
        while len(ends_s) <= _FEWEST_STEPS or ends_s[-1] < ends_s[0] + seconds:
            self._step(size)
            ends_s.append(time.perf_counter())
        return [after - before for before, after in pairwise(ends_s)]

    def curve(self, sizes: Sequence[int], seconds: float) -> dict[int, float]:
        """Return the mean step time at each size; collective, so all ranks need as many sizes."""
        return {size: self.measure(size, seconds) for size in sizes}

    def communication_s(self, repeats: int = 15) -> float:
        """Return the median time of averaging this model's gradients; collective."""
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
    fewest = 12 * len(rates)  # so that a share is not too coarse
    return int(min(max(round(wanted / 8) * 8, fewest), most))


def sizes_for(rate: float, rates: Sequence[float], global_batch: int) -> list[int]:
    """Return the batch sizes to calibrate a worker at: around its share, and the equal one.

    Always three, because measuring one is collective: a worker whose share is the equal one must
    measure as often as the others, who would wait for it for ever.
    """
    share = global_batch * rate / sum(rates)
    equal = global_batch / len(rates)
    wanted = (0.6 * share, share, equal, 1.5 * share, share + 1, share + 2, share + 3)
    sizes = dict.fromkeys(max(1, round(size)) for size in wanted)
    return sorted(list(sizes)[:_SIZES])


class DemoArm:
    """A model, an optimizer and a `Stride` of its own; every rank makes the same arms."""

    def __init__(self, policy: str, task: DemoTask, global_batch: int, trace: Path | None) -> None:
        self.policy = policy
        self.stride = Stride(global_batch, policy=policy, seed=1, trace=trace)
        self.loader = self.stride.loader(task.train)
        self.test = self.stride.loader(task.test, train=False)
        self.net = task.net()
        self.model = self.stride.watch(DistributedDataParallel(self.net))
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)

    def run(self, steps: int) -> Block:
        block = Block(self.policy)
        dist.barrier()
        while len(block.losses) < steps:
            self._some_steps(block, steps)
        block.shares = self.stride.shares
        return block

    def accuracy(self) -> float:
        """Return the part of the test samples that the model gets right; collective."""
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
        """Train to the end of the block or of the epoch, whichever comes first."""
        before_s = None
        for ids, images, labels in self.loader:
            losses = F.cross_entropy(self.model(images), labels)
            self.stride.scale(losses).backward()  # type: ignore[no-untyped-call]
            self.optimizer.step()
            self.optimizer.zero_grad()
            block.losses.append(float(losses.detach()) * self.stride.samples)
            block.counts.append(self.stride.samples)
            block.ids.append((self.stride.epoch, ids.tolist() if self.stride.samples else []))
            now_s = time.perf_counter()
            if before_s is not None:
                block.step_s.append(now_s - before_s)
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
