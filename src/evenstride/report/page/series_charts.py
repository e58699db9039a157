"""Charts of step times and shares over the run, time curves, losses and metrics."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from evenstride.core.fleet import FloatArray
from evenstride.report.analysis.attribution import speeds_of
from evenstride.report.analysis.run_timeline import kept_before
from evenstride.report.page.chart import Chart, ChartMark, ChartPanel, listed, look, unit_of
from evenstride.report.page.page_runs import MOST_LANES, Leg, ReportedRun, thinned
from evenstride.report.wording import duration, plain

HEIGHT = 190.0
TITLE = "Step time against the best and the equal split"
_BEYOND = 3.0  # times the time of nearly all steps; longer steps are cut off
_BUCKETS = 400  # of a metric
_FURTHEST = 1e100  # largest drawn value: sums and differences of such values do not overflow
_MEASURED = "loss of measured steps"


@dataclass(frozen=True, slots=True, eq=False)
class StepTimeSeries:
    """Step times of a run in its buckets, in seconds.

    ``equal`` and ``best`` are the mean times with those splits. Steps without a comparison count
    with their own times. A bucket without a comparison is NaN.
    """

    least: FloatArray
    mean: FloatArray
    most: FloatArray
    equal: FloatArray
    best: FloatArray


def step_times(run: ReportedRun) -> StepTimeSeries:
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
    """Return the upper end of the time axis. Single steps that are much longer are cut off."""
    found = [step_times(run) for run in runs]
    lines = np.concatenate([np.concatenate([one.mean, one.equal, one.best]) for one in found])
    longest = np.concatenate([one.most for one in found])
    usual_s = float(np.nanquantile(longest, 0.98)) if len(longest) else 0.0
    most_s = max(float(np.nanmax(lines, initial=0.0)), usual_s)
    return 1.08 * min(most_s, _BEYOND * float(np.nanquantile(lines, 0.98))) or 1.0


def steptime_chart(
    run: ReportedRun, length_s: float, key: str, high_s: float, title: str = TITLE
) -> Chart:
    """Return the chart of step times up to ``high_s``; the run must have at least one step."""
    found = step_times(run)
    unit_s, unit = unit_of(high_s)
    entries = [("line own", "this run, mean"), ("bar range", "shortest to longest step of a bar")]
    if run.each == 1:
        entries = [("line own", "this run")]
    if not np.isnan(found.best).all():
        entries += [
            ("line equal", "equal split, by the fitted curves"),
            ("line best", "best split, by the fitted curves"),
        ]
    panel = ChartPanel(
        marks=_steptime_marks(run, found, high_s, unit_s),
        title=_steptime_title(found),
        height=HEIGHT,
        y_high=high_s / unit_s,
        y_name=f"{unit} per step",
    )
    return Chart(
        key=f"{key}-steptime",
        title=title,
        words=tuple(_steptime_words(run, found, high_s)),
        panels=(panel,),
        x_high=length_s,
        x_name="time in s",
        legend=tuple(entries),
        axis=run.axis(length_s),
        rows=tuple(_steptime_rows(run, found, unit_s, unit)),
    )


def _steptime_marks(
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


def _steptime_words(run: ReportedRun, found: StepTimeSeries, high_s: float) -> list[str]:
    words = []
    if run.each > 1:
        words.append(
            f"The line is the mean of {run.each:,} steps; the band reaches from the shortest to "
            "the longest."
        )
    beyond = int(np.count_nonzero(found.most > high_s))
    if beyond:
        longest_s = duration(float(np.nanmax(found.most)))
        words.append(
            f"Dots at the upper edge: {beyond} {'bars have' if beyond > 1 else 'bar has'} steps "
            f"longer than the axis; the longest took {longest_s}."
        )
    if np.isnan(found.best).all():
        words.append("The times of other splits are unknown.")
    return words


def _steptime_title(found: StepTimeSeries) -> str:
    return (
        f"Step time: {duration(float(np.nanmean(found.mean)))} on average, from "
        f"{duration(float(np.nanmin(found.least)))} to {duration(float(np.nanmax(found.most)))}"
    )


def _steptime_rows(
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


def shares_chart(run: ReportedRun, length_s: float, key: str) -> Chart:
    """Return a chart with a line for each drawn worker; the run must have at least one step."""
    means = {
        lane: run.of_lane(lane, lambda leg, rank: leg.thin(leg.share(rank)).mean)
        for lane in run.drawn
    }
    high = 1.08 * max((float(np.nanmax(one, initial=0.0)) for one in means.values()), default=1.0)
    panel = ChartPanel(
        marks=tuple(mark for lane in run.drawn for mark in _share_marks(run, lane, means[lane])),
        title=_share_title(run, means),
        height=190.0,
        y_high=high or 1.0,
        y_name="samples per step",
    )
    return Chart(
        key=f"{key}-shares",
        title="Shares",
        words=tuple(_share_words(run)),
        panels=(panel,),
        x_high=length_s,
        x_name="time in s",
        legend=tuple((f"line {look(lane)}", run.lanes[lane]) for lane in run.drawn),
        axis=run.axis(length_s),
        rows=tuple(
            {"name": run.lanes[lane], "worker": lane, "parts": [["", "samples", listed(mean)]]}
            for lane, mean in means.items()
        ),
    )


def _share_words(run: ReportedRun) -> list[str]:
    words = ["Samples of each worker in a step. Their sum is the global batch."]
    if any(leg.curtailed for leg in run.legs):
        words.append(
            "A step with fewer samples, as the last of an epoch, shows the previous split."
        )
    if run.each > 1:
        words.append(
            f"The line is the mean of {run.each:,} steps; the band reaches from the smallest to "
            "the largest share."
        )
    if len(run.lanes) > MOST_LANES:
        words.append(f"{MOST_LANES} of {len(run.lanes):,} workers are drawn.")
    return words


def _share_marks(run: ReportedRun, lane: int, mean: FloatArray) -> list[ChartMark]:
    left, right = run.edges_s
    name, line = run.lanes[lane], f"line {look(lane)}"
    found = [ChartMark("stairs", line, left, mean, right, name=name, worker=lane)]
    if run.each > 1:
        least = run.of_lane(lane, lambda leg, rank: leg.thin(leg.share(rank)).least)
        most = run.of_lane(lane, lambda leg, rank: leg.thin(leg.share(rank)).most)
        band = f"band {look(lane)}"
        found.insert(0, ChartMark("band", band, left, least, right, most, worker=lane))
    return found


def _share_title(run: ReportedRun, means: dict[int, FloatArray]) -> str:
    ranges = []
    for lane in run.drawn[:12]:
        known = means[lane][~np.isnan(means[lane])]
        if len(known):
            ranges.append(f"{run.lanes[lane]} from {known[0]:.0f} to {known[-1]:.0f}")
    return f"Samples per step, first and last: {', '.join(ranges)}"


@dataclass(frozen=True, slots=True, eq=False)
class Fitted:
    """A worker's fitted curve and its measurements, in seconds."""

    lane: int
    fixed_s: float
    per_sample_s: float
    shares: FloatArray  # measured since the last change of its speed
    busy_s: FloatArray  # median busy time at each of them
    before: FloatArray  # the same before that change
    before_s: FloatArray


