"""What this machine's workers can do: their curves, measured without synchronisation."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import pairwise
from statistics import mean

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import default_collate

from evenstride.lab.demo.demo_task import LEARNING_RATE, MOMENTUM, DemoTask
from evenstride.lab.doctor.bandwidth import reduce_s

_FEWEST_STEPS = 3
_SIZES = 3


class Bench:
    """Trains a model of its own, alone, on batches of any size.

    Args:
        task: what is trained.
        alone: a group of this rank only, to do what DDP does besides averaging, or none.
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
