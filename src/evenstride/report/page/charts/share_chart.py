"""Which worker had how many samples, over the run."""

from __future__ import annotations

import numpy as np

from evenstride.core.fleet import FloatArray
from evenstride.report.page.charts.axes import Scale
from evenstride.report.page.charts.chart import ChartMark, LineChart
from evenstride.report.page.charts.chart_frame import listed
from evenstride.report.page.charts.palette import look
from evenstride.report.page.page_runs import MOST_LANES, Leg, ReportedRun

HEIGHT = 190.0
TITLE = "Shares"


def share_of(leg: Leg, rank: int) -> FloatArray:
    """Return a worker's samples in the split of each step; not a number where none was told."""
    return leg.share(rank)


def shares_chart(run: ReportedRun, x: Scale, key: str) -> LineChart:
    """Return the chart: a line for each worker that is drawn.

    Args:
        run: with at least one step.
        x: its time.
        key: begins the ids of what is made.
    """
    means = {
        lane: run.of_lane(lane, lambda leg, rank: leg.thin(share_of(leg, rank)).mean)
        for lane in run.drawn
    }
    high = 1.08 * max((float(np.nanmax(one, initial=0.0)) for one in means.values()), default=1.0)
    return LineChart(
        key=f"{key}-shares",
        title=TITLE,
        words=tuple(_words(run)),
        told=_told(run, means),
        height=HEIGHT,
        x=x,
        x_name="time in s",
        y_high=high or 1.0,
        y_name="samples per step",
        marks=tuple(mark for lane in run.drawn for mark in _marks(run, lane, means[lane])),
        legend=tuple((f"line {look(lane)}", run.lanes[lane]) for lane in run.drawn),
        run=run,
        rows=tuple(
            {"name": run.lanes[lane], "worker": lane, "parts": [["", "samples", listed(mean)]]}
            for lane, mean in means.items()
        ),
    )


def _words(run: ReportedRun) -> list[str]:
    told = ["Samples of each worker in a step; together they are the global batch."]
    if any(leg.curtailed for leg in run.legs):
        told.append("Steps that have fewer, as an epoch's last one, are drawn as the one before.")
    if run.each > 1:
        told.append(
            f"A line is the mean of {run.each:,} steps, the band around it from the smallest share "
            "to the largest."
        )
    if len(run.lanes) > MOST_LANES:
        told.append(f"{MOST_LANES} of {len(run.lanes):,} workers are drawn.")
    return told


def _marks(run: ReportedRun, lane: int, mean: FloatArray) -> list[ChartMark]:
    left, right = run.edges_s
    name, line = run.lanes[lane], f"line {look(lane)}"
    found = [ChartMark("stairs", line, left, mean, right, name=name, worker=lane)]
    if run.each > 1:
        least = run.of_lane(lane, lambda leg, rank: leg.thin(share_of(leg, rank)).least)
        most = run.of_lane(lane, lambda leg, rank: leg.thin(share_of(leg, rank)).most)
        band = f"band {look(lane)}"
        found.insert(0, ChartMark("band", band, left, least, right, most, worker=lane))
    return found


def _told(run: ReportedRun, means: dict[int, FloatArray]) -> str:
    told = []
    for lane in run.drawn[:12]:
        known = means[lane][~np.isnan(means[lane])]
        if len(known):
            told.append(f"{run.lanes[lane]} from {known[0]:.0f} to {known[-1]:.0f}")
    return f"Samples per step, first and last: {', '.join(told)}"
