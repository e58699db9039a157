"""Charts: the description that the page and the figures share, its axes, and the SVG.

An SVG is ``WIDTH`` units wide and is stretched in width only, so nothing in it may depend on the
width. Lines keep their stroke, dots are zero-length lines with round ends, hatching is horizontal,
and text is HTML outside the SVG.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from math import ceil, floor, inf, isnan, log10
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from evenstride.core.fleet import FloatArray

Shape = Literal["stairs", "band", "boxes", "line", "dots", "upright"]
Ticks = list[tuple[float, str]]
"""Positions of labels in the unit of the axis, and their texts."""
WIDTH = 1000.0
COLORS = 6
DASHES = 4
_FURTHEST = 290.0  # largest exponent of a power of ten
_LOW = 150.0  # pixels; lower panels have fewer labels
_LEAST = 1e-300  # a narrower range has no powers of ten for its labels
_SECONDS = (1.0, 2.0, 5.0, 10.0, 15.0, 30.0)
_MINUTES = (60.0, 120.0, 300.0, 600.0, 900.0, 1800.0)
_HOURS = (3600.0, 7200.0, 14400.0, 28800.0, 43200.0, 86400.0, 172800.0, 604800.0)


@dataclass(frozen=True, slots=True, eq=False)
class ChartMark:
    """A shape in a panel, in the units of its axes.

    ``stairs`` are level from each ``x`` to its ``right``. A ``band`` lies between two stairs, and
    ``boxes`` are separate rectangles. A ``line`` connects points, ``dots`` mark them, and
    ``upright`` lines go from ``y`` to ``top``.
    """

    shape: Shape
    style: str  # classes of the style sheet; `paper_figures.pen_of` maps them for matplotlib
    x: FloatArray  # left edge, or position
    y: FloatArray  # height, or lower edge
    right: FloatArray = field(default_factory=partial(np.zeros, 0))  # right edge of stairs, boxes
    top: FloatArray = field(default_factory=partial(np.zeros, 0))  # upper edge
    name: str = ""  # text under the pointer
    worker: int | None = None  # number of the worker with which it is hidden


@dataclass(frozen=True, slots=True, eq=False)
class ChartPanel:
    """One area of a chart: the lane of a worker if it has a name, else an area with a y axis."""

    marks: tuple[ChartMark, ...]  # later ones above earlier ones.
    title: str  # alternative text.
    height: float  # in pixels.
    y_low: float = 0.0  # lower end of the vertical axis.
    y_high: float = 1.0  # upper end of the vertical axis.
    y_name: str = ""  # label of the vertical axis, with its unit.
    name: str = ""  # of the lane.
    worker: int | None = None  # number of the worker with which the lane is hidden.
    heading: tuple[str, str] | None = None  # above the panel: a run, and the rest of the sentence.


@dataclass(frozen=True, slots=True)
class TimeAxis:
    """Marks of an axis over the time of a run."""

    pauses_s: tuple[float, ...]  # starts of later processes
    steps: Ticks  # labels of round steps


@dataclass(frozen=True, slots=True, eq=False)
class Chart:
    """Panels, one below the other, over the same horizontal axis."""

    key: str
    title: str
    words: tuple[str, ...]  # sentences that explain it.
    panels: tuple[ChartPanel, ...]  # at least one.
    x_high: float  # end of the horizontal axis.
    x_name: str  # label of the horizontal axis, with its unit.
    x_low: float = 0.0  # start of the horizontal axis.
    legend: tuple[tuple[str, str], ...] = ()  # style and text of each entry.
    axis: TimeAxis | None = None  # if the horizontal axis is the time of a run.
    # Values by bucket, shown under the pointer
    rows: tuple[dict[str, Any], ...] = ()


def look(number: int) -> str:
    """Return the classes of a worker's lines: six colours, then the same with other dashes.

    >>> look(0), look(7)
    ('c0 d0', 'c1 d1')
    """
    return f"c{number % COLORS} d{number // COLORS % DASHES}"


def unit_of(longest_s: float) -> tuple[float, str]:
    """Return the unit for times up to ``longest_s``: its length in seconds, and its name."""
    return (1.0, "s") if longest_s >= 2.0 else (1e-3, "ms")


def listed(values: FloatArray, figures: int = 4) -> list[float | None]:
    """Return rounded values for JSON, with ``None`` for NaN and infinity."""
    known = np.isfinite(values)
    with np.errstate(divide="ignore"):
        scale = np.where(known & (values != 0.0), np.abs(values), 1.0)
    # Neither the power of ten nor the product with it may overflow.
    power = 10.0 ** np.clip(figures - 1 - np.floor(np.log10(scale)), -_FURTHEST, _FURTHEST)
    rounded = np.round(np.where(known, values, 0.0) * power) / power
    return [
        (int(one) if one == int(one) else float(f"{one:.{figures}g}")) if there else None
        for one, there in zip(rounded.tolist(), known.tolist(), strict=True)
    ]


@dataclass(frozen=True, slots=True)
class Scale:
    """Values from ``low`` to ``high`` on a length from 0 to ``size``."""

    low: float
    high: float
    size: float

    def __call__(self, values: npt.ArrayLike) -> FloatArray:
        """Return the positions of values."""
        wide = self.high - self.low or 1.0
        return np.asarray((np.asarray(values, dtype=np.float64) - self.low) * (self.size / wide))

    def part(self, value: float) -> float:
        """Return the position of a value in percent of the length."""
        return 100.0 * float(self(value)) / self.size


def ticks(low: float, high: float, about: int = 5) -> Ticks:
    """Return round values within a range, with their labels.

    >>> ticks(0.0, 23.0)
    [(0.0, '0'), (5.0, '5'), (10.0, '10'), (15.0, '15'), (20.0, '20')]
    """
    if not _LEAST < high - low < inf:
        return [(low, f"{low:.4g}")]
    return [(value, _label(value)) for value in _multiples(low, high, _nice((high - low) / about))]


def _label(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1e4 else f"{value:.4g}"


def _nice(least: float) -> float:
    power = 10.0 ** floor(log10(least))
    return next(n * power for n in (1.0, 2.0, 2.5, 5.0, 10.0) if n * power >= least * (1 - 1e-9))


def _multiples(low: float, high: float, each: float) -> list[float]:
    return [n * each for n in range(ceil(low / each - 1e-9), floor(high / each + 1e-9) + 1)]


def time_ticks(low_s: float, high_s: float, about: int = 6) -> Ticks:
    """Return round times within a range, with their labels.

    >>> [label for _, label in time_ticks(0.0, 400.0)]
    ['0 s', '2 min', '4 min', '6 min']
    """
    least = (high_s - low_s) / about
    if not _LEAST < least < inf:
        return [(low_s, f"{low_s:.4g} s")]
    known = next((one for one in _SECONDS + _MINUTES + _HOURS if one >= least), 0.0)
    each = known if least > 1.0 and known else _nice(least)
    return [(value, _time(value, each)) for value in _multiples(low_s, high_s, each)]


def _time(value_s: float, each_s: float) -> str:
    if value_s == 0.0 or each_s % 60.0:
        return f"{value_s:.6g} s"
    return f"{value_s / 60:.6g} min" if each_s % 3600.0 else f"{value_s / 3600:.6g} h"


def step_ticks(first: int, last: int, about: int = 6) -> list[int]:
    """Return round numbers of steps.

    >>> step_ticks(0, 599)
    [0, 100, 200, 300, 400, 500]
    """
    if last <= first:
        return [first]
    each = max(1.0, _nice((last - first) / about))
    each = each if each != 2.5 else 5.0
    return [int(value) for value in _multiples(first, last, each)]


class SvgPath(NamedTuple):
    """A path, the text under the pointer, and the worker with which it is hidden."""

    way: str
    style: str
    name: str = ""
    worker: int | None = None


class AxisLabel(NamedTuple):
    """A label: its position in percent of the axis, its text, and its class at an edge."""

    at: float
    text: str
    edge: str = ""


def paths(chart: Chart, panel: ChartPanel) -> list[SvgPath]:
    """Return the paths of a panel, later ones above earlier ones, without empty ones."""
    x, y = Scale(chart.x_low, chart.x_high, WIDTH), Scale(panel.y_high, panel.y_low, panel.height)
    found = []
    if not panel.name:
        levels = y([value for value, _ in _y_ticks(panel)]).tolist()
        found.append(SvgPath("".join(f"{_to(0.0, at)}H{digits(WIDTH)}" for at in levels), "grid"))
    for mark in panel.marks:
        way = _way(mark, x, y)
        if "hollow" in mark.style:  # a ring is a dot with a smaller background-coloured dot on it
            outer = mark.style.replace(" hollow", "")
            found.append(SvgPath(way, outer, mark.name, mark.worker))
            found.append(SvgPath(way, "dot hollow", mark.name, mark.worker))
        else:
            found.append(SvgPath(way, mark.style, mark.name, mark.worker))
    if chart.axis is not None:
        pauses = x(chart.axis.pauses_s)
        bottom = np.full(len(pauses), panel.height)
        found.append(SvgPath(uprights_way(pauses, np.zeros(len(pauses)), bottom), "pause"))
    return [one for one in found if one.way]


def y_labels(panel: ChartPanel) -> list[AxisLabel]:
    """Return the labels on the left of a panel, from the top."""
    scale = Scale(panel.y_high, panel.y_low, panel.height)
    return [AxisLabel(scale.part(value), text) for value, text in _y_ticks(panel)]


def _y_ticks(panel: ChartPanel) -> Ticks:
    return ticks(panel.y_low, panel.y_high, 3 if panel.height < _LOW else 4)


def x_labels(chart: Chart) -> dict[str, list[AxisLabel]]:
    """Return the rows of labels below a chart by class: times, and the steps of a run."""
    scale = Scale(chart.x_low, chart.x_high, WIDTH)
    if chart.axis is not None:
        times = time_ticks(scale.low, scale.high)
        return {"times": _row(times, scale), "steps": _row(chart.axis.steps, scale)}
    few = not chart.panels[0].name and chart.panels[0].height < _LOW
    return {"times": _row(ticks(scale.low, scale.high, 4 if few else 6), scale)}


def _row(marks: Ticks, scale: Scale) -> list[AxisLabel]:
    parts = [(scale.part(value), text) for value, text in marks if value <= scale.high]
    return [
        AxisLabel(part, text, "begin" if part < 2.0 else "end" if part > 95.0 else "")
        for part, text in parts
        if part >= 0.0
    ]


def _way(mark: ChartMark, x: Scale, y: Scale) -> str:
    at, right = x(mark.x), x(mark.right)
    # Values above the axis follow its upper edge, so that their line is not broken.
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
    """Return the path of a line that is level from each left to its right edge.

    It is broken at NaN and where two neighbours do not touch.
    """
    way, pen = [], None
    for a, b, level in zip(left.tolist(), right.tolist(), y.tolist(), strict=True):
        if isnan(level):
            pen = None
            continue
        way.append(f"V{digits(level)}" if pen is not None and a - pen < 1e-6 else _to(a, level))
        way.append(f"H{digits(b)}")
        pen = b
    return "".join(way)


def band_way(left: FloatArray, right: FloatArray, low: FloatArray, high: FloatArray) -> str:
    """Return the path around the area between two such lines, piece by piece."""
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
        yield f"H{digits(b)}V{digits(level)}"
    for a, level in zip(left[:0:-1].tolist(), low[-2::-1].tolist(), strict=True):
        yield f"H{digits(a)}V{digits(level)}"
    yield f"H{digits(float(left[0]))}Z"


def boxes_way(left: FloatArray, right: FloatArray, top: FloatArray, bottom: FloatArray) -> str:
    """Return the path around boxes, without boxes that are too narrow to see."""
    edges = zip(*(one.tolist() for one in (left, right, top, bottom)), strict=True)
    return "".join(
        f"{_to(a, high)}H{digits(b)}V{digits(low)}H{digits(a)}Z"
        for a, b, high, low in edges
        if b - a > 1e-3
    )


def line_way(x: FloatArray, y: FloatArray) -> str:
    """Return the path through some points, broken at NaN."""
    way, begun = [], False
    for a, b in zip(x.tolist(), y.tolist(), strict=True):
        if isnan(b):
            begun = False
            continue
        way.append(f"L{digits(a)} {digits(b)}" if begun else _to(a, b))
        begun = True
    return "".join(way)


def dots_way(x: FloatArray, y: FloatArray) -> str:
    """Return the path of some dots: zero-length lines with round ends."""
    points = zip(x.tolist(), y.tolist(), strict=True)
    return "".join(f"{_to(a, b)}h0" for a, b in points if not isnan(b))


def uprights_way(x: FloatArray, top: FloatArray, bottom: FloatArray) -> str:
    """Return the path of vertical lines."""
    ends = zip(x.tolist(), top.tolist(), bottom.tolist(), strict=True)
    return "".join(f"{_to(a, high)}V{digits(low)}" for a, high, low in ends)


def _to(x: float, y: float) -> str:
    return f"M{digits(x)} {digits(y)}"


def digits(value: float, places: int = 2) -> str:
    """Return the shortest text of a number for an attribute.

    >>> digits(12.50), digits(3.0), digits(-0.001)
    ('12.5', '3', '0')
    """
    text = f"{value:.{places}f}"
    text = text.rstrip("0").rstrip(".") if "." in text else text
    return "0" if text == "-0" else text
