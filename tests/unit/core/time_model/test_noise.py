"""How noisy each worker is thought to be, and what its noise is not mistaken for."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from evenstride.core.time_model.estimates import Estimate
from evenstride.core.time_model.kalman import learn_times
from evenstride.core.time_model.observation import Measurements


def test_at_first_all_tell_the_noise_together_and_later_each_its_own() -> None:
    rng, noise = np.random.default_rng(0), np.repeat([0.2, 0.05], 8)
    estimates = [Estimate.unknown(16)]
    for step in range(300):
        busy_s = 0.5 * np.exp(noise * rng.standard_normal(16))
        reported = np.full(16, 50), np.full(16, step), np.ones(16, dtype=np.int64)
        seen = Measurements(np.arange(16), *reported, busy_s, np.zeros(16))
        estimates.append(learn_times(estimates[-1], seen))

    assert estimates[5].noise.min() == pytest.approx((noise**2).mean(), rel=0.4)
    assert np.sqrt(estimates[-1].noise) == pytest.approx(noise, rel=0.4)


def test_noise_regarded_as_changes_does_not_make_changes_likelier() -> None:
    """A wrong speed within the noise is never contradicted by one time, so it does not count."""
    rng, estimate = np.random.default_rng(1), Estimate.unknown(8)
    for step in range(400):
        spikes = np.where(rng.random(8) < 0.05, 2.0, 1.0)
        busy_s = 0.5 * np.exp(0.2 * rng.standard_normal(8)) * spikes
        reported = np.full(8, 50), np.full(8, step), np.ones(8, dtype=np.int64)
        estimate = learn_times(estimate, Measurements(np.arange(8), *reported, busy_s, np.zeros(8)))

    assert estimate.changes.lasting.sum() <= 1


def _after(times_s: list[np.ndarray]) -> Estimate:
    estimate = Estimate.unknown(len(times_s[0]))
    for step, busy_s in enumerate(times_s):
        size = len(busy_s)
        reported = np.full(size, 50), np.full(size, step), np.ones(size, dtype=np.int64)
        seen = Measurements(np.arange(size), *reported, busy_s, np.zeros(size))
        estimate = learn_times(estimate, seen)
    return estimate


def test_the_second_step_shows_that_the_first_ones_were_noise() -> None:
    rng = np.random.default_rng(0)
    estimate = _after([0.5 * np.exp(0.3 * rng.standard_normal(64)) for _ in range(2)])

    assert np.sqrt(estimate.noise).mean() == pytest.approx(0.3, rel=0.25)
    # The first times are no more accurate than the second ones.
    assert np.median(estimate.now.relative_std(np.full(64, 50))) > 0.15


def test_first_steps_that_were_all_slow_are_no_noise() -> None:
    rng = np.random.default_rng(0)
    calm = np.exp(0.02 * rng.standard_normal((2, 16)))
    estimate = _after([2.0 * calm[0], 0.2 * calm[1]])

    assert np.sqrt(estimate.noise).max() < 0.1


def test_short_times_that_come_alone_are_no_faster_worker() -> None:
    rng, dips = np.random.default_rng(3), np.random.default_rng(4)
    times_s = [
        0.5 * np.exp(0.03 * rng.standard_normal(4)) * np.where(dips.random(4) < 0.05, 0.5, 1.0)
        for _ in range(400)
    ]
    times_s[-1] = np.array([0.25, 0.5, 0.5, 0.5])
    before, after = _after(times_s[:-1]), _after(times_s)
    fast = _after([*times_s, np.array([0.25, 0.5, 0.5, 0.5])])

    assert before.now.time_s(50.0)[0] == pytest.approx(0.5, rel=0.05)
    assert after.now.time_s(50.0)[0] == pytest.approx(0.5, rel=0.05)
    assert fast.now.time_s(50.0)[0] == pytest.approx(0.25, rel=0.05)


def _walk(drift: float, noise: float) -> tuple[Estimate, float]:
    """Return what 400 steps teach of eight speeds that drift, and how far predictions were off."""
    rng, estimate, slower, off = np.random.default_rng(0), Estimate.unknown(8), np.zeros(8), []
    share, one = np.full(8, 50), np.ones(8, dtype=np.int64)
    for step in range(400):
        slower += drift * rng.standard_normal(8)
        off.append(estimate.now.time_s(share) / (0.5 * np.exp(slower)) - 1.0)
        busy_s = 0.5 * np.exp(slower + noise * rng.standard_normal(8))
        seen = Measurements(np.arange(8), share, np.full(8, step), one, busy_s, np.zeros(8))
        estimate = learn_times(estimate, seen)
    return estimate, float(np.sqrt(np.mean(np.square(off[50:]))))


@pytest.mark.parametrize(("drift", "noise"), [(0.02, 0.02), (0.03, 0.05), (0.05, 0.01)])
def test_the_drift_of_a_speed_is_learned(drift: float, noise: float) -> None:
    estimate, off = _walk(drift, noise)

    assert estimate.drift.mean() == pytest.approx(drift, rel=0.3)
    # The variance of a filter that knows both: ``p = drift^2 + p noise^2 / (p + noise^2)``.
    least = drift * (drift / 2 + np.hypot(drift / 2, noise))
    assert off < 1.2 * np.sqrt(least)


@pytest.mark.parametrize("noise", [0.01, 0.05, 0.3])
def test_independent_noise_is_no_drift(noise: float) -> None:
    estimate, off = _walk(0.0, noise)

    assert np.median(estimate.drift) < 0.1 * noise
    # As far as the mean of 20 steps.
    assert off < noise / np.sqrt(20.0)


def test_a_slow_first_step_at_a_new_share_is_no_drift() -> None:
    estimate = _after([np.full(3, 0.5)] * 10 + [np.full(3, 0.51)])
    estimate = replace(estimate, drift=np.full(3, 0.01))
    share, one = np.full(3, 40), np.ones(3, dtype=np.int64)

    seen = Measurements(np.arange(3), share, 20 * one, one, np.full(3, 1.5), np.zeros(3))

    assert (learn_times(estimate, seen).drift == 0.01).all()
