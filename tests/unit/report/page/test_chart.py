"""Values of a chart as scripts get them."""

from __future__ import annotations

import numpy as np

from evenstride.report.page.chart import listed


def test_values_for_scripts_are_rounded() -> None:
    assert listed(np.array([1.23456, 0.0, 98766.0, -0.00123456])) == [1.235, 0, 98770, -0.001235]


def test_nan_and_infinity_become_none() -> None:
    assert listed(np.array([np.nan, np.inf, 1.0])) == [None, None, 1]


def test_the_ends_of_the_range_of_numbers_stay_numbers() -> None:
    tiny, most = 5e-324, np.finfo(np.float64).max

    assert listed(np.array([tiny, -tiny])) == [0, 0]
    assert listed(np.array([most])) == [int(most)]
