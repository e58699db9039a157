"""Let workers of one kind share their evidence, so that equal workers stay equal.

Among many workers, the largest of their estimated times is far above its true value by chance
alone. Workers whose times scatter no more than their uncertainty explains form one kind, and
get their kind's mean (`kinds_of`). If there are more kinds than the maximum, the last ones stay
undivided; their workers move together only as far as their scatter allows.

Kinds are found by dividing the workers, in order of speed, until no part scatters
more than by chance. All parts are divided in one pass over all workers: separate passes over many
small parts would cost more than the arithmetic in them.

Source:
    Dividing where the sum of squares falls most is Fisher's grouping (JASA 1958); the stop by a
    chi-squared test of the scatter is ours. Moving estimates together is empirical Bayes (Efron &
    Morris, JASA 1973), with zero variance between workers of a kind, and with that of
    DerSimonian & Laird (1986) in groups that were not divided.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from evenstride.core.arrays import FloatArray, IntArray
from evenstride.core.time_model.curve_update import observed
from evenstride.core.time_model.estimates import PROOF, CurveEstimates, Estimate, Samples
from evenstride.core.time_model.observation import medians

# A part is divided again if its scatter is this many standard deviations above chance.
_DIFFER_STD = 2.0
_WIDEST = 0.5  # largest difference of a kind's times (in logarithms), at any uncertainty
# The same in standard deviations, times the square root of the logarithm of the number of members;
# about a fifth more than the range of so many normal values.
_RANGE_STD = 3.4
# Largest standard deviation that is noise. With more, a worker that takes twice as long as another
# would be of its kind.
_MOST_NOISE = 0.24
# If there are more, their workers still keep their differences, see `_drawn_together`.
_MOST_KINDS = 24
_TIE = 1.0 - 1e-9
_MOST = 1024  # workers used to find the kinds; of more, a sample stands for all
_LONGEST_USE = 8  # decisions for which kinds may be used without being found again
# Steps of the golden section match no pattern in the order of the workers.
_PLACES = np.arange(1, _MOST + 1) * 0.6180339887498949 % 1.0

# A worker whose speed has just changed fits any kind. It is left out if it is this many times as
# uncertain as the most certain of its kind. It stays if its uncertainty is small in itself (as a
# fraction of its time), or as small as after about six steps with its own noise.
_DOUBTFUL, _DOUBTFUL_STD, _DOUBTFUL_NOISE, _UNCLEAR = 3.0, 0.015, 0.4, 1e3

# Steps that the prior of the noise counts as, and those after which a worker's noise is known; and
# how much a test of scatter must allow for one step.
_PRIOR_STEPS, _KNOWN_STEPS, _UNSURE = 4.0, 100, 12.0
_APART = 2.0  # in logarithms; more than the differences of a kind's times


def kinds_of(
    curves: CurveEstimates,
    shares: IntArray,
    start: IntArray | None = None,
    unsure: float = 1.0,
) -> IntArray:
    """Return the number of each worker's kind, from 0 without gaps, ``(W,)``; all must be known.

    Workers are compared near their own shares. ``start`` are kinds to divide further, ``(W,)``;
    ``None`` begins with all workers in one. ``unsure`` is the factor by which scatter may exceed
    its uncertainty because the noise is not known well yet. Cost: ``O(W)`` for each halving, about
    five passes for the maximum of 24.
    """
    some = looked_at(len(shares))
    all_are_seen = len(some) == len(shares)
    seen, theirs = (curves, shares) if all_are_seen else (curves.of(some), shares[some])
    kinds = np.zeros(len(shares), dtype=np.int64) if start is None else start
    mine = kinds if all_are_seen else kinds[some]
    uncut, found = np.arange(len(some)), int(kinds.max()) + 1
    while len(uncut) and found < min(_MOST_KINDS, len(shares)):
        # `reduceat` sums over neighbours, so the members of a kind must be adjacent.
        uncut = uncut[mine[uncut].argsort(kind="stable")]
        cuts = _Cuts.of(seen.of(uncut), theirs[uncut], mine[uncut], found, unsure)
        if cuts.found == found:
            break
        uncut, found = uncut[np.isfinite(cuts.limit_s[mine[uncut]])], cuts.found
        mine = cuts.applied(seen, mine)
        # Kinds found on a sample are limits of time, so they apply to all the others.
        kinds = mine if all_are_seen else cuts.applied(curves, kinds)
    return kinds


@dataclass(frozen=True, slots=True, eq=False)
class Kinds:
    """The kinds of workers, which decisions use until one of them fails its test."""

    each: IntArray  # number of each worker's kind, ``(W,)``.
    count: int = 1  # number of kinds.
    # Number of decisions for which they are used before all are found again. It doubles if they
    # were found the same; otherwise a worker whose speed has just changed may be misplaced.
    period: int = 1
    left: int = 0  # how many of these are left.

    @classmethod
    def of(cls, estimate: Estimate, shares: IntArray, before: Kinds | None = None) -> Kinds:
        """Return the kinds for a decision; ``before`` are those of the previous one."""
        curves, shares, unsure = estimate.now, estimate.counted(shares), _unsure(estimate)
        if before is None or len(before.each) != len(shares):
            before = cls(np.zeros(len(shares), dtype=np.int64))
        # Kinds that have become one do not fail the test, so it does not replace a new search.
        if before.left and kinds_of(curves, shares, before.each, unsure) is before.each:
            return replace(before, left=before.left - 1)
        each = kinds_of(curves, shares, unsure=unsure)
        count = int(each.max()) + 1
        # With the maximum of kinds, the limits between them differ each time.
        same = count == before.count == _MOST_KINDS or np.array_equal(each, before.each)
        period = min(2 * before.period, _LONGEST_USE) if same else 1
        return cls(each, count, period, period - 1)


@lru_cache(maxsize=4)
def looked_at(workers: int) -> IntArray:
    """Return the workers to use: all, or a sample of very many, spread evenly over the ranks."""
    few = workers <= _MOST
    some = np.arange(workers) if few else np.unique((_PLACES * workers).astype(np.int64))
    some.flags.writeable = False  # cached for the next call
    return some


def levels(curves: CurveEstimates, share: Samples) -> tuple[FloatArray, FloatArray]:
    """Return the logarithms of times at a share, and the weight of each: one over variance."""
    time_s = curves.time_s(share)
    # A certain worker would have an infinite weight, so its uncertainty has a lower limit.
    square_s = time_s * time_s
    return np.log(time_s), square_s / np.maximum(curves.variance_s(share), 1e-12 * square_s)


def excess(scatter: FloatArray, members: FloatArray | IntArray) -> FloatArray:
    """Return the excess of a scatter over its uncertainty; 0 if chance may explain it."""
    free = np.maximum(members - 1.0, 0.0)
    return np.where(scatter > free + _DIFFER_STD * np.sqrt(2.0 * free), scatter - free, 0.0)


@dataclass(frozen=True, slots=True, eq=False)
class _Cuts:
    """One division of some of the kinds found so far; arrays with a place for every kind."""

    place: FloatArray  # the share at which a kind's members are compared
    # A member that takes longer there belongs to the new kind; infinite for no division.
    limit_s: FloatArray
    beyond: IntArray  # the number of the new kind
    found: int  # number of kinds after it

    @classmethod
    def of(
        cls,
        curves: CurveEstimates,
        shares: IntArray,
        kinds: IntArray,
        found: int,
        unsure: float,
    ) -> _Cuts:
        parts = KindMembers.of(kinds)
        places = parts.places(shares, curves.surest_share(shares))
        level, weight = levels(curves, places[:, parts.each])
        # Around the mean, where the scatter is least; `best_cuts` relies on it.
        level -= (parts.sums(weight * level) / parts.sums(weight))[:, parts.each]
        scatter = parts.sums(weight * level**2) / unsure
        apart = np.maximum.reduceat(level, parts.starts, axis=1)
        apart -= np.minimum.reduceat(level, parts.starts, axis=1)
        # Very uncertain workers never scatter more than chance allows, however different they are.
        # Unless all of them are, as after the first steps with much noise.
        usual = np.minimum(np.sqrt(parts.counts / parts.sums(weight)), _MOST_NOISE)
        widest = np.maximum(_WIDEST, _RANGE_STD * np.sqrt(np.log(parts.counts)) * usual)
        differ = (excess(scatter, parts.counts) > 0) | (apart > widest)
        if not differ.any():
            return cls._through(parts.kinds[:0], places[0, :0], places[0, :0], found)
        # At the first place where they differ: with only one place, a worker that became slow was
        # pooled with slow workers whose curves have another shape.
        at = differ.argmax(axis=0)
        place, here = places[at, np.arange(len(at))], (at[parts.each], np.arange(len(kinds)))
        # Gaps between neighbours are unsuitable: among a thousand workers they link kinds together.
        last, gain = parts.best_cuts(level[here], weight[here])
        time_s = curves.rows[0] + curves.rows[1] * place[parts.each]
        limit_s = time_s[last]
        gain[~differ.any(axis=0)] = 0.0
        gain[np.maximum.reduceat(time_s, parts.starts) <= limit_s] = 0.0  # a tie
        # The clearest divisions first, because there may be more than the remaining kinds.
        cut = np.argsort(-gain, kind="stable")[: min(np.count_nonzero(gain), _MOST_KINDS - found)]
        return cls._through(parts.kinds[cut], place[cut], limit_s[cut], found)

    @classmethod
    def _through(cls, kinds: IntArray, place: FloatArray, limit_s: FloatArray, found: int) -> _Cuts:
        after, new = found + len(kinds), np.arange(found, found + len(kinds))
        # Undivided kinds keep an infinite limit, so `applied` treats all alike.
        cuts = cls(np.zeros(after), np.full(after, np.inf), np.arange(after), after)
        cuts.place[kinds], cuts.limit_s[kinds], cuts.beyond[kinds] = place, limit_s, new
        return cuts

    def applied(self, curves: CurveEstimates, kinds: IntArray) -> IntArray:
        late = curves.rows[0] + curves.rows[1] * self.place[kinds] > self.limit_s[kinds]
        return np.where(late, self.beyond[kinds], kinds)


@dataclass(frozen=True, slots=True, eq=False)
class KindMembers:
    """Workers in order of kind."""

    kinds: IntArray  # the kinds among them, ``(n,)``
    starts: IntArray  # of each, the place of its first member, ``(n,)``
    counts: IntArray  # number of members, ``(n,)``
    each: IntArray  # every worker's place in these three

    @classmethod
    def of(cls, kinds: IntArray) -> KindMembers:
        first = np.ones(len(kinds), dtype=np.bool_)
        np.not_equal(kinds[1:], kinds[:-1], out=first[1:])
        starts, each = np.flatnonzero(first), np.cumsum(first) - 1
        return cls(kinds[starts], starts, np.bincount(each), each)

    def sums(self, values: FloatArray) -> FloatArray:
        """Sum the last axis over each kind's members."""
        return np.asarray(np.add.reduceat(values, self.starts, axis=-1), dtype=np.float64)

    def places(self, shares: IntArray, surest: FloatArray) -> FloatArray:
        """Return the shares at which to compare the members of each kind, ``(4, n)``, at least 1.

        The first three are the mean, the least and the largest of their shares, because curves of
        different shape may cross at one of them. The fourth is the mean of the ``surest``, because
        little is known at a share that has just been decided.
        """
        mean = self.sums(shares.astype(np.float64)) / self.counts
        least, most = (f.reduceat(shares, self.starts) for f in (np.minimum, np.maximum))
        known = np.exp(self.sums(np.log(surest)) / self.counts)
        places = np.array([mean, least, most, known])
        return np.asarray(np.maximum(places, 1.0))

    def best_cuts(self, level: FloatArray, weight: FloatArray) -> tuple[IntArray, FloatArray]:
        """Return the last member before the division that removes most scatter, and how much.

        Levels have mean 0 in each kind; ties go to the faster worker.
        """
        order = np.lexsort((level, self.each))
        level, weight = level[order], weight[order]
        whole = self.sums(weight)
        # As parts of their kind: the running sums of a kind with tiny weights would be lost in
        # those of the kinds before it.
        part = weight / whole[self.each]
        # At the ends of a kind only rounding errors are left, and nothing is gained there.
        before = np.clip(self._running(part), 1e-12, 1.0)
        after = np.maximum(1.0 - before, 1e-12)
        gain = self._running(part * level) ** 2 / (before * after)
        best = np.maximum.reduceat(gain, self.starts)
        near = gain >= _TIE * best[self.each]  # rounding depends on the order of the workers
        best_at = np.where(near, np.arange(len(gain)), len(gain))
        return order[np.minimum.reduceat(best_at, self.starts)], np.asarray(best * whole)

    def _running(self, values: FloatArray) -> FloatArray:
        running = np.cumsum(values)
        return running - (running - values)[self.starts][self.each]


