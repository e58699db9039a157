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

import math
from dataclasses import replace

import numpy as np

from evenstride.core.curves import Curves, Mask, Shares
from evenstride.core.estimation import Estimate
from evenstride.core.fleet import FloatArray, IntArray

# A part is cut again if its scatter is this many standard deviations above what chance gives.
_DIFFER_STD = 2.0
_WIDEST = 0.5  # no kind's times differ by more than this (in logarithms), however doubtful
_MOST_KINDS = 24
# A worker whose speed has just changed fits any kind: one that is so many times as doubtful as the
# surest of its kind is left out, unless its doubt is small in itself (parts of its time), or as
# small as some six steps make it under its own noise.
_DOUBTFUL, _DOUBTFUL_STD, _DOUBTFUL_NOISE, _UNCLEAR = 3.0, 0.015, 0.4, 1e3
_MOST = 512  # workers that are looked at to find a cut; of more, some stand for all
# Steps of the golden section fall in with no pattern in the order of the workers.
_PLACES = np.arange(1, _MOST + 1) * 0.6180339887498949 % 1.0


def pooled(estimate: Estimate, shares: IntArray) -> Estimate:
    """Return the estimate with each worker at the mean of its kind.

    Args:
        estimate: of ``W`` workers, all of them known.
        shares: decided, int64 ``(W,)``; workers are compared near their own shares.

    Cost:
        ``O(W)`` for each of at most 24 kinds, vectorised.
    """
    kinds, stray = _kinds(estimate.now, shares, np.sqrt(estimate.noise))
    return replace(estimate, now=_drawn_together(estimate.now, shares, kinds, stray))


def _kinds(curves: Curves, shares: IntArray, noise_std: FloatArray) -> tuple[IntArray, FloatArray]:
    """Return the kind of each worker, ``(W,)``, and how little it belongs to it (`_stray`)."""
    kinds, stray = np.zeros(len(shares), dtype=np.int64), np.zeros(len(shares))
    found, parts = 0, [np.arange(len(shares))]
    while parts:
        part = parts.pop()
        quicker = np.zeros(len(part), dtype=np.bool_)
        if len(part) > 1 and found + len(parts) < _MOST_KINDS:
            quicker = _quicker(curves, shares, part)
        if quicker.any() and not quicker.all():
            parts += [part[quicker], part[~quicker]]
        else:
            kinds[part], found = found, found + 1
            if len(part) > 1:
                stray[part] = _stray(curves.of(part), shares[part], noise_std[part])
    return kinds, stray


def _quicker(curves: Curves, shares: IntArray, part: IntArray) -> Mask:
    """Return which of a part's workers are before the cut; nobody if they are of one kind.

    They are compared at the middle, the least and the largest of their shares, because curves of
    different shape may cross at any one of them.
    """
    theirs = shares[part]
    places = np.array([theirs.mean(), theirs.min(), theirs.max()])
    places = np.maximum(places, 1.0)[: 1 if places[1] == places[2] else 3]
    some = curves.of(part[_looked_at(len(part))])
    level, weight = _levels(some, places[:, np.newaxis])
    mean = (weight * level).sum(axis=1) / weight.sum(axis=1)
    scatter = (weight * (level - mean[:, np.newaxis]) ** 2).sum(axis=1)
    differ = (_excess(scatter, level.shape[1]) > 0) | (np.ptp(level, axis=1) > _WIDEST)
    if not differ.any():
        return np.zeros(len(part), dtype=np.bool_)
    at = int(differ.argmax())
    order = np.argsort(level[at])
    last = order[_best_cut(level[at, order], weight[at, order]) - 1]
    last_s = some.rows[0, last] + some.rows[1, last] * places[at]
    return np.asarray(curves.rows[0, part] + curves.rows[1, part] * places[at] <= last_s)


def _stray(curves: Curves, shares: IntArray, noise_std: FloatArray) -> FloatArray:
    """Return how much further each is from the middle one than chance allows, 0 if it does.

    In standard deviations, at its own share; one worker among a thousand may be far off without
    adding much to the scatter of all. Those who are known too little to tell get a large number.
    """
    least = curves.least_relative_std
    small = np.maximum(_DOUBTFUL_STD, _DOUBTFUL_NOISE * noise_std)
    unclear = least > np.maximum(_DOUBTFUL * least.min(), small)
    fixed_s, per_sample_s = _medians(curves.rows[:2, _looked_at(len(shares))])
    level, weight = _levels(curves, shares)
    off = level - np.log(np.maximum(fixed_s + per_sample_s * shares, 1e-12))
    chance = math.sqrt(2.0 * math.log(len(level)))
    return np.where(unclear, _UNCLEAR, np.maximum(np.sqrt(weight) * np.abs(off) - chance, 0.0))


def _medians(rows: FloatArray) -> FloatArray:
    """Return the median of each row; quicker than numpy's on rows as short as these."""
    last = rows.shape[1] - 1
    two = (last // 2, last - last // 2)
    ordered = np.partition(rows, two, axis=1)
    return np.asarray(0.5 * (ordered[:, two[0]] + ordered[:, two[1]]))


def _looked_at(workers: int) -> IntArray | slice:
    """Return whom to look at: everybody, or of very many some, spread evenly over the ranks."""
    if workers <= _MOST:
        return slice(None)
    return np.asarray((_PLACES * workers).astype(np.int64))


def _levels(curves: Curves, share: Shares) -> tuple[FloatArray, FloatArray]:
    """Return the logarithms of times at a share, and the weight of each: one over variance."""
    time_s = curves.time_s(share)
    square_s = time_s * time_s
    return np.log(time_s), square_s / np.maximum(curves.variance_s(share), 1e-12 * square_s)


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


def _drawn_together(curves: Curves, shares: IntArray, kinds: IntArray, stray: FloatArray) -> Curves:
    """Return the curves after each has learned what all of its kind measured.

    To a worker, its kind is like one more measurement of its time, of a variance such that its
    own and this one together give the kind's mean; larger by the variance between them, and the
    more so the less it belongs to them. (In or out would make a split flip at the border.)
    """

    def whole(values: FloatArray | IntArray) -> FloatArray:
        """Sum over each worker's kind."""
        return np.asarray(np.bincount(kinds, values)[kinds], dtype=np.float64)

    members = whole(np.ones(len(shares)))
    at = np.maximum(whole(shares) / members, 1.0)
    level, weight = _levels(curves, at)
    own = weight / (1.0 + stray**2)
    total = whole(own)
    mean = whole(own * level) / total
    others = np.maximum(total - own, 1e-12)
    told = mean + (mean - level) * own / others
    spare = np.maximum(total - whole(own**2) / total, 1e-12)
    between = _excess(whole(own * (level - mean) ** 2), members) / spare
    apart = np.maximum(np.abs(mean - level), 1.0 / np.sqrt(weight))
    variance = 1.0 / others + between + (stray * apart) ** 2
    drawn = curves.observed(at, curves.time_s(at) * np.exp(told - level), variance)
    return drawn.where(members > 1, curves)
