"""The expected maximum of uncertain times."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstride.core.allocation.step_forecast import expected_max, late_curves
from evenstride.core.time_model.estimates import CurveEstimates, Estimate
from evenstride.core.time_model.kalman import learn_times
from evenstride.core.time_model.observation import Measurements, Observation


@pytest.mark.parametrize(
    ("values", "expected"), [(1, 0.0), (2, 0.5642), (8, 1.4236), (64, 2.3440), (1000, 3.2414)]
)
def test_equal_normal_values_have_their_known_expected_maximum(
    values: int, expected: float
) -> None:
    # Exact values of the normal order statistics, e.g. Harter, Biometrika 1961.
    assert expected_max(np.zeros(values), np.ones(values)) == pytest.approx(expected, abs=0.05)


def test_of_many_values_a_part_stands_for_all() -> None:
    rng = np.random.default_rng(0)
    mean, std = rng.normal(10, 1, 20_000), rng.uniform(0.1, 0.5, 20_000)
    drawn = (mean + std * rng.standard_normal((200, 20_000))).max(axis=1)

    assert expected_max(mean, std) == pytest.approx(drawn.mean(), rel=0.01)


@given(st.lists(st.tuples(st.floats(0.001, 10.0), st.floats(0.0, 1.0)), min_size=1, max_size=12))
def test_it_is_never_before_the_latest_mean(values: list[tuple[float, float]]) -> None:
    mean = np.array([m for m, _ in values])
    std = np.array([m * s for m, s in values])

    expected = expected_max(mean, std)

    assert expected >= mean.max() * (1 - 1e-3) - 4e-4 * std.max()
    assert expected <= (mean + 5.1 * std).max() + 1e-3 * mean.max()


def test_certain_values_have_their_maximum() -> None:
    assert expected_max(np.array([1.0, 3.0, 2.0]), np.zeros(3)) == pytest.approx(3.0)


def test_a_worker_without_samples_keeps_a_slope_in_curves_with_a_margin() -> None:
    shares = np.array([64, 64])
    estimate = Estimate.unknown(2)
    for step in range(2):
        seen = [Observation(k, 64, step, (0.064,), (0.0,)) for k in range(2)]
        estimate = learn_times(estimate, Measurements.of(seen))
    proportional = CurveEstimates(np.array([0.0, 1e-3, 1e-6, 0.0, 1e-8]).repeat(2).reshape(5, 2))

    late = late_curves(replace(estimate, now=proportional), shares, np.array([128, 0]), 1.0)

    assert (late.per_sample_s > 1e-4).all()
    assert np.isfinite(late.at(shares)).all()
