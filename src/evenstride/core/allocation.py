"""Split a global batch so that the slowest worker finishes as early as possible."""

from __future__ import annotations

import numpy as np

from evenstride.core.fleet import FloatArray, IntArray
from evenstride.core.timemodel import StepTimes
from evenstride.errors import InfeasibleShares

# Units left to hand out one by one after the bisection. Each costs one vectorised look at all
# workers, about as much as one more halving, so a few dozen balance the two.
_FILL_AT_MOST = 32


def equal_finish(
    times: StepTimes, lower: IntArray, upper: IntArray, total: int, *, quantum: int = 1
) -> IntArray:
    """Return the integer split of ``total`` with the least makespan.

    Bisection on the finish time finds a deadline under which every worker's largest share
    still sums to less than ``total``; whatever any optimal split must contain is in it. The
    units that are missing go, one at a time, to the worker that would finish earliest.

    Args:
        times: non-decreasing step times of ``W`` workers, in seconds.
        lower: fewest samples per worker, int64 ``(W,)``; 0 allows leaving a worker out.
        upper: most samples per worker, int64 ``(W,)``.
        total: samples to hand out.
        quantum: shares are multiples of this, except for one worker that takes the rest of
            ``total``. Bounds are rounded inwards to multiples.

    Returns:
        ``W`` counts in samples, int64, that sum to ``total``. Equal inputs give equal outputs:
        ties go to the smaller share, then to the lower rank.

    Raises:
        InfeasibleShares: ``total`` lies outside the sum of the (rounded) bounds.

    Cost:
        ``O(W (log(T / ulp T) + 32))`` vectorised; 10,000 workers take a few milliseconds.

    Source:
        The objective is LB-BSP's (Chen et al., SoCC 2020, doi:10.1145/3419111.3421299). Any
        non-decreasing curve, quanta and the integer fill are ours; optimality is checked
        against exhaustive search in ``tests/property/test_allocation.py``.

    >>> import numpy as np
    >>> from evenstride.core.timemodel import TimeModel
    >>> twice_as_slow = TimeModel.affine([0.0, 0.0], [0.001, 0.003])
    >>> equal_finish(twice_as_slow, np.array([1, 1]), np.array([64, 64]), 8).tolist()
    [6, 2]
    """
    if quantum > 1:
        return _in_quanta(times, lower, upper, total, quantum)
    if not int(lower.sum()) <= total <= int(upper.sum()):
        raise InfeasibleShares(
            total=total, at_least=int(lower.sum()), at_most=int(upper.sum()), workers=len(lower)
        )
    shares, room = _largest_below_optimum(times, lower, upper, total)
    missing = total - int(shares.sum())
    if missing > _FILL_AT_MOST:  # so many units end at one and the same instant: spread them
        return shares + apportion(np.ones(len(room)), missing, np.zeros_like(room), room)
    return _fill_earliest(times, shares, upper, missing)


