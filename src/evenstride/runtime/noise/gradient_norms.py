"""Squared norms of gradients, made and read without ever waiting for a device.

They stay tensors until the device has come to them. Reading one at once (``item()``) would hold up
the training thread until everything queued so far is done.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

# On a CPU, numbers whose squares are added up in the gradient's own precision; then the sums are in
# double precision. That is thirty times as fast as to convert ten million numbers, and the error is
# that of a sum of so many: a part of 1e-9, where the whole sum in single precision is off by 7e-4.
_ROW = 1024
_MANY = 64 * _ROW  # with fewer numbers there is nothing to gain


def norm(gradient: Tensor) -> Tensor:
    """Return the norm of a gradient: a number in double precision, on its device.

    What is looked for is the difference of two such norms, which may be a small part of them. So
    sums of millions of squares in single precision will not do; in half precision they overflow.
    """
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
    """Return the squared norm of what consists of parts with these norms; 0-d.

    Args:
        norms: of the parts, 0-d and on one device, at least one.
    """
    return torch.stack(list(norms)).square().sum()


def square(gradients: Sequence[Tensor]) -> Tensor:
    """Return the squared norm of several gradients together; 0-d, at least one on one device."""
    if gradients[0].device.type == "cpu":
        return square_of([norm(gradient) for gradient in gradients])
    real = [_real(gradient) for gradient in gradients]
    return square_of(torch._foreach_norm(real, 2.0, wide(real[0])))


def _real(gradient: Tensor) -> Tensor:
    """Return the same numbers as real ones, and out of any graph."""
    gradient = gradient.detach()
    return torch.view_as_real(gradient) if gradient.is_complex() else gradient


def wide(tensor: Tensor) -> torch.dtype:
    """Return the widest type of real numbers that a tensor's device has."""
    return torch.float32 if tensor.device.type == "mps" else torch.float64  # it has no other


class Reading:
    """Some numbers on their way from a device to this program.

    Args:
        numbers: 1-d. On a CUDA device a copy is queued and marked, nothing is waited for; other
            devices, which the program waits for in any case, are read when `values` is called.
    """

    def __init__(self, numbers: Tensor) -> None:
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
