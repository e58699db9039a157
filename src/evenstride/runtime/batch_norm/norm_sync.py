"""Gives a network's batch norm statistics over all ranks; see `Stride.sync_batch_norm`."""

from __future__ import annotations

from functools import partial

from torch import nn

from evenstride.core.sync_modes.mode_specs import SyncMode
from evenstride.runtime.batch_norm.norm_context import RankContext
from evenstride.runtime.batch_norm.norm_layers import batch_norms, check_convertible, convert
from evenstride.runtime.coordination.agreement import Plain
from evenstride.runtime.loading.loader_agreement import equal
from evenstride.runtime.loss.training_step import TrainingStep
from evenstride.runtime.session.rank_calls import RankCalls
from evenstride.runtime.synchronisation.mode_checks import check_unaligned_norm


class NormSync:
    """Converts networks.

    Args:
        step: of this rank.
        calls: of all ranks.
        mode: of synchronisation.
    """

    def __init__(self, step: TrainingStep, calls: RankCalls, mode: SyncMode) -> None:
        self._step, self._calls, self._mode = step, calls, mode
        self._contexts: list[RankContext] = []

    def convert(self, net: nn.Module) -> None:
        """Give batch norm statistics over all ranks; collective."""

        def show() -> Plain:
            check_unaligned_norm(self._mode)
            check_convertible(net)
            return {"layers": len(batch_norms(net))}

        call = "sync_batch_norm()"
        self._calls.agree(call, show, partial(equal, topic=call))
        self._step.limits.require_even()
        # A group of its own: collectives of a forward pass would get between those of the engine.
        group = self._calls.own_group()
        context = RankContext(group, self._step.batch, self._step.clock)
        self._contexts.append(context)
        convert(net, context)

    def close(self) -> None:
        """Let go of the process groups."""
        for context in self._contexts:
            context.close()
