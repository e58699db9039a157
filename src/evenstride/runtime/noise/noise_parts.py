"""The parts of a step whose gradients are compared: ranks, or one process's micro-batches.

Losses are weighted, so a part adds ``c w g`` to the gradients: ``g`` is the mean gradient over the
part, ``w`` its weight, and ``c`` the same for all parts of a step. Both classes return the sum of
``|c w g|^2 / w`` over their parts. They `begin` a measured step, get each batch's end (with weight
0 if it added no gradient), and `end` the step, or `drop` it at any time.

Norms and the loss of a measured step stay tensors until the device has computed them. An immediate
``item()`` would block the training thread until all queued work is done.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from evenstride.runtime.timing.device_timer import Mark, marks_on, untimed

# On a CPU, the squares of this many numbers are summed in the gradient's own precision, and these
# sums in double precision. For ten million numbers it is thirty times as fast as a conversion. Its
# relative error is 1e-9; summing all in single precision has an error of 7e-4.
_ROW = 1024
_MANY = 64 * _ROW  # below this there is no gain


def norm(gradient: Tensor) -> Tensor:
    """Return the norm of a gradient, in double precision, on its device."""
    # The result is used in a difference of norms, which may be small compared with the norms. So
    # sums of millions of squares in single precision are too inexact; in half precision they
    # overflow.
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
    """Return the squared norm of the concatenation of parts with these 0-d norms on one device."""
    return torch.stack(list(norms)).square().sum()


def square(gradients: Sequence[Tensor]) -> Tensor:
    """Return the squared norm of one or more gradients together; 0-d, on their common device."""
    if gradients[0].device.type == "cpu":
        return square_of([norm(gradient) for gradient in gradients])
    real = [_real(gradient) for gradient in gradients]
    return square_of(torch._foreach_norm(real, 2.0, wide(real[0])))


def _real(gradient: Tensor) -> Tensor:
    gradient = gradient.detach()
    return torch.view_as_real(gradient) if gradient.is_complex() else gradient


def wide(tensor: Tensor) -> torch.dtype:
    """Return the widest real dtype that a tensor's device supports."""
    return torch.float32 if tensor.device.type == "mps" else torch.float64


class Reading:
    """An asynchronous copy of a 1-d tensor from a device to the host."""

    def __init__(self, numbers: Tensor) -> None:
        self._numbers = numbers
        self._mark: Mark | None = None
        if numbers.device.type != "cpu" and not untimed(numbers.device):
            # Pinned, or the copy would block.
            self._numbers = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            self._numbers.copy_(numbers, non_blocking=True)
            self._mark = marks_on(numbers.device).record()

    @property
    def there(self) -> bool:
        """Whether the numbers have arrived; never waits."""
        return self._mark is None or self._mark.query()

    def values(self) -> list[float]:
        """Return the numbers; valid only after `there` is true."""
        values: list[float] = self._numbers.tolist()
        return values


class StepLoss:
    """The sum of the mean losses of a step's batches on this rank, weighted by the batches."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._known = device, True
        self._batch: Tensor | None = None  # of the current batch
        self._sum: Tensor | None = None

    def add(self, loss: Tensor) -> None:
        """Add a loss of the current batch: a mean over it, with one element."""
        # A loss on another device than the norms cannot be read with them without waiting.
        if loss.device != self._device:
            self._known = False
            return
        number = loss.detach().reshape(()).to(wide(loss), copy=True)
        # If a batch has several losses, the gradients are those of their sum.
        self._batch = number if self._batch is None else self._batch + number

    def piece_ended(self, weight: float) -> None:
        """Count the current batch; with weight 0, ignore its loss."""
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
        """The sum as a 0-d tensor on the device; ``None`` if a batch's loss is unknown."""
        return self._sum if self._known else None


class PartNorms(NamedTuple):
    """The sums over the parts of a step on this rank."""

    parts: int
    weight: float  # of all parts
    over_weight: Tensor  # sum of squared norms divided by weights; 0-d, on their device


class OwnGradient:
    """One part: the whole gradient of this rank, before the engine averages it.

    A hook runs when a parameter's gradient has been accumulated, inside the accumulating node. DDP
    uses that node's own hooks, which run later, and only then divides and sends. The user's hooks
    run before this one, so both DDP and this class see their result.
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
            # The last micro-batch that reaches a parameter leaves its whole gradient.
            self._norms[parameter] = norm(gradient)
        self._spent(time.perf_counter() - started_s)


class SentGradient:
    """One part: the gradient that this rank sends to parameter servers, which return the mean's.

    What the script does to the gradient before it is sent, such as clipping, is in both norms.
    """

    def __init__(self, spent: Callable[[float], None]) -> None:
        self._spent, self._weight, self._parameters = spent, 0.0, list[nn.Parameter]()
        self._own: Tensor | None = None  # squared norm of the sent gradient
        self.mean: float | None = None  # that of the ranks' mean; ``None`` if it is not known

    def begin(self, parameters: Sequence[nn.Parameter]) -> None:
        self.drop()
        self._parameters = list(parameters)

    def piece_ended(self, weight: float, *, last: bool) -> None:
        del last
        self._weight += weight

    def send(self, gradients: Sequence[Tensor]) -> bool:
        """Take the norm of the gradients that are about to be sent, if this step is measured.

        Return whether it is. A second optimizer sends another part of the gradient later, when the
        step is over, so a part that is not whole is not measured.
        """
        given = sum(parameter.grad is not None for parameter in self._parameters)
        if not gradients or len(gradients) != given or any(g.is_sparse for g in gradients):
            return False
        started_s = time.perf_counter()
        self._own = square(gradients)
        self._spent(time.perf_counter() - started_s)
        return True

    def averaged(self, squared: float) -> None:
        """Note the squared norm of the mean over the ranks."""
        self.mean = squared

    def end(self) -> PartNorms | None:
        own, weight = self._own, self._weight
        self._parameters, self._own, self._weight = [], None, 0.0
        return PartNorms(1, weight, own / weight) if own is not None and weight else None

    def drop(self) -> None:
        self._parameters, self._own, self._weight, self.mean = [], None, 0.0, None


class MicroBatches:
    """One part for each micro-batch of one process: its addition to the gradients."""

    def __init__(self) -> None:
        self._parameters: Sequence[nn.Parameter] = ()
        self._before: dict[nn.Parameter, Tensor] = {}
        self._found: list[tuple[float, Tensor]] = []

    def begin(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = parameters

    @torch.no_grad()
    def piece_ended(self, weight: float, *, last: bool) -> None:
        """Take the change of the gradients as the batch's own gradient."""
        now = {p: p.grad for p in self._parameters if p.grad is not None and not p.grad.is_sparse}
        if not weight or not now:
            return
        seen = [p for p in now if p in self._before]
        fresh = [gradient for p, gradient in now.items() if p not in self._before]
        added, latest = [self._before[p] for p in seen], [now[p] for p in seen]
        if seen:
            # The negative difference reuses the copy's memory; a norm ignores the sign.
            torch._foreach_sub_(added, latest)
        self._found.append((weight, square([*added, *fresh])))
        if last:
            return
        if seen:
            torch._foreach_copy_(added, latest)
        # A measured step needs memory for a copy of the gradients.
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
