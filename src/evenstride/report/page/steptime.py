"""How long steps took, against what the best and the equal split would have made of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from evenstride.core.fleet import FloatArray
from evenstride.report.page import drawing
from evenstride.report.page.frame import TimeAxis, figure, legend, listed, plot
from evenstride.report.page.markup import Markup, data_island
from evenstride.report.page.runs import Leg, Run
from evenstride.report.page.scales import Scale, ticks
from evenstride.report.words import duration

HEIGHT = 190.0
TITLE = "Step time against the best and the equal split"
_BEYOND = 3.0


@dataclass(frozen=True, slots=True, eq=False)
class StepTimes:
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


def step_times(run: Run) -> StepTimes:
    """Return the step times of a run."""

    def judged(leg: Leg, split_s: FloatArray) -> FloatArray:
        generation, own_s = leg.generation, leg.durations_s
        other_s = np.where(generation.judged, own_s - generation.slowest_s + split_s, own_s)
        unknown = np.isnan(leg.thin(split_s).mean)
        return np.where(unknown, np.nan, leg.thin(other_s).mean)

    return StepTimes(
        run.column(lambda leg: leg.thin(leg.durations_s).least),
        run.column(lambda leg: leg.thin(leg.durations_s).mean),
        run.column(lambda leg: leg.thin(leg.durations_s).most),
        run.column(lambda leg: judged(leg, leg.generation.equal_s)),
        run.column(lambda leg: judged(leg, leg.generation.best_s)),
    )


def top_s(runs: Sequence[Run]) -> float:
    """Return the longest time that is drawn: single steps that are much longer are not."""
    found = [step_times(run) for run in runs]
    lines = np.concatenate([np.concatenate([one.mean, one.equal, one.best]) for one in found])
    longest = np.concatenate([one.most for one in found])
    usual_s = float(np.nanquantile(longest, 0.98)) if len(longest) else 0.0
    most_s = max(float(np.nanmax(lines, initial=0.0)), usual_s)
    return 1.08 * min(most_s, _BEYOND * float(np.nanquantile(lines, 0.98))) or 1.0


def steptime_chart(run: Run, axis: TimeAxis, key: str, high_s: float, title: str = TITLE) -> Markup:
    """Return the chart of one run.

    Args:
        run: with at least one step.
        axis: of it.
        key: begins the ids of what is made.
        high_s: end of the axis of step times; see `top_s`.
        title: of the figure.
    """
    found = step_times(run)
    unit_s, unit = (1.0, "s") if high_s >= 2.0 else (1e-3, "ms")
    y = Scale(high_s / unit_s, 0.0, HEIGHT)
    marks = ticks(0.0, high_s / unit_s, 4)
    drawn = drawing.drawing(HEIGHT, _told(found), *_paths(run, found, axis, y, unit_s, marks))
    entries = [("line own", "this run, mean"), ("bar range", "shortest to longest step of a bar")]
    if run.each == 1:
        entries = [("line own", "this run")]
    if not np.isnan(found.best).all():
        entries += [
            ("line equal", "equal split, by the fitted curves"),
            ("line best", "best split, by the fitted curves"),
        ]
    words = _words(run, found, high_s)
    area = plot(drawn, marks, y, axis.labels(run), unit=f"{unit} per step")
    name = f"{key}-steptime"
    return figure(name, title, words, area, legend(*entries), _data(run, found, unit_s, unit, name))


def _paths(
    run: Run,
    found: StepTimes,
    axis: TimeAxis,
    y: Scale,
    unit_s: float,
    marks: list[tuple[float, str]],
) -> list[Markup]:
    left = axis.scale(run.column(lambda leg: leg.left_s))
    right = axis.scale(run.column(lambda leg: leg.right_s))

    def at(values_s: FloatArray) -> FloatArray:
        return np.maximum(y(values_s / unit_s), 0.0)

    beyond = np.flatnonzero(y(found.most / unit_s) < 0.0)
    middle = (left[beyond] + right[beyond]) / 2
    return [
        drawing.path(drawing.level_way(y([value for value, _ in marks])), "grid"),
        drawing.path(
            drawing.upright_way(axis.scale([at_s for at_s, _ in run.pauses]), HEIGHT), "pause"
        ),
        drawing.path(drawing.band_way(left, right, at(found.least), at(found.most)), "bar range"),
        drawing.path(drawing.steps_way(left, right, at(found.equal)), "line equal"),
        drawing.path(drawing.steps_way(left, right, at(found.mean)), "line own"),
        drawing.path(drawing.steps_way(left, right, at(found.best)), "line best"),
        drawing.path(drawing.dots_way(middle, np.full(len(middle), 3.0)), "dot beyond"),
    ]


def _words(run: Run, found: StepTimes, high_s: float) -> list[str]:
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


def _told(found: StepTimes) -> str:
    return (
        f"Step time: {duration(float(np.nanmean(found.mean)))} on average, from "
        f"{duration(float(np.nanmin(found.least)))} to {duration(float(np.nanmax(found.most)))}"
    )


def _data(run: Run, found: StepTimes, unit_s: float, unit: str, name: str) -> Markup:
    def column(values_s: FloatArray) -> list[float | None]:
        return listed(values_s / unit_s)

    own = [["", unit, column(found.mean)]]
    if run.each > 1:
        own = [["mean", unit, own[0][2]], ["longest", unit, column(found.most)]]
    rows = [{"name": "this run", "parts": own}]
    if not np.isnan(found.best).all():
        rows.append({"name": "equal split", "parts": [["", unit, column(found.equal)]]})
        rows.append({"name": "best split", "parts": [["", unit, column(found.best)]]})
    return data_island(f"{name}-data", rows)
