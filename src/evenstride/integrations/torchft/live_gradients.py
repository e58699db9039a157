"""The exact gradient of the global batch: sums of weighted gradients, and when they are made.

The loss is weighted by ``n_k / N``, so the sum over the workers is the mean over all samples,
however many workers there are. torchft's own wrapper of DDP averages instead, and with Gloo it
cannot be used after a worker has died in the midst of a step (seen with torchft 0.2.0 on torch
2.13: its hook asserts, and DDP refuses every backward pass from then on). So gradients are added
up here, when the backward pass of a step's last batch ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor, nn

from evenstride.core.sampling.draw import Draw
from evenstride.errors import ConfigError, UsageError
from evenstride.runtime.engines.watched_models import WatchedModels
from evenstride.runtime.loss.batch_in_hand import BatchInHand

AddUp = Callable[[list[Tensor]], None]
"""Replaces tensors by their sums over all workers."""

_BUCKET_BYTES = 32 << 20


class LiveGradients:
    """Adds gradients up over the workers when a step's last backward pass ends.

    Args:
        watched: the models that are trained.
        batch: in hand.
        add_up: collective over the workers.
    """

    def __init__(self, watched: WatchedModels, batch: BatchInHand, add_up: AddUp) -> None:
        self._watched, self._batch, self._add_up = watched, batch, add_up

    def add_up(self, draw: Draw) -> None:
        """Replace the gradients of a step by their sums over all workers.

        Raises:
            UsageError: that has been done for this step.
        """
        if self._batch.committed:
            raise UsageError(
                f"a second backward pass has run in step {draw.step}, whose gradients "
                "had been added up over the workers; add the losses, and call backward() once "
                "per batch"
            )
        sum_gradients(self._watched.parameters, self._add_up, counts=draw.share > 0)


def sum_gradients(parameters: Iterable[nn.Parameter], add_up: AddUp, *, counts: bool) -> None:
    """Replace gradients by their sums over the workers.

    A parameter that no worker has used has no gradient afterwards either; one that some have
    used has the same on all.

    Args:
        parameters: the same on every worker, in the same order.
        add_up: collective over the workers.
        counts: whether this worker has samples in the step.

    Cost:
        Memory of one more copy of the gradients while it runs.
    """
    with torch.no_grad():
        buckets = list(_buckets(parameters))
        flats = [_packed(bucket, counts=counts) for bucket in buckets]
        add_up(flats)
        for bucket, flat in zip(buckets, flats, strict=True):
            _unpack(bucket, flat)


def _buckets(parameters: Iterable[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Yield parameters that travel together: of one type and device, and not too many bytes."""
    alike: dict[tuple[torch.dtype, torch.device], list[nn.Parameter]] = {}
    for parameter in dict.fromkeys(parameters):
        if parameter.requires_grad:
            alike.setdefault((parameter.dtype, parameter.device), []).append(parameter)
    for group in alike.values():
        bucket, held_bytes = list[nn.Parameter](), 0
        for parameter in group:
            bucket.append(parameter)
            held_bytes += parameter.numel() * parameter.element_size()
            if held_bytes >= _BUCKET_BYTES:
                yield bucket
                bucket, held_bytes = [], 0
        if bucket:
            yield bucket


def _packed(bucket: list[nn.Parameter], *, counts: bool) -> Tensor:
    """Return all gradients of a bucket in a row, and behind them whether each was used."""
    pieces = [p.new_zeros(p.numel()) if p.grad is None else p.grad.reshape(-1) for p in bucket]
    used = [float(counts and p.grad is not None) for p in bucket]
    return torch.cat([*pieces, bucket[0].new_tensor(used)])


def _unpack(bucket: list[nn.Parameter], flat: Tensor) -> None:
    used = flat[-len(bucket) :].tolist()
    start = 0
    for parameter, uses in zip(bucket, used, strict=True):
        summed = flat[start : start + parameter.numel()].view_as(parameter)
        start += parameter.numel()
        if not uses:
            parameter.grad = None
        elif parameter.grad is None:
            parameter.grad = summed.clone()
        else:
            parameter.grad.copy_(summed)


def no_weights() -> None:
    """Refuse weights.

    Raises:
        ConfigError: always.
    """
    raise ConfigError(
        "weights were asked for, and live mode counts samples only; leave scale(weight=...) out, "
        "and make the loss a mean over samples"
    )
