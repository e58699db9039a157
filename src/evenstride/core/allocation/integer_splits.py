"""Split a global batch into integer shares: by weights, or for the earliest finish.

`apportion` splits by weights, `equal_finish` by time curves. With quanta, a share consists of whole
micro-batches: every share is a multiple of its worker's quantum. If the bounds allow no such split,
one worker, the *taker*, takes the remainder of the global batch. Lower bounds are rounded up to
multiples, also for the taker, so that every worker with a share has a whole micro-batch. Only the
taker may use the part of its upper bound that exceeds a multiple. Every total from the sum of the
lower bounds to the sum of the upper ones, plus the largest such part, then has a split.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np

from evenstride.core.arrays import FloatArray, IntArray
from evenstride.errors import InfeasibleShares

# Without rounding, the last digits of a bisection would decide ties instead of the rank.
_TIED = 6  # decimals of a remainder

# Units that the bisection may leave, distributed at once: this number, or one per this many
# workers. Distributing them costs almost nothing, but a halving evaluates all workers. With many
# workers, the rounding of the shares alone makes the sum jump by more than a few dozen.
_FILL_AT_MOST, _FILL_WORKERS = 32, 8
_TIED_QUANTA = 9  # decimals of a remainder, as a fraction of the quantum


def apportion(weights: FloatArray, total: int, lower: IntArray, upper: IntArray) -> IntArray:
    """Return ``total`` split in proportion to ``weights``, by largest remainder, int64 ``(W,)``.

    A worker whose proportional share lies outside its bounds gets the bound. The others then split
    the remaining samples, so the result always sums to ``total``. If all weights are 0, they count
    as equal. Ties in the remainder go to the lower rank. `InfeasibleShares` if ``total`` lies
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
    # The bisection may end just below a whole share, which must not cost a unit.
    shares = np.clip(np.floor(exact + 1e-9).astype(np.int64), lower, upper)
    remainder = np.round(exact - shares, _TIED)  # differences due to rounding are ties
    # Takes several passes if bounds leave room in fewer workers than units are missing.
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
    weights = np.where(weights < 1e-200, 0.0, weights)  # prevents overflow of products
    # At the upper end even the smallest weight gets all of ``total``.
    low, high = 0.0, max(1.0, total) / float(weights[weights > 0].min())
    while low < (middle := 0.5 * (low + high)) < high:
        if np.clip(middle * weights, lower, upper).sum() < total:
            low = middle
        else:
            high = middle
    return np.clip(high * weights, lower, upper)


class StepTimes(Protocol):
    """Non-decreasing time curves ``t_k(b)`` of ``W`` workers."""

    def at(self, shares: IntArray) -> FloatArray:
        """Return each worker's time in seconds at its share; both of shape ``(W,)``."""
        ...

    def capacity(self, deadline_s: float) -> IntArray:
        """Return per worker the largest share that ends by the deadline (0 if no share does)."""
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
    still sums to less than ``total``. At least one optimal split contains these shares. The
    missing units go, one at a time, to the worker that would finish earliest. Ties go to
    the smaller share, then to the lower rank. If a split of the least makespan without a
    remainder exists, the result is one.

    Args:
        times: non-decreasing step times of ``W`` workers, in seconds.
        lower: fewest samples per worker, int64 ``(W,)``; 0 allows a worker without samples.
        upper: most samples per worker, int64 ``(W,)``.
        total: samples to split.
        quantum: of all workers, or of each worker, int64 ``(W,)``; the module states the rule.
        near: a split of ``total`` within the bounds that may be close to the best one; it
            saves time and does not change the result.

    Raises:
        InfeasibleShares: ``total`` lies outside the sum of the (rounded) bounds.

    Cost:
        ``O(W (log(T / ulp T) + n))`` vectorised, where ``n`` is the most of the last units that
        one worker gets, rarely more than two; for different quanta see `finish_in_quanta`.

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
    if missing > few_enough:  # many units end at the same instant: level the shares
        return apportion(np.ones(len(room)), total, shares, shares + room)
    return _fill_earliest(times, shares, upper, missing)