def _largest_below_optimum(
    times: StepTimes, lower: IntArray, upper: IntArray, total: int
) -> tuple[IntArray, IntArray]:
    """Return shares that every optimal split contains, and the room above them.

    The shares are at most ``_FILL_AT_MOST`` short of ``total``, unless more units than that
    end at exactly the optimal finish time; the room then holds just those units.
    """
    # The equal split, where the bounds allow it, is a much nearer end than all for everybody.
    enough = np.clip(-(-total // len(lower)), lower, upper)
    if int(enough.sum()) < total:
        enough = np.minimum(upper, total)
    high_s = float(times.at(enough).max())
    low_s, shares = 0.0, lower
    over = np.clip(times.capacity(high_s), lower, upper)
    few, many, halve = int(shares.sum()), int(over.sum()), False
    while total - few > _FILL_AT_MOST:
        # By turns where the line between the ends says, and in the middle: the first is quick
        # on curves that are nearly straight, the second sure on any.
        part = 0.5 if halve else min(max((total - few) / max(many - few, 1), 0.001), 0.999)
        halve, middle_s = not halve, low_s + part * (high_s - low_s)
        if not low_s < middle_s < high_s:
            break
        candidate = np.clip(times.capacity(middle_s), lower, upper)
        count = int(candidate.sum())
        if count < total:
            low_s, shares, few = middle_s, candidate, count
        else:
            high_s, over, many = middle_s, candidate, count
    return shares.copy(), over - shares


def _fill_earliest(times: StepTimes, shares: IntArray, upper: IntArray, missing: int) -> IntArray:
    """Hand out ``missing`` units one by one, in place; ties go to the smaller share, then rank."""
    for _ in range(missing):
        following_s = np.where(shares < upper, times.at(shares + 1), np.inf)
        tied = np.flatnonzero(following_s == following_s.min())
        shares[tied[np.argmin(shares[tied])]] += 1
    return shares


class _InQuanta:
    """The same curves, counted in units of ``quantum`` samples."""

    def __init__(self, times: StepTimes, quantum: int) -> None:
        self._times, self._quantum = times, quantum

    def at(self, shares: IntArray) -> FloatArray:
        return self._times.at(shares * self._quantum)

    def capacity(self, deadline_s: float) -> IntArray:
        return self._times.capacity(deadline_s) // self._quantum


def _in_quanta(
    times: StepTimes, lower: IntArray, upper: IntArray, total: int, quantum: int
) -> IntArray:
    units, rest = divmod(total, quantum)
    unit_lower, unit_upper = -(-lower // quantum), upper // quantum
    shares = quantum * equal_finish(_InQuanta(times, quantum), unit_lower, unit_upper, units)
    if rest:
        with_rest_s = np.where(shares + rest <= upper, times.at(shares + rest), np.inf)
        taker = int(np.argmin(with_rest_s))
        if not np.isfinite(with_rest_s[taker]):
            at_most = int(shares.sum())
            raise InfeasibleShares(
                total=total, at_least=int(lower.sum()), at_most=at_most, workers=len(lower)
            )
        shares[taker] += rest
    return shares


def apportion(weights: FloatArray, total: int, lower: IntArray, upper: IntArray) -> IntArray:
    """Return ``total`` samples split in proportion to ``weights``, by largest remainder.

    Workers whose proportional part lies outside their bounds get the bound, and the rest is
    shared anew among the others, so the result always sums to ``total``.

    Args:
        weights: non-negative, ``(W,)``; all zero means equal.
        total: samples to hand out.
        lower: fewest samples per worker, ``(W,)``.
        upper: most samples per worker, ``(W,)``.

    Returns:
        Counts in samples, int64 ``(W,)``. Ties in the remainder go to the lower rank.

    Raises:
        InfeasibleShares: ``total`` lies outside the sum of the bounds.

    >>> import numpy as np
    >>> ideal = np.array([13.7, 16.5, 19.6, 14.2])
    >>> apportion(ideal, 64, np.ones(4, np.int64), np.full(4, 64)).tolist()
    [14, 16, 20, 14]
    """
    if not int(lower.sum()) <= total <= int(upper.sum()):
        raise InfeasibleShares(
            total=total, at_least=int(lower.sum()), at_most=int(upper.sum()), workers=len(lower)
        )
    exact = _proportional_within(np.asarray(weights, np.float64), float(total), lower, upper)
    shares = np.clip(np.floor(exact + 1e-9).astype(np.int64), lower, upper)
    remainder = exact - shares
    while (missing := total - int(shares.sum())) != 0:
        step = 1 if missing > 0 else -1
        room = shares < upper if missing > 0 else shares > lower
        order = np.argsort(np.where(room, -step * remainder, np.inf), kind="stable")
        chosen = order[: min(abs(missing), int(room.sum()))]
        shares[chosen] += step
        remainder[chosen] -= step
    return shares


def _proportional_within(
    weights: FloatArray, total: float, lower: IntArray, upper: IntArray
) -> FloatArray:
    """Return real-valued shares ``clip(s * weights, lower, upper)`` that sum to ``total``."""
    weights = weights / weights.max() if weights.max() > 0 else np.ones_like(weights)
    weights = np.where(weights < 1e-200, 0.0, weights)  # so that no product overflows
    low, high = 0.0, max(1.0, total) / float(weights[weights > 0].min())
    for _ in range(100):
        middle = 0.5 * (low + high)
        if np.clip(middle * weights, lower, upper).sum() < total:
            low = middle
        else:
            high = middle
    return np.clip(high * weights, lower, upper)
