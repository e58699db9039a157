"""Collective calls through the store, and the sums behind `Stride.mean`.

No collective of the engine takes part. A collective that a single rank starts would be paired with
whatever the other ranks send next, such as their gradients. Through the store the ranks meet
first, and an error names the rank that is missing.
"""

from __future__ import annotations

import base64
import contextlib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from evenstride.errors import RanksDisagree, WorkerLost
from evenstride.runtime.coordination.agreement import Passed, Plain, agree, named, require_equal
from evenstride.runtime.coordination.draw_barrier import DrawBarrier
from evenstride.runtime.engines.process_groups import let_threads_finish, own_group
from evenstride.runtime.failures.heartbeat import Beat
from evenstride.runtime.failures.survivors import FreeWorker, Survivors, watched
from evenstride.runtime.loading.position import CommittedPosition
from evenstride.runtime.store.store_channel import Channel
from evenstride.runtime.timing.device_timer import RankClock

Agree = Callable[[Callable[[], Plain], Callable[[list[Plain]], Plain]], Plain]
"""Lets all ranks show something and the leader decide on it."""

# Values per message, 512 KiB: a store accepts messages of up to 8 MiB.
_MOST_VALUES = 2**16


class Whereabouts:
    """Reports to any thread where the training thread is; heartbeats send it to other ranks.

    ``free`` may wait for its servers; it is ``None`` in modes with a common step.
    """

    def __init__(self, clock: RankClock, gate: DrawBarrier, free: FreeWorker | None) -> None:
        self._clock, self._gate, self._free = clock, gate, free
        self._agreeing = False

    @contextlib.contextmanager
    def agreeing(self) -> Iterator[None]:
        """Report that this rank is in a collective call."""
        self._agreeing = True
        try:
            yield
        finally:
            self._agreeing = False

    def at(self) -> tuple[str, int]:
        """Return the phase and the step."""
        timer = self._clock.timer
        phase, step = timer.at
        if self._free is not None and self._free.waits:
            # A phase in which other ranks look for a rank that is missing.
            return "sync", step
        if phase == "data" and self._gate.waiting:
            return "decision", step + 1
        if self._agreeing:
            return "agreement", step
        left = phase != "sync" and timer.left
        return "left" if left else phase, step


