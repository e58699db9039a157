"""What stands around a drawing: title, words, axes, legend, and data for who points at it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from evenstride.core.fleet import FloatArray
from evenstride.report.page.charts.axes import Scale, Ticks, step_ticks, time_ticks
from evenstride.report.page.markup import Markup, element, number, together
from evenstride.report.page.page_runs import ReportedRun

_CLOSE = 7.0  # percent; labels closer than that would run into each other
_FIGURES = 4
_FURTHEST = 290.0


@dataclass(frozen=True, slots=True)
class TimeAxis:
    """The axis of one or several runs.

    Args:
        key: charts of the same one are zoomed together.
        scale: from seconds to units of a drawing.
    """

    key: str
    scale: Scale

    def labels(self, run: ReportedRun | None) -> Markup:
        """Return the labels below a drawing: times, and the numbers of steps of a run."""
        rows = [_row("times", time_ticks(self.scale.low, self.scale.high), self.scale)]
        if run is not None:
            rows.append(_row("steps", _steps(run, self.scale), self.scale))
        return element("div", rows, class_="xlabels", data_axis=self.key, aria_hidden="true")


def figure(key: str, title: str, words: Sequence[str], *parts: Markup | None) -> Markup:
    """Return a figure: its title, a few sentences, and what is drawn.

    Args:
        key: its id.
        title: what it shows.
        words: sentences on how to read it.
        parts: drawing, legend and data.
    """
    told = [element("p", one, class_="how") for one in words]
    head = element("figcaption", element("h3", title), told)
    return element("figure", head, *[part for part in parts if part], id=key, class_="chart")


def plot(
    drawn: Markup, y: Ticks | None, scale: Scale | None, labels: Markup, unit: str = ""
) -> Markup:
    """Return a drawing with labels at its left and below.

    Args:
        drawn: the drawing.
        y: labels at its left.
        scale: where they stand, from the top.
        labels: below it.
        unit: of the values at its left.
    """
    sides = [
        element("span", told, style=f"top:{number(scale.part(value))}%")
        for value, told in (y or [])
        if scale is not None
    ]
    left = element("div", sides, class_="ylabels", aria_hidden="true")
    above = element("div", unit, class_="unit") if unit else None
    area = element("div", drawn, class_="area")
    return together(above, element("div", left, area, element("div"), labels, class_="plot"))


def axis_labels(ticks: Ticks, scale: Scale, unit: str) -> Markup:
    """Return the labels of an axis that is not zoomed."""
    rows = [_row("times", ticks, scale), element("div", unit, class_="xunit")]
    return element("div", rows, class_="xlabels", aria_hidden="true")


def legend(*entries: tuple[str, str]) -> Markup:
    """Return what colours and lines mean.

    Args:
        entries: classes of a swatch, and what it stands for.
    """
    told = [
        element("li", element("i", class_=f"swatch {class_}", aria_hidden="true"), text)
        for class_, text in entries
    ]
    return element("ul", told, class_="legend")


def buckets(run: ReportedRun) -> dict[str, Any]:
    """Return what scripts need to know of a run's buckets: their edges and steps."""
    return {
        "left": listed(run.column(lambda leg: leg.left_s), 6),
        "right": listed(run.column(lambda leg: leg.right_s), 6),
        "first": [int(leg.step_at(row)) for leg in run.legs for row in leg.first.tolist()],
        "last": [int(leg.step_at(row)) for leg in run.legs for row in leg.last.tolist()],
        "process": [leg.generation.life + 1 for leg in run.legs for _ in range(leg.buckets)],
        "processes": len(run.story.lives),
    }


def listed(values: FloatArray, figures: int = _FIGURES) -> list[float | None]:
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


def _row(kind: str, ticks: Ticks, scale: Scale) -> Markup:
    spans = [
        element(
            "span", told, style=f"left:{number(scale.part(value))}%", class_=_edge(scale, value)
        )
        for value, told in ticks
        if scale.low <= value <= scale.high
    ]
    return element("div", spans, class_=kind)


def _edge(scale: Scale, value: float) -> str | None:
    part = scale.part(value)
    return "begin" if part < 2.0 else "end" if part > 95.0 else None


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
