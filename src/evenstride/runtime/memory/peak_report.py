"""What memory this rank's batches take, as it is told with each exchange."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from evenstride.core.allocation.memory_model import PeakMemory
from evenstride.runtime.loss.loss_scaling import LossScaling
from evenstride.runtime.memory.memory_meter import MemoryMeter

# Steps until the optimizer has made its states, and a step was held beside them.
_WARM_STEPS = 2


class PeakReport:
    """Pairs the most memory held since the last exchange with the largest batch held meanwhile.

    Only where a share is held at once: micro-batches are as large as the user says. Until a model
    is watched nothing is known of its device.

    Args:
        scaling: has the batch in hand.
        rank: of this process.
        neighbours: processes of the job on this machine, this one included.
        steps: tells how many steps this process has committed.
    """

    def __init__(
        self, scaling: LossScaling, rank: int, neighbours: int, steps: Callable[[], int]
    ) -> None:
        self._scaling, self._rank, self._neighbours = scaling, rank, neighbours
        self._steps = steps
        self._meter: MemoryMeter | None = None

    def watch(self, model: nn.Module) -> None:
        """Look at the device of a model (training thread)."""
        if self._meter is None:
            devices = (p.device for p in model.parameters())
            self._meter = MemoryMeter(next(devices, torch.device("cpu")), self._neighbours)

    def take(self) -> PeakMemory | None:
        """Return what was held since the last call, if that is known (control thread)."""
        samples = self._scaling.largest()
        if self._meter is None or self._scaling.micro:
            return None
        peak_bytes = self._meter.peak_bytes()  # which begins anew, whatever becomes of it
        evaluated = self._scaling.take_evaluated()
        if self._steps() < _WARM_STEPS or evaluated:
            return None  # a peak of something else
        return PeakMemory(self._rank, max(samples, 1), peak_bytes, self._meter.limit_bytes)
