"""Gradients one step late: what the others send arrives while the next step is computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from evenstride.core.rounds import Place
from evenstride.core.weighting import loss_factor
from evenstride.errors import ConfigError
from evenstride.runtime.averaging import buckets
from evenstride.runtime.sampler import Draw
from evenstride.runtime.timing import StepTimer
from evenstride.runtime.trained import Trained


@dataclass(frozen=True, slots=True)
class OnTheWay:
    """Gradients that are being added up over the ranks.

    Args:
        parts: parameters, their gradients in one row, and what adds these up.
    """

    parts: tuple[tuple[list[nn.Parameter], Tensor, dist.Work], ...]

    @classmethod
    def of(cls, parameters: Sequence[nn.Parameter], group: dist.ProcessGroup | None) -> OnTheWay:
        """Begin to add up; collective, and nobody waits.

        Without a gradient here a parameter counts as 0: to ask the others would be to wait.

        Raises:
            ConfigError: a gradient is sparse.
        """
        parts = []
        for bucket in buckets(parameters):
            flat = torch.cat([_row(parameter) for parameter in bucket])
            work = dist.all_reduce(flat, group=group, async_op=True)
            assert work is not None, "every rank is in the group"
            parts.append((bucket, flat, work))
        return cls(tuple(parts))

    def arrive(self, world_size: int) -> None:
        """Wait for all of it, and give the parameters the mean."""
        for bucket, flat, work in self.parts:
            work.wait()
            flat.div_(world_size)
            start = 0
            for parameter in bucket:
                part = flat[start : start + parameter.numel()].view_as(parameter)
                start += parameter.numel()
                parameter.grad = part.clone()


def _row(parameter: nn.Parameter) -> Tensor:
    gradient = parameter.grad
    if gradient is None:
        return torch.zeros_like(parameter.detach()).reshape(-1)
    if gradient.is_sparse:
        raise ConfigError(
            "a gradient is sparse, and gradients that come late are sent dense; make the layer "
            'with sparse=False, or use sync="bsp"'
        )
    return gradient.detach().reshape(-1)


class DelayedTraining:
    """Applies each step's gradient in the next one, while that one's is on its way.

    The last step of an epoch (or of a run, by its limit of steps) applies its own gradient as well,
    so that every gradient is applied once, and between two epochs none is on its way.

    Args:
        world_size: number of ranks.
        join: returns a process group of all ranks for nothing else; collective.
        timer: the clock of this rank's steps.
        place_of: where the step of a batch stands in the run.

    Source:
        after ABS-SGD, arXiv 2308.15164, of which the abstract was read: a gradient of the step
        before, whose synchronisation is hidden. There workers go on computing micro-batches
        meanwhile, so that batches follow from speeds; here shares are set ahead as ever.
    """

    def __init__(
        self,
        world_size: int,
        join: Callable[[], dist.ProcessGroup | None],
        timer: Callable[[], StepTimer],
        place_of: Callable[[Draw], Place],
    ) -> None:
        self._world_size, self._join, self._timer = world_size, join, timer
        self._place_of = place_of
        self._group: dist.ProcessGroup | None = None
        self._joined = self._applying = False
        self._trained = Trained()
        self._place = Place(0, 0, 0, 0, 1)
        self._on_the_way: dict[int, tuple[Optimizer, OnTheWay]] = {}

    def factor(self, draw: Draw) -> float:
        """Return what makes the mean over workers the mean over samples."""
        self._place = self._place_of(draw)
        return loss_factor(self._world_size, draw.samples, draw.window)

    def watch(self, module: nn.Module) -> None:
        """Know a module's parameters; collective."""
        if not self._joined:
            self._group, self._joined = self._join(), True
        self._trained.watch(module)

    def before_step(self, optimizer: Optimizer) -> None:
        """Send this step's gradients, and wait for those of the step before."""
        if self._applying:
            return
        mine = self._trained.of(optimizer)
        sent = OnTheWay.of(mine, self._group)
        _, before = self._on_the_way.pop(id(optimizer), (None, None))
        self._on_the_way[id(optimizer)] = optimizer, sent
        for parameter in mine:
            parameter.grad = None  # without one from before the optimizer does nothing
        if before is not None:
            with self._timer().waiting():
                before.arrive(self._world_size)

    def after_step(self, optimizer: Optimizer) -> None:
        """Apply the step's own gradient as well, where the epoch ends."""
        if self._applying:
            return
        self._timer().gradients_ready()  # the optimizer's step was this rank's own work
        if self._place.ends_epoch:
            self._apply(optimizer)

    def bring_home(self) -> None:
        """Apply what is on its way, so that the weights here are all there is; collective."""
        for optimizer, _ in list(self._on_the_way.values()):
            self._apply(optimizer)

    def close(self, *, in_order: bool) -> None:
        """Let go of the process group. May be called again."""
        del in_order
        self._group = None
        self._on_the_way.clear()

    def _apply(self, optimizer: Optimizer) -> None:
        _, sent = self._on_the_way.pop(id(optimizer))
        sent.arrive(self._world_size)
        self._applying = True
        try:
            optimizer.step()
        finally:
            self._applying = False
        for parameter in self._trained.of(optimizer):
            parameter.grad = None
