"""Assembles a rank's training step for its synchronisation mode."""

from __future__ import annotations

import torch.distributed as dist

from evenstride.runtime.coordination.coordinator import Coordinator
from evenstride.runtime.loss.loss_convention import Convention
from evenstride.runtime.loss.training_step import TrainingStep, WeightExchange
from evenstride.runtime.session.rank_calls import RankCalls
from evenstride.runtime.session.rank_state import RankState
from evenstride.runtime.settings import Settings
from evenstride.runtime.synchronisation.synchroniser import Synchroniser, refuse_weights
from evenstride.runtime.team import Team


def training_step(
    state: RankState,
    calls: RankCalls,
    coordinator: Coordinator,
    team: Team,
    settings: Settings,
    sync: Synchroniser | None,
) -> TrainingStep:
    """Return what processes each step of a rank; ``sync``, if given, replaces the engine."""
    by_hand, mode = settings.engine == "none", settings.mode

    def join() -> dist.ProcessGroup | None:
        refuse_weights(mode)
        # Weights are numbers on the CPU, for any backend of the engine.
        return calls.own_group("gloo")

    convention = None
    if team.world_size > 1:
        # Without a common step, ranks cannot refuse a loss together, so none is refused.
        agree = calls.meet if mode.lockstep else None
        convention = Convention(team.world_size, team.rank, agree, state.batch)
    return TrainingStep(
        team.world_size,
        state.clock,
        state.watched,
        state.batch,
        state.limits,
        coordinator.commit,
        WeightExchange(join, state.clock),
        by_hand=by_hand,
        sync=sync,
        convention=convention,
        noise=state.noise,
    )
