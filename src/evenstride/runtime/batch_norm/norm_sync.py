"""Gives a network batch norm with statistics of all ranks; see `Stride.sync_batch_norm`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch.distributed as dist
from torch import nn

from evenstride.core.sync_modes.mode_specs import SyncMode
from evenstride.runtime.batch_norm.norm_layers import batch_norms, check_convertible, convert
from evenstride.runtime.coordination.agreement import Plain, require_equal
from evenstride.runtime.loss.batch_in_hand import BatchInHand
from evenstride.runtime.loss.training_step import TrainingStep
from evenstride.runtime.synchronisation.synchroniser import check_unaligned_norm
from evenstride.runtime.timing.device_timer import RankClock


class RankContext:
    """What a layer with statistics of all ranks knows of its rank; see `Context`."""

    def __init__(
        self, group: dist.ProcessGroup | None, batch: BatchInHand, clock: RankClock
    ) -> None:
        self.group, self.waiting, self._batch = group, clock.waiting, batch

    def close(self) -> None:
        """Release the process group; see `Channel.close`."""
        self.group = None

    @property
    def counts(self) -> bool:
        """Whether the current batch counts; a placeholder of a share of 0 does not."""
        draw = self._batch.draw
        return draw is None or draw.samples > 0


class NormCalls(Protocol):
    """The collective calls that layers with statistics of all ranks need."""

    def agree(
        self, call: str, show: Callable[[], Plain], judge: Callable[[list[Plain]], Plain]
    ) -> Plain:
        """Return the leader's verdict on what all ranks show; collective."""

    def own_group(self) -> dist.ProcessGroup | None:
        """Create another process group of the same ranks; ``None`` with one process; collective."""


class NormSync:
    """Converts networks to batch norm with statistics of all ranks."""

    def __init__(self, step: TrainingStep, calls: NormCalls, mode: SyncMode) -> None:
        self._step, self._calls, self._mode = step, calls, mode
        self._contexts: list[RankContext] = []

    def convert(self, net: nn.Module) -> None:
        """Give batch norm layers statistics of all ranks; collective."""

        def show() -> Plain:
            check_unaligned_norm(self._mode)
            check_convertible(net)
            return {"layers": len(batch_norms(net))}

        def judge(shown: list[Plain]) -> Plain:
            require_equal(shown, call)
            return {}

        call = "sync_batch_norm()"
        self._calls.agree(call, show, judge)
        self._step.limits.require_even()
        # A group of its own: collectives of a forward pass would mix with those of the engine.
        group = self._calls.own_group()
        context = RankContext(group, self._step.batch, self._step.clock)
        self._contexts.append(context)
        convert(net, context)

    def close(self) -> None:
        """Release the process groups."""
        for context in self._contexts:
            context.close()