def pooled(estimate: Estimate, shares: IntArray, kinds: Kinds | None = None) -> Estimate:
    """Return the estimate with each worker, all of them known, at the mean of its kind.

    Workers are compared near their own shares. Without ``kinds``, they are found first. Cost:
    ``O(W)``, vectorised; see `kinds_of`.
    """
    kinds = kinds or Kinds.of(estimate, shares)
    if kinds.count == len(shares):  # each is alone
        return estimate
    shares = estimate.counted(shares)
    stray = _stray(estimate.now, shares, np.sqrt(estimate.noise), kinds.each)
    return replace(estimate, now=_drawn_together(estimate.now, shares, kinds.each, stray))


def with_shared_cliffs(estimate: Estimate, kinds: IntArray) -> Estimate:
    """Return the estimate with the lowest cliff of each kind for all that may have it.

    Memory and caches of equal workers overflow at the same share. A worker that has had so many
    samples without a cliff, in the shares that are remembered, has another one or none.

    Args:
        estimate: of all workers.
        kinds: number of each worker's kind, ``(W,)``.

    Cost:
        ``O(W)``; almost nothing while no cliff is known.
    """
    seen = estimate.seen
    known = np.flatnonzero((seen.limit[1] > 0) & (seen.proof >= PROOF))
    if not len(known):
        return estimate
    known = known[np.argsort(seen.limit[1, known], kind="stable")]
    with_one, first = np.unique(kinds[known], return_index=True)
    lowest = np.full(int(kinds.max()) + 1, -1)
    lowest[with_one] = known[first]
    one, had = lowest[kinds], seen.share.max(axis=0)
    some = np.flatnonzero((one >= 0) & (seen.limit[1] == 0) & (had < seen.limit[1, one]))
    if not len(some):
        return estimate
    one, names = one[some], ("limit", "limit_level", "proof", "tries")
    shared = replace(seen, **{name: getattr(seen, name).copy() for name in names})
    least, most, since = seen.limit[:, one]
    since = since - seen.steps[one] + seen.steps[some]
    shared.limit[:, some] = np.maximum(least, had[some]), most, since
    shared.limit_level[some] = seen.limit_level[one] + seen.slower[one] - seen.slower[some]
    shared.proof[some], shared.tries[some] = PROOF, seen.tries[one]
    return replace(estimate, seen=shared)


