"""The description of a chart, which the page and the figures for papers both draw."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from evenstride.core.fleet import FloatArray
from evenstride.report.page.page_runs import ReportedRun

Shape = Literal["stairs", "band", "boxes", "line", "dots", "upright"]
COLORS = 6
DASHES = 4
_FURTHEST = 290.0


def _none() -> FloatArray:
    return np.zeros(0)


@dataclass(frozen=True, slots=True, eq=False)
class ChartMark:
    """Something drawn in a panel, in the units of its axes.

    Args:
        shape: ``stairs`` are level from each ``x`` to its ``right``, a ``band`` lies between two
            of them, and ``boxes`` are its parts one by one; a ``line`` goes through points,
            ``dots`` mark them, and ``upright`` lines go from ``y`` to ``top``.
        style: classes of the style sheet; `paper_figures.pen_of` is the same for matplotlib.
        x: where it begins, or is.
        y: its height, or its lower edge.
        right: where each stair or box ends.
        top: its upper edge.
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
class ChartPanel:
    """One area of a chart: the lane of a worker if it has a name, else an area with a y axis.

    Args:
        marks: the later ones above the earlier.
        told: read out in its place.
        height: in pixels.
        y_low: lower end of the vertical axis.
        y_high: upper end of it.
        y_name: what stands on that, with its unit.
        name: of the lane.
        worker: number of the worker that the lane is hidden with.
        heading: above it: whose it is, and the rest of the sentence.
    """

    marks: tuple[ChartMark, ...]
    told: str
    height: float
    y_low: float = 0.0
    y_high: float = 1.0
    y_name: str = ""
    name: str = ""
    worker: int | None = None
    heading: tuple[str, str] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Chart:
    """Panels below each other over the same horizontal axis.

    Args:
        key: its id.
        title: what it shows.
        words: sentences on how to read it.
        panels: at least one.
        x_high: end of the horizontal axis.
        x_name: what stands on that, with its unit.
        x_low: where it begins.
        legend: style of each entry and its text.
        run: whose time and steps the horizontal axis shows; ``None`` where it is another.
        rows: values by bucket that a pointer reads out; empty where none are.
    """

    key: str
    title: str
    words: tuple[str, ...]
    panels: tuple[ChartPanel, ...]
    x_high: float
    x_name: str
    x_low: float = 0.0
    legend: tuple[tuple[str, str], ...] = ()
    run: ReportedRun | None = None
    rows: tuple[dict[str, Any], ...] = ()


def look(number: int) -> str:
    """Return the classes of a worker's lines: six colours, and another dash for each next six.

    >>> look(0), look(7)
    ('c0 d0', 'c1 d1')
    """
    return f"c{number % COLORS} d{number // COLORS % DASHES}"


def listed(values: FloatArray, figures: int = 4) -> list[float | None]:
    """Return values for scripts, rounded, with ``None`` for what is not a number."""
    known = np.isfinite(values)
    with np.errstate(divide="ignore"):
        scale = np.where(known & (values != 0.0), np.abs(values), 1.0)
    # Neither a power of ten nor what is rounded by it may leave the range of numbers.
    power = 10.0 ** np.clip(figures - 1 - np.floor(np.log10(scale)), -_FURTHEST, _FURTHEST)
    rounded = np.round(np.where(known, values, 0.0) * power) / power
    return [
        (int(one) if one == int(one) else float(f"{one:.{figures}g}")) if there else None
        for one, there in zip(rounded.tolist(), known.tolist(), strict=True)
    ]