def fitted_of(run: ReportedRun) -> list[Fitted]:
    """Return the curves of the latest generation with fitted curves."""
    leg = next((one for one in reversed(run.legs) if one.generation.curves is not None), None)
    if leg is None:
        return []
    drawn = [rank for rank in leg.generation.serving if leg.lanes[rank] in run.drawn]
    return [_fitted(leg, rank) for rank in drawn]


def _fitted(leg: Leg, rank: int) -> Fitted:
    table, curves = leg.generation.table, leg.generation.curves
    assert curves is not None
    place = leg.generation.serving.index(rank)
    speeds = speeds_of(leg.generation, rank)
    phases = leg.phases(rank)
    usable = ~np.isnan(speeds)
    now = np.arange(len(usable)) >= (phases[-1].first if phases else 0)
    busy_s, share = table.busy_s[:, rank], table.share[:, rank].astype(np.float64)
    return Fitted(
        leg.lanes[rank],
        float(curves.fixed_s[place]),
        float(curves.per_sample_s[place]),
        *_medians(share[usable & now], busy_s[usable & now]),
        *_medians(share[usable & ~now], busy_s[usable & ~now]),
    )


def _medians(shares: FloatArray, busy_s: FloatArray) -> tuple[FloatArray, FloatArray]:
    found = np.unique(shares)
    return found, np.array([float(np.median(busy_s[shares == one])) for one in found])


