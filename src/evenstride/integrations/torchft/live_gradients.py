"""The exact gradient of the global batch, as a sum of weighted gradients.

The loss is weighted by ``n_k / N``. So the sum over the workers is the mean over all samples, for
any number of workers. torchft's own wrapper of DDP averages instead. With Gloo it cannot be used
after a worker has failed within a step (seen with torchft 0.2.0 on torch 2.13: its hook asserts,
and DDP refuses every later backward pass). So gradients are summed here, when the backward pass of
a step's last batch ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from evenstride.core.sampling.draw import Draw
from evenstride.errors import ConfigError, UsageError
from evenstride.runtime.engines.watched_models import WatchedModels
from evenstride.runtime.loading.micro_batch_limits import MicroBatchLimits
from evenstride.runtime.loss.batch_in_hand import BatchInHand
from evenstride.runtime.loss.training_step import TrainingStep, WeightExchange
from evenstride.runtime.timing.device_timer import RankClock
from evenstride.runtime.timing.step_timer import StepTimer

AddUp = Callable[[list[Tensor]], None]
"""Replaces tensors by their sums over all workers."""

BUCKET_BYTES = 32 << 20


class LiveGradients:
    """Sums gradients over the workers when a step's last backward pass ends."""

    def __init__(self, watched: WatchedModels, batch: BatchInHand, add_up: AddUp) -> None:
        self._watched, self._batch, self._add_up = watched, batch, add_up

    def add_up(self, draw: Draw) -> None:
        """Replace the gradients of a step by their sums over all workers; once per step."""
        if self._batch.committed:
            raise UsageError(
                f"a second backward pass has run in step {draw.step}, whose gradients were already "
                "summed over the workers; add the losses, and call backward() once per batch"
            )
        sum_gradients(self._watched.parameters, self._add_up, counts=draw.share > 0)


def sum_gradients(parameters: Iterable[nn.Parameter], add_up: AddUp, *, counts: bool) -> None:
    """Replace gradients by their sums over the workers.

    A parameter that no worker has used has no gradient afterwards. One that some workers have used
    has the same gradient on all. ``parameters`` are the same on every worker, in the same order.
    ``counts`` is whether this worker has samples in the step.

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
    """Yield parameters that are sent together: of one dtype and device, up to the bucket size."""
    alike: dict[tuple[torch.dtype, torch.device], list[nn.Parameter]] = {}
    for parameter in dict.fromkeys(parameters):
        if parameter.requires_grad:
            alike.setdefault((parameter.dtype, parameter.device), []).append(parameter)
    for group in alike.values():
        bucket, held_bytes = list[nn.Parameter](), 0
        for parameter in group:
            bucket.append(parameter)
            held_bytes += parameter.numel() * parameter.element_size()
            if held_bytes >= BUCKET_BYTES:
                yield bucket
                bucket, held_bytes = [], 0
        if bucket:
            yield bucket


def _packed(bucket: list[nn.Parameter], *, counts: bool) -> Tensor:
    """Return the gradients of a bucket in one tensor, then for each whether it was used."""
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
    """Refuse weights, with a `ConfigError`."""
    raise ConfigError(
        "live mode weights batches by their number of samples only; leave scale(weight=...) out, "
        "and make the loss a mean over samples"
    )


def live_step(commit: Callable[[Draw], None], add_up: AddUp) -> TrainingStep:
    """Return the training step of a worker.

    ``commit`` is called when a step's gradients are summed. A generation brings its own queue of
    measured steps; no step is trained before the first generation.
    """
    clock, watched = RankClock(StepTimer([])), WatchedModels()
    batch = BatchInHand(watched)
    return TrainingStep(
        1,
        clock,
        watched,
        batch,
        MicroBatchLimits(),
        commit,
        WeightExchange(no_weights, clock),
        add_up=LiveGradients(watched, batch, add_up).add_up,
    )


class VotingOptimizer(Optimizer):
    """An optimizer that votes before it steps; see `LiveStride.optimizer`.

    Args:
        optimizer: The optimizer that steps.
        vote: Returns whether the step may be kept; the same for all optimizers of a step.
    """

    def __init__(self, optimizer: Optimizer, vote: Callable[[], bool]) -> None:
        # Of the base class only the type is used, which schedulers check.
        self.inner, self._vote = optimizer, vote

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Step if this worker may keep the current step, else drop its gradients.

        Raises:
            UsageError: with a closure, which would run more than one backward pass.
        """
        if closure is not None:
            raise UsageError(
                "optimizer.step() got a closure, but a step is voted on once, after its single "
                "backward pass; use an optimizer that needs no closure"
            )
        if self._vote():
            self.inner.step()
        else:
            self.inner.zero_grad()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients."""
        self.inner.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the optimizer that steps."""
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of the optimizer that steps."""
        self.inner.load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters to the optimizer that steps."""
        self.inner.add_param_group(param_group)

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The parameter groups of the optimizer that steps."""
        return self.inner.param_groups

    @property
    def state(self) -> dict[Tensor, Any]:  # type: ignore[override]
        """The state of the optimizer that steps."""
        return self.inner.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The defaults of the optimizer that steps."""
        return self.inner.defaults