def _unsure(estimate: Estimate) -> float:
    """Return the factor by which scatter may exceed its uncertainty by chance."""
    # About the quotient of the quantiles of F and chi squared: the noise is known from so many
    # steps, besides its prior.
    known = _PRIOR_STEPS + float(np.clip(estimate.steps - 1, 0, _KNOWN_STEPS).sum())
    return 1.0 + _UNSURE / known


def _stray(
    curves: CurveEstimates, shares: IntArray, noise_std: FloatArray, kinds: IntArray
) -> FloatArray:
    """Return how much further each is from its kind's median than chance allows, at least 0."""
    # In standard deviations, at its own share; one worker among a thousand may be far off without
    # a large effect on the scatter of all. Workers that are too uncertain get a large number.
    members = np.bincount(kinds)
    least = curves.least_relative_std
    # A worker whose speed has just changed would shift its kind's next split by 20 %.
    surest = np.full(len(members), np.inf)
    np.minimum.at(surest, kinds, least)
    small = np.maximum(_DOUBTFUL_STD, _DOUBTFUL_NOISE * noise_std)
    unclear = least > np.maximum(_DOUBTFUL * surest[kinds], small)
    some = looked_at(len(shares))
    # The median rather than the mean: one outlier must not move the reference.
    fixed_s, per_sample_s = (
        medians(row[some], kinds[some], len(members))[kinds] for row in curves.rows[:2]
    )
    level, weight = levels(curves, shares)
    off = level - np.log(np.maximum(fixed_s + per_sample_s * shares, 1e-12))
    # About the distance of the furthest of so many by chance.
    chance = np.sqrt(2.0 * np.log(members))[kinds]
    return np.where(unclear, _UNCLEAR, np.maximum(np.sqrt(weight) * np.abs(off) - chance, 0.0))


