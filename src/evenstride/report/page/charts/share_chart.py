"""Which worker had how many samples, over the run."""

from __future__ import annotations

import numpy as np

from evenstride.core.fleet import FloatArray
from evenstride.report.page.charts.chart import Chart, ChartMark, ChartPanel, listed, look
from evenstride.report.page.page_runs import MOST_LANES, ReportedRun


def shares_chart(run: ReportedRun, length_s: float, key: str) -> Chart:
    """Return the chart of a run with at least one step: a line for each worker that is drawn."""
    means = {
        lane: run.of_lane(lane, lambda leg, rank: leg.thin(leg.share(rank)).mean)
        for lane in run.drawn
    }
    high = 1.08 * max((float(np.nanmax(one, initial=0.0)) for one in means.values()), default=1.0)
    panel = ChartPanel(
        marks=tuple(mark for lane in run.drawn for mark in _marks(run, lane, means[lane])),
        told=_told(run, means),
        height=190.0,
        y_high=high or 1.0,
        y_name="samples per step",
    )
    return Chart(
        key=f"{key}-shares",
        title="Shares",
        words=tuple(_words(run)),
        panels=(panel,),
        x_high=length_s,
        x_name="time in s",
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
        least = run.of_lane(lane, lambda leg, rank: leg.thin(leg.share(rank)).least)
        most = run.of_lane(lane, lambda leg, rank: leg.thin(leg.share(rank)).most)
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
