"""Lines and areas, as the ways of SVG paths."""

from __future__ import annotations

import numpy as np

from evenstride.report.page.charts.svg import (
    band_way,
    bars_way,
    dots_way,
    drawing,
    line_way,
    path,
    steps_way,
)

LEFT, RIGHT = np.array([0.0, 10.0, 30.0]), np.array([10.0, 20.0, 40.0])


def test_a_line_of_levels_is_broken_where_buckets_do_not_touch() -> None:
    assert steps_way(LEFT, RIGHT, np.array([5.0, 7.0, 1.0])) == "M0 5H10V7H20M30 1H40"


def test_a_line_is_broken_where_nothing_is_known() -> None:
    unknown = np.array([5.0, np.nan, 1.0])

    assert steps_way(LEFT, RIGHT, unknown) == "M0 5H10M30 1H40"
    assert line_way(LEFT, unknown) == "M0 5M30 1"
    assert dots_way(LEFT, unknown) == "M0 5h0M30 1h0"


def test_an_area_goes_around_each_piece() -> None:
    low, high = np.array([9.0, 8.0, 9.0]), np.array([1.0, 2.0, 3.0])

    assert band_way(LEFT, RIGHT, low, high) == ("M0 1H10V2H20V8H10V9H0ZM30 3H40V9H30Z")


def test_an_area_of_no_height_is_left_out() -> None:
    assert band_way(LEFT, RIGHT, LEFT, LEFT) == ""
    assert path(band_way(LEFT, RIGHT, LEFT, LEFT), "bar") == ""


def test_bars_too_narrow_to_be_seen_are_left_out() -> None:
    found = bars_way(np.array([0.0, 5.0]), np.array([4.0, 5.0]), 2.0, 12.0)

    assert found == "M0 2H4v10H0Z"


def test_a_drawing_says_what_it_shows() -> None:
    made = drawing(20.0, "<all>", path(line_way(LEFT, LEFT), "line", "told"))

    assert 'role="img"' in made
    assert "<title>&lt;all&gt;</title>" in made
    assert "<title>told</title>" in made
