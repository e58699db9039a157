"""An epoch in which every worker keeps to a contiguous part of the data set.

For data on local disks: a worker reads one stretch of the data set per epoch instead of samples
from all over it. The parts are cut anew at the start of each epoch, in proportion to the shares,
so that they move little while speeds do; within an epoch shares stay as they are, so that all
parts end with the same step.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from evenstride.core.arrays import IntArray, Shares
from evenstride.core.sampling.partition import step_shares
from evenstride.core.sampling.permutation import Permutation


@dataclass(frozen=True)
class EpochParts:
    """Who reads what in one epoch, and in which order.

    Source:
        Ye et al., DBS, arXiv 2007.11831: parts in proportion to the speeds, re-cut every epoch.
        The authors cut one permutation of the data set that is made once; here the data set
        itself is cut, and each part shuffled in every epoch.

    >>> parts = EpochParts(length=10, global_batch=4, shares=(1, 3), seed=0, epoch=0, shuffle=False)
    >>> parts.bounds
    (0, 3, 10)
    >>> [parts.indices(1, np.arange(p, p + 3)).tolist() for p in (1, 5)]
    [[3, 4, 5], [6, 7, 8]]
    """

    length: int  # samples in the data set
    global_batch: int  # samples per step
    shares: Shares  # of every full step, per worker; they sum to the global batch
    seed: int  # of the order within the parts
    epoch: int  # likewise
    shuffle: bool = True  # whether a part is read in random order; false keeps the data set's own

    @property
    def full_steps(self) -> int:
        """Steps of a whole global batch."""
        return self.length // self.global_batch

    @cached_property
    def tail(self) -> Shares:
        """Samples of each worker in the last, short step; zeros if there is none."""
        left = self.length % self.global_batch
        return step_shares(self.shares, left) if left else (0,) * len(self.shares)

    @cached_property
    def bounds(self) -> tuple[int, ...]:
        """Where the parts begin and end in the data set, ``W + 1`` indices."""
        sizes = [n * self.full_steps + k for n, k in zip(self.shares, self.tail, strict=True)]
        return (0, *np.cumsum(sizes).tolist())

    def indices(self, worker: int, positions: IntArray) -> IntArray:
        """Return which samples of the data set a worker trains at positions of the epoch.

        Args:
            worker: whose positions they are, as the windows of the steps are cut.
            positions: int64 ``(n,)``. A worker without a share in a step is given a position of
                another's; it gets a sample of its own part, or some sample if that is empty.
        """
        start, stop = self.bounds[worker], self.bounds[worker + 1]
        if start == stop:
            # An empty part at the end of the data set begins behind the last sample.
            return np.full(len(positions), min(start, self.length - 1))
        step, offset = np.divmod(positions, self.global_batch)
        before = np.where(
            step < self.full_steps, sum(self.shares[:worker]), sum(self.tail[:worker])
        )
        # A ghost asks for a position of another worker, which may lie outside of its part.
        within = np.clip(step * self.shares[worker] + offset - before, 0, stop - start - 1)
        if self.shuffle:
            return start + self._order(worker).at(within)
        return np.asarray(start + within)

    def _order(self, worker: int) -> Permutation:
        start, stop = self.bounds[worker], self.bounds[worker + 1]
        # Of its own, as parts of equal length would have the same order otherwise.
        return Permutation(stop - start, self.seed + (worker + 1) * 0x9E3779B97F4A7C15, self.epoch)