def _about_equal(lower: IntArray, upper: IntArray, total: int) -> IntArray:
    """Return shares that sum to at least ``total``: the equal split, if the bounds allow it."""
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
    # The sum of the shares is at most ``few_enough`` below ``total``. The exception: more units end
    # exactly at the optimal finish time, which is at most that of ``near``. The room then holds
    # exactly those units.
    near_s = times.at(near)
    low_s, high_s, shares = 0.0, float(near_s.max()), lower
    # All of ``near`` has ended by then, even if a capacity is rounded down.
    over = np.maximum(np.clip(times.capacity(high_s), lower, upper), near)
    below_s = np.nextafter(near_s.min(), 0.0)  # by then, no worker has ended its share of ``near``
    before = np.clip(times.capacity(below_s), lower, upper)
    if int(before.sum()) < total:
        low_s, shares = below_s, before
    # A close split brackets the optimum at once, which saves most of the halvings.
    few, many, halve = int(shares.sum()), int(over.sum()), False
    while total - few > few_enough:
        # Interpolate linearly while that narrows the bracket: fast on nearly straight curves.
        # Otherwise halve, which converges on any curve.
        wanted, width = total - few - few_enough // 2, many - few
        part = 0.5 if halve else min(max(wanted / max(width, 1), 0.001), 0.999)
        middle_s = low_s + part * (high_s - low_s)
        if not low_s < middle_s < high_s:
            middle_s = 0.5 * (low_s + high_s)
        if not low_s < middle_s < high_s:
            # The ends are neighbouring floats: all missing units end at the same instant.
            break
        candidate = np.clip(times.capacity(middle_s), lower, upper)
        count = int(candidate.sum())
        if count < total:
            low_s, shares, few = middle_s, candidate, count
        else:
            high_s, over, many = middle_s, candidate, count
        # A bend in a curve, such as a floor, can make interpolation very slow; halving cannot.
        halve = not halve and many - few > width // 2
    return shares.copy(), over - shares


def _fill_earliest(times: StepTimes, shares: IntArray, upper: IntArray, missing: int) -> IntArray:
    """Return shares with ``missing`` more units; ties go to the smaller share, then the rank."""
    # One by one, each unit goes to the worker that would finish it first. No time falls with the
    # share, so these are the ``missing`` further units of all workers that finish first.
    if not missing:
        return shares
    ranks, known_s, latest_s = np.arange(len(shares)), np.zeros(0), np.inf
    further: list[tuple[FloatArray, IntArray, IntArray]] = []
    while len(ranks) and len(further) < missing:
        more = shares + len(further) + 1
        end_s = np.where(more <= upper, times.at(more), np.inf)[ranks]
        known_s = np.concatenate([known_s, end_s])
        if len(known_s) - len(end_s) < missing <= len(known_s):  # later units come too late
            latest_s = np.partition(known_s, missing - 1)[missing - 1]
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
        # Units first and the remainder after them is exact. Any other split of the units gives one
        # worker a further unit, which ends no earlier than the remainder does here.
        units, rest = divmod(total, common)
        bounds = least // common, upper // common
        shares = common * equal_finish(InUnits(times, common), *bounds, units)
        return with_rest(shares, rest, upper, times.at(shares + rest))
        # Units of different size cannot be counted together, so a split into single samples is the
        # start. The best such split cannot end later, and usually one more quantum each is enough.
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
    """Return the largest total that has a split if each worker takes at most ``most`` samples."""
    # Only one worker may take a remainder, so only the largest of these parts counts.
    beyond = most % quanta
    return int(most.sum() - beyond.sum() + beyond.max(initial=0))


def whole_lower(lower: IntArray, upper: IntArray, total: int, quanta: int | IntArray) -> IntArray:
    """Return the lower bounds in multiples; `InfeasibleShares` if ``total`` has no split."""
    least = lower + -lower % quanta
    at_least, at_most = int(least.sum()), reach(upper, quanta)
    # If bounds contain no multiple, the message can name the worker.
    narrow = np.flatnonzero((least > upper) & (upper < total))
    if len(narrow):
        rank = int(narrow[0])
        own = int(np.broadcast_to(quanta, lower.shape)[rank])
        between = rank, int(lower[rank]), int(upper[rank]), own
        raise InfeasibleShares(total, at_least, at_most, len(lower), _distinct(quanta), between)
    if not at_least <= total <= at_most:
        # Bounds not below the batch have no effect, so the message leaves them out.
        limited = _distinct(upper[upper < total])
        known = total, at_least, at_most if limited else None, len(lower), _distinct(quanta)
        raise InfeasibleShares(*known, fewest=_distinct(lower), most=limited)
    return least


