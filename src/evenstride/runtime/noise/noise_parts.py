"""The parts of a step whose gradients are compared: the ranks' own, or one process's micro-batches.

Their losses are weighed, so what a part adds to the gradients is ``c w g``: ``g`` is the mean
gradient over the part, ``w`` its weight, and ``c`` the same for all parts of a step. Both kinds
return the sum of ``|c w g|^2 / w`` over their parts.

The loss of a measured step stays on its device until the norms are read.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from evenstride.core.sampling.draw import Draw
from evenstride.runtime.noise.gradient_norms import norm, square, square_of, wide


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


class PartNorms(NamedTuple):
    """What the parts of a step on this rank come to.

    Args:
        parts: how many.
        weight: of all of them.
        over_weight: sum of their squared norms, each over its weight; 0-d, on their device.
    """

    parts: int
    weight: float
    over_weight: Tensor


class Parts(Protocol):
    """A way to cut a step into parts, one measured step at a time."""

    def begin(self, parameters: Sequence[nn.Parameter]) -> None:
        """Begin a step; nothing of it is in the parameters' gradients."""
        ...

    def piece_ended(self, weight: float, *, last: bool) -> None:
        """Note that a batch's gradients are there; with weight 0 it has added nothing."""
        ...

    def end(self) -> PartNorms | None:
        """Return what was found; nothing if no part weighs anything or has a gradient."""
        ...

    def drop(self) -> None:
        """Forget the step, and hold nothing any longer. May be called at any time."""
        ...


class OwnGradient(Parts):
    """One part: all of this rank's gradient, before an engine averages it.

    A hook runs as soon as a parameter's gradient is accumulated, inside the node that does it. DDP
    is told by that node's own hooks, which run after it, and only then divides and sends. Of
    micro-batches the last one that reaches a parameter leaves its whole gradient. Hooks of the user
    are called before these, so that both see what is sent.

    Args:
        spent: told the seconds that each hook takes.
    """

    def __init__(self, spent: Callable[[float], None]) -> None:
        self._spent, self._weight = spent, 0.0
        self._norms: dict[Tensor, Tensor] = {}
        self._hooks: list[RemovableHandle] = []

    def begin(self, parameters: Sequence[nn.Parameter]) -> None:
        """Listen to the parameters until `end` or `drop`."""
        self._weight = 0.0
        self._hooks += (
            parameter.register_post_accumulate_grad_hook(self._note)  # type: ignore[no-untyped-call]
            for parameter in parameters
            if parameter.requires_grad
        )

    def piece_ended(self, weight: float, *, last: bool) -> None:
        """Count a batch's weight."""
        del last
        self._weight += weight

    def end(self) -> PartNorms | None:
        """Return the squared norm of what this rank would send."""
        norms, weight = list(self._norms.values()), self._weight
        self.drop()
        return PartNorms(1, weight, square_of(norms) / weight) if norms and weight else None

    def drop(self) -> None:
        """Listen no longer."""
        while self._hooks:
            self._hooks.pop().remove()
        self._norms.clear()

    def _note(self, parameter: Tensor) -> None:
        started_s = time.perf_counter()
        gradient = parameter.grad
        if gradient is not None and not gradient.is_sparse:
            self._norms[parameter] = norm(gradient)
        self._spent(time.perf_counter() - started_s)


class MicroBatches(Parts):
    """A part for each micro-batch of one process: what it has added to the gradients.

    Takes memory for a copy of the gradients while a step is measured.
    """

    def __init__(self) -> None:
        self._parameters: Sequence[nn.Parameter] = ()
        self._before: dict[nn.Parameter, Tensor] = {}
        self._found: list[tuple[float, Tensor]] = []

    def begin(self, parameters: Sequence[nn.Parameter]) -> None:
        """Look at these parameters until `end` or `drop`."""
        self._parameters = parameters

    @torch.no_grad()
    def piece_ended(self, weight: float, *, last: bool) -> None:
        """Take what the gradients are now, less what they were before, as the batch's own."""
        now = {p: p.grad for p in self._parameters if p.grad is not None and not p.grad.is_sparse}
        if not weight or not now:
            return
        seen = [p for p in now if p in self._before]
        fresh = [gradient for p, gradient in now.items() if p not in self._before]
        added, latest = [self._before[p] for p in seen], [now[p] for p in seen]
        if seen:
            # The other way round, to use the copy's memory: a norm does not see the sign.
            torch._foreach_sub_(added, latest)
        self._found.append((weight, square([*added, *fresh])))
        if last:
            return
        if seen:
            torch._foreach_copy_(added, latest)
        for parameter, gradient in now.items():
            if parameter not in self._before:
                self._before[parameter] = gradient.detach().clone()

    def end(self) -> PartNorms | None:
        """Return the sum over the micro-batches."""
        found = self._found
        weight = sum(weight for weight, _ in found)
        over = [square / weight for weight, square in found]
        self.drop()
        return PartNorms(len(over), weight, torch.stack(over).sum()) if over else None

    def drop(self) -> None:
        """Free the copy."""
        self._before, self._found, self._parameters = {}, [], ()
