"""What workers do together where the others go on without one that is lost.

Between two epochs all ranks still meet: they evaluate, take means and save. Who is lost then never
comes, and the process group would wait for it until its own timeout. So whoever waits asks the
first server from time to time, which knows who is lost.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch import Tensor

from evenstride.core.fleet import Shares
from evenstride.errors import WorkerLost
from evenstride.runtime.coordination.draw_barrier import DrawBarrier
from evenstride.runtime.environment import USUAL_SILENT_S
from evenstride.runtime.failures.heartbeat import is_of_collectives
from evenstride.runtime.store.store_channel import Channel

# How often who waits looks whether what it waits for has come, and whether somebody is lost.
_NAP_S, _LOOK_S = 0.01, 0.25
# Who has done its part may leave before the others have seen that all is done.
_GRACE_S = 2.0
# How long a collective that broke may be older than the news of whose end broke it: that of another
# machine's process is told by its heart.
_NEWS_S = USUAL_SILENT_S + 10.0


class FreeWorker(Protocol):
    """What is asked of a worker that does not keep step with the others."""

    @property
    def waits(self) -> bool:
        """Whether it waits for others."""
        ...

    @property
    def position(self) -> int:
        """Samples of the epoch that are trained, by all workers."""
        ...

    @property
    def split(self) -> tuple[int, ...]:
        """Samples that each worker trained in the epoch that ended last; empty without any."""
        ...

    def present(self) -> tuple[int, ...]:
        """Return the workers that are there."""
        ...

    def report(self) -> dict[str, Any]:
        """Return what the first server tells of the run, such as who is ``gone``."""
        ...

    def lost(self, rank: int) -> bool:
        """Tell the servers that a worker is gone; return whether the others can go on."""
        ...

    def waiting(self) -> AbstractContextManager[None]:
        """Note that this rank waits, so that the heartbeats of the others are watched."""
        ...


class Survivors:
    """One rank's view of who is there; ``opening`` is the split that the run began with."""

    def __init__(self, free: FreeWorker, opening: Shares, gate: DrawBarrier) -> None:
        self._free, self._opening, self._gate = free, opening, gate

    def split(self) -> Shares:
        """Return shares by which all ranks cut data alike, though they are at different steps.

        In proportion to the samples that each worker trained in the epoch that ended last, and by
        the opening split before; nothing for a worker that is lost.
        """
        shares, present = self._free.split or self._opening, self._free.present()
        there = tuple(share if rank in present else 0 for rank, share in enumerate(shares))
        # Those who are left may have trained nothing.
        return there if any(there) else tuple(int(r in present) for r in range(len(shares)))

    def lost(self) -> tuple[int, ...]:
        """Return the workers that are gone by now; raise if the run cannot go on without one."""
        if (error := self._gate.error) is not None:
            raise error
        return tuple(self._free.report().get("gone", ()))

    def absent(self) -> tuple[int, ...]:
        """Return the workers with whom nothing can be done together in this pause of training."""
        present = set(self._free.present()) - set(self.lost())
        return tuple(rank for rank in range(len(self._opening)) if rank not in present)

    def until(self, done: Callable[[], bool], call: str) -> None:
        """Wait for something that all ranks do in ``call``; `WorkerLost` if one of them is lost."""
        next_look_s, give_up_s = 0.0, math.inf
        with self.waiting():
            while not done():
                now_s = time.monotonic()
                if now_s >= next_look_s:
                    next_look_s, lost = now_s + _LOOK_S, self.lost()
                    give_up_s = min(give_up_s, now_s + _GRACE_S) if lost else math.inf
                    if now_s >= give_up_s:
                        raise _without(lost, call)
                time.sleep(_NAP_S)

    def summed(self, channel: Channel, topic: str, values: Tensor) -> Tensor:
        """Return the sums of all ranks' values, ``(n,)`` float64, the same on all; collective.

        By way of the store: a collective of the process group that waits for a lost rank cannot be
        left, not even by the end of the process. ``topic`` is a name used once. `WorkerLost` says
        that a rank is lost, before or meanwhile.
        """
        if lost := self.lost():
            raise _without(lost, "mean()")
        channel.show(f"{topic}/{channel.rank}", json.dumps(values.tolist()))
        keys = [f"{topic}/{rank}" for rank in range(channel.world_size)]
        texts = watched(channel, self, "mean()").meet(keys, channel.timeout)
        return torch.tensor([json.loads(text) for text in texts], dtype=torch.float64).sum(0)

    def blamed(self, error: BaseException) -> tuple[int, ...]:
        """Return the workers whose loss explains an error; waits for the news if it may be one."""
        end_s = time.monotonic() + (_NEWS_S if is_of_collectives(error) else 0.0)
        with self.waiting():
            while not (lost := self.lost()) and time.monotonic() < end_s:
                time.sleep(_LOOK_S)
        return lost

    def waiting(self) -> AbstractContextManager[None]:
        """Note that this rank waits, so that the heartbeats of the others are watched."""
        return self._free.waiting()


@dataclass(slots=True, eq=False)
class WatchedChannel(Channel):
    """A channel on which nobody waits for a rank that is lost, as ``survivors`` know."""

    survivors: Survivors | None = None  # tell who is
    call: str = "a call of all ranks"  # that ranks wait in

    def meet(
        self,
        keys: list[str],
        timeout: timedelta,
        tell: Callable[[], object] = lambda: None,
        look: Callable[[], object] | None = None,
    ) -> list[str]:
        """Wait for all keys; see `Channel.meet`. What would be looked for, survivors know."""
        del look
        assert self.survivors is not None, "made by `watched`"
        begun_s, untold = time.monotonic(), True

        def over() -> bool:
            nonlocal untold
            waited_s = time.monotonic() - begun_s
            if untold and waited_s >= self.tell_after.total_seconds():
                untold = False
                tell()
            return not self.missing(keys) or waited_s >= timeout.total_seconds()

        self.survivors.until(over, self.call)
        if self.missing(keys):
            raise RuntimeError(f"{keys} did not come in time")
        return [bytes(value).decode() for value in self.meeting.multi_get(keys)]


def watched(channel: Channel, survivors: Survivors | None, call: str) -> Channel:
    """Return a channel on which nobody waits for a rank that is lost, if the others go on."""
    if survivors is None:
        return channel
    own = {field.name: getattr(channel, field.name) for field in fields(Channel)}
    return WatchedChannel(**own, survivors=survivors, call=call)


def _without(lost: tuple[int, ...], call: str) -> WorkerLost:
    return WorkerLost(
        f"worker(s) {', '.join(map(str, lost))} are gone, and {call} needs all; train on without "
        "it, or start the run again to have all of them, from the newest checkpoint on"
    )
