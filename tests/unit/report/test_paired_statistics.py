"""What a few paired figures say."""

from __future__ import annotations

from math import inf

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstride.report.suite_text import mean_interval, quantile


def test_one_pair_has_no_interval() -> None:
    assert mean_interval(np.array([0.1])) is None


@given(st.lists(st.floats(-1, 1), min_size=2, max_size=30))
def test_an_interval_holds_the_mean_and_lies_within_the_values(values: list[float]) -> None:
    found = mean_interval(np.array(values))

    assert found is not None
    low, high = found
    mean = float(np.mean(values))
    assert min(values) - 1e-12 <= low <= mean + 1e-12
    assert mean - 1e-12 <= high <= max(values) + 1e-12


def test_an_interval_is_about_as_wide_as_normal_values_say() -> None:
    values = np.random.default_rng(0).normal(3.0, 2.0, 400)

    found = mean_interval(values)

    assert found is not None
    half = 1.96 * values.std() / np.sqrt(400)
    assert found == pytest.approx((values.mean() - half, values.mean() + half), abs=0.02)
    assert mean_interval(values) == found


@pytest.mark.parametrize(
    ("values", "median", "ninth"),
    [
        ([3], 3, 3),
        ([4, 1, 2], 2, 4),
        ([1, 2, 3, 4], 2, 4),
        (list(range(20)), 9, 17),
        ([1, None], 1, inf),
        ([None, None, 5], inf, inf),
        ([0] * 9 + [None], 0, 0),
        ([0] * 17 + [None] * 3, 0, inf),
    ],
)
def test_a_quantile_is_a_value_that_so_many_do_not_exceed(
    values: list[int | None], median: float, ninth: float
) -> None:
    assert quantile(values, 0.5) == median
    assert quantile(values, 0.9) == ninth
