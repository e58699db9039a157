"""Let workers of one kind share their evidence, so that equal workers stay equal.

Among many workers, the largest of their estimated times is far above its true value by chance
alone. Workers whose times scatter no more than their doubt explains are taken for one kind, and
get their kind's mean; what sets kinds apart is found by cutting the workers, in order of speed,
until no part scatters more than chance lets it.

Source:
    Drawing estimates together is empirical Bayes (Efron & Morris, JASA 1973), here with the
    variance between workers of a kind taken as zero. Cutting where the sum of squares falls most
    is Fisher's grouping (JASA 1958), stopped by a chi-squared test of the scatter; ours.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from evenstride.core.curves import Curves
from evenstride.core.estimation import Estimate
from evenstride.core.fleet import FloatArray, IntArray

# A part is cut again if its scatter is this many standard deviations above what chance gives.
_DIFFER_STD = 2.0
_WIDEST = 0.5  # no kind's times differ by more than this (in logarithms), however doubtful
_MOST_KINDS = 24


def pooled(estimate: Estimate, shares: IntArray) -> Estimate:
    """Return the estimate with each worker at the mean of its kind.

    Args:
        estimate: of ``W`` workers, all of them known.
        shares: in force, int64 ``(W,)``; workers are compared near their own shares.

    Cost:
        ``O(W log W)`` for each of at most 24 kinds, vectorised.
    """
    theirs = Curves(estimate.now.rows.copy())
    for members in _kinds(estimate.now, shares):
        if len(members) > 1:
            theirs.rows[:, members] = _drawn_together(theirs.of(members), shares[members]).rows
    return replace(estimate, now=theirs)


def _kinds(curves: Curves, shares: IntArray) -> list[IntArray]:
    """Return the ranks of each kind's workers."""
    kinds, parts = list[IntArray](), [np.arange(len(shares))]
    while parts:
        part = parts.pop()
        if len(part) == 1 or len(kinds) + len(parts) >= _MOST_KINDS:
            kinds.append(part)
            continue
        order, cut = _cut(curves.of(part), shares[part])
        ordered = part[order]
        if cut:
            parts += [ordered[:cut], ordered[cut:]]
        else:
            kinds.append(ordered)
    return kinds


def _cut(curves: Curves, shares: IntArray) -> tuple[IntArray, int]:
    """Return some workers in order of time, and how many are before the cut; 0 for one kind.

    They are compared at the middle, the least and the largest of their shares, because curves of
    different shape may cross at any one of them.
    """
    order = np.arange(len(shares))
    for at in (float(shares.mean()), float(shares.min()), float(shares.max())):
        everywhere = np.full(len(shares), max(at, 1.0))
        level = np.log(curves.time_s(everywhere))
        weight = 1.0 / np.maximum(curves.relative_std(everywhere), 1e-6) ** 2
        if _scatter(level, weight) or float(np.ptp(level)) > _WIDEST:
            order = np.argsort(level)
            return order, _best_cut(level[order], weight[order])
    return order, 0


def _scatter(level: FloatArray, weight: FloatArray) -> bool:
    """Return whether levels scatter more than their doubt explains."""
    mean = (weight * level).sum() / weight.sum()
    free = len(level) - 1
    chance = free + _DIFFER_STD * np.sqrt(2.0 * free)
    return bool((weight * (level - mean) ** 2).sum() > chance)


def _best_cut(level: FloatArray, weight: FloatArray) -> int:
    """Return after how many ascending levels a cut leaves the least scatter in both parts."""
    total, weighted = np.cumsum(weight), np.cumsum(weight * level)
    before, after = total[:-1], total[-1] - total[:-1]
    apart = weighted[:-1] / before - (weighted[-1] - weighted[:-1]) / after
    return int(np.argmax(before * after * apart**2)) + 1


def _drawn_together(curves: Curves, shares: IntArray) -> Curves:
    """Return curves of one kind after each has learned what all of them measured.

    To a worker, its kind is like one more measurement of its time, of a variance such that its
    own and this one together give the kind's mean.
    """
    at = np.full(len(shares), max(float(shares.mean()), 1.0))
    time_s, std = curves.time_s(at), np.maximum(curves.relative_std(at), 1e-6)
    weight = 1.0 / std**2
    mean = float((weight * np.log(time_s)).sum() / weight.sum())
    others = weight.sum() - weight
    told = mean + (mean - np.log(time_s)) * weight / others
    return curves.observed(at, time_s * (1.0 + told - np.log(time_s)), 1.0 / others)
