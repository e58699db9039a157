"""From the position in an epoch to every worker's samples, each position exactly once.

An epoch is a sequence of positions ``0 .. length - 1`` in an order that depends only on the seed
and the epoch. A step takes the next ``B`` positions as its *window*; the shares split the
window into contiguous ranges in rank order. The position in the data is therefore one number, and
the set of samples of a step does not depend on which worker trains which of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import numpy as np

from evenstride.core.allocation.integer_splits import apportion
from evenstride.core.arrays import FloatArray, IntArray, Shares
from evenstride.core.fleet import as_shares
from evenstride.core.sampling.permutation import Permutation

UNKNOWN_LENGTH = 2**48
"""Samples of an epoch whose length is not known: more than any training reads."""


@dataclass(frozen=True, slots=True)
class EpochCursor:
    """The committed position in an epoch."""

    length: int  # samples in the data set
    global_batch: int  # samples per step
    drop_last: bool = False  # whether the last, incomplete global batch is left out
    position: int = 0  # number of committed samples

    @property
    def end(self) -> int:
        return self.length - self.length % self.global_batch if self.drop_last else self.length

    @property
    def done(self) -> bool:
        return self.position >= self.end

    @property
    def steps(self) -> int:
        return -(-self.end // self.global_batch)

    @property
    def window(self) -> range:
        return range(self.position, min(self.position + self.global_batch, self.end))

    def commit(self, samples: int) -> EpochCursor:
        return replace(self, position=self.position + samples)


@dataclass(frozen=True, slots=True)
class Piece:
    """The samples of one worker in one step."""

    positions: range  # its epoch positions; a ghost sample's position belongs to another worker
    # The worker has share 0 and gets one sample of weight 0, because it must still take part in the
    # collectives.
    ghost: bool = False

    @property
    def samples(self) -> int:
        return 0 if self.ghost else len(self.positions)


def step_shares(shares: Shares, window_size: int) -> Shares:
    """Return the shares of a step whose window may be shorter than a full global batch.

    The tail of an epoch scales the current shares down by largest remainder. Every worker with
    a share keeps at least one sample while the window has enough of them. Quanta are ignored
    here: a tail is short, and multiples of large quanta would leave most workers without samples.

    >>> step_shares((20, 100), 120), step_shares((20, 100), 13), step_shares((20, 100), 1)
    ((20, 100), (2, 11), (0, 1))
    """
    if window_size == sum(shares):
        return shares
    full = np.asarray(shares, dtype=np.int64)
    present = (full > 0).astype(np.int64)
    lower = present if window_size >= int(present.sum()) else np.zeros_like(present)
    upper = np.where(full > 0, max(window_size, 1), 0)
    return as_shares(apportion(full.astype(np.float64), window_size, lower, upper))


def cut(window: range, shares: Shares) -> tuple[Piece, ...]:
    """Return each worker's range of the window, in rank order; the shares sum to its size.

    >>> [p.positions for p in cut(range(10, 15), (2, 3))]
    [range(10, 12), range(12, 15)]
    >>> cut(range(10, 12), (2, 0))[1]
    Piece(positions=range(10, 11), ghost=True)
    """
    assert sum(shares) == len(window) > 0, f"shares {shares} do not fit {window}"
    pieces, start = [], window.start
    for share in shares:
        if share:
            pieces.append(Piece(range(start, start + share)))
        else:
            pieces.append(Piece(range(window.start, window.start + 1), ghost=True))
        start += share
    return tuple(pieces)


def cut_by_cost(window: range, shares: Shares, costs: FloatArray) -> tuple[Piece, ...]:
    """Return each worker's range of the window, with a cost in proportion to its share.

    Ranges are consecutive and in rank order, as those of `cut`. Each ends where the cumulative cost
    is nearest to the cumulative share. Every worker with a share gets a sample, so the window must
    have at least as many positions.

    >>> [len(p.positions) for p in cut_by_cost(range(6), (1, 1), np.array([5.0, 1, 1, 1, 1, 1]))]
    [1, 5]
    """
    given = np.asarray(shares, dtype=np.int64)
    # A sample belongs to the side on which its middle lies, which is the nearest boundary.
    middles = np.cumsum(costs) - costs / 2
    wanted = np.cumsum(given) / given.sum() * costs.sum()
    ends = np.searchsorted(middles, wanted)
    # Rounding of the sums must not leave out the last sample.
    ends[-1] = len(window)
    present = (given > 0).astype(np.int64)
    before = np.cumsum(present)
    # Ends minus the workers up to there must not fall, nor leave too few for later workers.
    ends = np.maximum.accumulate(np.maximum(ends - before, 0)) + before
    ends = np.minimum(ends, len(window) - (before[-1] - before))
    starts = np.concatenate([[0], ends[:-1]])
    return tuple(
        Piece(window[a:b]) if share else Piece(window[:1], ghost=True)
        for share, a, b in zip(shares, starts.tolist(), ends.tolist(), strict=True)
    )


def micro_batches_by_cost(
    positions: range, costs: FloatArray, at_most: float, *, padded: bool = False
) -> tuple[range, ...]:
    """Return ``positions`` as consecutive micro-batches that cost at most ``at_most`` each.

    A sample that costs more is a micro-batch of its own. The result has as few as possible. If
    ``padded``, each sample of a micro-batch costs as much as its most expensive one.

    >>> micro_batches_by_cost(range(5), np.array([4.0, 3, 3, 9, 2]), 7)
    (range(0, 2), range(2, 3), range(3, 4), range(4, 5))
    >>> micro_batches_by_cost(range(4), np.array([1.0, 1, 2, 4]), 6, padded=True)
    (range(0, 3), range(3, 4))
    """
    ends, first, spent, most = list[int](), 0, 0.0, 0.0
    for place, cost in enumerate(costs.tolist()):
        after = max(most, cost) * (place - first + 1) if padded else spent + cost
        # A first sample above the limit must not leave an empty micro-batch before it.
        if place and after > at_most:
            ends.append(place)
            first, spent, most = place, 0.0, 0.0
        spent, most = spent + cost, max(most, cost)
    return tuple(positions[a:b] for a, b in pairwise([0, *ends, len(positions)]))


def micro_batches(positions: range, at_most: int | None) -> tuple[range, ...]:
    """Return ``positions`` as the fewest micro-batches of at most ``at_most``, of similar size.

    Similar sizes rather than full ones and a remainder: no micro-batch is so small that its fixed
    cost dominates, and the peak memory is lower.

    >>> micro_batches(range(0, 70), 32)
    (range(0, 24), range(24, 47), range(47, 70))
    """
    if at_most is None or len(positions) <= at_most:
        return (positions,)
    return tuple(_even_pieces(positions, at_most))


def _even_pieces(positions: range, at_most: int) -> Iterator[range]:
    return _pieces(positions, -(-len(positions) // at_most))


def _pieces(positions: range, count: int) -> Iterator[range]:
    small, larger = divmod(len(positions), max(count, 1))
    bounds = (positions.start + i * small + min(i, larger) for i in range(count + 1))
    return (range(a, b) for a, b in pairwise(bounds))


def numbered_micro_batches(positions: range, number: int) -> tuple[range, ...]:
    """Return ``positions`` as exactly ``number`` micro-batches of similar size.

    The last are empty if there are fewer positions.

    >>> numbered_micro_batches(range(0, 7), 3), numbered_micro_batches(range(0, 1), 2)
    ((range(0, 3), range(3, 5), range(5, 7)), (range(0, 1), range(1, 1)))
    """
    return tuple(_pieces(positions, number))


def whole_micro_batches(positions: range, size: int) -> tuple[range, ...]:
    """Return ``positions`` as micro-batches of exactly ``size``, with a smaller last one.

    Equal shapes from step to step need no new compilation and no new memory. A share that is a
    multiple of ``size`` has no remainder. Without positions, the result is one empty range.

    >>> whole_micro_batches(range(0, 70), 32)
    (range(0, 32), range(32, 64), range(64, 70))
    """
    return tuple(positions[at : at + size] for at in range(0, max(len(positions), 1), size))


def even_windows(length: int, at_most: int) -> Iterator[range]:
    """Yield windows for an evaluation pass: every position once, without padding.

    Window sizes differ by at most one, so the last is not much smaller. If ``at_most`` is at
    least twice the number of workers, and the data set has a sample per worker, each window
    has a sample for every worker, and all ranks run the same number of forward passes.

    >>> [len(w) for w in even_windows(10, 4)]
    [4, 3, 3]
    """
    return _even_pieces(range(length), at_most)


@dataclass(frozen=True)
class EpochParts:
    """An epoch in which every worker reads only its own part of the data set.

    Parts are ranges of one permutation of the data set, the same in every epoch. So a data set
    that is sorted by class gives no worker classes of its own. Each epoch starts with a new
    partition, in proportion to the shares. While speeds stay the same, the parts move little, so
    data on local disks can be kept. Within an epoch the shares stay fixed, so all parts end with
    the same step.

    Source:
        Ye et al., DBS, arXiv 2007.11831, and its public code: parts in proportion to the speeds,
        cut again every epoch from one permutation that is made once, each shuffled in every epoch.

    >>> parts = EpochParts(length=10, global_batch=4, shares=(1, 3), seed=0, epoch=0, shuffle=False)
    >>> parts.bounds
    (0, 3, 10)
    >>> [parts.indices(1, np.arange(p, p + 3)).tolist() for p in (1, 5)]
    [[3, 4, 5], [6, 7, 8]]
    """

    length: int  # samples in the data set.
    global_batch: int  # samples per step.
    shares: Shares  # of every full step, per worker; they sum to the global batch.
    seed: int  # of the order within the parts.
    epoch: int  # likewise.
    shuffle: bool = True  # whether parts are random, and read in random order

    @property
    def full_steps(self) -> int:
        return self.length // self.global_batch

    @cached_property
    def tail(self) -> Shares:
        """Samples of each worker in the last, short step; zeros if the last step is full."""
        left = self.length % self.global_batch
        return step_shares(self.shares, left) if left else (0,) * len(self.shares)

    @cached_property
    def bounds(self) -> tuple[int, ...]:
        """Boundaries of the parts in the permutation, ``W + 1`` numbers."""
        sizes = [n * self.full_steps + k for n, k in zip(self.shares, self.tail, strict=True)]
        return (0, *np.cumsum(sizes).tolist())

    def indices(self, worker: int, positions: IntArray) -> IntArray:
        """Return the data set indices that a worker trains at positions of the epoch, ``(n,)``.

        A worker without a share in a step gets a position of another worker. It trains a sample of
        its own part, or any sample if that is empty.
        """
        start, stop = self.bounds[worker], self.bounds[worker + 1]
        if start == stop:
            # An empty part at the end of the data set begins after the last sample.
            return self._samples(np.full(len(positions), min(start, self.length - 1)))
        step, offset = np.divmod(positions, self.global_batch)
        before = np.where(
            step < self.full_steps, sum(self.shares[:worker]), sum(self.tail[:worker])
        )
        # A ghost sample has a position of another worker, which may lie outside of its part.
        within = np.clip(step * self.shares[worker] + offset - before, 0, stop - start - 1)
        return self._samples(start + (self._order(worker).at(within) if self.shuffle else within))

    def left(self, start: int, positions: IntArray) -> IntArray:
        """Return the data set indices at positions of what is left at ``start``, ``(n,)``.

        For any workers: what the parts have left after some full steps, one part after the other.
        """
        done = start // self.global_batch * np.asarray(self.shares)
        ends = np.cumsum(np.diff(self.bounds) - done)
        worker = np.searchsorted(ends, positions - start, side="right")
        # Positions before the end of what a part has left are before the end of the part.
        within = positions - start - ends[worker] + np.diff(self.bounds)[worker]
        places = np.empty_like(within)
        for each in np.unique(worker).tolist():
            mine = worker == each
            order = self._order(each).at(within[mine]) if self.shuffle else within[mine]
            places[mine] = self.bounds[each] + order
        return self._samples(places)

    def _samples(self, places: IntArray) -> IntArray:
        """Return the samples at places of the permutation that the parts are cut from."""
        return Permutation(self.length, self.seed, 0).at(places) if self.shuffle else places

    def _order(self, worker: int) -> Permutation:
        start, stop = self.bounds[worker], self.bounds[worker + 1]
        # With its own seed, because parts of equal length would have the same order otherwise.
        return Permutation(stop - start, self.seed + (worker + 1) * 0x9E3779B97F4A7C15, self.epoch)
