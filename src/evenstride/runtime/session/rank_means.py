"""Means over all ranks, as `Stride.mean` returns them."""

from __future__ import annotations

from torch import Tensor

from evenstride.core.sync_modes.mode_specs import SyncMode
from evenstride.runtime.coordination.leader import Leader
from evenstride.runtime.loading.position import CommittedPosition
from evenstride.runtime.session.loader_factory import TrainLoaders
from evenstride.runtime.session.rank_calls import RankCalls
from evenstride.runtime.store.store_mean import Call, exact_mean
from evenstride.runtime.synchronisation.mode_checks import check_unaligned_mean
from evenstride.runtime.telemetry.run_facts import check_metric, tell_metric
from evenstride.runtime.timing.rank_clock import RankClock


class RankMeans:
    """Exact means over all ranks.

    Args:
        calls: of all ranks.
        clock: counts the wait for the others, which is not work.
        loaders: tell whether the training loop is running.
        progress: of this rank.
        mode: of synchronisation.
        leader: writes named means into the trace, on rank 0 only.
    """

    def __init__(
        self,
        calls: RankCalls,
        clock: RankClock,
        loaders: TrainLoaders,
        progress: CommittedPosition,
        mode: SyncMode,
        leader: Leader | None,
    ) -> None:
        self._calls, self._clock, self._loaders = calls, clock, loaders
        self._progress, self._mode, self._leader = progress, mode, leader

    def mean(
        self, total: float | Tensor, count: float | Tensor, name: str | None
    ) -> float | Tensor:
        """Return the sum of all totals over that of all counts; collective."""
        if name is not None:
            check_metric(name, total)
        # The ranks compare where they call from: one that is a step ahead would mix two means up.
        in_loop = self._loaders.busy
        if in_loop:
            check_unaligned_mean(self._mode)
        shape = tuple(total.shape) if isinstance(total, Tensor) and total.numel() > 1 else ()
        call = Call(name, shape, self._progress.step, in_loop)
        # The time in here is that of the slowest rank, which would make all look equally slow.
        with self._clock.waiting():
            mean = exact_mean(total, count, self._calls.summing(call))
        if name is not None:
            tell_metric(self._leader, name, mean, self._progress)
        return mean
