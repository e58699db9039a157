"""Find the waves of workers whose times change only at multiples of a number of samples.

A GPU computes a batch in waves, so its times are ``t(b) = fixed + per_sample * q * ceil(b / q)``.
For every possible ``q``, Bayes' rule compares this curve with a straight line and with a line that
begins after a floor, over all entries of a worker (`ShareTimes`). Workers that one ``q`` explains
have it together, so few shares of each are enough.

Source:
    The evidence of a linear model with a normal prior is textbook material (Bishop, "Pattern
    Recognition and Machine Learning", section 3.5); the prior over ``q`` and the grouping are ours.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from evenstride.core.arrays import FloatArray, IntArray, Mask
from evenstride.core.time_model.estimates import CurveEstimates, Estimate, ShareTimes

# Waves to compare: from the smallest that a device has, to the largest. Prior logarithms favour
# powers of two, then multiples of 8, because measured shares rarely exclude their neighbours.
_MOST = 1024
# Prior of a curve: the fixed part of the time at the mean share, its standard deviation, and that
# of the whole time.
_FIXED, _FIXED_STD, _WHOLE_STD = 0.25, 0.25, 0.3
# Relative standard deviation of a time that a true curve may have without noise.
_MODEL_STD = 0.01
# Required logarithm of the odds; and the odds at which a worker contradicts its group.
_CLEAR, _AGAINST = 9.0, -3.0
# Largest mean square of the residuals of a curve that explains its entries, in variances.
_FITS = 4.0
# Places of a bend, between the least and the largest share; by how much a line gets steeper there;
# and the logarithm of the odds against a bend at any of them.
_BENDS = np.linspace(0.0, 1.0, 17)[1:-1, None]
_STEEPER = 0.5, 2.0
_BENT = 2.0
# And against the choice of the workers that have waves, for each other one.
_CHOSEN = 2.0
_WORKERS = 32  # compared at most; of more, those with most entries
_GROUPS = 3  # different waves that are searched in one fleet


def _candidates() -> tuple[IntArray, FloatArray]:
    all_of = np.unique(
        np.concatenate([np.arange(4, 65), np.arange(64, 257, 8), np.arange(256, _MOST + 1, 32)])
    )
    power = (all_of & (all_of - 1)) == 0
    prior = np.where(power, 0.0, np.where(all_of % 16 == 0, -1.0, np.where(all_of % 8, -3.0, -1.5)))
    return np.append(1, all_of), np.append(0.0, prior - 2.0)


_QUANTA, _PRIOR = _candidates()


@dataclass(frozen=True, slots=True, eq=False)
class _Fits:
    """How well curves explain entries, arrays whose last dimension is the workers'."""

    evidence: FloatArray  # logarithm, without what all curves share
    square: FloatArray  # mean square of the residuals in variances
    fixed: FloatArray  # seconds relative to the worker's mean time
    slope: FloatArray  # per sample relative to that
    doubt: FloatArray  # ``(3, ...)``: their variance, covariance and variance

    def lines(self, which: IntArray, scale_s: FloatArray) -> FloatArray:
        """Return rows of `CurveEstimates`, given each worker's fit and its seconds."""
        at = which, np.arange(len(which))
        line = np.stack([self.fixed[at], self.slope[at]])
        return np.concatenate([line * scale_s, self.doubt[:, *at] * scale_s**2])


def with_waves(estimate: Estimate) -> Estimate:
    """Return the estimate with the waves that its entries show, if there are new entries.

    Cost: nothing unless a time at a new share was far from its curve; then about 100 curves through
    the entries of at most 32 workers.
    """
    seen = estimate.seen
    if not seen.odd.any():
        return estimate
    free = estimate.firsts.cost < 0
    # Again at the second step, if the first one does not count.
    seen = replace(seen, odd=seen.odd & ~free & (seen.here[1] < 2))
    estimate = replace(estimate, seen=seen)
    some, quanta, lines = _found(seen, free, estimate.drift)
    # A first step that was far too slow may be explained by times that fall with the share.
    rising = (lines[1] > 0) & (lines[0] + lines[1] > 0)
    some, quanta, lines = some[rising], quanta[rising], lines[:, rising]
    if not len(some):
        return estimate
    every = np.full(len(seen.steps), quanta[0])
    every[some] = quanta
    every[~seen.sought] = 1
    if (every == seen.quantum).all():
        return estimate
    changed = np.flatnonzero(every[some] != seen.quantum[some])
    curves = CurveEstimates(lines[:, changed])
    whose, all_of = some[changed], np.ones(len(changed), np.bool_)
    # What their filter learned in single samples is wrong in waves.
    return replace(
        estimate,
        # Waves explain what looked like a cliff.
        seen=replace(
            seen,
            quantum=every,
            limit=np.where(every > 1, 0, seen.limit),
            tries=seen.tries + (every != seen.quantum),
        ),
        now=estimate.now.put(whose, all_of, curves),
        former=estimate.former.put(whose, all_of, CurveEstimates.unknown(len(changed))),
        previous=estimate.previous.put(whose, all_of, curves),
    )


