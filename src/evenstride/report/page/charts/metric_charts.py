"""Losses and metrics that the run has told of, each in a small chart over the training's steps."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from evenstride.core.fleet import FloatArray
from evenstride.report.analysis.restarts import kept_before
from evenstride.report.analysis.thinning import thinned
from evenstride.report.page.charts.chart import Chart, ChartMark, ChartPanel
from evenstride.report.page.page_runs import ReportedRun
from evenstride.report.wording import plain

_BUCKETS = 400
_FURTHEST = 1e100  # drawn at most: sums and differences of such values are still numbers
_MEASURED = "loss of measured steps"


@dataclass(frozen=True, slots=True, eq=False)
class MetricSeries:
    """One metric over the run: the steps at which it was found, and its values."""

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


def metrics_charts(run: ReportedRun, key: str) -> list[Chart]:
    """Return a chart for each metric."""
    return [_chart(one, f"{key}-metric{n}") for n, one in enumerate(courses_of(run))]


def _chart(course: MetricSeries, key: str) -> Chart:
    few = thinned(np.clip(course.values, -_FURTHEST, _FURTHEST), _BUCKETS)
    steps = course.steps[few.last]
    low, high = float(few.least.min()), float(few.most.max())
    room = 0.06 * (high - low) or abs(high) * 0.1 or 1.0
    beside = 0.0 if len(steps) > 1 else 1.0
    marks = [ChartMark("line", "line own", steps, few.mean)]
    if len(steps) <= 60:
        marks.append(ChartMark("dots", "dot own", steps, few.mean))
    words = [f"First {course.values[0]:.4g}, last {course.values[-1]:.4g}."]
    if not few.exact:
        marks.insert(0, ChartMark("upright", "spread", steps, few.least, top=few.most))
        words.append(f"{len(course.values):,} values in {len(steps)} groups: mean, and range.")
    panel = ChartPanel(
        marks=tuple(marks),
        told=f"{course.name}: first {course.values[0]:.4g}, last {course.values[-1]:.4g}",
        height=130.0,
        y_low=low - room,
        y_high=high + room,
    )
    return Chart(
        key=key,
        title=course.name,
        words=tuple(words),
        panels=(panel,),
        x_low=float(steps.min()) - beside,
        x_high=float(steps.max()) + beside,
        x_name="step of the training",
    )
