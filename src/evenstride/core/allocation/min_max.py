"""Split a global batch so that the slowest worker finishes as early as possible."""

from __future__ import annotations

import numpy as np

from evenstride.core.allocation.quantum import (
    InUnits,
    common_quantum,
    finish_in_quanta,
    whole_lower,
    with_rest,
)
from evenstride.core.fleet import FloatArray, IntArray, StepTimes
from evenstride.errors import InfeasibleShares

# Units left over from the bisection, to be handed out all at once: so many, or one for so many
# workers. They cost next to nothing, a halving a look at all workers; and among many workers the
# rounding of their shares alone makes the sum jump by more than a few dozen.
_FILL_AT_MOST, _FILL_WORKERS = 32, 8
# Without rounding, the last digits of a bisection would decide ties instead of the rank.
_TIED = 6  # decimals of a remainder


def equal_finish(
    times: StepTimes,
    lower: IntArray,
    upper: IntArray,
    total: int,
    *,
    quantum: int | IntArray = 1,
    near: IntArray | None = None,
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
            ``total``; of all workers, or each worker's own, int64 ``(W,)``. Lower bounds are
            rounded up to multiples, and so are the upper ones down, but for who takes the rest.
        near: a split of ``total`` within the bounds that may be close to the best one; it
            saves time and changes nothing else.

    Returns:
        ``W`` counts in samples, int64, that sum to ``total``. Equal inputs give equal outputs:
        ties go to the smaller share, then to the lower rank. If some split of the least makespan
        is without a rest, so is this one.

    Raises:
        InfeasibleShares: ``total`` lies outside the sum of the (rounded) bounds.

    Cost:
        ``O(W (log(T / ulp T) + n))`` vectorised, ``n`` the most units that one worker gets of
        the last few, seldom more than two; for different quanta see `finish_in_quanta`.

    Source:
        The objective is LB-BSP's (Chen et al., SoCC 2020, doi:10.1145/3419111.3421299). Any
        non-decreasing curve, quanta and the integer fill are ours; optimality is checked
        against exhaustive search in ``tests/property/test_allocation.py``.

    >>> import numpy as np
    >>> from evenstride.core.time_model.step_times import TimeModel
    >>> twice_as_slow = TimeModel.affine([0.0, 0.0], [0.001, 0.003])
    >>> equal_finish(twice_as_slow, np.array([1, 1]), np.array([64, 64]), 8).tolist()
    [6, 2]
    """
    if (common := common_quantum(quantum)) != 1:
        return _in_multiples(times, lower, upper, total, quantum, common, near)
    if not int(lower.sum()) <= total <= int(upper.sum()):
        raise InfeasibleShares(
            total=total, at_least=int(lower.sum()), at_most=int(upper.sum()), workers=len(lower)
        )
    if near is None:
        near = _about_equal(lower, upper, total)
    few_enough = max(_FILL_AT_MOST, len(lower) // _FILL_WORKERS)
    shares, room = _largest_below_optimum(times, lower, upper, total, near, few_enough)
    missing = total - int(shares.sum())
    if missing > few_enough:  # so many units end at one and the same instant: level the shares
        return apportion(np.ones(len(room)), total, shares, shares + room)
    return _fill_earliest(times, shares, upper, missing)


def _about_equal(lower: IntArray, upper: IntArray, total: int) -> IntArray:
    """Return shares that are enough for ``total``: the equal split, where bounds allow it."""
    enough = np.clip(-(-total // len(lower)), lower, upper)
    return enough if int(enough.sum()) >= total else np.maximum(np.minimum(upper, total), lower)


def _largest_below_optimum(
    times: StepTimes,
    lower: IntArray,
    upper: IntArray,
    total: int,
    near: IntArray,
    few_enough: int,
) -> tuple[IntArray, IntArray]:
    """Return shares that every optimal split contains, and the room above them."""
    # The shares are at most ``few_enough`` short of ``total``, unless more units than that end at
    # exactly the optimal finish time, which is at most that of ``near``; the room then holds just
    # those.
    near_s = times.at(near)
    low_s, high_s, shares = 0.0, float(near_s.max()), lower
    # By then all of ``near`` has ended, whatever a rounded capacity says.
    over = np.maximum(np.clip(times.capacity(high_s), lower, upper), near)
    below_s = np.nextafter(near_s.min(), 0.0)  # by then, nobody ends as much as in ``near``
    before = np.clip(times.capacity(below_s), lower, upper)
    if int(before.sum()) < total:
        low_s, shares = below_s, before
    # A split that is close brackets the optimum at once, which saves most of the halvings.
    few, many, halve = int(shares.sum()), int(over.sum()), False
    while total - few > few_enough:
        # Where the line between the ends says, as long as that brings them together: quick on
        # curves that are nearly straight. Else in the middle, which is sure on any.
        wanted, width = total - few - few_enough // 2, many - few
        part = 0.5 if halve else min(max(wanted / max(width, 1), 0.001), 0.999)
        middle_s = low_s + part * (high_s - low_s)
        if not low_s < middle_s < high_s:
            middle_s = 0.5 * (low_s + high_s)
        if not low_s < middle_s < high_s:
            # The ends are neighbouring floats: all that is missing ends at the same instant.
            break
        candidate = np.clip(times.capacity(middle_s), lower, upper)
        count = int(candidate.sum())
        if count < total:
            low_s, shares, few = middle_s, candidate, count
        else:
            high_s, over, many = middle_s, candidate, count
        # A bend in a curve, such as a floor, can make interpolation creep; halving cannot.
        halve = not halve and many - few > width // 2
    return shares.copy(), over - shares


def _fill_earliest(times: StepTimes, shares: IntArray, upper: IntArray, missing: int) -> IntArray:
    """Return shares with ``missing`` more units; ties go to the smaller share, then the rank."""
    # Handed out one by one, each unit goes to who would finish it first. As no time falls with the
    # share, these are the first of all units to be finished: of each worker one more, two more and
    # so on, as long as no ``missing`` others are finished before.
    if not missing:
        return shares
    ranks, last = np.arange(len(shares)), min(missing, len(shares)) - 1
    further: list[tuple[FloatArray, IntArray, IntArray]] = []
    while len(ranks) and len(further) < missing:
        more = shares + len(further) + 1
        end_s = np.where(more <= upper, times.at(more), np.inf)[ranks]
        if not further:  # of more than these, none is among the first
            latest_s = np.partition(end_s, last)[last] if last + 1 == missing else np.inf
        few = np.flatnonzero(end_s <= latest_s)
        ranks = ranks[few]
        further.append((end_s[few], more[ranks], ranks))
    ends_s, sizes, whose = (np.concatenate(column) for column in zip(*further, strict=True))
    # `lexsort` goes by its last key first: the end, then the smaller share, then the lower rank.
    first = np.lexsort((whose, sizes, ends_s))[:missing]
    return shares + np.bincount(whose[first], minlength=len(shares))


def _in_multiples(
    times: StepTimes,
    lower: IntArray,
    upper: IntArray,
    total: int,
    quanta: int | IntArray,
    common: int,
    near: IntArray | None,
) -> IntArray:
    """Return the best split in multiples; ``common`` is the quantum of all, or 0."""
    least = whole_lower(lower, upper, total, common or quanta)
    if common:
        # Units first and the rest then is exact: any other split of the units gives somebody one
        # more, which ends no earlier than the rest does on top of what it has here.
        units, rest = divmod(total, common)
        bounds = least // common, upper // common
        shares = common * equal_finish(InUnits(times, common), *bounds, units)
        return with_rest(shares, rest, upper, times.at(shares + rest))
    # Units of different size cannot be counted as one kind of unit, so the ones are only a start.
    # The best split into ones cannot end later, and a quantum more each is enough as a rule.
    ones = equal_finish(times, least, upper, total, near=near)
    each = np.broadcast_to(np.asarray(quanta, np.int64), lower.shape)
    return finish_in_quanta(times, (least, upper), total, each, ones)


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
    # The bisection may end just below a whole share, which must not lose a unit by that.
    shares = np.clip(np.floor(exact + 1e-9).astype(np.int64), lower, upper)
    remainder = np.round(exact - shares, _TIED)  # what rounding alone makes differ is a tie
    # More than one round where bounds leave fewer workers with room than units are missing.
    while (missing := total - int(shares.sum())) != 0:
        step = 1 if missing > 0 else -1
        room = shares < upper if missing > 0 else shares > lower
        # Stable, so that ties go to the lower rank.
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
    # At the upper end even the smallest weight gets all of ``total``.
    low, high = 0.0, max(1.0, total) / float(weights[weights > 0].min())
    while low < (middle := 0.5 * (low + high)) < high:
        if np.clip(middle * weights, lower, upper).sum() < total:
            low = middle
        else:
            high = middle
    return np.clip(high * weights, lower, upper)
