"""One rank's running parts, put together: what `Stride` is made of."""

from __future__ import annotations

import sys
from dataclasses import replace

from evenstride.runtime.batch_norm.norm_sync import NormSync
from evenstride.runtime.environment import Environment
from evenstride.runtime.failures.heartbeat import ending_exception
from evenstride.runtime.memory.oom_retry import MemoryGuard
from evenstride.runtime.session.model_watcher import ModelWatcher
from evenstride.runtime.session.rank_loaders import RankLoaders
from evenstride.runtime.session.rank_means import RankMeans
from evenstride.runtime.session.rank_state import RankState
from evenstride.runtime.session.rank_summary import RankSummary
from evenstride.runtime.session.rank_ties import RankTies
from evenstride.runtime.session.step_setup import training_step
from evenstride.runtime.settings import Settings
from evenstride.runtime.synchronisation.mode_runtime import free_of, synchroniser
from evenstride.runtime.team import Team


class RankSession:
    """The parts of one rank, each made of those before it.

    Args:
        team: of all ranks.
        settings: of the run.
        environment: of this process.
    """

    def __init__(self, team: Team, settings: Settings, environment: Environment) -> None:
        self.team, self.environment = team, environment
        self._closed = False
        self.state = state = RankState(team, settings, self._ask)
        self.sync = sync = synchroniser(
            settings.mode, team, state.gate, state.clock, state.progress, settings.max_steps
        )
        """Takes the place of the engine's averaging; ``None`` where the engine does it."""
        self.free = free_of(sync)
        """The same, in modes in which workers do not keep step; else ``None``."""
        self.ties = ties = RankTies(state, team, self.free, environment, self._ask)
        self.step = step = training_step(state, ties.calls, team, settings, sync)
        self.memory = MemoryGuard(step, team.rank)
        made = RankLoaders(state, ties, step, team, settings, sync, environment.calibrate)
        self.loaders, self.evaluation = made.training, made.evaluation
        self.watcher = ModelWatcher(
            state,
            ties,
            step,
            self.loaders.refuse_in_loop,
            team,
            settings,
            environment,
            sync,
        )
        self.norms = NormSync(step, ties.calls, settings.mode)
        self.means = RankMeans(
            ties.calls, state.clock, self.loaders, state.progress, settings.mode, team.leader
        )
        self.summary = RankSummary(state, ties, step, self.loaders, settings, sync, team.leader)
        # Workers that do not keep step have no first steps in common to find a split in.
        if team.opening and not settings.mode.lockstep:
            ties.opening.skip()

    def _ask(self) -> None:
        self.ties.link.ask()

    def close(self, *, at_exit: bool) -> None:
        """Part from the others and close the trace. May be called again."""
        if self._closed:
            return
        self._closed = True
        self.ties.continuity.notified.close()
        # A device that waits for a lost rank would never come to the mark.
        if not at_exit and not self.state.gate.failed and sys.exc_info()[1] is None:
            self.state.clock.timer.settle()
        if self.state.noise is not None:
            self.state.noise.close()
        if self.sync is not None:
            self.sync.close(in_order=not (at_exit and ending_exception()))
        # See Channel.close: nothing of torch.distributed may be left in our reference cycles.
        self.ties.close(at_exit=at_exit)
        self.team = replace(self.team, group=None, channel=None)
        self.watcher.close()
        self.step.close()
        self.norms.close()
        if self.team.leader is not None:
            self.team.leader.close(self.summary.make().to_dict())
        if self.team.step_file is not None:
            self.team.step_file.close()
