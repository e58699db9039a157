"""A rank's state of its own training, before it is connected to other ranks."""

from __future__ import annotations

from collections.abc import Callable

from evenstride.core.fleet import Shares
from evenstride.core.gradients.noise_scale import StepParts
from evenstride.runtime.coordination.draw_barrier import DrawBarrier
from evenstride.runtime.engines.watched_models import WatchedModels
from evenstride.runtime.host.machine_resources import loads_for
from evenstride.runtime.loading.micro_batch_limits import MicroBatchLimits, RankLayout
from evenstride.runtime.loading.position import CommittedPosition
from evenstride.runtime.loss.batch_in_hand import BatchInHand
from evenstride.runtime.memory.memory_meter import PeakReport
from evenstride.runtime.noise.noise_meter import NoiseMeter
from evenstride.runtime.settings import Settings
from evenstride.runtime.team import Team
from evenstride.runtime.timing.device_timer import RankClock
from evenstride.runtime.timing.recorder import Recorder
from evenstride.runtime.timing.step_timer import StepTimer


class RankState:
    """One rank's clock, barrier, position and batch; ``ask`` requests an exchange."""

    def __init__(self, team: Team, settings: Settings, ask: Callable[[], None]) -> None:
        self.recorder = Recorder(team.rank, ask, loads_for(settings.decides))
        self.clock = RankClock(StepTimer(self.recorder))
        self.progress = CommittedPosition(
            settings.seed,
            settings.global_batch,
            varies=settings.bounds is not None and not settings.chosen,
            adopts=settings.bounds if settings.chosen else None,
        )
        self.gate = DrawBarrier(
            team.shares,
            # Workers without a common step cannot all stand at a barrier.
            blocking=team.opening and settings.mode.lockstep,
            timeout_s=team.channel.timeout.total_seconds() if team.channel else 0.0,
            ask=ask if team.rank == 0 else lambda: None,
        )
        self.watched = WatchedModels()
        self.batch = BatchInHand(self.watched)
        self.limits = MicroBatchLimits(
            whole=(settings.quantum or 1) > 1, layout=RankLayout(team.spans, open=settings.chosen)
        )
        self.peaks = PeakReport(self.batch, self.limits, self.progress, team.rank, team.neighbours)
        every = settings.noise_every
        self.noise = NoiseMeter(every, team.world_size, self.clock) if every else None

    def latest_shares(self) -> Shares:
        """Return the shares of the latest committed step, which every rank knows."""
        parts = () if self.progress.parts_end else self.progress.parts
        return parts or self.gate.expected(max(self.progress.step - 1, 0))

    def take_noise(self) -> tuple[StepParts, ...]:
        """Return the norms of gradients since the last call, if noise is measured."""
        return () if self.noise is None else self.noise.take()
