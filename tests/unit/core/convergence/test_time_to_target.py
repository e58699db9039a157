"""When a figure first came to its target, and how scattered losses are smoothed."""

from __future__ import annotations

from math import exp, inf, log

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstride.core.convergence.batch_laws import Value, reaching, smoothed


def test_between_two_values_it_falls_in_a_straight_line() -> None:
    values = [Value(0.0, 2.0), Value(1.0, 1.0), Value(3.0, 0.5), Value(4.0, 0.7), Value(5.0, 0.1)]

    assert reaching(values, 0.6).epochs == pytest.approx(2.6)
    assert reaching(values, 0.5).epochs == 3.0, "at the target is there"
    assert reaching(values, 0.2).epochs == pytest.approx(4 + 5 / 6), "the first time that low"


def test_what_never_came_there_tells_how_near_and_where() -> None:
    found = reaching([Value(1.0, 0.9), Value(2.0, 0.4), Value(3.0, 0.4), Value(4.0, 0.6)], 0.3)

    assert (found.epochs, found.nearest) == (None, Value(2.0, 0.4))


def test_a_metric_at_its_target_at_first_may_have_reached_it_earlier() -> None:
    found = reaching([Value(2.0, 0.3), Value(3.0, 0.2)], 0.3)

    assert (found.epochs, found.at_first) == (2.0, True)
    assert not reaching([Value(1.0, 0.4), Value(2.0, 0.3)], 0.3).at_first


def test_values_after_infinity_are_not_interpolated() -> None:
    found = reaching([Value(1.0, inf), Value(2.0, 0.3)], 0.35)

    assert (found.epochs, found.at_first) == (2.0, False)
    assert reaching([Value(1.0, inf)], 0.35).epochs is None


@given(
    falls=st.lists(st.floats(0.0, 1.0), min_size=2, max_size=20),
    part=st.floats(0.0, 1.0),
)
def test_the_place_found_is_where_the_line_is_at_the_target(
    falls: list[float], part: float
) -> None:
    values = [Value(float(at), 30.0 - sum(falls[:at])) for at in range(len(falls))]
    target = values[-1].value + part * (values[0].value - values[-1].value)

    epochs = reaching(values, target).epochs

    assert epochs is not None
    at = np.interp(epochs, [one.epochs for one in values], [one.value for one in values])
    assert float(at) == pytest.approx(target, abs=1e-9)


def test_a_straight_line_stays_where_it_is_however_much_is_averaged() -> None:
    """Averages of losses alone would be late, by as many epochs as they reach back."""
    values = [Value(0.3 * at, 5.0 - 0.03 * at) for at in range(100)]

    for memory in (1.0, 5.0, 20.0):
        found = reaching(smoothed(values, memory), 3.0).epochs
        assert found == pytest.approx(20.0)


def test_lucky_batches_are_not_the_target() -> None:
    rng = np.random.default_rng(5)
    steps = np.arange(600) / 60.0
    true = 10 * log(2 / 0.5) / log(2 / 0.2)  # of 2 exp(-k e), which comes to 0.2 after 10 epochs
    rate = log(2 / 0.2) / 10
    found, plain = list[float](), list[float]()
    for _ in range(40):
        values = [Value(e, 2 * exp(-rate * e) + 0.08 * rng.normal()) for e in steps.tolist()]
        found.append(reaching(smoothed(values), 0.5).epochs or inf)
        plain.append(reaching(values, 0.5).epochs or inf)

    assert np.mean(found) == pytest.approx(true, rel=0.04)
    assert np.mean(plain) < 0.9 * true, "single batches come there too soon"


def test_values_that_are_no_numbers_are_left_out() -> None:
    assert smoothed([Value(1.0, inf), Value(2.0, 3.0)]) == [Value(2.0, 3.0)]
