"""Choices that were not judged yet, as arrays: by their bounds they may be among the best."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Self

import numpy as np
import numpy.typing as npt

from evenstride.core.fleet import FloatArray, IntArray
from evenstride.planner.search.pareto import ParetoFront

_MOST = 300_000
"""Choices that are kept at once; of more, those that could gain least are let go."""


@dataclass(slots=True, eq=False)
class FrontierQueue:
    """Choices, as arrays of ``(n,)`` each.

    Args:
        pair: of kinds, by its number.
        cell: machines of both and batch, by their number.
        time_s: of the whole training, at least.
        usd: the same.
        close: whether these are as close as they can be without judging it.
    """

    pair: IntArray
    cell: IntArray
    time_s: FloatArray
    usd: FloatArray
    close: npt.NDArray[np.bool_]

    @classmethod
    def of(
        cls,
        pair: int,
        cell: IntArray,
        time_s: FloatArray,
        usd: FloatArray,
    ) -> Self:
        """Return choices of one pair of kinds."""
        pairs = np.full(len(cell), pair)
        return cls(pairs, cell, time_s, usd, np.zeros(len(cell), dtype=np.bool_))

    @classmethod
    def none(cls) -> Self:
        """Return no choice."""
        floats = np.zeros(0)
        return cls.of(0, np.zeros(0, dtype=np.int64), floats, floats)

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """Return all of some, at least one."""
        return cls(
            np.concatenate([part.pair for part in parts]),
            np.concatenate([part.cell for part in parts]),
            np.concatenate([part.time_s for part in parts]),
            np.concatenate([part.usd for part in parts]),
            np.concatenate([part.close for part in parts]),
        )

    def some(self, which: IntArray) -> Self:
        """Return some of them."""
        return type(self)(
            *(self.pair[which], self.cell[which]),
            *(self.time_s[which], self.usd[which]),
            self.close[which],
        )

    def lowest(self, most: int) -> IntArray:
        """Return those whose bounds no other's beat; of more than some, evenly chosen ones."""
        which = lower_left(self.time_s, self.usd)
        if len(which) <= most:
            return which
        return which[np.linspace(0, len(which) - 1, most).round().astype(np.int64)]

    def improve(self, index: int, time_s: float, usd: float) -> None:
        """Take closer bounds of one."""
        self.close[index] = True
        self.time_s[index] = max(time_s, self.time_s[index])
        self.usd[index] = max(usd, self.usd[index])

    def done(self, which: IntArray) -> None:
        """Take those that were judged as unable to gain anything more."""
        self.time_s[which] = self.usd[which] = inf


def lower_left(time_s: FloatArray, usd: FloatArray) -> IntArray:
    """Return the points that no other is both quicker and cheaper than, the quickest first."""
    order = np.lexsort((usd, time_s))
    order = order[np.isfinite(time_s[order])]
    before = np.concatenate([[inf], np.minimum.accumulate(usd[order])[:-1]])
    found: IntArray = order[usd[order] < before[: len(order)]]
    return found


class Rest:
    """What was let go for want of room: the best of its bounds."""

    def __init__(self) -> None:
        self._time_s, self._usd = np.zeros(0), np.zeros(0)

    def overflow(self, kept: FrontierQueue, front: ParetoFront) -> FrontierQueue:
        """Return those of some that can be kept; the others are remembered by their bounds."""
        if len(kept.pair) <= _MOST:
            return kept
        order = front.order(kept.time_s, kept.usd, front.gains(kept.time_s, kept.usd))
        aimed = front.order(kept.time_s, kept.usd, front.aimed_gains(kept.time_s, kept.usd))
        first = np.unique(np.concatenate([order[: _MOST // 4], aimed[: _MOST // 4]]))
        gone = np.delete(np.arange(len(kept.pair)), first)
        time_s = np.concatenate([self._time_s, kept.time_s[gone]])
        usd = np.concatenate([self._usd, kept.usd[gone]])
        best = lower_left(time_s, usd)
        self._time_s, self._usd = time_s[best], usd[best]
        return kept.some(first)

    def with_kept(self, kept: FrontierQueue) -> tuple[FloatArray, FloatArray]:
        """Return the bounds of all that was not judged."""
        return (
            np.concatenate([self._time_s, kept.time_s]),
            np.concatenate([self._usd, kept.usd]),
        )
