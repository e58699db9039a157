"""The sum of all ranks' weights in a step, exchanged while the forward pass runs."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from evenstride.errors import ScaleError
from evenstride.runtime.timing.rank_clock import RankClock


class WeightExchange:
    """Sums one number per rank over a small group of its own, on the CPU.

    The sum is asked for when a step's batches are there and needed when its loss is scaled; by
    then all ranks have usually begun the step. What is left to wait is not counted as work.

    Args:
        join: returns a Gloo group of the same ranks, ``None`` with one process; collective.
        clock: of this rank's steps.
    """

    def __init__(self, join: Callable[[], dist.ProcessGroup | None], clock: RankClock) -> None:
        self._join, self._clock = join, clock
        self._group: dist.ProcessGroup | None = None
        self._opened = False
        self._sum = torch.zeros(1, dtype=torch.float64)
        self._work: dist.Work | None = None

    def open(self) -> None:
        """Make the group, unless there is one: few runs need it; collective the first time."""
        if not self._opened:
            self._group, self._opened = self._join(), True

    def close(self) -> None:
        """Let go of the process group; see `Channel.close`."""
        self._group, self._work = None, None

    def start(self, weight: float) -> None:
        """Begin to sum; every rank must call it once per step."""
        self._sum = torch.tensor([checked(weight)], dtype=torch.float64)
        if self._group is not None:
            work = dist.all_reduce(self._sum, group=self._group, async_op=True)
            assert work is not None, "this rank is in the group"
            self._work = work

    def total(self) -> float:
        """Return the sum that `start` began; may be called again."""
        if self._work is not None:
            with self._clock.waiting():
                self._work.wait()
            self._work = None
        return float(self._sum)


def checked(weight: float | Tensor) -> float:
    """Return the weight as a float.

    Raises:
        ScaleError: it is negative or not finite.
    """
    value = float(weight)
    if not math.isfinite(value) or value < 0:
        raise ScaleError(
            f"a batch was given the weight {value}; it must be a finite number of at least 0, "
            "such as the number of tokens that are not padding"
        )
    return value
