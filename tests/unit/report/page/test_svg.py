"""Lines and areas, as the ways of SVG paths."""

from __future__ import annotations

import numpy as np

from evenstride.report.page.chart import (
    Chart,
    ChartMark,
    ChartPanel,
    band_way,
    boxes_way,
    dots_way,
    line_way,
    paths,
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


def test_boxes_too_narrow_to_be_seen_are_left_out() -> None:
    left, right = np.array([0.0, 5.0]), np.array([4.0, 5.0])
    found = boxes_way(left, right, np.array([2.0, 2.0]), np.array([12.0, 12.0]))

    assert found == "M0 2H4V12H0Z"


def chart_of(*marks: ChartMark) -> Chart:
    panel = ChartPanel(marks, title="name", height=100.0, y_high=10.0)
    return Chart("key", "title", (), (panel,), x_high=40.0, x_name="x")


def test_a_panel_is_drawn_from_its_marks_the_later_above() -> None:
    line = ChartMark("line", "line own", LEFT, LEFT, name="name", worker=3)
    nothing = ChartMark("band", "band c0", LEFT, LEFT, RIGHT, LEFT)
    chart = chart_of(nothing, line)

    grid, drawn = paths(chart, chart.panels[0])
    assert grid.style == "grid"
    assert drawn == ("M0 100L250 0L750 -200", "line own", "name", 3)


def test_values_beyond_the_axis_run_along_its_edge() -> None:
    chart = chart_of(ChartMark("stairs", "line own", LEFT, np.array([5.0, 50.0, 0.0]), RIGHT))

    assert paths(chart, chart.panels[0])[1].way == "M0 50H250V0H500M750 100H1000"


def test_a_ring_is_a_dot_with_a_smaller_one_of_paper_on_it() -> None:
    chart = chart_of(ChartMark("dots", "dot c0 d0 hollow", LEFT, LEFT))

    assert [one.style for one in paths(chart, chart.panels[0])] == [
        "grid",
        "dot c0 d0",
        "dot hollow",
    ]
