"""Learn every worker's step-time curve from what it measured.

Each worker ``k`` has two unknowns, ``theta = (fixed_s, per_sample_s)``, in a Kalman filter
whose observation is ``y = fixed_s + b * per_sample_s + noise``. The two live on different
clocks: the *shape* (their ratio) belongs to model and device and hardly changes, the *speed*
changes at any time and scales both. So the filter drifts along ``theta`` itself, which keeps
the ratio, and a change of speed (`Changes` finds it) moves and frees just that direction: one
observation after a slow-down is enough to know the whole new curve.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from evenstride.core.changes import Changes
from evenstride.core.fleet import FloatArray, IntArray
from evenstride.core.observation import Measured
from evenstride.core.timemodel import TimeModel

# Before anything is known about the shape, this part of the fastest worker's first time is fixed.
# A slower worker's fixed time would be the same if only its arithmetic were slower, and longer
# in proportion if all of it were; a power of the times lies between the two.
_PRIOR_FIXED, _PRIOR_FIXED_STD, _PRIOR_POWER = 0.30, 0.15, 0.75
# What looks like a change of speed may be a wrong idea of the shape, which must not last.
_JUMP_SHAPE_STD = 0.10
# Relative drift of the speed per square root of a step, and the doubt that never averages out.
_DRIFT, _MODEL_STD = 0.0005, 0.004
# At least this part of a time must come from the samples: a curve that is flat by mistake would
# draw the whole batch to one worker.
_FLATTEST = 0.02
_NOISE_FIRST, _NOISE_LEAST, _NOISE_MOST = 0.05**2, 0.005**2, 0.5**2


@dataclass(frozen=True, slots=True, eq=False)
class Estimate:
    """What is believed about ``W`` workers' step times, with its uncertainty.

    Args:
        theta: ``(W, 2)``, fixed seconds and seconds per sample.
        cov: ``(W, 2, 2)``, covariance of ``theta``.
        noise: ``(W,)``, relative variance of one step's time.
        steps: ``(W,)``, steps learned from; 0 means the worker is unknown.
        changes: what is remembered of the latest residuals.
    """

    theta: FloatArray
    cov: FloatArray
    noise: FloatArray
    steps: IntArray
    changes: Changes

    @classmethod
    def unknown(cls, workers: int) -> Estimate:
        """Return the estimate before anything was observed."""
        return cls(
            theta=np.zeros((workers, 2)),
            cov=np.zeros((workers, 2, 2)),
            noise=np.full(workers, _NOISE_FIRST),
            steps=np.zeros(workers, dtype=np.int64),
            changes=Changes.none(workers),
        )

    @property
    def known(self) -> bool:
        """Whether every worker has been observed."""
        return bool((self.steps > 0).all())

    def known_at(self, shares: IntArray) -> bool:
        """Return whether every worker that has a share there has been observed."""
        return bool(((self.steps > 0) | (np.asarray(shares) == 0)).all())

    @property
    def model(self) -> TimeModel:
        """The mean curves; only meaningful where `steps` is above 0."""
        return TimeModel.affine(self.theta[:, 0], self.theta[:, 1])

    def relative_std(self, shares: IntArray) -> FloatArray:
        """Return the standard deviation of each predicted mean time, as a part of it."""
        x = _features(shares)
        variance = np.einsum("wi,wij,wj->w", x, self.cov, x)
        predicted = np.maximum((self.theta * x).sum(axis=1), 1e-12)
        relative: FloatArray = np.sqrt(np.maximum(variance, 0.0)) / predicted
        return relative

    def learn(self, measured: Measured) -> Estimate:
        """Return the estimate after some observations, each worker's own in order of step.

        Observations of ghosts and of steps flagged as not modelled are passed over.

        Cost:
            ``O(W)`` vectorised per observation of the worker that has the most of them.
        """
        usable = measured.only(measured.modelled & (measured.share > 0))
        estimate = self
        for turn in usable.turns():
            estimate = _learn_one_each(estimate, _Batch.of(usable, turn))
        return estimate


@dataclass(frozen=True, slots=True, eq=False)
class _Batch:
    """One observation each of some workers, as arrays of shape ``(n,)``."""

    workers: IntArray
    share: IntArray
    time_s: FloatArray
    steps: IntArray
    spread: FloatArray  # relative variance within the observation, nan if too short to say

    @classmethod
    def of(cls, measured: Measured, at: IntArray | npt.NDArray[np.bool_]) -> _Batch:
        return cls(
            measured.worker[at],
            measured.share[at],
            np.maximum(measured.median_s[at], 1e-9),
            measured.steps[at],
            measured.relative_variance[at],
        )

    def only(self, mask: npt.NDArray[np.bool_]) -> _Batch:
        return _Batch(
            self.workers[mask],
            self.share[mask],
            self.time_s[mask],
            self.steps[mask],
            self.spread[mask],
        )


def _learn_one_each(estimate: Estimate, batch: _Batch) -> Estimate:
    fresh = estimate.steps[batch.workers] == 0
    return _update(_begin(estimate, batch.only(fresh)), batch.only(~fresh))


def _begin(estimate: Estimate, batch: _Batch) -> Estimate:
    """Start workers seen for the first time from the prior shape through their first time."""
    if not len(batch.workers):
        return estimate
    theta, cov, steps = estimate.theta.copy(), estimate.cov.copy(), estimate.steps.copy()
    y, b, w = batch.time_s, batch.share, batch.workers
    fixed = np.minimum(_PRIOR_FIXED * y**_PRIOR_POWER * y.min() ** (1 - _PRIOR_POWER), 0.9 * y)
    theta[w] = np.stack([fixed, (y - fixed) / b], axis=1)
    speed_variance = _measurement_variance(estimate.noise[w], np.ones(len(w)), batch.steps)
    cov[w] = speed_variance[:, None, None] * _outer(theta[w])
    cov[w] += _PRIOR_FIXED_STD**2 * _outer(_shape_direction(batch))
    steps[w] = batch.steps
    return replace(estimate, theta=theta, cov=cov, steps=steps)


def _shape_direction(batch: _Batch) -> FloatArray:
    """Return the change of ``theta`` that leaves the time at the observed share as it is."""
    return np.stack([batch.time_s, -batch.time_s / batch.share], axis=1)


def _update(estimate: Estimate, batch: _Batch) -> Estimate:
    if not len(batch.workers):
        return estimate
    w, x = batch.workers, _features(batch.share)
    theta, cov = estimate.theta[w], estimate.cov[w]
    cov = cov + (_DRIFT**2 * batch.steps)[:, None, None] * _outer(theta)
    predicted = (theta * x).sum(axis=1)
    measure = _measurement_variance(estimate.noise[w], predicted, batch.steps)
    std = np.sqrt(np.einsum("wi,wij,wj->w", x, cov, x) + measure) / predicted
    changes, judged = estimate.changes.judge(w, batch.time_s / predicted, std, batch.steps)

    ratio, told = judged.ratio[:, None], judged.told
    free = estimate.noise[w] / told + _MODEL_STD**2
    jumped_theta = theta * ratio
    jumped_cov = cov * ratio[:, :, None] ** 2 + free[:, None, None] * _outer(jumped_theta)
    jumped_cov += _JUMP_SHAPE_STD**2 * _outer(_shape_direction(batch))
    learned_theta, learned_cov = _kalman(theta, cov, x, measure, batch.time_s)
    jumped = judged.jumped[:, None]
    new_theta = np.where(jumped, jumped_theta, _physical(learned_theta, x))
    new_cov = np.where(jumped[:, :, None], jumped_cov, learned_cov)

    out = replace(
        estimate,
        theta=estimate.theta.copy(),
        cov=estimate.cov.copy(),
        noise=estimate.noise.copy(),
        steps=estimate.steps.copy(),
        changes=changes,
    )
    take, at = ~judged.held, w[~judged.held]
    out.theta[at], out.cov[at] = new_theta[take], new_cov[take]
    calm = take & ~judged.jumped
    out.noise[w[calm]] = _noise(estimate.noise[w], batch, predicted)[calm]
    out.steps[at] += batch.steps[take]
    return out


def observed(
    theta: FloatArray, cov: FloatArray, shares: FloatArray, time_s: FloatArray, variance: FloatArray
) -> tuple[FloatArray, FloatArray]:
    """Return ``theta`` and its covariance after one more time of each worker.

    Args:
        theta: ``(W, 2)``.
        cov: ``(W, 2, 2)``.
        shares: at which the times were measured, ``(W,)``.
        time_s: the times in seconds, ``(W,)``.
        variance: of the times, in seconds squared, ``(W,)``.
    """
    x = np.stack([np.ones_like(shares), shares], axis=1)
    learned, less = _kalman(theta, cov, x, variance, time_s)
    return _physical(learned, x), less


def _kalman(
    theta: FloatArray, cov: FloatArray, x: FloatArray, measure: FloatArray, time_s: FloatArray
) -> tuple[FloatArray, FloatArray]:
    cov_x = np.einsum("wij,wj->wi", cov, x)
    gain = cov_x / ((x * cov_x).sum(axis=1) + measure)[:, None]
    innovation = time_s - (theta * x).sum(axis=1)
    return theta + gain * innovation[:, None], cov - gain[:, :, None] * cov_x[:, None, :]


def _physical(theta: FloatArray, x: FloatArray) -> FloatArray:
    """Return ``theta`` with a fixed time of at least 0 and a positive time per sample.

    The predicted time at the observed share stays as it is.
    """
    share = x[:, 1]
    predicted = np.maximum((theta * x).sum(axis=1), 1e-9)
    per_sample = np.clip(theta[:, 1], _FLATTEST * predicted / share, predicted / share)
    return np.stack([predicted - per_sample * share, per_sample], axis=1)


def _measurement_variance(noise: FloatArray, predicted: FloatArray, steps: IntArray) -> FloatArray:
    """Variance of the median of ``steps`` times (pi/2 times that of a mean, for three or more)."""
    median_cost = np.where(steps > 2, np.pi / 2, 1.0)
    return np.asarray((noise * median_cost / steps + _MODEL_STD**2) * predicted**2)


def _noise(noise: FloatArray, batch: _Batch, predicted: FloatArray) -> FloatArray:
    """Blend the relative variance of one step's time with what this observation shows."""
    residual = ((batch.time_s - predicted) / predicted) ** 2 * batch.steps
    seen = np.clip(np.where(np.isnan(batch.spread), residual, batch.spread), 0, _NOISE_MOST)
    weight = batch.steps / (batch.steps + 30.0)
    blended: FloatArray = np.maximum((1 - weight) * noise + weight * seen, _NOISE_LEAST)
    return blended


def _features(shares: IntArray) -> FloatArray:
    return np.stack([np.ones(len(shares)), np.asarray(shares, dtype=np.float64)], axis=1)


def _outer(vectors: FloatArray) -> FloatArray:
    return np.asarray(vectors[:, :, None] * vectors[:, None, :])
