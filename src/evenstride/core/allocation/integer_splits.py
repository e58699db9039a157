"""Split a global batch into whole shares: in proportion to weights, or to end as early as possible.

`apportion` goes by weights, `equal_finish` by time curves. With quanta, shares are whole
micro-batches. The rule for quanta: every share is a multiple of its worker's quantum. Where the
bounds allow no such split, one worker, the *taker*, takes what is left of the global batch. Lower
bounds are rounded up to multiples, for the taker as well, so that whoever has a share has a whole
micro-batch; only the taker may use what its upper bound has beyond a multiple. Then every total
from the sum of the lower bounds to that of the upper ones, with the widest such part, has a split.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np

from evenstride.core.arrays import FloatArray, IntArray
from evenstride.errors import InfeasibleShares

# Without rounding, the last digits of a bisection would decide ties instead of the rank.
_TIED = 6  # decimals of a remainder

# Units left over from the bisection, to be handed out all at once: so many, or one for so many
# workers. They cost next to nothing, a halving a look at all workers; and among many workers the
# rounding of their shares alone makes the sum jump by more than a few dozen.
_FILL_AT_MOST, _FILL_WORKERS = 32, 8
_TIED_QUANTA = 9  # decimals of a remainder, as a part of the quantum


def apportion(weights: FloatArray, total: int, lower: IntArray, upper: IntArray) -> IntArray:
    """Return ``total`` split in proportion to ``weights``, by largest remainder, int64 ``(W,)``.

    Workers whose proportional part lies outside their bounds get the bound, and the rest is
    shared anew among the others, so the result always sums to ``total``. Weights that are all 0
    mean equal. Ties in the remainder go to the lower rank. `InfeasibleShares` if ``total`` lies
    outside the sum of the bounds.

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


class StepTimes(Protocol):
    """Any non-decreasing time curves ``t_k(b)`` of ``W`` workers."""

    def at(self, shares: IntArray) -> FloatArray:
        """Return each worker's time in seconds at its share; both of shape ``(W,)``."""
        ...

    def capacity(self, deadline_s: float) -> IntArray:
        """Return per worker the largest share that ends by the deadline (0 if none does)."""
        ...


