"""Weighted sums of many tensors over the ranks, in few collectives.

Tensors of one kind and device are sent as one flat tensor, up to some tens of megabytes. An
all-reduce gives every rank the same bytes, so what is made of them is the same everywhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

TensorT = TypeVar("TensorT", bound=Tensor)

# Enough for a collective to run at full speed, little beside a model.
BUCKET_BYTES = 2**25


def summed(
    tensors: Iterable[TensorT], weight: float, group: dist.ProcessGroup | None
) -> Iterator[tuple[TensorT, Tensor]]:
    """Yield each tensor with the sum over ranks of ``weight`` times theirs; collective.

    Args:
        tensors: floating-point or complex, alike in number, shape and kind on all ranks.
        weight: of this rank. With 0, whatever its tensors hold adds exact zeros.
        group: of the ranks.

    Returns:
        Pairs of a tensor and its sum, of the same shape; sums of 16 bits and less are float32.

    Cost:
        A copy of the tensors and one all-reduce per `BUCKET_BYTES`.
    """
    for bucket in buckets(tensors):
        yield from Sum(bucket, weight, group).arrive()


class Sum(Generic[TensorT]):
    """The weighted sum of one bucket over the ranks, on its way; collective to make.

    Args:
        bucket: as `summed` takes them, of one kind and device.
        weight: of this rank.
        group: of the ranks.
    """

    def __init__(
        self, bucket: Sequence[TensorT], weight: float, group: dist.ProcessGroup | None
    ) -> None:
        self._bucket, self._flat = bucket, _flat(bucket, weight)
        self._work = dist.all_reduce(self._flat, group=group, async_op=True)

    def arrive(self) -> Iterator[tuple[TensorT, Tensor]]:
        """Wait for it, and yield each tensor with its sum."""
        assert self._work is not None, "every rank is in the group"
        self._work.wait()
        start = 0
        for tensor in self._bucket:
            real = _real(tensor)
            part = self._flat[start : start + real.numel()].view(real.shape)
            start += real.numel()
            yield tensor, torch.view_as_complex(part) if tensor.is_complex() else part


def buckets(tensors: Iterable[TensorT], most_bytes: int = BUCKET_BYTES) -> list[list[TensorT]]:
    """Return the tensors in buckets of one kind and device, each of at least one tensor.

    Args:
        tensors: in an order that is the same on all ranks.
        most_bytes: of a bucket, unless a single tensor is larger.
    """
    full, last = list[list[TensorT]](), dict[object, list[TensorT]]()
    for tensor in tensors:
        kind = tensor.dtype, tensor.device
        size_bytes = sum(map(_size_bytes, last.get(kind, ()))) + _size_bytes(tensor)
        if kind not in last or size_bytes > most_bytes:
            last[kind] = []
            full.append(last[kind])
        last[kind].append(tensor)
    return full


def gathered(mine: Sequence[int], group: dist.ProcessGroup | None) -> list[list[int]]:
    """Return every rank's numbers, in rank order; collective.

    Args:
        mine: of this rank; as many on all ranks.
        group: of the ranks, serving the CPU.
    """
    own = torch.tensor(mine, dtype=torch.int64)
    everyone = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyone, own, group=group)
    return [numbers.tolist() for numbers in everyone]


def anywhere(flags: Sequence[bool], group: dist.ProcessGroup | None) -> list[bool]:
    """Return for each flag whether it is set on any rank; collective, over a group of the CPU."""
    told = torch.tensor(flags, dtype=torch.uint8)
    dist.all_reduce(told, dist.ReduceOp.MAX, group=group)
    return [bool(flag) for flag in told.tolist()]


def sums_as(dtype: torch.dtype) -> torch.dtype:
    """Return the kind that sums of a kind are made in: 16 bits would round too much."""
    return torch.float32 if dtype.itemsize < 4 else dtype


def _real(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _size_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _flat(bucket: Sequence[Tensor], weight: float) -> Tensor:
    reals = [_real(tensor) for tensor in bucket]
    dtype, device = sums_as(reals[0].dtype), reals[0].device
    if not weight:  # a product with 0 would let through what is not finite
        return torch.zeros(sum(real.numel() for real in reals), dtype=dtype, device=device)
    return torch.cat([real.reshape(-1).to(dtype) for real in reals]).mul_(weight)