def curves_chart(run: ReportedRun, key: str) -> Chart | None:
    """Return the chart of fitted curves; ``None`` without curves."""
    found = fitted_of(run)
    if not found:
        return None
    most = 1.1 * max(float(np.max(np.append(one.shares, one.before), initial=1.0)) for one in found)
    times_s = np.concatenate([np.append(one.busy_s, one.before_s) for one in found])
    high_s = 1.08 * float(np.max(times_s, initial=1e-6))
    unit_s, unit = unit_of(high_s)
    panel = ChartPanel(
        marks=tuple(mark for one in found for mark in _curve_marks(run, one, most, unit_s)),
        title="Fitted time curves: "
        + "; ".join(f"{run.lanes[one.lane]} {_formula(one)}" for one in found[:12]),
        height=240.0,
        y_high=high_s / unit_s,
        y_name=f"{unit} busy",
    )
    return Chart(
        key=f"{key}-curves",
        title="Fitted time curves",
        words=(
            "Lines are the controller's curves at the end. A dot is the median busy time of all "
            "steps with that share since the last change of the worker's speed; rings are older.",
        ),
        panels=(panel,),
        x_high=most,
        x_name="samples of a worker in a step",
        legend=tuple(
            (f"line {look(one.lane)}", f"{run.lanes[one.lane]}: {_formula(one)}") for one in found
        ),
    )


def _formula(one: Fitted) -> str:
    return f"{1e3 * one.fixed_s:.3g} ms + {1e3 * one.per_sample_s:.3g} ms per sample"


def _curve_marks(
    run: ReportedRun, one: Fitted, most: float, unit_s: float
) -> tuple[ChartMark, ...]:
    lane, name, style = one.lane, run.lanes[one.lane], look(one.lane)
    ends = np.array([0.0, most])
    line = (one.fixed_s + one.per_sample_s * ends) / unit_s
    ring, before = f"dot {style} hollow", f"{name}, before its speed changed"
    return (
        ChartMark("line", f"line {style}", ends, line, name=name, worker=lane),
        ChartMark("dots", ring, one.before, one.before_s / unit_s, name=before, worker=lane),
        ChartMark("dots", f"dot {style}", one.shares, one.busy_s / unit_s, name=name, worker=lane),
    )


@dataclass(frozen=True, slots=True, eq=False)
class MetricSeries:
    """One metric over the run: the steps at which it was recorded, and its values."""

    name: str
    steps: FloatArray
    values: FloatArray


def courses_of(run: ReportedRun) -> list[MetricSeries]:
    """Return the series of each metric, in the order of their first records."""
    found: dict[str, list[tuple[int, float]]] = {}
    lives = run.story.lives
    for life, kept in zip(lives, kept_before(lives), strict=True):
        series = {
            plain(name, 80): [(s, v) for s, _, v in one] for name, one in life.metrics.items()
        }
        if life.losses:  # losses count the steps of the process, metrics those of the training
            series[_MEASURED] = [(kept + step, loss) for step, loss in life.losses]
        for name, values in series.items():
            # The next process repeats the steps after the checkpoint from which it started.
            before = [one for one in found.get(name, []) if one[0] < values[0][0]]
            found[name] = [*before, *values]
    return [MetricSeries(name, *np.array(one, dtype=np.float64).T) for name, one in found.items()]


def metrics_charts(run: ReportedRun, key: str) -> list[Chart]:
    """Return a chart for each metric."""
    return [_metric_chart(one, f"{key}-metric{n}") for n, one in enumerate(courses_of(run))]


def _metric_chart(course: MetricSeries, key: str) -> Chart:
    few = thinned(np.clip(course.values, -_FURTHEST, _FURTHEST), _BUCKETS)
    steps = course.steps[few.last]
    low, high = float(few.least.min()), float(few.most.max())
    room = 0.06 * (high - low) or abs(high) * 0.1 or 1.0
    margin = 0.0 if len(steps) > 1 else 1.0
    marks = [ChartMark("line", "line own", steps, few.mean)]
    if len(steps) <= 60:
        marks.append(ChartMark("dots", "dot own", steps, few.mean))
    words = [f"First {course.values[0]:.4g}, last {course.values[-1]:.4g}."]
    if not few.exact:
        marks.insert(0, ChartMark("upright", "spread", steps, few.least, top=few.most))
        words.append(f"{len(course.values):,} values in {len(steps)} groups: mean and range.")
    panel = ChartPanel(
        marks=tuple(marks),
        title=f"{course.name}: first {course.values[0]:.4g}, last {course.values[-1]:.4g}",
        height=130.0,
        y_low=low - room,
        y_high=high + room,
    )
    return Chart(
        key=key,
        title=course.name,
        words=tuple(words),
        panels=(panel,),
        x_low=float(steps.min()) - margin,
        x_high=float(steps.max()) + margin,
        x_name="step of the training",
    )
