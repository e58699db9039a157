"""What is believed about affine time curves: their two coefficients, and how sure we are.

``t = fixed + share * slope`` with a covariance of the two, for many workers at once. Everything
is kept in rows of one array, because at ten thousand workers small matrices are what costs.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from evenstride.core.arrays import FloatArray, IntArray, Mask

Which = IntArray | slice
"""Ranks of some workers, or a slice for all of them."""
Shares = FloatArray | IntArray | float

# At least this part of a time must come from the samples: a curve that is flat by mistake would
# draw the whole batch to one worker.
_FLATTEST = 0.02
# Standard deviation, as a part of the time, of a fixed time of which nothing is known.
_WIDEST_STD = 0.25


@dataclass(frozen=True, slots=True, eq=False)
class CurveEstimates:
    """Beliefs about ``n`` curves."""

    # ``(5, n)``: fixed seconds, seconds per sample, the variance of the one, the covariance of
    # both, the variance of the other.
    rows: FloatArray

    @classmethod
    def unknown(cls, workers: int) -> CurveEstimates:
        """Return curves of which nothing is known; all zero."""
        return cls(np.zeros((5, workers)))

    @classmethod
    def certain(cls, fixed_s: FloatArray, per_sample_s: FloatArray) -> CurveEstimates:
        """Return curves without any doubt; arguments of shape ``(n,)``."""
        none = np.zeros_like(fixed_s)
        return cls(np.stack([fixed_s, per_sample_s, none, none, none]))

    @property
    def fixed_s(self) -> FloatArray:
        """Seconds that do not depend on the share, ``(n,)``."""
        return np.asarray(self.rows[0])

    @property
    def per_sample_s(self) -> FloatArray:
        """Seconds per sample, ``(n,)``."""
        return np.asarray(self.rows[1])

    def of(self, workers: Which) -> CurveEstimates:
        """Return the curves of some workers."""
        return CurveEstimates(self.rows[:, workers])

    def put(self, workers: Which, mask: Mask, curves: CurveEstimates) -> CurveEstimates:
        """Return these curves with those of ``workers`` replaced where the mask says so."""
        if isinstance(workers, slice):
            return curves.where(mask, self)
        rows = self.rows.copy()
        rows[:, workers[mask]] = curves.rows[:, mask]
        return CurveEstimates(rows)

    def where(self, mask: Mask, other: CurveEstimates) -> CurveEstimates:
        """Return these curves where the mask is true, and the other ones elsewhere."""
        count = np.count_nonzero(mask)
        if count in (0, len(mask)):
            return self if count else other
        # One of the two is nearly whole as a rule, and a copy costs less than a choice.
        many, few, rare = (other, self, mask) if 2 * count < len(mask) else (self, other, ~mask)
        some = np.flatnonzero(rare)
        # With a mask of even odds `np.where` is three to four times as slow, so it only serves
        # where many columns would have to be copied one by one.
        if 8 * len(some) > len(mask):
            return CurveEstimates(np.where(mask, self.rows, other.rows))
        rows = many.rows.copy()
        rows[:, some] = few.rows[:, some]
        return CurveEstimates(rows)

    def time_s(self, shares: Shares) -> FloatArray:
        """Return the expected times at some shares, ``(n,)``; one share is for all."""
        # Above 0, because times are divided by it; curves that are not known are all zero.
        return at_least(self.rows[0] + self.rows[1] * shares, 1e-12)

    def relative_std(self, shares: Shares) -> FloatArray:
        """Return the standard deviation of those times, as a part of them."""
        return np.asarray(np.sqrt(self.variance_s(shares)) / self.time_s(shares))

    def variance_s(self, shares: Shares) -> FloatArray:
        """Return the variance of those times, in seconds squared."""
        _, _, ff, fs, ss = self.rows
        # Rounding may take the small difference of large terms below 0.
        return at_least(ff + (2.0 * fs + ss * shares) * shares, 0.0)

    @property
    def least_relative_std(self) -> FloatArray:
        """Return that deviation at the share where it is smallest, whatever that share is.

        It is the least value of ``(x' P x) / (m' x)^2``, which is ``1 / (m' P^-1 m)``, for the
        mean ``m`` and covariance ``P`` of the two coefficients.
        """
        fixed, slope, ff, fs, ss = self.rows
        whole = ss * fixed**2 - 2.0 * fs * fixed * slope + ff * slope**2
        # Both are 0 for a curve without doubt, and rounding may take either below that.
        part = at_least(ff * ss - fs**2, 0.0) / at_least(whole, 1e-300)
        return np.asarray(np.sqrt(part))

    def surest_share(self, shares: IntArray) -> FloatArray:
        """Return the shares at which the times are known best, ``(n,)``.

        At least 1; and a hundred times those given at most, which stand where none is best.
        """
        fixed, slope, ff, fs, ss = self.rows
        over, under = ff * slope - fs * fixed, ss * fixed - fs * slope
        # Of doubt about the speed alone, rounding is all that is left of both.
        known = (over > 1e-9 * np.abs(fs) * fixed) & (under > 1e-9 * np.abs(fs) * slope)
        best = np.divide(over, under, out=shares.astype(np.float64), where=known)
        return np.asarray(np.clip(best, 1.0, np.maximum(100.0 * shares, 1.0)))

    def observed(self, shares: Shares, time_s: FloatArray, variance: FloatArray) -> CurveEstimates:
        """Return the curves after one more time of each: a Kalman filter's update.

        Args:
            shares: at which the times were measured, ``(n,)``.
            time_s: the times in seconds, ``(n,)``.
            variance: of the times, in parts of their prediction squared, ``(n,)``.
        """
        fixed, slope, ff, fs, ss = self.rows
        # Noise is a part of the time, so its variance in seconds follows from the prediction.
        predicted_s = self.time_s(shares)
        with_fixed, with_slope = ff + fs * shares, fs + ss * shares
        whole = with_fixed + with_slope * shares + variance * predicted_s**2
        gain_fixed, gain_slope = with_fixed / whole, with_slope / whole
        off_s = time_s - predicted_s
        fixed, slope = _physical(
            fixed + gain_fixed * off_s, slope + gain_slope * off_s, shares, slope
        )
        left = (
            ff - gain_fixed * with_fixed,
            fs - gain_fixed * with_slope,
            ss - gain_slope * with_slope,
        )
        return CurveEstimates(np.stack([fixed, slope, *left]))._possible(shares)

    def _possible(self, shares: Shares) -> CurveEstimates:
        """Return the curves, in place, with no more doubt about their shape than there can be."""
        # What is left of doubt about far longer times is more than a fixed time between nothing and
        # the whole allows. It is cut to the whole, the doubt about the time at ``shares`` stays.
        # (Cut to a half or a quarter, workers among thousands are trusted too soon.)
        widest = self.time_s(shares) ** 2
        some = np.flatnonzero(self.rows[2] > widest)
        if len(some):
            # After one far too long first step, such doubt kept a worker at one sample for good.
            at = np.maximum(np.broadcast_to(shares, widest.shape)[some], 1.0)
            variance = self.of(some).variance_s(at)
            self.rows[2, some], self.rows[3, some] = widest[some], -widest[some] / at
            self.rows[4, some] = (variance + widest[some]) / at**2
        return self

    def times(self, ratio: FloatArray | float, variance: FloatArray) -> CurveEstimates:
        """Return the curves with all times multiplied, the multiple being known only roughly.

        Args:
            ratio: of the new times to the old ones, ``(n,)``.
            variance: of the ratio, in parts squared, ``(n,)``.
        """
        fixed, slope = self.rows[0] * ratio, self.rows[1] * ratio
        ff, fs, ss = self.rows[2:] * np.square(ratio)
        doubt = (
            ff + variance * fixed**2,
            fs + variance * fixed * slope,
            ss + variance * slope**2,
        )
        return CurveEstimates(np.stack([fixed, slope, *doubt]))

    def bent(self, shares: FloatArray | IntArray, std: FloatArray) -> CurveEstimates:
        """Return the curves with more doubt about their shape, the time at ``shares`` apart.

        A fixed time lies between nothing and the whole; doubt that is as wide as that does not
        grow.

        Args:
            shares: at which the times stay as sure as they are, ``(n,)``.
            std: by how much of its time there each fixed time may be off, ``(n,)``.
        """
        fixed, slope, ff, fs, ss = self.rows
        time_s = self.time_s(shares)
        room = np.maximum(_WIDEST_STD**2 - ff / time_s**2, 0.0)
        by_s = time_s * np.sqrt(np.minimum(std**2, room))
        per_sample = by_s / np.maximum(shares, 1)
        # A longer fixed time means less time per sample, since the time at ``shares`` stays.
        doubt = (ff + by_s**2, fs - by_s * per_sample, ss + per_sample**2)
        return CurveEstimates(np.stack([fixed, slope, *doubt]))


def at_least(values: FloatArray, least: float) -> FloatArray:
    """Return ``np.maximum(values, least)``, three times as quickly for thousands of values."""
    return np.asarray(np.clip(values, least, np.inf))


def _physical(
    fixed: FloatArray, slope: FloatArray, shares: Shares, before: FloatArray
) -> tuple[FloatArray, FloatArray]:
    """Return both with a fixed time of at least 0 and a positive time per sample."""
    # The time at the observed share stays as it is. A curve that was flatter ``before`` may stay
    # so: at a share of next to nothing, a part of the time would be far too much per sample.
    predicted = at_least(fixed + slope * shares, 1e-9)
    # Steeper than this, the fixed time would be below 0.
    steepest = predicted / np.maximum(shares, 1e-9)
    slope = np.clip(slope, np.minimum(_FLATTEST * steepest, before), steepest)
    return predicted - slope * shares, slope
