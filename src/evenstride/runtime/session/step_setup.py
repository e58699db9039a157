"""Puts a rank's training step together, as the mode of synchronisation wants it."""

from __future__ import annotations

import torch.distributed as dist

from evenstride.runtime.loss.loss_convention import Convention
from evenstride.runtime.loss.token_weights import WeightExchange
from evenstride.runtime.loss.training_step import TrainingStep
from evenstride.runtime.session.first_step import FirstStepCheck
from evenstride.runtime.session.rank_calls import RankCalls
from evenstride.runtime.session.rank_state import RankState
from evenstride.runtime.session.step_ends import StepCommits
from evenstride.runtime.settings import Settings
from evenstride.runtime.synchronisation.mode_checks import refuse_weights
from evenstride.runtime.synchronisation.mode_runtime import free_of
from evenstride.runtime.synchronisation.synchroniser import Synchroniser
from evenstride.runtime.team import Team


def training_step(
    state: RankState,
    calls: RankCalls,
    team: Team,
    settings: Settings,
    sync: Synchroniser | None,
) -> TrainingStep:
    """Return what happens to each step of a rank."""
    by_hand, mode = settings.engine == "none", settings.mode

    def join() -> dist.ProcessGroup | None:
        refuse_weights(mode)
        # Weights are numbers on the CPU, whatever the engine's backend is.
        return calls.own_group("gloo")

    convention = None
    if team.world_size > 1:
        # Ranks that have no step in common cannot refuse a loss alike, so there none is refused.
        agree = calls.meet if mode.lockstep else None
        convention = Convention(team.world_size, team.rank, agree, state.batch)
    first_step = FirstStepCheck(
        calls, state.clock, state.watched, by_engine=sync is None and not by_hand
    )
    commits = StepCommits(state.progress, state.watched, first_step, team.leader, free_of(sync))
    return TrainingStep(
        team.world_size,
        state.clock,
        state.watched,
        state.batch,
        state.limits,
        commits.commit,
        WeightExchange(join, state.clock),
        by_hand=by_hand,
        sync=sync,
        convention=convention,
        noise=state.noise,
    )
