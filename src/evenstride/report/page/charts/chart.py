"""One description of a chart over lines, which the page and the figures for papers both draw."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from evenstride.core.fleet import FloatArray
from evenstride.report.page.charts.axes import Scale
from evenstride.report.page.page_runs import ReportedRun

Shape = Literal["stairs", "band", "line", "dots"]


def _none() -> FloatArray:
    return np.zeros(0)


@dataclass(frozen=True, slots=True, eq=False)
class ChartMark:
    """Something drawn in a chart, in the units of its axes.

    Args:
        shape: ``stairs`` are level from each ``x`` to its ``right``, and a ``band`` lies between
            two of them; a ``line`` goes through points, and ``dots`` mark them.
        style: classes of the style sheet; `palette.pen_of` is the same for matplotlib.
        x: where it begins, or is.
        y: its height; of a band, the lower edge.
        right: where each of the stairs ends.
        top: upper edge of a band.
        name: read out by a pointer on it.
        worker: number of the worker that it is hidden with.
    """

    shape: Shape
    style: str
    x: FloatArray
    y: FloatArray
    right: FloatArray = field(default_factory=_none)
    top: FloatArray = field(default_factory=_none)
    name: str = ""
    worker: int | None = None


@dataclass(frozen=True, slots=True, eq=False)
class LineChart:
    """A chart of one area.

    Args:
        key: its id.
        title: what it shows.
        words: sentences on how to read it.
        told: read out in its place.
        height: of the area in pixels.
        x: its horizontal axis; times in seconds where there is a run.
        x_name: what stands on that, with its unit.
        y_high: end of the vertical axis, which begins at 0.
        y_name: what stands on that, with its unit.
        marks: the later ones above the earlier.
        legend: style of each entry and its text.
        run: whose time and steps the horizontal axis shows; ``None`` where it is another.
        rows: values by bucket that a pointer reads out; empty where none are.
    """

    key: str
    title: str
    words: tuple[str, ...]
    told: str
    height: float
    x: Scale
    x_name: str
    y_high: float
    y_name: str
    marks: tuple[ChartMark, ...]
    legend: tuple[tuple[str, str], ...]
    run: ReportedRun | None = None
    rows: tuple[dict[str, Any], ...] = ()
