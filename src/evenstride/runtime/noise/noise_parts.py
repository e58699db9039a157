"""The parts of a step whose gradients are compared: the ranks' own, or one process's micro-batches.

Their losses are weighed, so what a part adds to the gradients is ``c w g``: ``g`` is the mean
gradient over the part, ``w`` its weight, and ``c`` the same for all parts of a step. Both kinds
return the sum of ``|c w g|^2 / w`` over their parts. They `begin` a measured step, hear of each
batch's end (with weight 0 it has added nothing), and `end` the step, or `drop` it at any time.

Norms, and the loss of a measured step, stay tensors until their device has come to them. Reading
one at once (``item()``) would hold up the training thread until everything queued so far is done.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

# On a CPU, numbers whose squares are added up in the gradient's own precision; then the sums are in
# double precision. That is thirty times as fast as to convert ten million numbers, and the error is
# that of a sum of so many: a part of 1e-9, where the whole sum in single precision is off by 7e-4.
_ROW = 1024
_MANY = 64 * _ROW  # with fewer numbers there is nothing to gain


def norm(gradient: Tensor) -> Tensor:
    """Return the norm of a gradient: a number in double precision, on its device."""
    # What is looked for is the difference of two such norms, which may be a small part of them. So
    # sums of millions of squares in single precision will not do; in half precision they overflow.
    gradient = _real(gradient)
    if gradient.device.type != "cpu" or gradient.numel() < _MANY:
        whole: Tensor = torch.linalg.vector_norm(gradient, dtype=wide(gradient))
        return whole
    flat = gradient.reshape(-1)
    even = len(flat) - len(flat) % _ROW
    single = torch.promote_types(flat.dtype, torch.float32)
    rows = torch.linalg.vector_norm(flat[:even].view(-1, _ROW), dim=1, dtype=single)
    rest = torch.linalg.vector_norm(flat[even:], dtype=torch.float64)
    return torch.hypot(torch.linalg.vector_norm(rows, dtype=torch.float64), rest)


def square_of(norms: Sequence[Tensor]) -> Tensor:
    """Return the squared norm of what consists of parts with these norms, 0-d and on one device."""
    return torch.stack(list(norms)).square().sum()


def square(gradients: Sequence[Tensor]) -> Tensor:
    """Return the squared norm of several gradients together; 0-d, at least one on one device."""
    if gradients[0].device.type == "cpu":
        return square_of([norm(gradient) for gradient in gradients])
    real = [_real(gradient) for gradient in gradients]
    return square_of(torch._foreach_norm(real, 2.0, wide(real[0])))


def _real(gradient: Tensor) -> Tensor:
    gradient = gradient.detach()
    return torch.view_as_real(gradient) if gradient.is_complex() else gradient


def wide(tensor: Tensor) -> torch.dtype:
    """Return the widest type of real numbers that a tensor's device has."""
    return torch.float32 if tensor.device.type == "mps" else torch.float64  # it has no other


class Reading:
    """Some numbers, 1-d, on their way from a device to this program."""

    def __init__(self, numbers: Tensor) -> None:
        # Other devices than CUDA's are waited for in any case, when the values are read.
        self._numbers, self._mark = numbers, None
        if numbers.is_cuda:
            # Pinned, or the copy would be waited for.
            self._numbers = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            self._numbers.copy_(numbers, non_blocking=True)
            self._mark = torch.cuda.Event()  # type: ignore[no-untyped-call]
            # By name: the callbacks of a backward pass run on a thread of their own.
            self._mark.record(torch.cuda.current_stream(numbers.device))

    @property
    def there(self) -> bool:
        """Whether the numbers have come; never waits."""
        return self._mark is None or bool(self._mark.query())  # type: ignore[no-untyped-call]

    def values(self) -> list[float]:
        """Return them; right only once they are `there`."""
        values: list[float] = self._numbers.tolist()
        return values


class StepLoss:
    """Sums up the mean losses of a step's batches on this rank, each times its batch's weight."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._known = device, True
        self._batch: Tensor | None = None  # of the batch in hand
        self._sum: Tensor | None = None

    def add(self, loss: Tensor) -> None:
        """Add a loss of the batch in hand: a mean over it, of one element."""
        # A loss elsewhere than the norms cannot be read with them without waiting.
        if loss.device != self._device:
            self._known = False
            return
        number = loss.detach().reshape(()).to(wide(loss), copy=True)
        # The gradients are of the sum, if a batch has several losses.
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


class PartNorms(NamedTuple):
    """What the parts of a step on this rank come to."""

    parts: int
    weight: float  # of all of them
    over_weight: Tensor  # sum of their squared norms, each over its weight; 0-d, on their device


class OwnGradient:
    """One part: all of this rank's gradient, before an engine averages it.

    A hook runs as soon as a parameter's gradient is accumulated, inside the node that does it. DDP
    is told by that node's own hooks, which run after it, and only then divides and sends. Hooks of
    the user are called before these, so that both see what is sent.
    """

    def __init__(self, spent: Callable[[float], None]) -> None:
        self._spent, self._weight = spent, 0.0
        self._norms: dict[Tensor, Tensor] = {}
        self._hooks: list[RemovableHandle] = []

    def begin(self, parameters: Sequence[nn.Parameter]) -> None:
        self._weight = 0.0
        self._hooks += (
            parameter.register_post_accumulate_grad_hook(self._note)  # type: ignore[no-untyped-call]
            for parameter in parameters
            if parameter.requires_grad
        )

    def piece_ended(self, weight: float, *, last: bool) -> None:
        del last
        self._weight += weight

    def end(self) -> PartNorms | None:
        norms, weight = list(self._norms.values()), self._weight
        self.drop()
        return PartNorms(1, weight, square_of(norms) / weight) if norms and weight else None

    def drop(self) -> None:
        while self._hooks:
            self._hooks.pop().remove()
        self._norms.clear()

    def _note(self, parameter: Tensor) -> None:
        started_s = time.perf_counter()
        gradient = parameter.grad
        if gradient is not None and not gradient.is_sparse:
            # Of micro-batches the last one that reaches a parameter leaves its whole gradient.
            self._norms[parameter] = norm(gradient)
        self._spent(time.perf_counter() - started_s)


class MicroBatches:
    """A part for each micro-batch of one process: what it has added to the gradients."""

    def __init__(self) -> None:
        self._parameters: Sequence[nn.Parameter] = ()
        self._before: dict[nn.Parameter, Tensor] = {}
        self._found: list[tuple[float, Tensor]] = []

    def begin(self, parameters: Sequence[nn.Parameter]) -> None:
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
        # Takes memory for a copy of the gradients while a step is measured.
        for parameter, gradient in now.items():
            if parameter not in self._before:
                self._before[parameter] = gradient.detach().clone()

    def end(self) -> PartNorms | None:
        found = self._found
        weight = sum(weight for weight, _ in found)
        over = [square / weight for weight, square in found]
        self.drop()
        return PartNorms(len(over), weight, torch.stack(over).sum()) if over else None

    def drop(self) -> None:
        self._before, self._found, self._parameters = {}, [], ()
