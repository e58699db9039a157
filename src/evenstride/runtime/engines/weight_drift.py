"""Checks that the ranks still have the same weights; if not, they get rank 0's.

All ranks get the same reduced gradient, bit for bit. But optimizers round differently on CPUs and
on accelerators, and no engine compares the weights again. So replicas on devices of different kinds
drift apart by a last digit per step.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from evenstride.runtime.timing.device_timer import RankClock

logger = logging.getLogger("evenstride")

USUAL_STEPS = 100
"""Steps between two comparisons if ranks compute on devices of different kinds."""

# Number of elements that are widened to 8 bytes at once: 32 MiB.
_MOST_AT_ONCE = 2**22
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def fingerprint(parameters: Iterable[Tensor]) -> Tensor:
    """Return two numbers that are equal for equal bits; int64 of shape ``(2,)``, on the CPU.

    Costs two passes over the parameters.
    """
    total = torch.zeros(2, dtype=torch.int64)
    for parameter in parameters:
        bits = torch.view_as_real(parameter) if parameter.is_complex() else parameter
        bits = bits.detach().view(_BITS[bits.element_size()]).reshape(-1)
        sums = torch.zeros(2, dtype=torch.int64, device=bits.device)
        for piece in torch.split(bits, _MOST_AT_ONCE):
            wide = piece.to(torch.int64)
            # Opposite differences in last digits may cancel in one of the two sums. Both wrap
            # around on overflow.
            sums += torch.stack([wide.sum(), wide.square_().sum()])
        total += sums.cpu()
    return total


class DriftGuard:
    """Compares the weights of all ranks at a fixed interval of steps."""

    def __init__(self, clock: RankClock) -> None:
        self.checks = self.drifts = 0
        self.every = 0
        """Steps between two comparisons; 0 for none."""
        self._clock = clock
        self._parameters: list[nn.Parameter] = []
        self._group: dist.ProcessGroup | None = None
        self._checked = 0

    def watch(
        self, model: nn.Module, every: int, join: Callable[[], dist.ProcessGroup | None]
    ) -> None:
        """Also compare the weights of a model; equal in number and shape on all ranks."""
        # The first model's interval counts for all. `join` creates a group for the devices of all
        # ranks; collective.
        if not self.every:
            self.every, self._group = every, join()
        ignored = getattr(model, "parameters_to_ignore", ())
        inner = getattr(model, "module", model)
        self._parameters += (p for name, p in inner.named_parameters() if name not in ignored)

    def close(self) -> None:
        """Stop comparing; the counts stay."""
        self._parameters.clear()
        self._group = None

    def check(self, step: int) -> None:
        """Compare if it is due after ``step`` steps; every rank must call it after each step."""
        # A loop that stops and is entered again calls this twice after the same step.
        if not self.every or step % self.every or step == self._checked or self._group is None:
            return
        self._checked, self.checks = step, self.checks + 1
        with self._clock.waiting(), torch.no_grad():
            if self._alike():
                return
            self.drifts += 1
            if self.drifts == 1:
                logger.warning(
                    "after %d steps the weights of the ranks differed, so those of the group's "
                    "rank 0 were broadcast; summary() counts how often that happens",
                    step,
                )
            for parameter in self._parameters:
                self._broadcast(parameter)

    def _alike(self) -> bool:
        mine = fingerprint(self._parameters)
        others = [torch.empty_like(mine) for _ in range(dist.get_world_size(self._group))]
        dist.all_gather(others, mine, group=self._group)
        return all(torch.equal(others[0], other) for other in others)

    def _broadcast(self, parameter: nn.Parameter) -> None:
        # Gloo would misread a tensor that is not contiguous.
        whole = parameter.detach().contiguous()
        dist.broadcast(whole, group=self._group, group_src=0)
        parameter.copy_(whole)
