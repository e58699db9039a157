"""Where all ranks agree on the next epoch's global batch: at the end of one.

A batch may change where an epoch ends and nowhere else, so that each step's window is known from
the position in the data alone. Every rank stands still there until all have told the leader so in
one and the same exchange. Nobody has drawn the next step then, whatever its loader prefetches.
"""

from __future__ import annotations

from collections.abc import Callable

from evenstride.runtime.coordination.messages import BatchChange
from evenstride.runtime.loading.micro_batch_limits import MicroBatchLimits
from evenstride.runtime.loading.position import CommittedPosition
from evenstride.runtime.noise.noise_meter import NoiseMeter
from evenstride.runtime.timing.rank_clock import RankClock


class BatchChanges:
    """The turns of one rank's training loop.

    Args:
        progress: of the rank; its batch is changed here.
        limits: of the rank's micro-batches, which follow.
        clock: of the rank's steps.
        noise: measures gradients; ``None`` where it is not asked for.
        meet: tells the leader, waits for the others, and returns the batch to go on with; ``None``
            if no more decisions will come.
    """

    def __init__(
        self,
        progress: CommittedPosition,
        limits: MicroBatchLimits,
        clock: RankClock,
        noise: NoiseMeter | None,
        meet: Callable[[BatchChange], int | None],
    ) -> None:
        self._progress, self._limits, self._clock = progress, limits, clock
        self._noise, self._meet = noise, meet
        self._in_force = progress.global_batch

    def before_pass(self) -> None:
        """Let a batch that was restored be taken up by all.

        A rank that did not restore it is found by the step that it draws.
        """
        wanted = self._progress.global_batch
        if wanted != self._in_force:
            self._turn(wanted)

    def after_pass(self) -> None:
        """Have the next epoch's batch chosen, if the epoch has ended."""
        if self._progress.order is not None and self._progress.cursor.done:
            self._turn(None)

    def _turn(self, wanted: int | None) -> None:
        progress, timer = self._progress, self._clock.timer
        assert progress.order is not None, "there is a loader, so there is an order"
        timer.settle()  # so that the steps before it are measured
        weighted = self._noise is not None and self._noise.weighted
        with timer.turning():
            batch = self._meet(BatchChange(progress.step, wanted, progress.order.length, weighted))
        if batch is None or batch == self._in_force:
            return
        progress.go_on_with(batch)
        self._in_force = batch
        tail = 0 if progress.order.drop_last else progress.order.length % batch
        self._limits.change_tail(tail)