def _drawn_together(
    curves: CurveEstimates, shares: IntArray, kinds: IntArray, stray: FloatArray
) -> CurveEstimates:
    """Return the curves after each has learned the measurements of its kind."""
    # To a worker, its kind is one more measurement of its time. The variance is such that its own
    # measurement and this one together give the kind's mean. It is larger by the variance between
    # them, and larger for outliers. (A sharp boundary would make a split oscillate.)

    def whole(values: FloatArray | IntArray) -> FloatArray:
        return np.asarray(np.bincount(kinds, values)[kinds], dtype=np.float64)

    members = whole(np.ones(len(shares)))
    at = np.maximum(whole(shares) / members, 1.0)
    level, weight = levels(curves, at)
    # The weight fades with distance. With a sharp boundary, workers near it made splits oscillate.
    own = weight / (1.0 + stray**2)
    total = whole(own)
    mean = whole(own * level) / total
    others = np.maximum(total - own, 1e-12)
    # For a worker that outweighs all others by far, only rounding errors are left of this.
    level_of_others = mean + np.clip((mean - level) * own / others, -_APART, _APART)
    spare = np.maximum(total - whole(own**2) / total, 1e-12)
    # After the last division, a group counts as one kind, so its inner differences must count:
    # without them, 400 workers of 400 speeds were 5 % wrong.
    between = excess(whole(own * (level - mean) ** 2), members) / spare
    apart = np.maximum(np.abs(mean - level), 1.0 / np.sqrt(weight))
    variance = 1.0 / others + between + (stray * apart) ** 2
    # By a filter's update rather than by setting the time, so that shape and uncertainty follow.
    time_s = curves.time_s(at) * np.exp(level_of_others - level)
    drawn = observed(curves, at, time_s, variance)
    return drawn.where(members > 1, curves)
