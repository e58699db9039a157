"""The loss of a measured step on one rank, kept on its device until the norms are read."""

from __future__ import annotations

import torch
from torch import Tensor

from evenstride.runtime.sampler import Draw
from evenstride.runtime.squares import wide


class StepLoss:
    """Sums up the mean losses of a step's batches on this rank, each times its batch's weight.

    Nothing is read here, so nobody waits for a device.

    Args:
        device: of the norms, with which the sum is read. A loss elsewhere cannot be read with them
            without waiting, and makes the sum unknown.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._known = device, True
        self._batch: Tensor | None = None  # of the batch in hand
        self._sum: Tensor | None = None

    def add(self, loss: Tensor) -> None:
        """Add a loss of the batch in hand: a mean over it, of one element.

        What the gradients are of is the sum, if a batch has several.
        """
        if loss.device != self._device:
            self._known = False
            return
        number = loss.detach().reshape(()).to(wide(loss), copy=True)
        self._batch = number if self._batch is None else self._batch + number

    def piece_ended(self, weight: float) -> None:
        """Count the batch in hand; with weight 0 it has added nothing, and its loss neither."""
        batch, self._batch = self._batch, None
        if not weight:
            return
        if batch is None:
            self._known = False
            return
        weighed = batch * weight
        self._sum = weighed if self._sum is None else self._sum + weighed

    @property
    def total(self) -> Tensor | None:
        """The sum, 0-d and on the device; ``None`` if the loss of a batch is not known."""
        return self._sum if self._known else None


def mean_of_sum(loss: Tensor, draw: Draw) -> Tensor:
    """Return the mean over a batch of a loss that adds up to that of the global batch."""
    return loss.detach() * (draw.window / draw.samples) if draw.samples else loss
