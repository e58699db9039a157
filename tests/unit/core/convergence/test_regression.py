"""Lines through few points, and their intervals."""

import numpy as np
import pytest
from scipy import stats

from evenstride.core.convergence.regression import line, t975
from tests.messages import raises_message


@pytest.mark.parametrize("freedom", [*range(1, 16), 25, 60, 1000])
def test_the_quantile_is_students(freedom: int) -> None:
    assert t975(freedom) == pytest.approx(stats.t.ppf(0.975, freedom), rel=1e-3)


def test_without_freedom_nothing_is_known() -> None:
    through = line([1.0, 2.0], [3.0, 5.0])

    assert (through.start, through.slope) == pytest.approx((1.0, 2.0))
    assert t975(0) == float("inf")
    assert through.mean(1.5).high == float("inf")


@pytest.mark.parametrize("unit", [1e-6, 1.0, 1e6])
def test_exact_points_give_the_line_whatever_x_counts(unit: float) -> None:
    xs = [unit * x for x in (1.0, 2.0, 4.0, 8.0)]

    through = line(xs, [0.5 + 3.0 * x / unit for x in xs])

    assert through.start == pytest.approx(0.5)
    assert through.slope * unit == pytest.approx(3.0)
    assert through.scatter == pytest.approx(0.0, abs=1e-9)


def test_errors_count_in_proportion() -> None:
    """Twice too large at both ends: a fit of absolute errors would look at the large end only."""
    through = line([1.0, 10.0, 100.0], [2.0, 10.0, 100.0])

    assert through.at(10.0) == pytest.approx(10.0, rel=0.35)
    assert through.at(1.0) > 1.2


def test_intervals_hold_the_truth_as_often_as_they_say() -> None:
    random, xs = np.random.default_rng(0), [64.0, 128.0, 256.0, 512.0, 1024.0]
    true = [5.0 + 0.01 * x for x in xs]
    inside_mean = inside_next = 0
    for _ in range(2000):
        through = line(xs, [y * (1 + 0.05 * random.standard_normal()) for y in true])
        mean, following = through.mean(700.0), through.next(700.0)
        inside_mean += mean.low <= 12.0 <= mean.high
        inside_next += (
            following.low <= 12.0 * (1 + 0.05 * random.standard_normal()) <= following.high
        )

    assert inside_mean / 2000 == pytest.approx(0.95, abs=0.02)
    assert inside_next / 2000 == pytest.approx(0.95, abs=0.02)


def test_points_at_one_place_or_not_above_0_are_refused() -> None:
    with raises_message(ValueError):
        line([3.0, 3.0], [1.0, 2.0])
    with raises_message(ValueError):
        line([1.0, 2.0], [0.0, 2.0])


def test_points_count_by_their_errors() -> None:
    """One of three is off, and known four times worse, so its pull is a sixteenth."""
    xs, ys = [1.0, 2.0, 4.0], [3.0, 10.0, 9.0]

    alike, by_error = line(xs, ys, [0.1] * 3), line(xs, ys, [0.01, 0.04, 0.01])
    through = line([1.0, 4.0], [3.0, 9.0], [0.1, 0.2])

    assert alike.at(2.0) == pytest.approx(line(xs, ys).at(2.0)), "only their ratios count"
    assert abs(by_error.at(2.0) - 5.0) < 0.2 * abs(alike.at(2.0) - 5.0)
    unit = (0.1**2 + 0.2**2) / 2
    c00, c01, c11 = (unit * one for one in through.spread)
    assert c00 + 2 * c01 + c11 == pytest.approx((0.1 * 3.0) ** 2), "a point's own variance there"
    assert c00 + 8 * c01 + 16 * c11 == pytest.approx((0.2 * 9.0) ** 2)
