"""Divide a worker's speed over a run into phases of constant speed.

The phases are the best piecewise-constant fit to the logarithm of the speed, with a price on each
phase. Dynamic programming finds it exactly on medians of blocks of steps; each change is then
moved to its exact step. Single slow steps are noise: a phase has at least three blocks.

Source:
    Jackson et al., "An algorithm for optimal partitioning of data on an interval", IEEE Signal
    Processing Letters 2005, doi:10.1109/LSP.2001.838216. Blocks and medians are ours.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from math import sqrt

import numpy as np

from evenstride.core.fleet import FloatArray

_MOST_BLOCKS = 800
_PRICE = 4.0  # of a phase, in units of a block's variance times the logarithm of their number
_LEAST_STD = 0.01
_SAME = 0.07  # closer speeds are one phase
_FEWEST = 3  # blocks of a phase
_SPIKE = 6.0  # distance from the neighbours, in medians of that distance


@dataclass(frozen=True, slots=True)
class SpeedPhase:
    """Steps in which a worker's speed stayed the same."""

    first: int
    last: int
    speed: float  # as a fraction of that of its best phase


def phases_of(speed: FloatArray) -> tuple[SpeedPhase, ...]:
    """Return the phases of one worker, which cover all steps of known speed.

    Speeds are above 0, in any unit. Unknown speeds are NaN.

    Cost:
        ``O(n + 800^2)``, about 20 ms.

    >>> import numpy as np
    >>> found = phases_of(np.repeat([1.0, 0.5, 1.0], [50, 30, 40]))
    >>> [(phase.first, phase.last, round(phase.speed, 2)) for phase in found]
    [(0, 49, 1.0), (50, 79, 0.5), (80, 119, 1.0)]
    """
    known = np.flatnonzero(np.isfinite(speed) & (speed > 0.0))
    if not len(known):
        return ()
    values = np.log(speed[known])
    cuts = [0, *_cuts(values), len(values)]
    levels = [float(np.median(values[a:b])) for a, b in pairwise(cuts)]
    best = _best(cuts, levels)
    return tuple(
        SpeedPhase(int(known[a]), int(known[b - 1]), min(1.0, float(np.exp(level - best))))
        for a, b, level in zip(cuts[:-1], cuts[1:], levels, strict=True)
    )


def _best(cuts: list[int], levels: list[float]) -> float:
    """Return the highest level that lasts 2 % of the steps, or the highest one otherwise."""
    lasting = [b - a for a, b in pairwise(cuts)]
    long = [level for level, n in zip(levels, lasting, strict=True) if n >= 0.02 * cuts[-1]]
    return max(long or levels)


def _cuts(values: FloatArray) -> list[int]:
    """Return the starts of the phases except the first."""
    each = max(1, -(-len(values) // _MOST_BLOCKS))
    count = len(values) // each
    if count < 2 * _FEWEST:
        return []
    blocks = np.median(values[: count * each].reshape(count, each), axis=1)
    if each == 1:
        blocks = _despiked(blocks)
    found = _partition(blocks, _spread(blocks))
    cuts = [_moved(values, cut * each, each) for cut in found]
    return _joined(values, sorted({cut for cut in cuts if 0 < cut < len(values)}))


def _despiked(values: FloatArray) -> FloatArray:
    """Return the values with single spikes replaced by the median of five neighbours."""
    padded = np.pad(values, 2, mode="edge")
    around = np.median(np.lib.stride_tricks.sliding_window_view(padded, 5), axis=1)
    away = np.abs(values - around)
    return np.where(away > _SPIKE * max(float(np.median(away)), _LEAST_STD), around, values)


def _spread(blocks: FloatArray) -> float:
    """Return the standard deviation of a block within its phase, from adjacent differences."""
    return max(1.4826 / sqrt(2.0) * float(np.median(np.abs(np.diff(blocks)))), _LEAST_STD)


def _partition(blocks: FloatArray, std: float) -> list[int]:
    """Return the optimal cuts by least squares plus a price for each phase."""
    count = len(blocks)
    price = _PRICE * std**2 * np.log(count)
    sums = np.concatenate([[0.0], np.cumsum(blocks)])
    squares = np.concatenate([[0.0], np.cumsum(blocks**2)])
    best, came = np.full(count + 1, np.inf), np.zeros(count + 1, dtype=np.int64)
    best[0] = -price
    for end in range(_FEWEST, count + 1):
        begin = np.arange(end - _FEWEST + 1)
        length = end - begin
        cost = squares[end] - squares[begin] - (sums[end] - sums[begin]) ** 2 / length
        total = best[begin] + cost + price
        came[end] = int(np.argmin(total))
        best[end] = total[came[end]]
    cuts, end = [], count
    while end > 0:
        end = int(came[end])
        cuts.append(end)
    return sorted(cut for cut in cuts if cut > 0)


def _moved(values: FloatArray, cut: int, each: int) -> int:
    """Return the exact step of a change within the adjacent blocks."""
    low, high = max(0, cut - 2 * each), min(len(values), cut + 2 * each)
    before = np.median(values[max(0, low - 8 * each) : max(cut - each, low + 1)])
    after = np.median(values[min(cut + each, high - 1) : high + 8 * each])
    here = values[low:high]
    far = np.abs(here - before), np.abs(here - after)
    left = np.concatenate([[0.0], np.cumsum(far[0])])
    right = np.concatenate([np.cumsum(far[1][::-1])[::-1], [0.0]])
    return low + int(np.argmin(left + right))


def _joined(values: FloatArray, cuts: list[int]) -> list[int]:
    """Return the cuts without those between phases of nearly equal speed, the closest first."""
    cuts = _without_slivers(values, cuts)
    while cuts:
        steps = np.abs(np.diff(_levels(values, cuts)))
        closest = int(np.argmin(steps))
        if steps[closest] >= _SAME:
            break
        del cuts[closest]
    return cuts


def _without_slivers(values: FloatArray, cuts: list[int]) -> list[int]:
    """Return the cuts with phases of one or two steps joined to the neighbour of nearest speed.

    Two cuts may have moved to the same change, one step apart.
    """
    cuts = list(cuts)
    while cuts:
        edges = np.array([0, *cuts, len(values)])
        short = int(np.argmin(np.diff(edges)))
        if edges[short + 1] - edges[short] > 2:
            break
        steps = np.abs(np.diff(_levels(values, cuts)))
        adjacent = [cut for cut in (short - 1, short) if 0 <= cut < len(cuts)]
        del cuts[min(adjacent, key=lambda cut: steps[cut])]
    return cuts


def _levels(values: FloatArray, cuts: list[int]) -> list[float]:
    return [float(np.median(values[a:b])) for a, b in pairwise([0, *cuts, len(values)])]
