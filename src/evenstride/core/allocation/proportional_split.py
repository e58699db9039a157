"""Whole shares in proportion to weights, by largest remainder, within bounds."""

from __future__ import annotations

import numpy as np

from evenstride.core.arrays import FloatArray, IntArray
from evenstride.errors import InfeasibleShares

# Without rounding, the last digits of a bisection would decide ties instead of the rank.
_TIED = 6  # decimals of a remainder


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