def spans(
    lower: IntArray, upper: IntArray, total: int, quanta: int | IntArray
) -> tuple[IntArray, IntArray]:
    """Return the fewest and the most samples that each worker can have in a split of ``total``.

    With quanta above 1 the ends may lie slightly beyond those of any split that keeps the rule.
    `InfeasibleShares` if there is no split.

    >>> import numpy as np
    >>> [n.tolist() for n in spans(np.array([1, 4]), np.array([6, 16]), 16, 1)]
    [[1, 10], [6, 15]]
    """
    least, common = whole_lower(lower, upper, total, quanta), common_quantum(quanta)
    # A remainder stays with the worker that has it, even below its quantum (`in_quanta`).
    whole = common > 0 and total % common == 0
    slack = 0 if whole else int((least - lower).max(initial=0))
    fewest = np.maximum(least if whole else lower, total - (upper.sum() - upper))
    return fewest, np.minimum(upper, total - (least.sum() - least) + slack)


def _distinct(quanta: int | IntArray) -> tuple[int, ...]:
    return tuple(np.unique(quanta).tolist())


def in_quanta(
    shares: IntArray, lower: IntArray, upper: IntArray, quanta: int | IntArray
) -> IntArray:
    """Return the nearest split that keeps the rule (see the module), with the same sum.

    Shares are rounded down or up to a multiple, by largest remainder relative to the quantum. If a
    taker is necessary, it is the worker that would lack most. A split that keeps rule and bounds
    stays unchanged. If there is a remainder, no worker moves by its quantum or more, provided that
    the multiples on both sides of each share are within the bounds.
    `InfeasibleShares` if no split of the same sum keeps the rule and the bounds.

    Cost:
        ``O(W log W)``; ``O(W log B)`` if bounds force shares far from the given ones.

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
    # With one quantum for all, a single uneven share is the remainder. With different quanta a
    # split without a remainder may exist, which is better: a new shape is compiled again.
    if inside and uneven < (2 if common_quantum(quanta) else 1):
        return shares
    beyond = shares % quanta
    below, most = shares - beyond, upper - upper % quanta
    # Rounded and stable, so that equal remainders go to the lower rank.
    order = np.argsort(-np.round(beyond / quanta, _TIED_QUANTA), kind="stable")

    def level(half: int) -> IntArray:  # multiples change only if bounds leave no other worker
        units = (half + (beyond > 0)) // 2
        return np.asarray(np.clip(below + units * quanta, least, most))

    low, high = int(((least - below) // quanta).min()), int(((most - below) // quanta).max())
    after, rest = _filled(level, (2 * low, 2 * high), order, total)
    # With one quantum for all, the batch determines the remainder; no change of units removes it.
    if rest and not isinstance(quanta, int) and not common_quantum(quanta):
        apart = _Apart(shares, quanta)
        whole = _without_rest(apart, after, rest, (least, np.maximum(most, after)), quanta)
        if whole is not None:
            return whole
        if inside and uneven < 2:
            return shares
    return with_rest(after, rest, upper, (after + rest - shares) / quanta)


class _Apart:
    """Distance of shares above the wanted ones, in quanta, used in place of times."""

    def __init__(self, wanted: IntArray, quanta: IntArray) -> None:
        self._wanted, self._quanta = wanted, quanta

    def at(self, shares: IntArray) -> FloatArray:
        return np.asarray((shares - self._wanted) / self._quanta)

    def capacity(self, deadline_s: float) -> IntArray:
        return np.asarray(self._wanted + np.floor(deadline_s * self._quanta)).astype(np.int64)


def with_rest(shares: IntArray, rest: int, upper: IntArray, cost: FloatArray) -> IntArray:
    """Add the remainder to the cheapest worker that has room for it, in place."""
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
    """Return the split with the least makespan among those that keep the rule (see the module).

    Searches the least deadline by which the workers' multiples, plus what one of them ends beyond
    its multiple, reach ``total``. Of the units that end at that instant, the smaller shares get
    theirs first. If that leaves a remainder and splits without one exist, the result is the split
    without a remainder that ends first, even if it ends later: a new shape is compiled again.

    The fewest samples in ``bounds`` are multiples already (`whole_lower`), and ``total`` is within
    reach. ``near`` is a split that may be close; it saves time and does not change the result.

    Cost:
        ``O(W log(T / t))``, where ``t`` is the time between the ends of samples. With a remainder
        also ``O(B / g * log B)`` bit operations per distinct quantum, on whole words, where ``g``
        is the common divisor of the quanta.
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
    """Return the split in multiples that ends first; ``None`` if no such split exists.

    ``shares`` are multiples whose sum is ``rest`` samples below the total. ``bounds`` are the
    fewest samples, the most by an early deadline, and the most overall.
    """
    lower, early, upper = bounds

    def by(deadline_s: float) -> IntArray | None:
        last = np.clip(times.capacity(deadline_s), early, upper)
        most = np.maximum(last - last % quanta, shares)
        return _without_rest(times, shares, rest, (lower, most), quanta)

    first_s, last_s = float(times.at(shares).max()), float(times.at(upper).max())
    # First without a deadline: if no whole split exists, the search is over.
    found = by(last_s)
    if found is None:
        return None
    while True:  # a split ends no later than its deadline, and often earlier
        last_s = float(times.at(found).max())
        middle_s = 0.5 * (first_s + last_s)
        if not first_s < middle_s < last_s:
            return found
        sooner = by(middle_s)
        # What ends by the early deadline is always allowed, so a split may end after its own.
        if sooner is None or float(times.at(sooner).max()) >= last_s:
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
    """Return what each worker ends before, and at, the least sufficient deadline."""
    before, by_then = bounds
    upper = by_then
    ends_s = times.at(near).max(), times.at(np.minimum(near + quanta - 1, upper)).max()
    # Two guesses from ``near``; if they are wrong, they cost two evaluations.
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
            return before, by_then  # the curves are inconsistent in their last digits
        before, by_then = (before, found) if enough else (found, by_then)


