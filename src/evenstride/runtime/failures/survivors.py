"""Collective calls in runs that continue without a lost worker.

Between two epochs the ranks still make collective calls: they evaluate, take means and save. A lost
worker never joins such a call, and the process group would wait for it until its timeout. So a
waiting rank regularly asks the first parameter server, which knows the lost workers.
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
from evenstride.runtime.store.store_channel import Channel, nap_s

# Intervals at which a waiting rank checks the awaited condition, and for lost workers.
_NAP_S, _LOOK_S = 0.01, 0.25
# A worker that completed the call may leave before the others have seen its completion.
_GRACE_S = 2.0
# The report of a loss may follow the broken collective by this time: the loss of a process on
# another machine shows only in its missing heartbeats.
_NEWS_S = USUAL_SILENT_S + 10.0


class FreeWorker(Protocol):
    """Interface of a worker that does not train in lockstep with the others."""

    @property
    def waits(self) -> bool:
        """Whether it waits for others."""
        ...

    @property
    def position(self) -> int:
        """Samples of the epoch that all workers together have trained."""
        ...

    @property
    def split(self) -> tuple[int, ...]:
        """Samples that each worker trained in the last complete epoch; empty before one."""
        ...

    def present(self) -> tuple[int, ...]:
        """Return the workers that take part."""
        ...

    def report(self) -> dict[str, Any]:
        """Return the first server's report on the run, such as the workers that are ``gone``."""
        ...

    def lost(self, rank: int) -> bool:
        """Report a lost worker to the servers; return whether the others can continue."""
        ...

    def waiting(self) -> AbstractContextManager[None]:
        """Note that this rank waits, so that the heartbeats of the others are watched."""
        ...


class Survivors:
    """One rank's view of the remaining workers; ``opening`` is the first split of the run."""

    def __init__(self, free: FreeWorker, opening: Shares, gate: DrawBarrier) -> None:
        self._free, self._opening, self._gate = free, opening, gate

    def split(self) -> Shares:
        """Return shares that are equal on all ranks, although the ranks are at different steps.

        Each share is the number of samples that the worker trained in the last complete epoch.
        Before that, the shares are those of the opening split. A lost worker has share 0.
        """
        shares, present = self._free.split or self._opening, self._free.present()
        there = tuple(share if rank in present else 0 for rank, share in enumerate(shares))
        # The remaining workers may have trained no samples.
        return there if any(there) else tuple(int(r in present) for r in range(len(shares)))

    def lost(self) -> tuple[int, ...]:
        """Return the workers lost so far; raise if the run cannot continue without one."""
        if (error := self._gate.error) is not None:
            raise error
        return tuple(self._free.report().get("gone", ()))

    def absent(self) -> tuple[int, ...]:
        """Return the workers that cannot take part in collective calls between these epochs."""
        present = set(self._free.present()) - set(self.lost())
        return tuple(rank for rank in range(len(self._opening)) if rank not in present)

    def until(self, done: Callable[[], bool], call: str) -> None:
        """Wait until all ranks are ``done`` with ``call``; raise `WorkerLost` if one is lost."""
        next_look_s, give_up_s = 0.0, math.inf
        with self.waiting():
            while not done():
                now_s = time.monotonic()
                if now_s >= next_look_s:
                    next_look_s, lost = now_s + _LOOK_S, self.lost()
                    give_up_s = min(give_up_s, now_s + _GRACE_S) if lost else math.inf
                    if now_s >= give_up_s:
                        raise _without(lost, call)
                time.sleep(nap_s(len(self._opening), _NAP_S))

    def summed(self, channel: Channel, topic: str, values: Tensor) -> Tensor:
        """Return the sums of all ranks' values, ``(n,)`` float64, the same on all; collective.

        The values go through the store: a collective of the process group that waits for a lost
        rank cannot be interrupted, not even at the end of the process. ``topic`` is a name used
        once. Raises `WorkerLost` if a rank is lost before or during the call.
        """
        if lost := self.lost():
            raise _without(lost, "mean()")
        channel.show(f"{topic}/{channel.rank}", json.dumps(values.tolist()))
        meeting = watched(channel, self, "mean()")
        if channel.rank == 0:
            keys = [f"{topic}/{rank}" for rank in range(channel.world_size)]
            texts = meeting.meet(keys, channel.timeout)
            sums = torch.tensor([json.loads(text) for text in texts], dtype=torch.float64).sum(0)
            channel.show(f"{topic}/sums", json.dumps(sums.tolist()))
            return sums
        # Only rank 0 adds up. If every rank read all values, the cost would grow with W squared.
        (text,) = meeting.meet([f"{topic}/sums"], channel.timeout)
        return torch.tensor(json.loads(text), dtype=torch.float64)

    def blamed(self, error: BaseException) -> tuple[int, ...]:
        """Return the workers whose loss explains an error.

        If the error may come from a loss, wait for the report of one.
        """
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
    """A channel on which no rank waits for a lost one; ``survivors`` reports the losses."""

    survivors: Survivors | None = None
    call: str = "a collective call"  # name of the call in which ranks wait

    def meet(
        self,
        keys: list[str],
        timeout: timedelta,
        tell: Callable[[], object] = lambda: None,
        look: Callable[[], object] | None = None,
    ) -> list[str]:
        """Wait for all keys as `Channel.meet`. ``look`` is unused: ``survivors`` finds losses."""
        del look
        assert self.survivors is not None, "made by `watched`"
        begun_s, silent = time.monotonic(), True

        def over() -> bool:
            nonlocal silent
            waited_s = time.monotonic() - begun_s
            if silent and waited_s >= self.tell_after.total_seconds():
                silent = False
                tell()
            return self.all_there(keys) or waited_s >= timeout.total_seconds()

        self.survivors.until(over, self.call)
        if self.missing(keys):
            raise RuntimeError(f"timed out waiting for the store keys {keys}")
        return [bytes(value).decode() for value in self.meeting.multi_get(keys)]


def watched(channel: Channel, survivors: Survivors | None, call: str) -> Channel:
    """Return a channel on which no rank waits for a lost one, if the run can continue."""
    if survivors is None:
        return channel
    own = {field.name: getattr(channel, field.name) for field in fields(Channel)}
    return WatchedChannel(**own, survivors=survivors, call=call)


def _without(lost: tuple[int, ...], call: str) -> WorkerLost:
    return WorkerLost(
        f"worker(s) {', '.join(map(str, lost))} are gone, and {call} needs all workers; continue "
        "without this call, or restart the run with all workers from the newest checkpoint"
    )
