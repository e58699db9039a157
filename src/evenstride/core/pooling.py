"""Let workers of one kind share their evidence, so that equal workers stay equal.

Among many workers, the largest of their estimated times is far above its true value by chance
alone. Workers whose times cannot be told apart are most likely of one kind: their estimates
are drawn together, the more the less they differ beyond what their doubt explains.

Source:
    Empirical Bayes for normal means (Efron & Morris, JASA 1973); the variance between workers
    by the moments of DerSimonian & Laird (Controlled Clinical Trials 1986), taken as zero unless
    it is significant. Finding the kinds by gaps between neighbours is ours.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from evenstride.core.curves import Curves
from evenstride.core.estimation import Estimate
from evenstride.core.fleet import FloatArray, IntArray

# Neighbours in order of speed whose times differ by fewer standard deviations are of one kind.
_ALIKE_STD = 3.0
# Workers of a kind differ truly if their scatter is this many standard deviations above chance.
_DIFFER_STD = 2.0
_WIDEST = 0.25  # no kind spans neighbours that differ by more than this part, however doubtful


def pooled(estimate: Estimate, shares: IntArray) -> Estimate:
    """Return the estimate with the workers of each kind drawn together.

    Args:
        estimate: of ``W`` workers, all of them known.
        shares: in force, int64 ``(W,)``; workers are compared near their own shares.

    Cost:
        ``O(W log W)``, vectorised.
    """
    if len(shares) < 2:
        return estimate
    curves = estimate.now
    kind = _kinds(curves, shares)
    sizes = np.bincount(kind)
    if sizes.max() < 2:
        return estimate
    at = np.maximum(np.bincount(kind, weights=shares) / sizes, 1.0)[kind]
    time_s, std = curves.time_s(at), curves.relative_std(at)
    level = np.log(time_s)
    drawn, less = _drawn_together(level, std**2, kind)
    # What a worker learns from its kind is like one more measurement of its time.
    more = np.maximum(std**2 - less, 1e-18)
    variance = std**2 * less / more
    told_s = time_s * (1.0 + (drawn - level) * std**2 / more)
    learns = (sizes[kind] > 1) & (less < 0.999 * std**2)
    return replace(estimate, now=curves.observed(at, told_s, variance).where(learns, curves))


def _kinds(curves: Curves, shares: IntArray) -> IntArray:
    """Return the number of each worker's kind, ``(W,)``."""
    usual_s = curves.time_s(np.full(len(shares), max(float(shares.mean()), 1.0)))
    order = np.argsort(usual_s)
    apart = np.zeros(len(shares), dtype=np.bool_)
    apart[1:] = _differ(curves, order, shares[order[:-1]])
    apart[1:] |= _differ(curves, order, shares[order[1:]])
    kind = np.empty(len(shares), dtype=np.int64)
    kind[order] = np.cumsum(apart)
    return kind


def _differ(curves: Curves, order: IntArray, shares: IntArray) -> npt.NDArray[np.bool_]:
    """Return which neighbours' times differ at these shares, ``(W - 1,)``.

    Asked at the shares of both, because two curves of different shape may cross between them.
    """
    at = np.maximum(shares, 1)
    low, high = curves.of(order[:-1]), curves.of(order[1:])
    gap = np.abs(np.log(high.time_s(at) / low.time_s(at)))
    doubt = np.sqrt(low.relative_std(at) ** 2 + high.relative_std(at) ** 2)
    return np.asarray((gap > _ALIKE_STD * doubt) | (gap > _WIDEST))


def _drawn_together(
    level: FloatArray, variance: FloatArray, kind: IntArray
) -> tuple[FloatArray, FloatArray]:
    """Return the posterior means and variances of levels that scatter around their kind's mean."""
    variance = np.maximum(variance, 1e-12)
    between = _variance_between(level, variance, kind)
    weight = 1.0 / (variance + between)
    total = _per_kind(weight, kind)
    mean = _per_kind(weight * level, kind) / total
    own = between / (between + variance)
    less = own * variance + (1.0 - own) ** 2 / total
    return mean + own * (level - mean), less


def _variance_between(level: FloatArray, variance: FloatArray, kind: IntArray) -> FloatArray:
    """Return the variance between the workers of each one's kind; 0 if chance explains it."""
    weight = 1.0 / variance
    total = _per_kind(weight, kind)
    mean = _per_kind(weight * level, kind) / total
    scatter = _per_kind(weight * (level - mean) ** 2, kind)
    free = np.maximum(_per_kind(np.ones_like(level), kind) - 1.0, 1.0)
    significant = scatter > free + _DIFFER_STD * np.sqrt(2.0 * free)
    scale = np.maximum(total - _per_kind(weight**2, kind) / total, 1e-300)
    return np.where(significant, np.maximum(scatter - free, 0.0) / scale, 0.0)


def _per_kind(values: FloatArray, kind: npt.NDArray[np.int64]) -> FloatArray:
    """Return for each worker the sum over its kind."""
    return np.asarray(np.bincount(kind, weights=values)[kind])
