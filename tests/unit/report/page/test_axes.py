"""Where values stand, and at which there are labels."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstride.report.page.chart import Scale, step_ticks, ticks, time_ticks


def test_an_axis_may_run_upwards() -> None:
    scale = Scale(10.0, 0.0, 200.0)

    assert scale([10.0, 5.0, 0.0]).tolist() == [0.0, 100.0, 200.0]
    assert scale.part(2.5) == 75.0


def test_an_axis_of_one_value_does_not_divide_by_zero() -> None:
    assert Scale(3.0, 3.0, 100.0)([3.0]).tolist() == [0.0]
    assert ticks(3.0, 3.0) == [(3.0, "3")]
    assert time_ticks(0.0, 0.0) == [(0.0, "0 s")]


@given(st.floats(-1e6, 1e6), st.floats(1e-6, 1e6))
def test_labels_lie_within_the_axis_and_are_neither_few_nor_many(low: float, wide: float) -> None:
    found = [value for value, _ in ticks(low, low + wide)]

    assert all(low - 1e-6 * wide <= value <= low + wide * (1 + 1e-6) for value in found)
    assert 1 <= len(found) <= 8


@pytest.mark.parametrize(
    ("high_s", "last"),
    [(0.02, "0.02 s"), (9.0, "8 s"), (100.0, "90 s"), (3000.0, "50 min"), (2e5, "48 h")],
)
def test_times_are_labelled_in_units_that_people_use(high_s: float, last: str) -> None:
    assert time_ticks(0.0, high_s)[-1][1] == last


def test_steps_are_whole_numbers() -> None:
    assert step_ticks(0, 3) == [0, 1, 2, 3]
    assert step_ticks(95, 310, 4) == [100, 200, 300]
    assert step_ticks(5, 5) == [5]


@pytest.mark.parametrize(("low", "high"), [(-1e308, 1e308), (0.0, 5e-324), (0.0, 1e-310)])
def test_a_range_that_has_no_powers_of_ten_has_one_label(low: float, high: float) -> None:
    assert [value for value, _ in ticks(low, high)] == [low]
    assert [value for value, _ in time_ticks(low, high)] == [low]
