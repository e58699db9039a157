"""A rank's reports of the run: the means of `Stride.mean`, and its summary."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from evenstride.runtime.coordination.leader import Leader
from evenstride.runtime.engines.weight_drift import DriftGuard
from evenstride.runtime.noise.noise_meter import noise_summary
from evenstride.runtime.session.opening_split import OpeningSplit
from evenstride.runtime.session.rank_calls import Call, RankCalls, exact_mean
from evenstride.runtime.session.rank_state import RankState
from evenstride.runtime.settings import Settings
from evenstride.runtime.synchronisation.synchroniser import Synchroniser, check_unaligned_mean
from evenstride.runtime.synchronisation.synchroniser_factory import facts_of
from evenstride.runtime.telemetry.run_facts import check_metric, tell_metric
from evenstride.runtime.telemetry.summary import Summary, summarise


class RankReports:
    """Computes one rank's means and summaries.

    ``in_loop`` returns whether the training loop is running, and ``own_s`` the time spent in
    evenstride's own code, in seconds. ``leader`` writes named means into the trace, on rank 0 only.
    """

    def __init__(
        self,
        state: RankState,
        calls: RankCalls,
        opening: OpeningSplit,
        drift: DriftGuard,
        settings: Settings,
        sync: Synchroniser | None,
        leader: Leader | None,
        in_loop: Callable[[], bool],
        own_s: Callable[[], float],
    ) -> None:
        self._state, self._calls, self._opening, self._drift = state, calls, opening, drift
        self._settings, self._sync, self._leader = settings, sync, leader
        self._in_loop, self._own_s = in_loop, own_s

    def mean(
        self, total: float | Tensor, count: float | Tensor, name: str | None
    ) -> float | Tensor:
        """Return the sum of all totals over the sum of all counts; collective."""
        if name is not None:
            check_metric(name, total)
        # The ranks compare where they call: a rank that is a step ahead would mix two means.
        in_loop = self._in_loop()
        if in_loop:
            check_unaligned_mean(self._settings.mode)
        shape = tuple(total.shape) if isinstance(total, Tensor) and total.numel() > 1 else ()
        call = Call(name, shape, self._state.progress.step, in_loop)
        # This takes as long as the slowest rank needs, and would make all ranks look equally slow.
        with self._state.clock.waiting():
            mean = exact_mean(total, count, self._calls.summing(call))
        if name is not None:
            tell_metric(self._leader, name, mean, self._state.progress)
        return mean

    def summary(self) -> Summary:
        """Return a summary of the run so far; complete on rank 0."""
        state, leader, drift = self._state, self._leader, self._drift
        progress, order, limits = state.progress, state.progress.order, state.limits
        return summarise(
            leader,
            rank=self._calls.rank,
            epoch=progress.epoch,
            step=progress.step,
            global_batch=progress.global_batch,
            policy=self._settings.policy,
            not_measured=self._opening.not_measured,
            samples_dropped=0 if order is None else order.dropped(progress.global_batch),
            overhead_s=self._own_s() / max(progress.step, 1),
            by_epoch=order is not None and order.by_epoch,
            shards=0 if order is None else len(order.shards),
            batches_repeated=limits.repeated,
            fits=limits.learned,
            drift_checks=drift.checks,
            drifts=drift.drifts,
            noise=noise_summary(None if leader is None else leader.noise, state.noise),
            **facts_of(self._settings.mode, self._sync),
        )
