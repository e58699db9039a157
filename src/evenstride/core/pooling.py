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
# A worker that is sure of its time at its own share only, because its speed has just changed or
# its shape is not known yet, fits any kind elsewhere: it is left alone where it is this many
# times as doubtful as at home, and so doubtful in parts of its time.
_ABROAD, _ABROAD_STD = 1.5, 0.03
_MOST = 1024  # workers that are looked at to find a cut; of more, some stand for all
_GOLDEN = 0.6180339887498949


def pooled(estimate: Estimate, shares: IntArray) -> Estimate:
    """Return the estimate with each worker at the mean of its kind.

    Args:
        estimate: of ``W`` workers, all of them known.
        shares: in force, int64 ``(W,)``; workers are compared near their own shares.

    Cost:
        ``O(W)`` for each of at most 24 kinds, vectorised.
    """
    theirs = Curves(estimate.now.rows.copy())
    for kind in _kinds(estimate.now, shares):
        members = kind[_at_home(theirs.of(kind), shares[kind])]
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
        quicker = _quicker(curves.of(part), shares[part])
        if quicker.any() and not quicker.all():
            parts += [part[quicker], part[~quicker]]
        else:
            kinds.append(part)
    return kinds


def _quicker(curves: Curves, shares: IntArray) -> Mask:
    """Return which of some workers are before the cut; nobody if they are of one kind.

    They are compared at the middle, the least and the largest of their shares, because curves of
    different shape may cross at any one of them.
    """
    some = curves.of(_looked_at(len(shares)))
    for at in (float(shares.mean()), float(shares.min()), float(shares.max())):
        level, weight = _levels(some, max(at, 1.0))
        if _excess(level, weight) > 0 or float(np.ptp(level)) > _WIDEST:
            order = np.argsort(level)
            last = order[_best_cut(level[order], weight[order]) - 1]
            return np.asarray(np.log(curves.time_s(_everywhere(curves, at))) <= level[last])
    return np.zeros(len(shares), dtype=np.bool_)


def _looked_at(workers: int) -> IntArray:
    """Return whom to look at: everybody, or of very many some, spread evenly over the ranks."""
    if workers <= _MOST:
        return np.arange(workers)
    # Steps of the golden section fall in with no pattern in the order of the workers.
    places = np.arange(1, _MOST + 1) * _GOLDEN % 1.0
    return np.asarray((places * workers).astype(np.int64))


def _everywhere(curves: Curves, share: float) -> FloatArray:
    return np.full(curves.rows.shape[1], max(share, 1.0))


def _levels(curves: Curves, share: float) -> tuple[FloatArray, FloatArray]:
    """Return the logarithms of times at one share, and the weight of each: one over variance."""
    everywhere = _everywhere(curves, share)
    std = np.maximum(curves.relative_std(everywhere), 1e-6)
    return np.log(curves.time_s(everywhere)), 1.0 / std**2


def _excess(level: FloatArray, weight: FloatArray) -> float:
    """Return by how much levels scatter more than doubt explains, as a sum of squares; 0 if not."""
    mean = (weight * level).sum() / weight.sum()
    free = len(level) - 1
    scatter = float((weight * (level - mean) ** 2).sum())
    return scatter - free if scatter > free + _DIFFER_STD * np.sqrt(2.0 * free) else 0.0


def _best_cut(level: FloatArray, weight: FloatArray) -> int:
    """Return after how many ascending levels a cut leaves the least scatter in both parts."""
    total, weighted = np.cumsum(weight), np.cumsum(weight * level)
    before, after = total[:-1], total[-1] - total[:-1]
    apart = weighted[:-1] / before - (weighted[-1] - weighted[:-1]) / after
    return int(np.argmax(before * after * apart**2)) + 1


def _at_home(curves: Curves, shares: IntArray) -> Mask:
    """Return which workers of a kind are about as sure of their time at its share as at theirs."""
    std = curves.relative_std(_everywhere(curves, float(shares.mean())))
    home = curves.relative_std(shares)
    return np.asarray(std <= np.maximum(_ABROAD * home, _ABROAD_STD))


def _drawn_together(curves: Curves, shares: IntArray) -> Curves:
    """Return curves of one kind after each has learned what all of them measured.

    To a worker, its kind is like one more measurement of its time, of a variance such that its
    own and this one together give the kind's mean; larger by the variance between them.
    """
    at = float(shares.mean())
    level, weight = _levels(curves, at)
    mean = float((weight * level).sum() / weight.sum())
    others = weight.sum() - weight
    told = mean + (mean - level) * weight / others
    between = _excess(level, weight) / (weight.sum() - (weight**2).sum() / weight.sum())
    everywhere = _everywhere(curves, at)
    time_s = curves.time_s(everywhere) * (1.0 + told - level)
    return curves.observed(everywhere, time_s, 1.0 / others + between)