def _found(
    seen: ShareTimes, free: Mask, drift: FloatArray
) -> tuple[IntArray, IntArray, FloatArray]:
    """Return workers with entries, the wave of each, and their lines in waves.

    ``free`` are workers whose first steps at new shares have not been slower than later ones,
    ``drift`` is the relative drift of their speeds per square root of a step, both ``(W,)``.
    """
    # Of the others, a slow first step would look like a wave.
    share, _, count = seen.entries
    entries = (share > 0) & (count >= np.where(free, 1, 2))
    number = entries.sum(axis=0)
    some = np.flatnonzero(number >= 2)
    some = some[np.argsort(-number[some], kind="stable")[:_WORKERS]]
    if not len(some):
        return some, some, np.zeros((5, 0))
    shares, weight, times, scale = _columns(seen, some, entries, drift[some])
    fits = _fitted(_rounded(shares), shares, times, weight)
    bent = _fitted(_bent(shares, weight), shares, times, weight)
    plain = np.maximum(fits.evidence[0], bent.evidence.max(axis=0) - _BENT)
    odds = fits.evidence - plain
    left, taken = np.ones(len(some), np.bool_), np.zeros(len(some), np.int64)
    for _ in range(_GROUPS):
        total = odds[:, left].sum(axis=1) + _PRIOR
        best = int(total[1:].argmax()) + 1
        inside = left & (odds[best] > _AGAINST) & (fits.square[best] < _FITS)
        # Some workers of many always seem to have waves.
        mine = odds[best, inside].sum() + _PRIOR[best] - _CHOSEN * np.count_nonzero(left & ~inside)
        if float(mine) < _CLEAR:
            break
        taken[inside] = best
        left &= ~inside
        if not left.any():
            break
    return some, _QUANTA[taken], fits.lines(taken, scale)


def _columns(
    seen: ShareTimes, some: IntArray, entries: Mask, drift: FloatArray
) -> tuple[FloatArray, FloatArray, FloatArray, FloatArray]:
    here = entries[:, some]
    share, level, count = (rows[:, some] for rows in seen.entries)
    shares = np.where(here, share, 0).astype(np.float64)
    level = np.where(here, level, 0.0)
    mean = level.sum(axis=0) / here.sum(axis=0)
    times = np.exp(level - mean)
    noise = np.maximum(seen.noise[some], 1e-5)
    # Since the worker left a share, its speed has drifted. The first row is its present share.
    passed = np.where(np.arange(len(share))[:, None] > 0, seen.steps[some] - seen.used[:, some], 0)
    variance = noise / np.maximum(count, 1) + drift**2 * passed + _MODEL_STD**2
    weight = np.where(here, 1.0 / (variance * times**2), 0.0)
    return shares, weight, times, np.exp(mean + seen.slower[some])


def _rounded(shares: FloatArray) -> FloatArray:
    quanta = _QUANTA[:, None, None].astype(np.float64)
    return np.asarray(np.ceil(shares / quanta) * quanta)


def _bent(shares: FloatArray, weight: FloatArray) -> FloatArray:
    """Return what counts of shares if a line has a floor, or gets steeper, ``(n, R, S)``."""
    here = weight > 0
    least = np.where(here, shares, np.inf).min(axis=0)
    most = np.where(here, shares, 0.0).max(axis=0)
    at = (least + _BENDS * (most - least))[:, None]
    above = np.maximum(shares - at, 0.0)
    return np.concatenate([np.maximum(shares, at), *(shares + part * above for part in _STEEPER)])


def _fitted(
    counted: FloatArray, shares: FloatArray, times: FloatArray, weight: FloatArray
) -> _Fits:
    """Return the fits of lines through counted samples, ``(Q, n, S)``, to times, ``(n, S)``."""
    number = np.maximum((weight > 0).sum(axis=0), 1)
    middle = shares.sum(axis=0) / number
    x = counted / middle
    whole, apart = _WHOLE_STD**2, _FIXED_STD**2
    ff = whole * _FIXED**2 + apart
    fs = whole * _FIXED * (1 - _FIXED) - apart
    ss = whole * (1 - _FIXED) ** 2 + apart
    det = ff * ss - fs**2
    prior = np.array([ss, -fs, ff]) / det  # precision
    off = times - _FIXED - (1 - _FIXED) * x
    wx = weight * x
    a0 = weight.sum(axis=0) + prior[0]
    a1 = wx.sum(axis=1) + prior[1]
    a2 = (wx * x).sum(axis=1) + prior[2]
    v0, v1 = (weight * off).sum(axis=1), (wx * off).sum(axis=1)
    # Far more certain than times are, the difference is rounding alone.
    whole_det = np.maximum(a0 * a2 - a1**2, 1e-12 * a0 * a2)
    fixed, slope = (a2 * v0 - a1 * v1) / whole_det, (a0 * v1 - a1 * v0) / whole_det
    least = (weight * off**2).sum(axis=1) - v0 * fixed - v1 * slope
    doubt = np.stack([a2, -a1, np.broadcast_to(a0, a2.shape)]) / whole_det
    fixed, slope = fixed + _FIXED, slope + 1 - _FIXED
    # No fixed time is below 0.
    below = np.minimum(fixed, 0.0) ** 2 / doubt[0]
    evidence = -0.5 * (least + below + np.log(whole_det * det))
    resid = times - fixed[:, None] - slope[:, None] * x
    square = ((weight * resid**2).sum(axis=1) + below) / number
    doubt = doubt / np.stack([np.ones_like(middle), middle, middle**2])[:, None]
    return _Fits(evidence, square, np.maximum(fixed, 0.0), slope / middle, doubt)
