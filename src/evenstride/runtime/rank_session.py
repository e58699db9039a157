"""The parts of one rank, assembled: the implementation of `Stride`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

from evenstride.runtime.batch_norm.norm_sync import NormSync
from evenstride.runtime.coordination.leader_start import Lead
from evenstride.runtime.environment import Environment
from evenstride.runtime.loading.evaluation import Evaluation
from evenstride.runtime.memory.oom_retry import MemoryGuard
from evenstride.runtime.session.model_watcher import ModelWatcher
from evenstride.runtime.session.rank_loaders import TrainLoaders
from evenstride.runtime.session.rank_reports import RankReports
from evenstride.runtime.session.rank_state import RankState
from evenstride.runtime.session.rank_ties import RankTies
from evenstride.runtime.session.step_setup import training_step
from evenstride.runtime.session.team_coordinator import FirstStepCheck, TeamCoordinator
from evenstride.runtime.settings import Settings
from evenstride.runtime.synchronisation.synchroniser_factory import (
    free_of,
    sampler_of,
    synchroniser,
)
from evenstride.runtime.team import Team


class RankSession:
    """The parts of one rank, each built from those before it."""

    def __init__(
        self, team: Team, lead: Lead | None, settings: Settings, environment: Environment
    ) -> None:
        self.team, self.environment, self._settings = team, environment, settings
        self._lead = lead
        self.leader = leader = None if lead is None else lead.leader
        self._closed = False
        self.state = state = RankState(team, settings, self._ask)
        # Replaces the engine's averaging; `None` if the engine averages.
        self.sync = sync = synchroniser(
            settings, team, lambda: state.gate.error, state.clock, state.progress, state.noise
        )
        # The same object in modes without a common step; else `None`.
        self.free = free_of(sync)
        self.ties = ties = RankTies(state, team, leader, self.free, environment, self._ask)
        by_engine = sync is None and settings.engine != "none"
        first_step = FirstStepCheck(state, ties.calls, by_engine=by_engine)
        coordinator = TeamCoordinator(lead, state, ties.link, first_step, self.free)
        self.step = step = training_step(state, ties.calls, coordinator, team, settings, sync)
        self.memory = MemoryGuard(step, team.rank)
        self.loaders = TrainLoaders(
            state,
            step,
            coordinator,
            ties.calls,
            ties.opening,
            ties.drift,
            ties.link.plane.turn,
            settings,
            sampler_of(self.free),
            environment.calibrate,
        )
        self.evaluation = Evaluation(ties.calls, ties.split, state.watched, state.peaks, settings)
        self.watcher = self._new_watcher()
        self.norms = NormSync(step, ties.calls, settings.mode)
        self.reports = self._new_reports()
        # Without a common step, there are no first steps in which to search for a split.
        if team.opening and not settings.mode.lockstep:
            ties.opening.skip()

    def _new_watcher(self) -> ModelWatcher:
        return ModelWatcher(
            self.state,
            self.step,
            self.ties.calls,
            self.ties.opening,
            self.ties.drift,
            self.team,
            self.leader,
            self._settings,
            self.environment.connections,
            self.environment.calibrate is not None,
            self.sync,
            self.loaders.refuse_in_loop,
        )

    def _new_reports(self) -> RankReports:
        return RankReports(
            self.state,
            self.ties.calls,
            self.ties.opening,
            self.ties.drift,
            self._settings,
            self.sync,
            self.leader,
            self.loaders.busy,
            self._own_s,
        )

    def _ask(self) -> None:
        self.ties.link.plane.ask()

    def _own_s(self) -> float:
        loader = self.loaders.latest
        own_s = self.step.own_s + self.ties.link.cpu_s
        return own_s if loader is None else own_s + loader.own_s

    def close(self, *, at_exit: bool) -> None:
        """Disconnect from the other ranks and close the trace. May be called again."""
        if self._closed:
            return
        self._closed = True
        with ExitStack() as stack:
            # Each part is closed even if one before it raises.
            for part in reversed(list(self._closing(at_exit=at_exit))):
                stack.callback(part)

    def _closing(self, *, at_exit: bool) -> Iterator[Callable[[], None]]:
        """Yield what closes each part, in order."""
        yield self.ties.lifecycle.notified.close
        # A device that waits for a lost rank would never reach the mark.
        if not at_exit and not self.state.gate.failed and sys.exc_info()[1] is None:
            yield self.state.clock.timer.settle
        if self.state.noise is not None:
            yield self.state.noise.close
        if self.sync is not None:
            yield partial(self.sync.close, in_order=self.ties.in_order(at_exit=at_exit))
        yield partial(self.ties.close, at_exit=at_exit)
        yield self._leave_team
        yield from (self.watcher.close, self.step.close, self.norms.close)
        if self._lead is not None:
            yield self._close_lead

    def _leave_team(self) -> None:
        # See Channel.close: our reference cycles must not keep torch.distributed objects alive.
        self.team = replace(self.team, group=None, channel=None)

    def _close_lead(self) -> None:
        assert self._lead is not None
        self._lead.leader.close(self.reports.summary().to_dict())
        if self._lead.step_file is not None:
            self._lead.step_file.close()
