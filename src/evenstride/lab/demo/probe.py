"""What this machine's workers can do: their curves, measured without synchronisation."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils.data import default_collate

from evenstride.lab.demo.arm import LEARNING_RATE, MOMENTUM
from evenstride.lab.demo.task import Task, small_net
from evenstride.lab.links import reduce_s

_FEWEST_STEPS = 3


class Bench:
    """Trains a model of its own, alone, on batches of any size."""

    def __init__(self, task: Task) -> None:
        self._data = task.train
        self._net = small_net(task.stride)
        self._optimizer = torch.optim.SGD(
            self._net.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM
        )

    def measure(self, size: int, seconds: float) -> float:
        """Return the mean time of a step of ``size`` samples; all ranks measure together.

        Every rank works for the whole time, so that all are loaded while any is measured. The
        mean, because a limited worker's steps come in whole periods of its limit.
        """
        dist.barrier()
        self._step(size)
        started_s, steps = time.perf_counter(), 0
        while steps < _FEWEST_STEPS or time.perf_counter() < started_s + seconds:
            self._step(size)
            steps += 1
        return (time.perf_counter() - started_s) / steps

    def curve(self, sizes: Sequence[int], seconds: float) -> dict[int, float]:
        """Return the mean step time at each size; collective."""
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
    """Return a global batch whose balanced step takes about ``step_s`` seconds.

    Args:
        rates: samples per second of each worker.
        step_s: wanted time of a balanced step.
        most: largest batch that makes sense for the data.
    """
    wanted = step_s * sum(rates)
    fewest = 12 * len(rates)  # so that a share is not too coarse
    return int(min(max(round(wanted / 8) * 8, fewest), most))


def sizes_for(rate: float, rates: Sequence[float], global_batch: int) -> list[int]:
    """Return the batch sizes to calibrate a worker at: around its share, and the equal one."""
    share = global_batch * rate / sum(rates)
    equal = global_batch / len(rates)
    return sorted({max(1, round(size)) for size in (0.6 * share, share, equal)})
