"""Let workers of one kind share their evidence, so that equal workers stay equal.

Among many workers, the largest of their estimated times is far above its true value by chance
alone. Workers whose times scatter no more than their doubt explains are taken for one kind, and
get their kind's mean; what sets kinds apart is found by cutting the workers, in order of speed,
until no part scatters more than chance lets it. Parts that are left when there are enough kinds
are drawn together only as far as their scatter leaves room for.

Source:
    Drawing estimates together is empirical Bayes (Efron & Morris, JASA 1973), with the variance
    between workers taken as zero in a kind, and by DerSimonian & Laird (1986) in what was not cut
    into kinds. Cutting where the sum of squares falls most
    is Fisher's grouping (JASA 1958), stopped by a chi-squared test of the scatter; ours.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from evenstride.core.curves import Curves, Mask
from evenstride.core.estimation import Estimate
from evenstride.core.fleet import FloatArray, IntArray

# A part is cut again if its scatter is this many standard deviations above what chance gives.
_DIFFER_STD = 2.0
_WIDEST = 0.5  # no kind's times differ by more than this (in logarithms), however doubtful
_MOST_KINDS = 24
# A worker whose speed has just changed fits any kind: one that is so many times as doubtful as the
# surest of its kind is left out, unless its doubt is small in itself (parts of its time).
_DOUBTFUL, _DOUBTFUL_STD = 3.0, 0.015
_MOST = 1024  # workers that are looked at to find a cut; of more, some stand for all
_GOLDEN = 0.6180339887498949


def pooled(estimate: Estimate, shares: IntArray) -> Estimate:
    """Return the estimate with each worker at the mean of its kind.

    Args:
        estimate: of ``W`` workers, all of them known.
        shares: decided, int64 ``(W,)``; workers are compared near their own shares.

    Cost:
        ``O(W)`` for each of at most 24 kinds, vectorised.
    """
    kinds = _kinds(estimate.now, shares)
    return replace(estimate, now=_drawn_together(estimate.now, shares, kinds))


def _kinds(curves: Curves, shares: IntArray) -> IntArray:
    """Return the kind of each worker, ``(W,)``, counted from 0."""
    kinds, found, parts = np.zeros(len(shares), dtype=np.int64), 0, [np.arange(len(shares))]
    while parts:
        part = parts.pop()
        quicker = np.zeros(len(part), dtype=np.bool_)
        if len(part) > 1 and found + len(parts) < _MOST_KINDS:
            quicker = _quicker(curves.of(part), shares[part])
        if quicker.any() and not quicker.all():
            parts += [part[quicker], part[~quicker]]
        else:
            kinds[part], found = found, found + 1
    return kinds


def _quicker(curves: Curves, shares: IntArray) -> Mask:
    """Return which of some workers are before the cut; nobody if they are of one kind.

    They are compared at the middle, the least and the largest of their shares, because curves of
    different shape may cross at any one of them.
    """
    places = np.array([shares.mean(), shares.min(), shares.max()])
    places = np.maximum(places, 1.0)[: 1 if places[1] == places[2] else 3]
    level, weight = _levels(curves.of(_looked_at(len(shares))), places[:, np.newaxis])
    mean = (weight * level).sum(axis=1) / weight.sum(axis=1)
    scatter = (weight * (level - mean[:, np.newaxis]) ** 2).sum(axis=1)
    differ = (_excess(scatter, level.shape[1]) > 0) | (np.ptp(level, axis=1) > _WIDEST)
    if not differ.any():
        return _surer(curves)
    at = int(differ.argmax())
    order = np.argsort(level[at])
    last = order[_best_cut(level[at, order], weight[at, order]) - 1]
    return np.asarray(np.log(curves.time_s(places[at])) <= level[at, last])


def _surer(curves: Curves) -> Mask:
    """Return who is left if those are taken out who know too little to be compared, if any do."""
    least = curves.least_relative_std
    doubtful = least > np.maximum(_DOUBTFUL * least.min(), _DOUBTFUL_STD)
    return np.asarray(doubtful.any() & ~doubtful)


def _looked_at(workers: int) -> IntArray | slice:
    """Return whom to look at: everybody, or of very many some, spread evenly over the ranks."""
    if workers <= _MOST:
        return slice(None)
    # Steps of the golden section fall in with no pattern in the order of the workers.
    places = np.arange(1, _MOST + 1) * _GOLDEN % 1.0
    return np.asarray((places * workers).astype(np.int64))


def _levels(curves: Curves, share: FloatArray | float) -> tuple[FloatArray, FloatArray]:
    """Return the logarithms of times at a share, and the weight of each: one over variance."""
    std = np.maximum(curves.relative_std(share), 1e-6)
    return np.log(curves.time_s(share)), 1.0 / std**2


def _excess(scatter: FloatArray, members: FloatArray | int) -> FloatArray:
    """Return how much larger a scatter is than what doubt explains; 0 if chance may explain it.

    Args:
        scatter: weighted sum of squares of members' levels about their mean.
        members: how many they are.
    """
    free = np.maximum(members - 1.0, 0.0)
    return np.where(scatter > free + _DIFFER_STD * np.sqrt(2.0 * free), scatter - free, 0.0)


def _best_cut(level: FloatArray, weight: FloatArray) -> int:
    """Return after how many ascending levels a cut leaves the least scatter in both parts."""
    total, weighted = np.cumsum(weight), np.cumsum(weight * level)
    before, after = total[:-1], total[-1] - total[:-1]
    apart = weighted[:-1] / before - (weighted[-1] - weighted[:-1]) / after
    return int(np.argmax(before * after * apart**2)) + 1


def _drawn_together(curves: Curves, shares: IntArray, kinds: IntArray) -> Curves:
    """Return the curves after each has learned what all of its kind measured.

    To a worker, its kind is like one more measurement of its time, of a variance such that its
    own and this one together give the kind's mean; larger by the variance between them.
    """

    def whole(values: FloatArray | IntArray | Mask) -> FloatArray:
        """Sum over each worker's kind."""
        return np.asarray(np.bincount(kinds, values)[kinds], dtype=np.float64)

    members = whole(np.ones(len(shares)))
    at = np.maximum(whole(shares) / members, 1.0)
    level, weight = _levels(curves, at)
    total = whole(weight)
    mean = whole(weight * level) / total
    others = np.maximum(total - weight, 1e-12)
    spare = np.maximum(total - whole(weight**2) / total, 1e-12)
    between = _excess(whole(weight * (level - mean) ** 2), members) / spare
    told = mean + (mean - level) * weight / others
    time_s = curves.time_s(at) * (1.0 + told - level)
    return curves.observed(at, time_s, 1.0 / others + between).where(members > 1, curves)
