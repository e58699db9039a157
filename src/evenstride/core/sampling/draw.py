"""The next samples of a rank: one drawn batch, and the assignment of shards to workers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from evenstride.core.arrays import IntArray, Shares
from evenstride.core.sampling.permutation import Permutation

Stretch = tuple[int, int]
"""Consecutive samples of one shard: the first one, and the one after the last."""


class Draw(NamedTuple):
    """One (micro-)batch on its way to the training loop; a tuple, because every step makes one."""

    step: int  # global index of its step.
    window: int  # samples of the whole step over all ranks.
    share: int  # samples of this rank in the step; 0 for a ghost sample.
    samples: int  # samples in this micro-batch that count; 0 for a ghost sample.
    first: bool  # first micro-batch of this rank in the step.
    last: bool  # last one; its backward pass synchronises.
    # State of the shards after its step, for sequential data sets.
    dealing: ShardAssignment | None = None
    # The intended share without lockstep; at the end of an epoch there may be fewer samples.
    claimed: int = 0
    # Samples of this rank in the step that count, with lockstep; they differ from the share if
    # batches are split by cost.
    trained: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class ShardAssignment:
    """Assigns the shards of an epoch to workers; holds what is left of the shards in progress.

    For sequential data sets (record files, streams). A worker reads its current shard to the end
    and then takes the next one in the epoch's order. When no shard is left, it takes the second
    half of what another worker still has. All ranks know the shares of every step, so they compute
    the same assignment without communication. Every sample is trained once per epoch, every step
    has its full global batch, and no worker finishes before the others. Which samples form a step
    depends on the split.

    Samples are numbered over all shards in order. A worker with several loader processes has a
    *lane* for each, with its own shard, and its steps alternate between the lanes.

    Source:
        Own. Taking half of what a busy worker has left is the usual rule of work stealing (Blumofe
        & Leiserson, J. ACM 46(5), 1999, analyse its random form, which is not used here).

    >>> dealing = ShardAssignment.of((6, 4), lanes=(1, 1), seed=0, epoch=0, shuffle=False)
    >>> dealing, indices = dealing.step(0, (3, 1), worker=0)
    >>> indices.tolist()
    [0, 1, 2]
    >>> dealing.step(1, (4, 2), worker=0)[1].tolist()
    [3, 4, 5, 9]
    """

    ends: IntArray  # int64 ``(S,)``, the number after each shard's last sample.
    order: IntArray  # int64 ``(S,)``, the order in which the epoch starts the shards.
    lanes: IntArray  # int64 ``(W,)``, number of lanes of each worker.
    # Int64 ``(W, L)``, the next sample on each lane; ``L`` is the largest number of lanes.
    low: IntArray
    high: IntArray  # int64 ``(W, L)``, the end of the samples left there
    rest: tuple[Stretch, ...] = ()  # left by an earlier run; assigned before any new shard
    begun: int = 0  # number of shards assigned so far

    @classmethod
    def of(
        cls, lengths: Shares, lanes: tuple[int, ...], seed: int, epoch: int, *, shuffle: bool
    ) -> ShardAssignment:
        ends = np.cumsum(np.asarray(lengths, dtype=np.int64))
        order = np.arange(len(lengths), dtype=np.int64)
        if shuffle:
            order = Permutation(len(lengths), seed, epoch).at(order)
        nothing = np.zeros((len(lanes), max(lanes)), dtype=np.int64)
        return cls(ends, order, np.asarray(lanes, dtype=np.int64), nothing, nothing)

    def step(self, step: int, shares: Shares, worker: int) -> tuple[ShardAssignment, IntArray]:
        """Return the assignment after a step, and a worker's samples in the step, ``(n,)``.

        A worker without a share gets one index, -1: it takes part with any sample. Cost:
        O(W), and for each shard that ends O(1), or O(W L) once no new one is left.
        """
        rows, lanes = np.arange(len(self.lanes)), step % self.lanes
        wanted, table = np.asarray(shares, dtype=np.int64), _Table(self)
        here = table.low[rows, lanes]
        taken = np.minimum(wanted, table.high[rows, lanes] - here)
        table.low[rows, lanes] += taken
        mine: list[Stretch] = [(int(here[worker]), int(here[worker] + taken[worker]))]
        missing = wanted - taken
        # In order of rank, so that every rank computes the same assignment without communication.
        for short in np.flatnonzero(missing).tolist():
            read = table.read((short, int(lanes[short])), int(missing[short]))
            if short == worker:
                mine += read
        if shares[worker]:
            return table.closed(), np.concatenate([np.arange(*stretch) for stretch in mine])
        return table.closed(), np.array([-1])

    def save(self) -> dict[str, Any]:
        """Return the position as plain values: what is left of every shard in progress."""
        rows = zip(self.low.tolist(), self.high.tolist(), self.lanes.tolist(), strict=True)
        return {
            "begun": self.begun,
            "rest": [list(stretch) for stretch in self.rest],
            "open": [list(map(list, zip(low[:n], high[:n], strict=True))) for low, high, n in rows],
        }

    def restored(self, saved: dict[str, Any]) -> ShardAssignment:
        """Return a saved position in this epoch, for the current workers and lanes.

        With the same number of them, each continues its shards; otherwise the shards in progress
        are assigned again.
        """
        lanes = [[_stretch_of(pair) for pair in mine] for mine in saved["open"]]
        table = _Table(self)
        table.rest, table.begun = [_stretch_of(pair) for pair in saved["rest"]], saved["begun"]
        if list(map(len, lanes)) == self.lanes.tolist():
            for worker, mine in enumerate(lanes):
                for lane, stretch in enumerate(mine):
                    table.low[worker, lane], table.high[worker, lane] = stretch
        else:
            left = [(first, end) for mine in lanes for first, end in mine if first < end]
            table.rest = left + table.rest
        return table.closed()


class _Table:
    """A `ShardAssignment` under construction."""

    def __init__(self, before: ShardAssignment) -> None:
        self._before = before
        self.low, self.high = before.low.copy(), before.high.copy()
        self.rest, self.begun = list(before.rest), before.begun

    def read(self, lane: tuple[int, int], samples: int) -> list[Stretch]:
        """Start as many stretches on a lane as needed to read some samples."""
        read: list[Stretch] = []
        while samples:
            first, end = self._next(samples)
            last = min(first + samples, end)
            self.low[lane], self.high[lane] = last, end
            if first < last:
                read.append((first, last))
            samples -= last - first
        return read

    def _next(self, samples: int) -> Stretch:
        """Return the next stretch: from an earlier run, a shard, or part of another lane's."""
        # The last is the second half of what is left there, or as much as is wanted at once.
        if self.rest:
            return self.rest.pop(0)
        if self.begun < len(self._before.order):
            shard = int(self._before.order[self.begun])
            self.begun += 1
            return int(self._before.ends[shard - 1]) if shard else 0, int(self._before.ends[shard])
        # Halving the longest one keeps reads sequential; among equals, the lower rank's.
        left = self.high - self.low
        longest = np.unravel_index(int(left.argmax()), left.shape)
        assert left[longest] > 0, "a step has no more samples than are left"
        end = int(self.high[longest])
        self.high[longest] -= max((left[longest] + 1) // 2, min(samples, left[longest]))
        return int(self.high[longest]), end

    def closed(self) -> ShardAssignment:
        rest = tuple(self.rest)
        return replace(self._before, low=self.low, high=self.high, rest=rest, begun=self.begun)


def _stretch_of(pair: Any) -> Stretch:
    first, end = pair
    return int(first), int(end)
