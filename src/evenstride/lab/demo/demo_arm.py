"""One way of splitting the batch, training its own copy of the model, block by block."""

from __future__ import annotations

import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

from evenstride.lab.demo.demo_schedule import Block
from evenstride.lab.demo.demo_task import LEARNING_RATE, MOMENTUM, DemoTask
from evenstride.runtime.stride import Stride


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
