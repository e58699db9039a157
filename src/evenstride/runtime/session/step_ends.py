"""What follows from the end of a step: the position moves, the trace and the leader hear of it."""

from __future__ import annotations

from evenstride.core.sampling.draw import Draw
from evenstride.runtime.coordination.leader import Leader
from evenstride.runtime.engines.watched_models import WatchedModels
from evenstride.runtime.failures.peer_link import PeerLink
from evenstride.runtime.loading.position import CommittedPosition
from evenstride.runtime.parameter_server.async_worker import AsyncWorker
from evenstride.runtime.session.first_step import FirstStepCheck
from evenstride.runtime.telemetry.run_facts import tell_pass, tell_workload
from evenstride.runtime.timing.progress_file import StepFile


class StepCommits:
    """Commits steps.

    Args:
        progress: moves on.
        watched: the models that are trained.
        first_step: looks whether the first step's gradients were averaged.
        leader: writes the trace, on rank 0 only.
        free: knows what other workers have trained; ``None`` where all are at one step.
    """

    def __init__(
        self,
        progress: CommittedPosition,
        watched: WatchedModels,
        first_step: FirstStepCheck,
        leader: Leader | None,
        free: AsyncWorker | None,
    ) -> None:
        self._progress, self._watched, self._first_step = progress, watched, first_step
        self._leader, self._free = leader, free

    def commit(self, draw: Draw) -> None:
        """Count a step as trained, all of whose gradients are synchronised."""
        progress = self._progress
        if not progress.step:
            # Before the position moves: a step that was not averaged must not be saved as trained.
            self._first_step.check()
            tell_workload(self._leader, self._watched.models, progress.order)
        # Not where the pass begins: a loop may look at the data only, before a state is loaded.
        if progress.untrained_pass:
            tell_pass(self._leader, progress)
        progress.commit(draw.window, draw.dealing)
        if self._free is not None:
            # The servers give samples out, so where training stands is what they say.
            progress.follow(self._free.position)


class StepTicks:
    """On the leader, starts the exchanges that are due between two steps."""

    def __init__(
        self, progress: CommittedPosition, link: PeerLink, step_file: StepFile | None
    ) -> None:
        self._progress, self._link, self._step_file = progress, link, step_file

    def tick(self) -> None:
        """Note the steps that are committed."""
        step = self._progress.step
        self._link.tick(step)
        if self._step_file is not None:
            self._step_file.write(step)
