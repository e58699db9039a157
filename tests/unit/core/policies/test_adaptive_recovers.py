"""No mistake about a worker lasts: whatever its first times were, it gets its share back."""

from __future__ import annotations

import numpy as np
import pytest

from evenstride.core.time_model.curve_update import bent, observed
from evenstride.core.time_model.estimates import CurveEstimates
from tests.unit.core.policies.plant import Plant


@pytest.mark.parametrize("factor", [3.0, 20.0, 300.0, 3000.0])
@pytest.mark.parametrize("count", [2, 3, 8, 16])
@pytest.mark.parametrize(("lag", "slow_steps"), [(1, 1), (1, 3), (3, 1), (3, 5)])
def test_first_steps_that_were_far_too_long_are_got_over(
    factor: float, count: int, lag: int, slow_steps: int
) -> None:
    plant = Plant("adaptive", 64 * count, [0.01] * count, [0.001] * count, lag=lag)
    plant.per_sample_s[0], plant.fixed_s[0] = factor * 0.001, factor * 0.01
    plant.run(slow_steps)
    plant.per_sample_s[0], plant.fixed_s[0] = 0.001, 0.01

    plant.run(30 + 10 * lag)

    assert plant.step_s() <= 1.02 * plant.best_s()


@pytest.mark.parametrize("factor", [20.0, 300.0])
def test_a_slow_worker_that_seemed_far_slower_still_at_first_is_got_over(factor: float) -> None:
    usual = np.array([0.001, 0.001, 0.004])
    plant = Plant("adaptive", 300, [0.01] * 3, list(usual))
    plant.per_sample_s = usual * [1.0, 1.0, factor]
    plant.exchange()
    plant.per_sample_s = usual

    plant.run(40)

    assert plant.step_s() <= 1.02 * plant.best_s()


def test_doubt_about_the_shape_is_no_more_than_a_fixed_time_can_make() -> None:
    """A long time at 64 samples leaves doubt that is far more than a short one at 1 allows."""
    long = CurveEstimates.certain(np.array([8.0, 0.01]), np.array([0.2, 0.001]))
    long = long.times(1.0, np.full(2, 0.09**2))
    long = bent(long, np.array([64, 64]), np.array([0.17, 0.17]))

    # In parts of what was predicted, 8.2 s and 0.074 s.
    variance = np.array([1e-5, 0.01]) ** 2
    short = observed(long, np.array([1, 64]), np.array([0.011, 0.074]), variance)

    time_s = short.time_s(np.array([1, 64]))
    assert time_s == pytest.approx([0.011, 0.074], rel=0.01)
    assert np.sqrt(short.rows[2]) == pytest.approx([0.011, 0.17 * 0.074], rel=0.02)
    # At most in proportion to the share, at least not at all: 0.011 s to 0.077 s at 7 samples.
    assert short.relative_std(7.0)[0] * short.time_s(7.0)[0] <= 1.01 * (0.077 - 0.011)
    assert short.relative_std(np.array([1.0, 64.0])) == pytest.approx([0.0075, 0.01], rel=0.1)
