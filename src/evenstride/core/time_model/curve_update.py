"""How a new time, or doubt about the shape, changes the curves of some workers.

`kalman` says which times these are; `pooling` draws workers of one kind together.
"""

from __future__ import annotations

import numpy as np

from evenstride.core.arrays import FloatArray, IntArray
from evenstride.core.time_model.estimates import CurveEstimates, Samples

# At least this fraction of a time must come from the samples: a curve that is wrongly flat would
# attract the whole batch to one worker.
_FLATTEST = 0.02
# Below this fraction, residuals and their logarithms are treated as equal.
_LINEAR = 0.08
# Standard deviation, as a fraction of the time, of a completely unknown fixed time.
_WIDEST_STD = 0.25


def observed(
    curves: CurveEstimates, shares: Samples, time_s: FloatArray, variance: FloatArray
) -> CurveEstimates:
    """Return the curves after one more time of each: a Kalman filter's update; all ``(n,)``.

    The ``variance`` is of the times, relative to their prediction squared.
    """
    fixed, slope, ff, fs, ss = curves.rows
    # Noise is relative to the time, so its variance in seconds follows from the prediction.
    predicted_s = curves.time_s(shares)
    with_fixed, with_slope = ff + fs * shares, fs + ss * shares
    whole = with_fixed + with_slope * shares + variance * predicted_s**2
    gain_fixed, gain_slope = with_fixed / whole, with_slope / whole
    gain = gain_fixed + gain_slope * shares
    off_s = predicted_s * _in_logarithms(time_s / predicted_s, gain)
    fixed, slope = _physical(fixed + gain_fixed * off_s, slope + gain_slope * off_s, shares, slope)
    left = (
        ff - gain_fixed * with_fixed,
        fs - gain_fixed * with_slope,
        ss - gain_slope * with_slope,
    )
    return _possible(CurveEstimates(np.array((fixed, slope, *left))), shares)


def bent(curves: CurveEstimates, shares: FloatArray | IntArray, std: FloatArray) -> CurveEstimates:
    """Return the curves with a less certain shape, but the same certainty at ``shares``.

    ``std`` is the standard deviation of each fixed time as a fraction of the time there,
    ``(n,)``. A fixed time lies between 0 and the whole time; wider uncertainty does not grow.
    """
    fixed, slope, ff, fs, ss = curves.rows
    time_s = curves.time_s(shares)
    room = np.maximum(_WIDEST_STD**2 - ff / time_s**2, 0.0)
    by_s = time_s * np.sqrt(np.minimum(std**2, room))
    per_sample = by_s / np.maximum(shares, 1)
    # A longer fixed time means less time per sample, because the time at ``shares`` stays.
    doubt = (ff + by_s**2, fs - by_s * per_sample, ss + per_sample**2)
    return CurveEstimates(np.array((fixed, slope, *doubt)))


def _possible(curves: CurveEstimates, shares: Samples) -> CurveEstimates:
    """Return the curves, in place, with the uncertainty of their shape limited."""
    # Uncertainty from far longer times may exceed what a fixed time between 0 and the whole
    # time allows. It is cut to the whole; the uncertainty of the time at ``shares`` stays.
    # (If it is cut to a half or a quarter, workers among thousands are trusted too soon.)
    widest = curves.time_s(shares) ** 2
    some = (curves.rows[2] > widest).nonzero()[0]
    if len(some):
        # After one far too long first step, this kept a worker at one sample permanently.
        at = np.maximum(np.broadcast_to(shares, widest.shape)[some], 1.0)
        variance = curves.of(some).variance_s(at)
        curves.rows[2, some], curves.rows[3, some] = widest[some], -widest[some] / at
        curves.rows[4, some] = (variance + widest[some]) / at**2
    return curves


def _in_logarithms(part: FloatArray, gain: FloatArray) -> FloatArray:
    """Return the residuals of times, given as fractions of their prediction, for a filter's gain.

    Noise is multiplicative, so a filter of the logarithms moves a time to ``part ** gain`` of it.
    In a linear one, slow times would count more than equally likely fast ones. If all of the time
    is new (a gain of 1), there is no difference.
    """
    off = part - 1.0
    some = np.flatnonzero(np.abs(off) > _LINEAR)
    if len(some):  # elsewhere both are the same within a tenth of a percent
        some_gain = np.clip(gain[some], 1e-6, 1.0)
        off[some] = np.expm1(some_gain * np.log(np.maximum(part[some], 1e-9))) / some_gain
    return np.asarray(off)


def _physical(
    fixed: FloatArray, slope: FloatArray, shares: Samples, before: FloatArray
) -> tuple[FloatArray, FloatArray]:
    """Return both with a fixed time of at least 0 and a positive time per sample."""
    # The time at the observed share stays. A curve that was flatter ``before`` may stay so: at a
    # very small share, this fraction of the time would be far too much per sample.
    predicted = np.maximum(fixed + slope * shares, 1e-9)
    # A steeper slope would need a negative fixed time.
    steepest = predicted / np.maximum(shares, 1e-9)
    slope = slope.clip(np.minimum(_FLATTEST * steepest, before), steepest)
    return predicted - slope * shares, slope
