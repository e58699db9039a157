"""Losses and metrics that the run has told of, each in a small chart over the training's steps."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from evenstride.core.fleet import FloatArray
from evenstride.report.analysis.restarts import kept_before
from evenstride.report.analysis.thinning import thinned
from evenstride.report.page.charts import svg
from evenstride.report.page.charts.axes import Scale, ticks
from evenstride.report.page.charts.chart_frame import axis_labels, figure, plot
from evenstride.report.page.markup import Markup, element
from evenstride.report.page.page_runs import ReportedRun
from evenstride.report.wording import plain

HEIGHT = 130.0
TITLE = "Loss and metrics"
_MOST = 12
_BUCKETS = 400
_FURTHEST = 1e100  # drawn at most: sums and differences of such values are still numbers
_MEASURED = "loss of measured steps"


@dataclass(frozen=True, slots=True, eq=False)
class MetricSeries:
    """One metric over the run.

    Args:
        name: of it.
        steps: at which it was found.
        values: that were found.
    """

    name: str
    steps: FloatArray
    values: FloatArray


def courses_of(run: ReportedRun) -> list[MetricSeries]:
    """Return what was found of each metric, in the order in which they were first told of."""
    found: dict[str, list[tuple[int, float]]] = {}
    lives = run.story.lives
    for life, kept in zip(lives, kept_before(lives), strict=True):
        told = {plain(name, 80): [(s, v) for s, _, v in one] for name, one in life.metrics.items()}
        if life.losses:  # by the steps of the process, and metrics by those of the training
            told[_MEASURED] = [(kept + step, loss) for step, loss in life.losses]
        for name, values in told.items():
            # What a process trained beyond the checkpoint that the next one began from is undone.
            before = [one for one in found.get(name, []) if one[0] < values[0][0]]
            found[name] = [*before, *values]
    return [MetricSeries(name, *np.array(one, dtype=np.float64).T) for name, one in found.items()]


def metrics_charts(run: ReportedRun, key: str) -> Markup | None:
    """Return a chart for each metric; ``None`` if there is none.

    Args:
        run: any.
        key: begins their ids.
    """
    courses = courses_of(run)
    if not courses:
        return None
    charts = [_chart(one, f"{key}-metric{n}") for n, one in enumerate(courses[:_MOST])]
    more = len(courses) - _MOST
    note = f"{more} more metrics are in the output of --json." if more > 0 else None
    return element(
        "div",
        element("div", charts, class_="small"),
        element("p", note, class_="how") if note else None,
    )


def _chart(course: MetricSeries, key: str) -> Markup:
    few = thinned(np.clip(course.values, -_FURTHEST, _FURTHEST), _BUCKETS)
    steps = course.steps[few.last]
    low, high = float(few.least.min()), float(few.most.max())
    room = 0.06 * (high - low) or abs(high) * 0.1 or 1.0
    x = Scale(float(steps.min()), float(steps.max()), svg.WIDTH)
    y = Scale(high + room, low - room, HEIGHT)
    marks = ticks(low - room, high + room, 3)
    at = x(steps) if len(steps) > 1 else np.array([svg.WIDTH / 2])
    drawn = [
        svg.path(svg.level_way(y([value for value, _ in marks])), "grid"),
        svg.path(svg.line_way(at, y(few.mean)), "line own"),
    ]
    if len(steps) <= 60:
        drawn.append(svg.path(svg.dots_way(at, y(few.mean)), "dot own"))
    if not few.exact:
        spread = zip(at.tolist(), y(few.least).tolist(), y(few.most).tolist(), strict=True)
        way = Markup("".join(f"M{a:.2f} {b:.1f}V{c:.1f}" for a, b, c in spread))
        drawn.insert(1, svg.path(way, "spread"))
    told = f"{course.name}: first {course.values[0]:.4g}, last {course.values[-1]:.4g}"
    picture = svg.drawing(HEIGHT, told, *drawn, zoomed=False)
    labels = axis_labels(ticks(x.low, x.high, 4), x, "step of the training")
    words = [f"First {course.values[0]:.4g}, last {course.values[-1]:.4g}."]
    if not few.exact:
        words.append(f"{len(course.values):,} values in {len(steps)} groups: mean, and range.")
    return figure(key, course.name, words, plot(picture, marks, y, labels))
