"""How noisy each worker is thought to be, and what its noise is not mistaken for."""

from __future__ import annotations

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
