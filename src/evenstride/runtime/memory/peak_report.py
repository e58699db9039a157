"""What memory this rank's batches take, as it is told with each exchange."""

from __future__ import annotations

import torch
from torch import nn

from evenstride.core.allocation.memory_model import PeakMemory
from evenstride.runtime.loading.micro_batch_limits import MicroBatchLimits
from evenstride.runtime.loading.position import CommittedPosition
from evenstride.runtime.loss.batch_in_hand import BatchInHand
from evenstride.runtime.memory.memory_meter import MemoryMeter

# Steps until the optimizer has made its states, and a step was held beside them.
_WARM_STEPS = 2


class PeakReport:
    """Pairs the most memory held since the last exchange with the largest batch held meanwhile.

    Only where a share is held at once: micro-batches are as large as the user says. Until a model
    is watched nothing is known of its device.

    Args:
        batch: in hand.
        limits: say whether a share is cut into micro-batches.
        progress: of this rank.
        rank: this rank.
        neighbours: processes of the job on this machine, this one included.
    """

    def __init__(
        self,
        batch: BatchInHand,
        limits: MicroBatchLimits,
        progress: CommittedPosition,
        rank: int,
        neighbours: int,
    ) -> None:
        self._batch, self._limits, self._progress = batch, limits, progress
        self._rank, self._neighbours = rank, neighbours
        self._meter: MemoryMeter | None = None
        self._evaluated = False  # since the last call of `take`

    def note_evaluation(self) -> None:
        """Note that an evaluation runs, whose memory is not that of a step."""
        self._evaluated = True

    def watch(self, model: nn.Module) -> None:
        """Look at the device of a model (training thread)."""
        if self._meter is None:
            devices = (p.device for p in model.parameters())
            self._meter = MemoryMeter(next(devices, torch.device("cpu")), self._neighbours)

    def take(self) -> PeakMemory | None:
        """Return what was held since the last call, if that is known (control thread)."""
        samples = self._batch.largest()
        if self._meter is None or self._limits.micro:
            return None
        peak_bytes = self._meter.peak_bytes()  # which begins anew, whatever becomes of it
        evaluated, self._evaluated = self._evaluated, False
        if self._progress.step < _WARM_STEPS or evaluated:
            return None  # a peak of something else
        return PeakMemory(self._rank, max(samples, 1), peak_bytes, self._meter.limit_bytes)