def _filled(
    level: Callable[[int], IntArray], span: tuple[int, int], order: IntArray, total: int
) -> tuple[IntArray, int]:
    """Return the highest level whose sum is within ``total``, with units of the next, and the rest.

    ``level`` returns shares in multiples; from one level to the next, each share grows by at most
    one quantum. ``span`` holds a level whose shares sum to at most ``total``, and the highest
    level. ``order`` is the order in which workers get their unit of the next level, if it fits.
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
    # Units differ in size: smaller ones may fit after one that does not.
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
    """Return shares with ``rest`` more and few changes; ``None`` if no multiples sum to it."""
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
        for _ in range(has - had):  # take units from the worker that would finish last
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
    """Return how many of each coin sum to an amount, at most ``room`` of each coin."""
    # Numbers are close to those wanted, from the last coin on; ``None`` if impossible. Changes
    # beyond the furthest would contain some that cancel out: in some order, the sums after each of
    # them stay between -max(coins) and the larger of max(coins) and what is missing.
    missing = amount - sum(coin * near for coin, near in zip(coins, wanted, strict=True))
    furthest = 2 * max(coins) + abs(missing)
    least = [max(near - furthest, 0) for near in wanted]
    spans = zip(coins, room, wanted, least, strict=True)
    kinds = [(c, min(most, near + furthest) - few, near - few) for c, most, near, few in spans]
    amount -= sum(coin * few for coin, few in zip(coins, least, strict=True))
    if amount < 0:
        return None
    # The bits of a number stand for the possible sums, up to the amount.
    within = (1 << (amount + 1)) - 1
    sums = [1]
    for coin, most, _ in kinds:
        made, count, some = sums[-1], min(most, amount // coin), 1
        # In groups of 1, 2, 4 and so on, so that many coins of a kind take few shifts.
        while count:
            some = min(some, count)
            made |= (made << (coin * some)) & within
            count, some = count - some, 2 * some
        sums.append(made)
    if not sums[-1] >> amount:
        return None
    numbers = []
    # From the last coin back: the sums of the coins before it limit how many of this one to take.
    for (coin, most, near), made, few in list(zip(kinds, sums[:-1], least, strict=True))[::-1]:
        count = min(most, amount // coin)
        near = min(near, count)
        # The nearest number first, so that few shares change.
        steps = (near + way * step for step in range(count + 1) for way in (-1, 1))
        number = next(n for n in steps if 0 <= n <= count and made >> (amount - coin * n) & 1)
        numbers.append(few + number)
        amount -= coin * number
    return numbers[::-1]
