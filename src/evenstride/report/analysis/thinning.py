"""Many points as few, with the extremes kept: a spike of one step in 100,000 is still there."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from evenstride.core.fleet import FloatArray, IntArray


@dataclass(frozen=True, slots=True, eq=False)
class Thinned:
    """Buckets of neighbouring points, all of the same length but the last.

    Args:
        first: index of each bucket's first point, ``(buckets,)``.
        last: index of its last.
        least: smallest value; not a number where none is known.
        mean: mean value.
        most: largest value.
    """

    first: IntArray
    last: IntArray
    least: FloatArray
    mean: FloatArray
    most: FloatArray

    @property
    def exact(self) -> bool:
        """Whether nothing was left out: each bucket is one point."""
        return bool((self.first == self.last).all())


def thinned(values: FloatArray, most: int) -> Thinned:
    """Return the values in at most so many buckets.

    Args:
        values: any; not a number where not known, ``(n,)``.
        most: buckets, at least 1.

    >>> import numpy as np
    >>> few = thinned(np.array([1.0, 9.0, 1.0, 1.0]), 2)
    >>> few.least.tolist(), few.mean.tolist(), few.most.tolist()
    ([1.0, 1.0], [5.0, 1.0], [9.0, 1.0])
    """
    each = max(1, -(-len(values) // most))
    first = np.arange(0, len(values), each, dtype=np.int64)
    last = np.minimum(first + each, len(values)) - 1
    if not len(values):
        return Thinned(first, last, *(np.zeros(0),) * 3)
    known = ~np.isnan(values)
    counts = np.add.reduceat(known.astype(np.int64), first)
    gone = counts == 0
    least = np.minimum.reduceat(np.where(known, values, np.inf), first)
    largest = np.maximum.reduceat(np.where(known, values, -np.inf), first)
    mean = np.add.reduceat(np.where(known, values, 0.0), first) / np.maximum(counts, 1)
    return Thinned(first, last, *(np.where(gone, np.nan, a) for a in (least, mean, largest)))
