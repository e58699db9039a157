"""Whether the ranks still have the same weights; where they do not, they get rank 0's.

All ranks get the same reduced gradient, bit for bit. But optimizers round differently on a CPU and
on an accelerator, and no engine ever compares weights again, so that replicas on devices of
several kinds drift apart by a last digit per step.
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
"""Steps between two comparisons where ranks compute on devices of several kinds."""

# Elements that are widened to 8 bytes at once: 32 MiB.
_MOST_AT_ONCE = 2**22
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def fingerprint(parameters: Iterable[Tensor]) -> Tensor:
    """Return two numbers that equal bits have in common; int64 of shape ``(2,)``, on the CPU.

    Costs two passes over the parameters.
    """
    total = torch.zeros(2, dtype=torch.int64)
    for parameter in parameters:
        bits = torch.view_as_real(parameter) if parameter.is_complex() else parameter
        bits = bits.detach().view(_BITS[bits.element_size()]).reshape(-1)
        sums = torch.zeros(2, dtype=torch.int64, device=bits.device)
        for piece in torch.split(bits, _MOST_AT_ONCE):
            wide = piece.to(torch.int64)
            # Differences of a last digit up and down may cancel in one of the two. Both wrap
            # around.
            sums += torch.stack([wide.sum(), wide.square_().sum()])
        total += sums.cpu()
    return total


class DriftGuard:
    """Compares the weights of all ranks every so many steps."""

    def __init__(self, clock: RankClock) -> None:
        self.checks = self.drifts = 0
        self.every = 0
        """Steps between two comparisons; 0 while none is asked for."""
        self._clock = clock
        self._parameters: list[nn.Parameter] = []
        self._group: dist.ProcessGroup | None = None
        self._checked = 0

    def watch(
        self, model: nn.Module, every: int, join: Callable[[], dist.ProcessGroup | None]
    ) -> None:
        """Compare the weights of a model, too; equal in number and shape on all ranks."""
        # The first model's interval counts for all. `join` makes a group that serves the devices of
        # all ranks; collective.
        if not self.every:
            self.every, self._group = every, join()
        ignored = getattr(model, "parameters_to_ignore", ())
        inner = getattr(model, "module", model)
        self._parameters += (p for name, p in inner.named_parameters() if name not in ignored)

    def close(self) -> None:
        """Compare no more; the counts stay."""
        self._parameters.clear()
        self._group = None

    def check(self, step: int) -> None:
        """Compare if it is due after ``step`` steps; every rank must call it after each."""
        # A loop that is left and entered again comes by twice after the same step.
        if not self.every or step % self.every or step == self._checked or self._group is None:
            return
        self._checked, self.checks = step, self.checks + 1
        with self._clock.waiting(), torch.no_grad():
            if self._alike():
                return
            self.drifts += 1
            if self.drifts == 1:
                logger.warning(
                    "after %d steps the weights of the ranks differed, and those of the group's "
                    "rank 0 were broadcast; how often that happens is in summary()",
                    step,
                )
            for parameter in self._parameters:
                self._broadcast(parameter)

    def _alike(self) -> bool:
        mine = fingerprint(self._parameters)
        everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size(self._group))]
        dist.all_gather(everyone, mine, group=self._group)
        return all(torch.equal(everyone[0], other) for other in everyone)

    def _broadcast(self, parameter: nn.Parameter) -> None:
        # Gloo takes what is not contiguous for something else.
        whole = parameter.detach().contiguous()
        dist.broadcast(whole, group=self._group, group_src=0)
        parameter.copy_(whole)
