"""Let workers of one kind share their evidence, so that equal workers stay equal.

Among many workers, the largest of their estimated times is far above its true value by chance
alone. Workers whose times scatter no more than their doubt explains are taken for one kind, and
get their kind's mean (`kinds_of`). Kinds that would be cut further, were there not enough of
them, are drawn together only as far as their scatter leaves room for.

Source:
    Drawing estimates together is empirical Bayes (Efron & Morris, JASA 1973), with the variance
    between workers taken as zero in a kind, and by DerSimonian & Laird (1986) in what was not cut
    into kinds.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from evenstride.core.arrays import FloatArray, IntArray
from evenstride.core.time_model.clustering import excess, kinds_of, levels, looked_at
from evenstride.core.time_model.curve_estimates import CurveEstimates
from evenstride.core.time_model.kalman import Estimate
from evenstride.core.time_model.observation import medians

# A worker whose speed has just changed fits any kind: one that is so many times as doubtful as the
# surest of its kind is left out, unless its doubt is small in itself (parts of its time), or as
# small as some six steps make it under its own noise.
_DOUBTFUL, _DOUBTFUL_STD, _DOUBTFUL_NOISE, _UNCLEAR = 3.0, 0.015, 0.4, 1e3

_APART = 2.0  # in logarithms; more than the times of a kind differ by


def pooled(estimate: Estimate, shares: IntArray) -> Estimate:
    """Return the estimate with each worker at the mean of its kind.

    Args:
        estimate: of ``W`` workers, all of them known.
        shares: decided, int64 ``(W,)``; workers are compared near their own shares.

    Cost:
        ``O(W)``, vectorised; see `kinds_of`.
    """
    kinds = kinds_of(estimate.now, shares)
    stray = _stray(estimate.now, shares, np.sqrt(estimate.noise), kinds)
    return replace(estimate, now=_drawn_together(estimate.now, shares, kinds, stray))


def _stray(
    curves: CurveEstimates, shares: IntArray, noise_std: FloatArray, kinds: IntArray
) -> FloatArray:
    """Return how much further each is from its kind's middle than chance allows, 0 if it is not."""
    # In standard deviations, at its own share; one worker among a thousand may be far off without
    # adding much to the scatter of all. Those who are known too little to tell get a large number.
    members = np.bincount(kinds)
    least = curves.least_relative_std
    # A worker whose speed has just changed would bring its kind's next split 20 % off.
    surest = np.full(len(members), np.inf)
    np.minimum.at(surest, kinds, least)
    small = np.maximum(_DOUBTFUL_STD, _DOUBTFUL_NOISE * noise_std)
    unclear = least > np.maximum(_DOUBTFUL * surest[kinds], small)
    some = looked_at(len(shares))
    # The middle rather than the mean: one stray worker must not move what it is held against.
    fixed_s, per_sample_s = (
        medians(row[some], kinds[some], len(members))[kinds] for row in curves.rows[:2]
    )
    level, weight = levels(curves, shares)
    off = level - np.log(np.maximum(fixed_s + per_sample_s * shares, 1e-12))
    # About as far off as the furthest of so many is by chance.
    chance = np.sqrt(2.0 * np.log(members))[kinds]
    return np.where(unclear, _UNCLEAR, np.maximum(np.sqrt(weight) * np.abs(off) - chance, 0.0))


def _drawn_together(
    curves: CurveEstimates, shares: IntArray, kinds: IntArray, stray: FloatArray
) -> CurveEstimates:
    """Return the curves after each has learned what all of its kind measured."""
    # To a worker, its kind is like one more measurement of its time, of a variance such that its
    # own and this one together give the kind's mean; larger by the variance between them, and the
    # more so the less it belongs to them. (In or out would make a split flip at the border.)

    def whole(values: FloatArray | IntArray) -> FloatArray:
        """Sum over each worker's kind."""
        return np.asarray(np.bincount(kinds, values)[kinds], dtype=np.float64)

    members = whole(np.ones(len(shares)))
    at = np.maximum(whole(shares) / members, 1.0)
    level, weight = levels(curves, at)
    # The pull fades with distance. With an edge, workers near it made the split flip.
    own = weight / (1.0 + stray**2)
    total = whole(own)
    mean = whole(own * level) / total
    others = np.maximum(total - own, 1e-12)
    # Of one who outweighs all others by far, rounding is all that is left of this.
    told = mean + np.clip((mean - level) * own / others, -_APART, _APART)
    spare = np.maximum(total - whole(own**2) / total, 1e-12)
    # What is left after the most kinds is taken for one, so the differences within it must count:
    # without them, 400 workers of 400 speeds came out 5 % wrong.
    between = excess(whole(own * (level - mean) ** 2), members) / spare
    apart = np.maximum(np.abs(mean - level), 1.0 / np.sqrt(weight))
    variance = 1.0 / others + between + (stray * apart) ** 2
    # By a filter's update rather than by setting the time, so that shape and doubt follow.
    drawn = curves.observed(at, curves.time_s(at) * np.exp(told - level), variance)
    return drawn.where(members > 1, curves)