class RankCalls:
    """One rank's part in collective calls; a single process agrees with itself.

    ``channel`` and ``group`` are ``None`` with one process. ``beats`` returns the latest heartbeats
    of some ranks. ``survivors`` is set in modes that continue without a lost rank.
    """

    def __init__(
        self,
        channel: Channel | None,
        group: dist.ProcessGroup | None,
        clock: RankClock,
        gate: DrawBarrier,
        progress: CommittedPosition,
        beats: Callable[[list[int]], dict[int, Beat]],
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
        """Return the seed for comparing samples between ranks; ``None`` with one process."""
        return seed if self.world_size > 1 else None

    def agree(
        self,
        call: str,
        show: Callable[[], Plain],
        judge: Callable[[list[Plain]], Plain],
        passed: Passed | None = None,
    ) -> Plain:
        """Return the leader's verdict on what all ranks show; see `agreement.agree`."""
        # A rank that reaches this call has read the verdict of the previous one, so the leader may
        # remove that from the store.
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
        """Return a function that adds up all ranks' values; ``None`` for a single rank."""
        if self._channel is None:
            return None
        if self._survivors is None:
            return partial(sum_over_ranks, call=call, agree=partial(self.meet, "mean()"))
        # Such a mean bypasses the agreement, but its keys in the store need a number, too.
        self._meetings += 1
        return partial(self._survivors.summed, self._channel, f"mean {self._meetings}")

    def own_group(self, backend: str | None = None) -> dist.ProcessGroup | None:
        """Create another process group of the same ranks; ``None`` with one process; collective."""
        with self._clock.waiting():
            return own_group(self._group, self._channel, backend)

    def close(self) -> None:
        """Release the process group; see `Channel.close`."""
        # What is released next may be the last reference to a model and its process group; see
        # `WatchedModels.clear`. Older torch joins the group's threads with the lock in any case.
        if self._channel is not None:
            let_threads_finish()
        self._group = self._channel = None

    def _passed(self, ranks: list[int]) -> dict[int, str]:
        """Return those of the ranks that are in a later step than this one, and where they are."""
        # The loss of a rank explains a wait better than a rank that is ahead.
        if self._gate.error is not None:
            raise self._gate.error
        return ahead(self._beats(ranks), self._progress.step)


def ahead(beats: dict[int, Beat], step: int) -> dict[int, str]:
    """Return the ranks that are in a later step or have ended, and where they are.

    Raises:
        WorkerLost: an error has ended one of them. Its heartbeat may be read before its loss is
            reported.
    """
    for rank, beat in beats.items():
        if beat.error is not None:
            raise WorkerLost(
                f"rank {rank} is gone: it ended with {beat.error}, so step {step} cannot be "
                "finished"
            )
    return {rank: beat.where for rank, beat in beats.items() if beat.steps > step}


def _topic(meeting: int) -> str:
    return f"call {meeting} of loader(), watch(), sync_batch_norm() or mean()"


@dataclass(frozen=True, slots=True)
class Call:
    """One rank's call of `Stride.mean`, which the other ranks must have made, too."""

    name: str | None  # under which the trace records the mean
    shape: tuple[int, ...]  # of the total; empty for one number
    steps: int  # that the rank has committed
    in_loop: bool  # whether its training loop is running


def exact_mean(
    total: float | Tensor, count: float | Tensor, summed: Callable[[Tensor], Tensor] | None = None
) -> float | Tensor:
    """Return the sum of all ranks' totals over the sum of their counts, in float64.

    A tensor of several elements gives a tensor of the same shape, anything else a float. The result
    is NaN if the count over all ranks is 0. ``summed`` returns the sums of all ranks' values; it is
    ``None`` for a single rank.
    """
    totals = torch.as_tensor(total, dtype=torch.float64, device="cpu").detach()
    sums = torch.cat([totals.reshape(-1), torch.tensor([float(count)], dtype=torch.float64)])
    if summed is not None:
        sums = summed(sums)
    mean = sums[:-1] / sums[-1]
    return float(mean) if totals.numel() == 1 else mean.reshape(totals.shape)


def sum_over_ranks(values: Tensor, call: Call, agree: Agree) -> Tensor:
    """Return the sums of all ranks' values, ``(n,)`` float64; every rank makes the same call."""

    def show(piece: Tensor) -> Plain:
        return {**asdict(call), "values": _text(piece)}

    pieces = torch.split(values, _MOST_VALUES)
    return torch.cat([_numbers(agree(partial(show, piece), _judged)["sums"]) for piece in pieces])


def _judged(shown: list[Plain]) -> Plain:
    places: dict[str, list[int]] = {}
    for rank, mine in enumerate(shown):
        places.setdefault(_place(mine), []).append(rank)
    if len(places) > 1:
        shown_places = "; ".join(
            f"{place} on rank {', '.join(map(str, ranks[:8]))}" for place, ranks in places.items()
        )
        raise RanksDisagree(
            f"the ranks called mean() at different places: {shown_places}; every rank must call it "
            "equally often and at the same places"
        )
    require_equal([{"name": mine["name"], "shape": mine["shape"]} for mine in shown], "mean()")
    return {"sums": _text(torch.stack([_numbers(mine["values"]) for mine in shown]).sum(0))}


def _place(shown: Plain) -> str:
    where = "inside the training loop" if shown["in_loop"] else "outside the training loop"
    return f"{where} after {shown['steps']} steps"


def _text(values: Tensor) -> str:
    # As bytes, so that no digit is rounded.
    return base64.b64encode(values.numpy().tobytes()).decode()


def _numbers(text: str) -> Tensor:
    # Copied, because the array of a bytes object is read-only and torch's tensors are not.
    return torch.from_numpy(np.frombuffer(base64.b64decode(text), dtype=np.float64).copy())
