"""Gathers what `Stride.summary` reports on a rank."""

from __future__ import annotations

from evenstride.runtime.coordination.leader import Leader
from evenstride.runtime.loss.training_step import TrainingStep
from evenstride.runtime.noise.noise_summary import noise_summary
from evenstride.runtime.session.loader_factory import TrainLoaders
from evenstride.runtime.session.rank_state import RankState
from evenstride.runtime.session.rank_ties import RankTies
from evenstride.runtime.settings import Settings
from evenstride.runtime.synchronisation.mode_runtime import facts_of
from evenstride.runtime.synchronisation.synchroniser import Synchroniser
from evenstride.runtime.telemetry.summary import Summary, summarise


class RankSummary:
    """Makes the summaries of one rank."""

    def __init__(
        self,
        state: RankState,
        ties: RankTies,
        step: TrainingStep,
        loaders: TrainLoaders,
        settings: Settings,
        sync: Synchroniser | None,
        leader: Leader | None,
    ) -> None:
        self._state, self._ties, self._step = state, ties, step
        self._loaders = loaders
        self._settings, self._sync, self._leader = settings, sync, leader

    def make(self) -> Summary:
        """Return the run so far."""
        progress, noise, drift = self._state.progress, self._state.noise, self._ties.drift
        loader, order = self._loaders.latest, progress.order
        own_s = self._step.own_s + self._ties.link.cpu_s
        own_s += loader.own_s if loader is not None else 0.0
        leader = self._leader
        return summarise(
            leader,
            rank=self._ties.calls.rank,
            epoch=progress.epoch,
            step=progress.step,
            global_batch=progress.global_batch,
            policy=self._settings.policy,
            not_measured=self._ties.opening.not_measured,
            samples_dropped=order.length - progress.cursor.end if order is not None else 0,
            overhead_s=own_s / max(progress.step, 1),
            by_epoch=order is not None and order.by_epoch,
            shards=0 if order is None else len(order.shards),
            batches_repeated=self._state.limits.repeated,
            fits=self._state.limits.learned,
            drift_checks=drift.checks,
            drifts=drift.drifts,
            noise=noise_summary(None if leader is None else leader.noise, noise),
            **facts_of(self._settings.mode, self._sync),
        )