def equal_finish(
    times: StepTimes,
    lower: IntArray,
    upper: IntArray,
    total: int,
    *,
    quantum: int | IntArray = 1,
    near: IntArray | None = None,
) -> IntArray:
    """Return the integer split of ``total`` with the least makespan, int64 ``(W,)``.

    Bisection on the finish time finds a deadline under which every worker's largest share
    still sums to less than ``total``; whatever any optimal split must contain is in it. The
    units that are missing go, one at a time, to the worker that would finish earliest. Ties go to
    the smaller share, then to the lower rank. If some split of the least makespan is without a
    rest, so is this one.

    Args:
        times: non-decreasing step times of ``W`` workers, in seconds.
        lower: fewest samples per worker, int64 ``(W,)``; 0 allows leaving a worker out.
        upper: most samples per worker, int64 ``(W,)``.
        total: samples to hand out.
        quantum: of all workers, or each worker's own, int64 ``(W,)``; see the module for the rule.
        near: a split of ``total`` within the bounds that may be close to the best one; it
            saves time and changes nothing else.

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
    >>> from evenstride.core.time_model import TimeModel
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


def common_quantum(quanta: int | IntArray) -> int:
    """Return the quantum that all workers have, or 0 if they have different ones."""
    if np.ndim(quanta) == 0:
        return int(quanta)
    each = np.asarray(quanta)
    return int(each[0]) if (each == each[0]).all() else 0


class InUnits:
    """The same curves, counted in units of ``quantum`` samples."""

    def __init__(self, times: StepTimes, quantum: int) -> None:
        self._times, self._quantum = times, quantum

    def at(self, units: IntArray) -> FloatArray:
        return self._times.at(units * self._quantum)

    def capacity(self, deadline_s: float) -> IntArray:
        return self._times.capacity(deadline_s) // self._quantum


def reach(most: IntArray, quanta: int | IntArray) -> int:
    """Return the largest total that has a split if each worker takes at most so many samples."""
    # Only one worker may take a rest, so of these parts only the widest counts.
    beyond = most % quanta
    return int(most.sum() - beyond.sum() + beyond.max(initial=0))


def whole_lower(lower: IntArray, upper: IntArray, total: int, quanta: int | IntArray) -> IntArray:
    """Return the lower bounds in multiples; `InfeasibleShares` if ``total`` has no split."""
    least = lower + -lower % quanta
    at_least, at_most = int(least.sum()), reach(upper, quanta)
    # No multiple lies within these bounds. The message can then name the worker.
    narrow = np.flatnonzero((least > upper) & (upper < total))
    if len(narrow):
        rank = int(narrow[0])
        own = int(np.broadcast_to(quanta, lower.shape)[rank])
        between = rank, int(lower[rank]), int(upper[rank]), own
        raise InfeasibleShares(total, at_least, at_most, len(lower), _distinct(quanta), between)
    if not at_least <= total <= at_most:
        # Bounds that are no lower than the batch limit nothing, so the message leaves them out.
        limited = _distinct(upper[upper < total])
        known = total, at_least, at_most if limited else None, len(lower), _distinct(quanta)
        raise InfeasibleShares(*known, fewest=_distinct(lower), most=limited)
    return least


def spans(
    lower: IntArray, upper: IntArray, total: int, quanta: int | IntArray
) -> tuple[IntArray, IntArray]:
    """Return the fewest and the most samples that each worker can have in a split of ``total``.

    With quanta above 1 the ends may lie a little beyond those of any split that keeps the rule.
    `InfeasibleShares` if there is no split.

    >>> import numpy as np
    >>> [n.tolist() for n in spans(np.array([1, 4]), np.array([6, 16]), 16, 1)]
    [[1, 10], [6, 15]]
    """
    least, common = whole_lower(lower, upper, total, quanta), common_quantum(quanta)
    # A rest is left with whoever has it, even if that is less than its quantum (`in_quanta`).
    whole = common > 0 and total % common == 0
    slack = 0 if whole else int((least - lower).max(initial=0))
    fewest = np.maximum(least if whole else lower, total - (upper.sum() - upper))
    return fewest, np.minimum(upper, total - (least.sum() - least) + slack)


def _distinct(quanta: int | IntArray) -> tuple[int, ...]:
    return tuple(np.unique(quanta).tolist())


def in_quanta(
    shares: IntArray, lower: IntArray, upper: IntArray, quanta: int | IntArray
) -> IntArray:
    """Return the split next to another one that keeps the rule (see the module), of the same sum.

    Shares are rounded to a multiple below or above, by largest remainder as a part of the
    quantum; the taker, if there must be one, is who then lacks most. Splits that keep rule and
    bounds stay as they are. Where there is a rest, no worker moves by its quantum or more, as long
    as the multiples on both sides of its share are within the bounds, for every worker.
    `InfeasibleShares` if no split of the same sum keeps the rule and the bounds.

    Cost:
        ``O(W log W)``; ``O(W log B)`` where bounds force shares far from those given.

    >>> import numpy as np
    >>> one, most = np.ones(3, np.int64), np.full(3, 96)
    >>> in_quanta(np.array([13, 27, 8]), one, most, 8).tolist()
    [16, 24, 8]
    >>> in_quanta(np.array([37, 37, 37]), one, most, np.array([32, 12, 12])).tolist()
    [39, 36, 36]
    """
    total = int(shares.sum())
    least = whole_lower(lower, upper, total, quanta)
    inside = bool((lower <= shares).all() and (shares <= upper).all())
    uneven = np.count_nonzero(shares % quanta)
    # With one quantum for all, a single uneven share is the rest. With different quanta there may
    # still be a split without a rest, which is better: an odd shape is compiled again.
    if inside and uneven < (2 if common_quantum(quanta) else 1):
        return shares
    beyond = shares % quanta
    below, most = shares - beyond, upper - upper % quanta
    # Rounded and stable, so that equal remainders go to the lower rank.
    order = np.argsort(-np.round(beyond / quanta, _TIED_QUANTA), kind="stable")

    def level(half: int) -> IntArray:  # multiples wait, until bounds leave nobody else
        units = (half + (beyond > 0)) // 2
        return np.asarray(np.clip(below + units * quanta, least, most))

    low, high = int(((least - below) // quanta).min()), int(((most - below) // quanta).max())
    after, rest = _filled(level, (2 * low, 2 * high), order, total)
    # With one quantum for all the rest is that of the batch, and no change of units removes it.
    if rest and not isinstance(quanta, int) and not common_quantum(quanta):
        apart = _Apart(shares, quanta)
        whole = _without_rest(apart, after, rest, (least, np.maximum(most, after)), quanta)
        if whole is not None:
            return whole
        if inside and uneven < 2:
            return shares
    return with_rest(after, rest, upper, (after + rest - shares) / quanta)


class _Apart:
    """How far shares lie above those wanted, in quanta, in place of times."""

    def __init__(self, wanted: IntArray, quanta: IntArray) -> None:
        self._wanted, self._quanta = wanted, quanta

    def at(self, shares: IntArray) -> FloatArray:
        return np.asarray((shares - self._wanted) / self._quanta)

    def capacity(self, deadline_s: float) -> IntArray:
        return np.asarray(self._wanted + np.floor(deadline_s * self._quanta)).astype(np.int64)


def with_rest(shares: IntArray, rest: int, upper: IntArray, cost: FloatArray) -> IntArray:
    """Give what is no multiple to the worker with room for it that costs least, in place."""
    if rest:
        shares[int(np.argmin(np.where(shares + rest <= upper, cost, np.inf)))] += rest
    return shares


def finish_in_quanta(
    times: StepTimes,
    bounds: tuple[IntArray, IntArray],
    total: int,
    quanta: IntArray,
    near: IntArray,
) -> IntArray:
    """Return the split with the least makespan of those that keep the rule (see the module).

    The least deadline is looked for by which the multiples that each worker ends, and what one
    of them ends beyond, are enough. Of the units that end at that very instant, the smaller
    shares get theirs first. If that leaves a rest and there are splits without one, it is of
    those the one that ends first, even if it ends later: an odd shape is compiled anew.

    The fewest samples in ``bounds`` are multiples already (`whole_lower`), and ``total`` is within
    their reach. ``near`` is a split that may be close; it saves time and changes nothing else.

    Cost:
        ``O(W log(T / t))``, ``t`` the time between the ends of samples; and, only if there is a
        rest, ``O(B / g * log B)`` bit operations for each different quantum, ``g`` their common
        divisor, on whole words.
    """
    lower, upper = bounds
    if total == int(lower.sum()):
        return lower.copy()
    before, by_then = _last_instant(times, bounds, total, quanta, near)
    base, most = before - before % quanta, by_then - by_then % quanta

    def level(size: int) -> IntArray:
        return np.asarray(np.clip(size - size % quanta, base, most))

    order = np.arange(len(lower))
    shares, rest = _filled(level, (0, int(most.max())), order, total)
    if not rest:
        return shares
    ragged = with_rest(shares.copy(), rest, by_then, times.at(shares + rest))
    whole = _first_whole(times, shares, rest, (lower, by_then, upper), quanta)
    return ragged if whole is None else whole


def _first_whole(
    times: StepTimes,
    shares: IntArray,
    rest: int,
    bounds: tuple[IntArray, IntArray, IntArray],
    quanta: IntArray,
) -> IntArray | None:
    """Return the split in multiples that ends first; ``None`` if there is none.

    ``shares`` are multiples, ``rest`` samples short; ``bounds`` the fewest samples, the most by an
    early deadline, and the most at all.
    """
    lower, early, upper = bounds

    def by(deadline_s: float) -> IntArray | None:
        last = np.clip(times.capacity(deadline_s), early, upper)
        most = np.maximum(last - last % quanta, shares)
        return _without_rest(times, shares, rest, (lower, most), quanta)

    first_s, last_s = float(times.at(shares).max()), float(times.at(upper).max())
    # Without any deadline first: if there is no whole split at all, the search is over.
    found = by(last_s)
    if found is None:
        return None
    while True:  # what is found ends no later than its deadline, and often earlier
        last_s = float(times.at(found).max())
        middle_s = 0.5 * (first_s + last_s)
        if not first_s < middle_s < last_s:
            return found
        sooner = by(middle_s)
        if sooner is None:
            first_s = middle_s
        else:
            found = sooner


def _last_instant(
    times: StepTimes,
    bounds: tuple[IntArray, IntArray],
    total: int,
    quanta: IntArray,
    near: IntArray,
) -> tuple[IntArray, IntArray]:
    """Return what each worker ends before the least deadline that is enough, and by then."""
    before, by_then = bounds
    upper = by_then
    ends_s = times.at(near).max(), times.at(np.minimum(near + quanta - 1, upper)).max()
    # Two guesses next to ``near``; if they are wrong, they cost two evaluations and no more.
    hints_s = [float(np.nextafter(ends_s[0], 0.0)), float(ends_s[1])]
    while True:
        moving = before < by_then
        first_s = float(times.at(before + 1)[moving].min())
        last_s = float(times.at(by_then)[moving].max())
        if first_s >= last_s:
            return before, by_then
        middle_s = hints_s.pop() if hints_s else 0.5 * (first_s + last_s)
        # A guess outside of the bracket, or a rounded mean, would not narrow it.
        middle_s = middle_s if first_s <= middle_s < last_s else first_s
        found = np.clip(times.capacity(middle_s), before, by_then)
        enough = reach(found, quanta) >= total
        if (found == (by_then if enough else before)).all():
            return before, by_then  # the curves contradict themselves, in their last digits
        before, by_then = (before, found) if enough else (found, by_then)


def _filled(
    level: Callable[[int], IntArray], span: tuple[int, int], order: IntArray, total: int
) -> tuple[IntArray, int]:
    """Return the highest level that ``total`` is enough for with units of the next, and the rest.

    ``level`` gives shares in multiples that do not fall, each by one quantum at most per level.
    ``span`` is a level whose shares sum to at most ``total``, and one that none is above; ``order``
    that in which workers get their unit of the next level, if it still fits.
    """
    low, high = span
    while low < high:
        middle = (low + high + 1) // 2
        if int(level(middle).sum()) <= total:
            low = middle
        else:
            high = middle - 1
    shares = level(low)
    units, rest = level(low + 1) - shares, total - int(shares.sum())
    # Units differ in size: after one that no longer fits, smaller ones still may.
    while len(order := order[(units[order] > 0) & (units[order] <= rest)]):
        count = int(np.searchsorted(np.cumsum(units[order]), rest, side="right"))
        given, order = order[:count], order[count:]
        shares[given] += units[given]
        rest -= int(units[given].sum())
    return shares, rest


def _without_rest(
    times: StepTimes,
    shares: IntArray,
    rest: int,
    bounds: tuple[IntArray, IntArray],
    quanta: IntArray,
) -> IntArray | None:
    """Return shares with ``rest`` more, changed in few places; ``None`` if no multiples make it."""
    lower, most = bounds
    kinds, kind = np.unique(quanta, return_inverse=True)
    unit = int(np.gcd.reduce(kinds))
    surplus = int((most - shares).sum()) - rest
    # Every sum of quanta is a multiple of their common divisor.
    if surplus < 0 or surplus % unit:
        return None
    spare = _per_kind((most - shares) // quanta, kind, len(kinds))
    room = _per_kind((most - lower) // quanta, kind, len(kinds))
    left = _change((kinds // unit).tolist(), room, surplus // unit, spare)
    if left is None:
        return None
    shares = shares.copy()
    for which, (had, has) in enumerate(zip(spare, left, strict=True)):
        for _ in range(has - had):  # fewer units: from who would finish last
            may = (kind == which) & (shares - quanta >= lower)
            last = int(np.argmax(np.where(may, times.at(shares), -np.inf)))
            shares[last] -= quanta[last]
        for _ in range(had - has):
            may = (kind == which) & (shares + quanta <= most)
            first = int(np.argmin(np.where(may, times.at(shares + quanta), np.inf)))
            shares[first] += quanta[first]
    return shares


def _per_kind(units: IntArray, kind: IntArray, kinds: int) -> list[int]:
    sums = np.zeros(kinds, dtype=np.int64)
    np.add.at(sums, kind, units)
    return sums.tolist()


def _change(coins: list[int], room: list[int], amount: int, wanted: list[int]) -> list[int] | None:
    """Return how many of each coin make an amount, with no more of each than there is room for."""
    # Numbers are close to those wanted, from the last coin on; ``None`` if there are none. Sums
    # that can be made are the bits of a number.
    # Sums above the amount are cut off, or the numbers would grow with the room of all workers.
    within = (1 << (amount + 1)) - 1
    sums = [1]
    for coin, count in zip(coins, room, strict=True):
        made, count, some = sums[-1], min(count, amount // coin), 1
        # In groups of 1, 2, 4 and so on, so that many coins of a kind take few shifts.
        while count:
            some = min(some, count)
            made |= (made << (coin * some)) & within
            count, some = count - some, 2 * some
        sums.append(made)
    if not sums[-1] >> amount:
        return None
    numbers = []
    # From the last coin back: what those before it can make limits how many of this one to take.
    for coin, count, near, made in list(zip(coins, room, wanted, sums[:-1], strict=True))[::-1]:
        count = min(count, amount // coin)
        near = min(near, count)
        # The nearest number first, so that few shares change.
        steps = (near + way * step for step in range(count + 1) for way in (-1, 1))
        number = next(n for n in steps if 0 <= n <= count and made >> (amount - coin * n) & 1)
        numbers.append(number)
        amount -= coin * number
    return numbers[::-1]
