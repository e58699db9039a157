"""Gradients with a delay of one step: their all-reduce runs during the next step."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from evenstride.core.gradients.weighting import loss_factor
from evenstride.core.sampling.draw import Draw
from evenstride.core.sync_modes.mode_specs import RoundPosition
from evenstride.errors import ConfigError
from evenstride.runtime import usage_errors
from evenstride.runtime.synchronisation.weighted_average import Sum, TrainedState, buckets
from evenstride.runtime.timing.device_timer import RankClock


class GradientInFlight:
    """An asynchronous average of gradients over the ranks; collective to make, without waiting.

    A missing gradient counts as 0, because asking the other ranks for theirs would have to wait.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        world_size: int,
        group: dist.ProcessGroup | None,
    ) -> None:
        gradients = [_gradient(parameter) for parameter in parameters]
        pairs = zip(gradients, parameters, strict=True)
        self._owners = {id(gradient): parameter for gradient, parameter in pairs}
        self._sums = [Sum(bucket, 1 / world_size, group) for bucket in buckets(gradients)]

    def arrive(self) -> None:
        for each in self._sums:
            for gradient, mean in each.arrive():
                # Copied, because a view would keep the memory of the whole bucket alive.
                self._owners[id(gradient)].grad = mean.to(gradient.dtype, copy=True)


def _gradient(parameter: nn.Parameter) -> Tensor:
    if parameter.grad is None:
        return torch.zeros_like(parameter.detach())
    if parameter.grad.is_sparse:
        raise ConfigError(
            "a gradient is sparse, but delayed gradients must be dense; create the layer with "
            'sparse=False, or use sync="bsp"'
        )
    return parameter.grad


class DelayedTraining:
    """Applies each step's gradient in the next step, while the next gradient is all-reduced.

    The last step of an epoch, or of a run with a limit of steps, also applies its own gradient. So
    every gradient is applied once, and no all-reduce is pending between two epochs.

    Args:
        world_size: Number of ranks.
        join: Returns a process group of all ranks for this use only; collective.
        clock: Measures this rank's waiting time.
        place_of: Returns the position of a batch's step in the run.

    Source:
        After ABS-SGD, arXiv 2308.15164 (only the abstract was read): it applies the gradient of the
        previous step and hides its synchronisation. Its workers compute further micro-batches
        meanwhile, so batches follow from speeds. Here the shares are set in advance as usual.
    """

    def __init__(
        self,
        world_size: int,
        join: Callable[[], dist.ProcessGroup | None],
        clock: RankClock,
        place_of: Callable[[Draw], RoundPosition],
    ) -> None:
        self._world_size, self._clock = world_size, clock
        self._join: Callable[[], dist.ProcessGroup | None] | None = join
        self._place_of = place_of
        self._group: dist.ProcessGroup | None = None
        self._applying = False
        self._trained = TrainedState()
        self._place = RoundPosition(0, 0, 0, 0, 1)
        self._in_flight: dict[int, tuple[Optimizer, GradientInFlight]] = {}

    def factor(self, draw: Draw) -> float:
        self._place = self._place_of(draw)
        return loss_factor(self._world_size, draw.samples, draw.window)

    def watch(self, module: nn.Module) -> None:
        if self._join is not None:  # the first model
            self._group, self._join = self._join(), None
        self._trained.watch(module)

    def before_step(self, optimizer: Optimizer) -> None:
        """Start the all-reduce of this step's gradients, and wait for the previous one."""
        if self._applying:
            return
        mine = self._trained.of(optimizer)
        sent = GradientInFlight(mine, self._world_size, self._group)
        _, before = self._in_flight.pop(id(optimizer), (None, None))
        self._in_flight[id(optimizer)] = optimizer, sent
        for parameter in mine:
            parameter.grad = None  # without an earlier gradient, the optimizer does nothing
        if before is not None:
            with self._clock.waiting():
                before.arrive()

    def after_step(self, optimizer: Optimizer) -> None:
        """At the end of an epoch, also apply the step's own gradient."""
        if self._applying:
            return
        self._clock.timer.gradients_ready()  # the optimizer's step was this rank's own work
        if self._place.ends_epoch:
            self._apply(optimizer)

    def bring_home(self) -> None:
        """Apply the pending gradients, so that the weights are the complete state; collective."""
        for optimizer, _ in list(self._in_flight.values()):
            self._apply(optimizer)

    def close(self, *, in_order: bool) -> None:
        """Release the process group. Idempotent.

        After a run without errors (``in_order``), warn if a gradient was never applied.
        """
        if in_order and self._in_flight:
            usage_errors.tell_of_late_gradient()
        self._join = self._group = None
        self._in_flight.clear()

    def _apply(self, optimizer: Optimizer) -> None:
        _, sent = self._in_flight.pop(id(optimizer))
        with self._clock.waiting():
            sent.arrive()
        # torch calls `before_step` and `after_step` for this step as well.
        self._applying = True
        try:
            optimizer.step()
        finally:
            self._applying = False
        for parameter in self._trained.of(optimizer):
            parameter.grad = None
