"""Calls that all ranks make together, in the same order."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch.distributed as dist
from torch import Tensor

from evenstride.runtime.coordination.agreement import Plain, agree, named
from evenstride.runtime.coordination.draw_barrier import DrawBarrier
from evenstride.runtime.engines.process_groups import own_group
from evenstride.runtime.failures.heartbeat import Beat
from evenstride.runtime.failures.survivors import Survivors, watched
from evenstride.runtime.loading.position import CommittedPosition
from evenstride.runtime.session.whereabouts import Whereabouts
from evenstride.runtime.store.store_channel import Channel
from evenstride.runtime.store.store_mean import Call, sum_over_ranks
from evenstride.runtime.timing.rank_clock import RankClock


class RankCalls:
    """One rank's part in what all ranks do together; a single process agrees with itself.

    Args:
        channel: to the other ranks; ``None`` with one process.
        group: of all ranks, likewise.
        clock: of this rank's steps.
        gate: knows why the run cannot go on, if it cannot.
        progress: of this rank.
        beats: returns the latest heartbeat of every rank.
        whereabouts: of this rank.
        survivors: who is there, where the others go on without a rank that is lost.
    """

    def __init__(
        self,
        channel: Channel | None,
        group: dist.ProcessGroup | None,
        clock: RankClock,
        gate: DrawBarrier,
        progress: CommittedPosition,
        beats: Callable[[], dict[int, Beat]],
        whereabouts: Whereabouts,
        survivors: Survivors | None,
    ) -> None:
        self.rank = 0 if channel is None else channel.rank
        self.world_size = 1 if channel is None else channel.world_size
        self._group, self._channel = group, channel
        self._clock, self._gate, self._progress = clock, gate, progress
        self._beats, self._whereabouts, self._survivors = beats, whereabouts, survivors
        self._meetings = 0

    def seed_to_compare(self, seed: int) -> int | None:
        """Return the seed of samples that are compared between ranks; ``None`` for one process."""
        return seed if self.world_size > 1 else None

    def agree(
        self,
        call: str,
        show: Callable[[], Plain],
        judge: Callable[[list[Plain]], Plain],
        passed: Callable[[], dict[int, str]] | None = None,
    ) -> Plain:
        """Return what the leader makes of what all ranks show; see `agreement.agree`."""
        # All have read the verdict of the call before once they come to this one, so the leader may
        # remove it from the store.
        before, self._meetings = _topic(self._meetings), self._meetings + 1
        show, judge = named(call, show, judge)
        if self._channel is None:
            return judge([show()])
        channel = watched(self._channel, self._survivors, call)
        return agree(channel, _topic(self._meetings), show, judge, call, passed, before)

    def meet(
        self, call: str, show: Callable[[], Plain], judge: Callable[[list[Plain]], Plain]
    ) -> Plain:
        """Agree as in `agree`, in a call that a rank may have left out by mistake."""
        with self._whereabouts.agreeing():
            return self.agree(call, show, judge, self._passed)

    def summing(self, call: Call) -> Callable[[Tensor], Tensor] | None:
        """Return what adds up all ranks' values; ``None`` for a rank alone."""
        if self._channel is None:
            return None
        if self._survivors is None:
            return partial(sum_over_ranks, call=call, agree=partial(self.meet, "mean()"))
        # Such a mean goes around the agreement, and its keys in the store need a number, too.
        self._meetings += 1
        return partial(self._survivors.summed, self._channel, f"mean {self._meetings}")

    def own_group(self, backend: str | None = None) -> dist.ProcessGroup | None:
        """Return another process group of the same ranks, ``None`` for one; collective."""
        with self._clock.waiting():
            return own_group(self._group, self._channel, backend)

    def close(self) -> None:
        """Let go of the process group; see `Channel.close`."""
        self._group = self._channel = None

    def _passed(self) -> dict[int, str]:
        """Return the ranks that have gone on to a later step than this one, and where they are.

        Raises:
            EvenstrideError: the run cannot go on, above all because a rank is gone.
        """
        # The loss of a rank explains a wait better than another that is ahead.
        if self._gate.error is not None:
            raise self._gate.error
        beats = self._beats().items()
        return {rank: beat.where for rank, beat in beats if beat.steps > self._progress.step}


def _topic(meeting: int) -> str:
    return f"call {meeting} of loader(), watch(), sync_batch_norm() or mean()"
