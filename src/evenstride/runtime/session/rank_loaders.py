"""The loaders of a rank: one for training, any number for evaluation."""

from __future__ import annotations

from evenstride.runtime.loading.batch_change import BatchChanges
from evenstride.runtime.loading.evaluation import Evaluation
from evenstride.runtime.loading.loader import Rank
from evenstride.runtime.loss.training_step import TrainingStep
from evenstride.runtime.session.loader_factory import TrainLoaders
from evenstride.runtime.session.rank_state import RankState
from evenstride.runtime.session.rank_ties import RankTies
from evenstride.runtime.session.step_ends import StepTicks
from evenstride.runtime.settings import Settings
from evenstride.runtime.synchronisation.mode_runtime import free_of, sampler_of
from evenstride.runtime.synchronisation.synchroniser import Synchroniser
from evenstride.runtime.team import Team


class RankLoaders:
    """What makes a rank's loaders.

    Args:
        state: of this rank.
        ties: to the other ranks.
        step: that batches are trained in.
        team: of all ranks.
        settings: of the run.
        sync: takes the place of the engine's averaging; ``None`` where the engine does it.
        calibrate: what to calibrate, as in the environment; ``None`` for nothing.
    """

    def __init__(
        self,
        state: RankState,
        ties: RankTies,
        step: TrainingStep,
        team: Team,
        settings: Settings,
        sync: Synchroniser | None,
        calibrate: str | None,
    ) -> None:
        turns = None
        if settings.chosen:
            turns = BatchChanges(
                state.progress, state.limits, state.clock, state.noise, ties.link.turn
            )
        ticks = StepTicks(state.progress, ties.link, team.step_file)
        rank = Rank(
            gate=state.gate,
            step=step,
            progress=state.progress,
            rank=team.rank,
            max_steps=settings.max_steps,
            tick=ticks.tick if team.leader is not None else None,
            explain_failure=ties.link.explain_failure,
            sampler=sampler_of(free_of(sync)),
            turns=turns,
            drift=ties.drift,
        )
        self.training = TrainLoaders(rank, ties.calls, ties.opening, settings, calibrate)
        self.evaluation = Evaluation(ties.calls, ties.split, state.watched, state.peaks, settings)
