"""Bring the ranks' gradients, weights and buffers together.

Before anything large is sent, ranks tell each other what they are about to bring, so that a
misunderstanding is an error with a name, and not a wrong sum or a wait without end.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from evenstride.errors import ConfigError, UsageError
from evenstride.runtime.averaging import anywhere, gathered, summed
from evenstride.runtime.trained import Trained


class _Told(NamedTuple):
    """What a rank tells the others."""

    step: int
    parameters: int
    samples: int = 0
    left_out: int = 0
    without_gradient: int = 0


class Joint:
    """Averages tensors over the ranks; all its calls are collective.

    Args:
        group: of the ranks, at least two, which large tensors are sent over.
        small_group: another one of the same ranks, that serves the CPU.
    """

    def __init__(
        self, group: dist.ProcessGroup | None, small_group: dist.ProcessGroup | None
    ) -> None:
        self._group, self._small = group, small_group
        self.world_size = dist.get_world_size(group)

    def close(self) -> None:
        """Let go of the process groups."""
        self._group = self._small = None

    @torch.no_grad()
    def gradients(
        self, step: int, parameters: Sequence[nn.Parameter], *, left_out: bool = False
    ) -> None:
        """Give the parameters the mean of all ranks' gradients.

        Args:
            step: of the run.
            parameters: the same on all ranks. Where only some ranks have a gradient, those of the
                others count as 0; without any there is none.
            left_out: whether a gradient scaler has left out the step on this rank. If it has on
                any, no rank has gradients afterwards.

        Raises:
            ConfigError: a gradient is sparse.
            UsageError: the ranks do not bring the same.
        """
        missing = sum(p.grad is None for p in parameters)
        told = self._tell(_Told(step, len(parameters), 0, left_out, missing))
        if any(rank.left_out for rank in told):
            for parameter in parameters:
                parameter.grad = None
            return
        if any(rank.without_gradient for rank in told):
            found = anywhere([p.grad is not None for p in parameters], self._small)
            parameters = [p for p, has in zip(parameters, found, strict=True) if has]
        for gradient, mean in summed(map(_gradient, parameters), 1 / self.world_size, self._group):
            gradient.copy_(mean)

    @torch.no_grad()
    def weights(
        self,
        step: int,
        parameters: Sequence[nn.Parameter],
        samples: int,
        trained: Trained | None,
    ) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Yield the parameters with their mean over the ranks; then average the buffers.

        Args:
            step: of the run.
            parameters: the same on all ranks.
            samples: that this rank counts; without any it adds nothing. If no rank has any, no
                weights have changed and none are yielded; buffers then count alike.
            trained: whose buffers are averaged; ``None`` for none.

        Raises:
            UsageError: the ranks do not bring the same.
        """
        told = self._tell(_Told(step, len(parameters), samples))
        total = sum(rank.samples for rank in told)
        if total:
            yield from summed(parameters, samples / total, self._group)
        if trained is not None:
            self._buffers(trained, samples / total if total else 1 / self.world_size)

    @torch.no_grad()
    def states(self, step: int, tensors: Sequence[Tensor], samples: int) -> None:
        """Give tensors their mean over the ranks, as `weights`; nothing if some rank lacks any."""
        told = [
            _Told(*numbers) for numbers in gathered(_Told(step, len(tensors), samples), self._small)
        ]
        total = sum(rank.samples for rank in told)
        if total and len({rank.parameters for rank in told}) == 1:
            for tensor, mean in summed(tensors, samples / total, self._group):
                tensor.copy_(mean)

    @torch.no_grad()
    def _buffers(self, trained: Trained, weight: float) -> None:
        """Average buffers that have changed; of those of whole numbers, rank 0's count."""
        buffers, changed = trained.changed_buffers()
        changed = anywhere(changed, self._small)
        moved = [b for b, has in zip(buffers, changed, strict=True) if has]
        for buffer, mean in summed(filter(_has_mean, moved), weight, self._group):
            buffer.copy_(mean)
        for buffer in moved:
            if not _has_mean(buffer):
                whole = buffer.contiguous()
                dist.broadcast(whole, group=self._group, group_src=0)
                buffer.copy_(whole)
        trained.note_buffers()

    def _tell(self, mine: _Told) -> list[_Told]:
        """Return what all ranks tell, in rank order.

        Raises:
            UsageError: they are not about to bring the same.
        """
        told = [_Told(*numbers) for numbers in gathered(mine, self._small)]
        if len({(rank.step, rank.parameters) for rank in told}) > 1:
            raise _not_alike(told)
        return told


def _gradient(parameter: nn.Parameter) -> Tensor:
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    if parameter.grad.is_sparse:
        raise ConfigError(
            "a parameter has a sparse gradient, and the first steps of local-sgd(after=...) "
            "average dense ones only; use sparse=False, or leave out after"
        )
    return parameter.grad


def _has_mean(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _not_alike(told: Sequence[_Told]) -> UsageError:
    steps = ", ".join(f"{rank.parameters} parameters in step {rank.step}" for rank in told)
    return UsageError(
        f"the ranks are to average different things (in rank order: {steps}); let every rank call "
        "the same optimizers in the same order, and use one optimizer with a gradient scaler, "
        "which may leave out its step on some ranks only"
    )
