"""Which timer measures a rank's steps: the host's, until a model works on a device of its own."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch

from evenstride.runtime.timing.device_timer import CudaMarks, DeviceTimer
from evenstride.runtime.timing.step_timer import StepTimer


class RankClock:
    """Holds the timer in use. What makes marks keeps the clock, as its timer may be replaced."""

    __slots__ = ("_sizes", "timer")

    def __init__(self, timer: StepTimer) -> None:
        self.timer = timer
        self._sizes: set[int] = set()  # of the batches that have run

    def waiting(self) -> AbstractContextManager[None]:
        """Return a context whose time counts as waiting for others, not as work."""
        return self.timer.waiting()

    def time_on(self, device: torch.device) -> None:
        """Measure steps on a model's device from now on, if that works on its own time."""
        if device.type == "cuda" and not self.timer.on_device:
            self.timer = DeviceTimer.instead_of(self.timer, CudaMarks(device))

    def handed_out(self, samples: int, *, compiled: bool) -> None:
        """Leave a step unmodelled that holds the first batch of its size, where that is slow."""
        if samples not in self._sizes:
            self._sizes.add(samples)
            # A device chooses kernels and grows its memory for a new size, and a compiled model
            # may be compiled again.
            if compiled or self.timer.on_device:
                self.timer.spoil()
