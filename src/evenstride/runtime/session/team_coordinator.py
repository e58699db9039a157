"""The `Coordinator` of a fixed team: it checks the first step and counts all steps."""

from __future__ import annotations

from evenstride.core.sampling.draw import Draw
from evenstride.runtime import usage_errors
from evenstride.runtime.coordination.agreement import Plain
from evenstride.runtime.coordination.coordinator import Standing
from evenstride.runtime.coordination.leader_start import Lead
from evenstride.runtime.engines.watched_models import (
    bypassed,
    engine_exists,
    engine_of,
    gradient_digest,
)
from evenstride.runtime.failures.peer_link import PeerLink
from evenstride.runtime.failures.survivors import FreeWorker
from evenstride.runtime.session.rank_calls import RankCalls
from evenstride.runtime.session.rank_state import RankState
from evenstride.runtime.telemetry.run_facts import tell_pass, tell_workload


class FirstStepCheck:
    """Checks that an engine has averaged the gradients of the first step.

    Without an engine (``by_engine`` is ``False``) it checks nothing.
    """

    def __init__(self, state: RankState, calls: RankCalls, *, by_engine: bool) -> None:
        self._calls, self._clock, self._watched = calls, state.clock, state.watched
        self._wanted = by_engine and calls.world_size > 1

    def check(self) -> None:
        """Raise if the first step's gradients were not averaged; collective in case of doubt.

        Raises:
            ConfigError: nothing in any rank's process averages gradients.
            UsageError: the loop calls the module inside its DistributedDataParallel.
        """
        models, world_size = self._watched.models, self._calls.world_size
        if not self._wanted:
            return
        doubtful = [model for model in models if bypassed(model)]
        if models and not doubtful:
            return

        def show() -> Plain:
            engine = bool(models) or engine_exists()
            return {"engine": engine, "gradients": [gradient_digest(one) for one in doubtful]}

        def judge(shown: list[Plain]) -> Plain:
            if not all(mine["engine"] for mine in shown):
                raise usage_errors.no_engine(world_size)
            if any(mine["gradients"] != shown[0]["gradients"] for mine in shown):
                raise usage_errors.engine_bypassed(type(engine_of(doubtful[0])).__name__)
            return {}

        with self._clock.waiting():
            self._calls.agree("the first step", show, judge)
        if not models and self._calls.rank == 0:
            usage_errors.tell_of_unwatched()


class TeamCoordinator:
    """The `Coordinator` of a fixed team; the loss of a rank ends the run.

    ``free`` knows what other workers have trained; it is ``None`` in modes with a common step.
    """

    def __init__(
        self,
        lead: Lead | None,
        state: RankState,
        link: PeerLink,
        first_step: FirstStepCheck,
        free: FreeWorker | None,
    ) -> None:
        self.standing = Standing(state.recorder.rank, state.gate)
        self._leader = None if lead is None else lead.leader
        self._step_file = None if lead is None else lead.step_file
        self._progress, self._watched = state.progress, state.watched
        self._link, self._first_step, self._free = link, first_step, free

    def stand(self) -> Standing:
        """Return this rank's standing, the same in every step."""
        return self.standing

    def exchange(self) -> None:
        """On the leader, start an exchange if it is due, and write the step count to its file."""
        if self._leader is None:
            return
        # The step file and the exchanges depend on committed steps, not on batches.
        step = self._progress.step
        self._link.plane.tick(step)
        if self._step_file is not None:
            self._step_file.write(step)

    def commit(self, draw: Draw) -> None:
        """Count a step as trained, after all its gradients are synchronised."""
        progress = self._progress
        if not progress.step:
            # Before the position moves: a step that was not averaged must not be saved as trained.
            self._first_step.check()
            tell_workload(self._leader, self._watched.models, progress.order)
            if self._leader is not None and self._watched.compiled_by_shape:
                self._leader.expect_slow_firsts()
        # Not at the start of the pass: a loop may only inspect the data, before a state is loaded.
        if progress.untrained_pass:
            tell_pass(self._leader, progress)
        progress.commit(draw.window, draw.dealing)
        if self._free is not None:
            # The servers distribute the samples, so they know the position.
            progress.follow(self._free.position)

    def explain_failure(self) -> None:
        """Raise which rank's loss broke a collective, if there are other ranks."""
        self._link.explain_failure()
