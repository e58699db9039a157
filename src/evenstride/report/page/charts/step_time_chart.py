"""How long steps took, against what the best and the equal split would have made of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from evenstride.core.fleet import FloatArray
from evenstride.report.page.charts.chart import Chart, ChartMark, ChartPanel, listed
from evenstride.report.page.page_runs import Leg, ReportedRun
from evenstride.report.wording import duration

HEIGHT = 190.0
TITLE = "Step time against the best and the equal split"
_BEYOND = 3.0


@dataclass(frozen=True, slots=True, eq=False)
class StepTimeSeries:
    """Step times of a run in its buckets, in seconds.

    Args:
        least: shortest of a bucket.
        mean: of it.
        most: longest of it.
        equal: mean that the equal split would have; steps that cannot be compared count as they
            were, and a bucket without others is not a number.
        best: mean that the best split would have, likewise.
    """

    least: FloatArray
    mean: FloatArray
    most: FloatArray
    equal: FloatArray
    best: FloatArray


def step_times(run: ReportedRun) -> StepTimeSeries:
    """Return the step times of a run."""

    def judged(leg: Leg, split_s: FloatArray) -> FloatArray:
        generation, own_s = leg.generation, leg.durations_s
        other_s = np.where(generation.judged, own_s - generation.slowest_s + split_s, own_s)
        unknown = np.isnan(leg.thin(split_s).mean)
        return np.where(unknown, np.nan, leg.thin(other_s).mean)

    return StepTimeSeries(
        run.column(lambda leg: leg.thin(leg.durations_s).least),
        run.column(lambda leg: leg.thin(leg.durations_s).mean),
        run.column(lambda leg: leg.thin(leg.durations_s).most),
        run.column(lambda leg: judged(leg, leg.generation.equal_s)),
        run.column(lambda leg: judged(leg, leg.generation.best_s)),
    )


def top_s(runs: Sequence[ReportedRun]) -> float:
    """Return the longest time that is drawn: single steps that are much longer are not."""
    found = [step_times(run) for run in runs]
    lines = np.concatenate([np.concatenate([one.mean, one.equal, one.best]) for one in found])
    longest = np.concatenate([one.most for one in found])
    usual_s = float(np.nanquantile(longest, 0.98)) if len(longest) else 0.0
    most_s = max(float(np.nanmax(lines, initial=0.0)), usual_s)
    return 1.08 * min(most_s, _BEYOND * float(np.nanquantile(lines, 0.98))) or 1.0


def steptime_chart(
    run: ReportedRun, length_s: float, key: str, high_s: float, title: str = TITLE
) -> Chart:
    """Return the chart of a run with at least one step, with times up to ``high_s``."""
    found = step_times(run)
    unit_s, unit = (1.0, "s") if high_s >= 2.0 else (1e-3, "ms")
    entries = [("line own", "this run, mean"), ("bar range", "shortest to longest step of a bar")]
    if run.each == 1:
        entries = [("line own", "this run")]
    if not np.isnan(found.best).all():
        entries += [
            ("line equal", "equal split, by the fitted curves"),
            ("line best", "best split, by the fitted curves"),
        ]
    panel = ChartPanel(
        marks=_marks(run, found, high_s, unit_s),
        told=_told(found),
        height=HEIGHT,
        y_high=high_s / unit_s,
        y_name=f"{unit} per step",
    )
    return Chart(
        key=f"{key}-steptime",
        title=title,
        words=tuple(_words(run, found, high_s)),
        panels=(panel,),
        x_high=length_s,
        x_name="time in s",
        legend=tuple(entries),
        run=run,
        rows=tuple(_rows(run, found, unit_s, unit)),
    )


def _marks(
    run: ReportedRun, found: StepTimeSeries, high_s: float, unit_s: float
) -> tuple[ChartMark, ...]:
    left, right = run.edges_s
    beyond = np.flatnonzero(found.most > high_s)
    edge = np.full(len(beyond), (1.0 - 3.0 / HEIGHT) * high_s / unit_s)
    lines = (("equal", found.equal), ("own", found.mean), ("best", found.best))
    return (
        ChartMark("band", "bar range", left, found.least / unit_s, right, found.most / unit_s),
        *(
            ChartMark("stairs", f"line {name}", left, times / unit_s, right)
            for name, times in lines
        ),
        ChartMark("dots", "dot beyond", (left[beyond] + right[beyond]) / 2, edge),
    )


def _words(run: ReportedRun, found: StepTimeSeries, high_s: float) -> list[str]:
    told = []
    if run.each > 1:
        told.append(
            f"Each bar of {run.each:,} steps has its mean as a line, and its shortest and longest "
            "step as a band."
        )
    beyond = int(np.count_nonzero(found.most > high_s))
    if beyond:
        longest_s = duration(float(np.nanmax(found.most)))
        told.append(
            f"Dots at the upper edge: {beyond} {'bars have' if beyond > 1 else 'bar has'} steps "
            f"longer than the axis; the longest took {longest_s}."
        )
    if np.isnan(found.best).all():
        told.append("What other splits would have taken is not known.")
    return told


def _told(found: StepTimeSeries) -> str:
    return (
        f"Step time: {duration(float(np.nanmean(found.mean)))} on average, from "
        f"{duration(float(np.nanmin(found.least)))} to {duration(float(np.nanmax(found.most)))}"
    )


def _rows(
    run: ReportedRun, found: StepTimeSeries, unit_s: float, unit: str
) -> list[dict[str, Any]]:
    def column(values_s: FloatArray) -> list[float | None]:
        return listed(values_s / unit_s)

    own = [["", unit, column(found.mean)]]
    if run.each > 1:
        own = [["mean", unit, own[0][2]], ["longest", unit, column(found.most)]]
    rows: list[dict[str, Any]] = [{"name": "this run", "parts": own}]
    if not np.isnan(found.best).all():
        rows.append({"name": "equal split", "parts": [["", unit, column(found.equal)]]})
        rows.append({"name": "best split", "parts": [["", unit, column(found.best)]]})
    return rows
