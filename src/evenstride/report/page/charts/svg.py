"""Draws a chart for the page: the paths of its SVG, and where its labels stand.

A drawing is ``WIDTH`` units wide whatever the screen and stretched in width alone, so nothing in it
may hang on its width: lines keep theirs, dots are lines of no length with round ends, hatching is
horizontal, and text stands beside it as HTML.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import isnan
from typing import NamedTuple

import numpy as np

from evenstride.core.fleet import FloatArray
from evenstride.report.page.charts.axes import Scale, Ticks, step_ticks, ticks, time_ticks
from evenstride.report.page.charts.chart import Chart, ChartMark, ChartPanel
from evenstride.report.page.page_runs import ReportedRun

WIDTH = 1000.0
_CLOSE = 7.0  # percent; labels closer than that would run into each other
_LOW = 150.0  # pixels; panels of less have fewer labels


class SvgPath(NamedTuple):
    """A path, with the text that a pointer on it shows and the worker that it is hidden with."""

    way: str
    style: str
    name: str = ""
    worker: int | None = None


class AxisLabel(NamedTuple):
    """A label: where it stands in percent of the axis, its text, and its class at an edge."""

    at: float
    text: str
    edge: str = ""


def paths(chart: Chart, panel: ChartPanel) -> list[SvgPath]:
    """Return what is drawn in a panel, the later above the earlier; empty paths are left out."""
    x, y = Scale(chart.x_low, chart.x_high, WIDTH), Scale(panel.y_high, panel.y_low, panel.height)
    found = []
    if not panel.name:
        levels = y([value for value, _ in _y_ticks(panel)]).tolist()
        found.append(SvgPath("".join(f"{_to(0.0, at)}H{number(WIDTH)}" for at in levels), "grid"))
    for mark in panel.marks:
        way = _way(mark, x, y)
        if "hollow" in mark.style:  # a ring is a dot with a smaller one of paper on it
            outer = mark.style.replace(" hollow", "")
            found.append(SvgPath(way, outer, mark.name, mark.worker))
            found.append(SvgPath(way, "dot hollow", mark.name, mark.worker))
        else:
            found.append(SvgPath(way, mark.style, mark.name, mark.worker))
    if chart.run is not None:
        pauses = x([at_s for at_s, _ in chart.run.pauses])
        bottom = np.full(len(pauses), panel.height)
        found.append(SvgPath(uprights_way(pauses, np.zeros(len(pauses)), bottom), "pause"))
    return [one for one in found if one.way]


def y_labels(panel: ChartPanel) -> list[AxisLabel]:
    """Return the labels at the left of a panel, from the top."""
    scale = Scale(panel.y_high, panel.y_low, panel.height)
    return [AxisLabel(scale.part(value), text) for value, text in _y_ticks(panel)]


def _y_ticks(panel: ChartPanel) -> Ticks:
    return ticks(panel.y_low, panel.y_high, 3 if panel.height < _LOW else 4)


def x_labels(chart: Chart) -> dict[str, list[AxisLabel]]:
    """Return the rows of labels below a chart by their class: times, and the steps of a run."""
    scale = Scale(chart.x_low, chart.x_high, WIDTH)
    if chart.run is not None:
        times = time_ticks(scale.low, scale.high)
        return {"times": _row(times, scale), "steps": _row(_steps(chart.run, scale), scale)}
    few = not chart.panels[0].name and chart.panels[0].height < _LOW
    return {"times": _row(ticks(scale.low, scale.high, 4 if few else 6), scale)}


def _row(marks: Ticks, scale: Scale) -> list[AxisLabel]:
    parts = [(scale.part(value), text) for value, text in marks if value <= scale.high]
    return [
        AxisLabel(part, text, "begin" if part < 2.0 else "end" if part > 95.0 else "")
        for part, text in parts
        if part >= 0.0
    ]


def _steps(run: ReportedRun, scale: Scale) -> Ticks:
    """Return the labels of round steps, none too close to the one before."""
    found: Ticks = []
    before = -np.inf
    for leg in run.legs:
        part = (leg.ends_s[-1] - leg.opens_s[0]) / max(scale.high - scale.low, 1e-9)
        last = leg.step_at(leg.generation.steps - 1)
        for step in step_ticks(leg.step_at(0), last, max(1, round(8 * float(part)))):
            at_s = float(leg.opens_s[step - leg.generation.first])
            if scale.part(at_s) - before >= _CLOSE and scale.part(at_s) < 97.0:
                found.append((at_s, f"step {step:,}" if not found else f"{step:,}"))
                before = scale.part(at_s) + (3.0 if len(found) == 1 else 0.0)
    return found


def _way(mark: ChartMark, x: Scale, y: Scale) -> str:
    at, right = x(mark.x), x(mark.right)
    # Buckets above the axis run along its upper edge, so that their lines do not end.
    level, top = (np.maximum(y(values), 0.0) for values in (mark.y, mark.top))
    match mark.shape:
        case "stairs":
            return steps_way(at, right, level)
        case "band":
            return band_way(at, right, level, top)
        case "boxes":
            return boxes_way(at, right, top, level)
        case "line":
            return line_way(at, y(mark.y))
        case "dots":
            return dots_way(at, level)
        case "upright":
            return uprights_way(at, top, level)


def steps_way(left: FloatArray, right: FloatArray, y: FloatArray) -> str:
    """Return the way of a line that is level from each left to its right edge.

    It is broken where a value is not a number or two neighbours do not touch.
    """
    way, pen = [], None
    for a, b, level in zip(left.tolist(), right.tolist(), y.tolist(), strict=True):
        if isnan(level):
            pen = None
            continue
        way.append(f"V{number(level)}" if pen is not None and a - pen < 1e-6 else _to(a, level))
        way.append(f"H{number(b)}")
        pen = b
    return "".join(way)


def band_way(left: FloatArray, right: FloatArray, low: FloatArray, high: FloatArray) -> str:
    """Return the way around the area between two such lines, piece by piece."""
    known = ~(np.isnan(low) | np.isnan(high))
    touching = np.append(False, (left[1:] - right[:-1] < 1e-6) & known[1:] & known[:-1])
    found: list[str] = []
    for start in np.flatnonzero(known & ~touching).tolist():
        end = start + 1
        while end < len(left) and touching[end]:
            end += 1
        rows = slice(start, end)
        if (np.abs(high[rows] - low[rows]) >= 0.05).any():
            found += _around(left[rows], right[rows], low[rows], high[rows])
    return "".join(found)


def _around(
    left: FloatArray, right: FloatArray, low: FloatArray, high: FloatArray
) -> Iterator[str]:
    yield _to(float(left[0]), float(high[0]))
    for b, level in zip(right.tolist(), [*high[1:].tolist(), float(low[-1])], strict=True):
        yield f"H{number(b)}V{number(level)}"
    for a, level in zip(left[:0:-1].tolist(), low[-2::-1].tolist(), strict=True):
        yield f"H{number(a)}V{number(level)}"
    yield f"H{number(float(left[0]))}Z"


def boxes_way(left: FloatArray, right: FloatArray, top: FloatArray, bottom: FloatArray) -> str:
    """Return the way around boxes, without those too narrow to be seen."""
    edges = zip(*(one.tolist() for one in (left, right, top, bottom)), strict=True)
    return "".join(
        f"{_to(a, high)}H{number(b)}V{number(low)}H{number(a)}Z"
        for a, b, high, low in edges
        if b - a > 1e-3
    )


def line_way(x: FloatArray, y: FloatArray) -> str:
    """Return the way through some points, broken where one is not a number."""
    way, begun = [], False
    for a, b in zip(x.tolist(), y.tolist(), strict=True):
        if isnan(b):
            begun = False
            continue
        way.append(f"L{number(a)} {number(b)}" if begun else _to(a, b))
        begun = True
    return "".join(way)


def dots_way(x: FloatArray, y: FloatArray) -> str:
    """Return the way of some dots: lines of no length, as their ends are round."""
    points = zip(x.tolist(), y.tolist(), strict=True)
    return "".join(f"{_to(a, b)}h0" for a, b in points if not isnan(b))


def uprights_way(x: FloatArray, top: FloatArray, bottom: FloatArray) -> str:
    """Return the way of lines from top to bottom."""
    ends = zip(x.tolist(), top.tolist(), bottom.tolist(), strict=True)
    return "".join(f"{_to(a, high)}V{number(low)}" for a, high, low in ends)


def _to(x: float, y: float) -> str:
    return f"M{number(x)} {number(y)}"


def number(value: float, places: int = 2) -> str:
    """Return a number for an attribute, as short as it can be.

    >>> number(12.50), number(3.0), number(-0.001)
    ('12.5', '3', '0')
    """
    told = f"{value:.{places}f}"
    told = told.rstrip("0").rstrip(".") if "." in told else told
    return "0" if told == "-0" else told
