"""Whether the first step's gradients were averaged over the ranks."""

from __future__ import annotations

from evenstride.runtime import usage_errors
from evenstride.runtime.coordination.agreement import Plain
from evenstride.runtime.engines.forward_timing import (
    bypassed,
    engine_exists,
    engine_of,
    gradient_digest,
)
from evenstride.runtime.engines.watched_models import WatchedModels
from evenstride.runtime.session.rank_calls import RankCalls
from evenstride.runtime.timing.rank_clock import RankClock


class FirstStepCheck:
    """Looks whether an engine has averaged gradients.

    Args:
        calls: of all ranks.
        clock: of this rank's steps.
        watched: the models that are trained.
        by_engine: whether an engine is to do so.
    """

    def __init__(
        self, calls: RankCalls, clock: RankClock, watched: WatchedModels, *, by_engine: bool
    ) -> None:
        self._calls, self._clock, self._watched = calls, clock, watched
        self._wanted = by_engine and calls.world_size > 1

    def check(self) -> None:
        """Raise if the first step's gradients were not averaged; collective if that is in doubt.

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
