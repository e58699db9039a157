"""Which worker had how many samples, over the run."""

from __future__ import annotations

import numpy as np

from evenstride.core.fleet import FloatArray
from evenstride.report.page import drawing
from evenstride.report.page.frame import TimeAxis, figure, legend, listed, plot
from evenstride.report.page.markup import Markup, data_island, element
from evenstride.report.page.palette import look
from evenstride.report.page.runs import MOST_LANES, Leg, Run
from evenstride.report.page.scales import Scale, ticks

HEIGHT = 190.0
TITLE = "Shares"


def share_of(leg: Leg, rank: int) -> FloatArray:
    """Return a worker's samples in the split of each step; not a number where none was told."""
    return leg.share(rank)


def shares_chart(run: Run, axis: TimeAxis, key: str) -> Markup:
    """Return the chart: a line for each worker that is drawn.

    Args:
        run: with at least one step.
        axis: of it.
        key: begins the ids of what is made.
    """
    means = {
        lane: run.of_lane(lane, lambda leg, rank: leg.thin(share_of(leg, rank)).mean)
        for lane in run.drawn
    }
    high = 1.08 * max((float(np.nanmax(one, initial=0.0)) for one in means.values()), default=1.0)
    y = Scale(high or 1.0, 0.0, HEIGHT)
    marks = ticks(0.0, high or 1.0, 4)
    lines = [_line(run, lane, means[lane], axis, y) for lane in run.drawn]
    grid = drawing.path(drawing.level_way(y([value for value, _ in marks])), "grid")
    pauses = axis.scale([at_s for at_s, _ in run.pauses])
    pause = drawing.path(drawing.upright_way(pauses, HEIGHT), "pause")
    drawn = drawing.drawing(HEIGHT, _told(run, means), grid, pause, *lines)
    area = plot(drawn, marks, y, axis.labels(run), unit="samples per step")
    entries = legend(*[(f"line {look(lane)}", run.lanes[lane]) for lane in run.drawn])
    rows = [
        {"name": run.lanes[lane], "worker": lane, "parts": [["", "samples", listed(means[lane])]]}
        for lane in run.drawn
    ]
    name = f"{key}-shares"
    return figure(name, TITLE, _words(run), area, entries, data_island(f"{name}-data", rows))


def _words(run: Run) -> list[str]:
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


def _line(run: Run, lane: int, mean: FloatArray, axis: TimeAxis, y: Scale) -> Markup:
    left = axis.scale(run.column(lambda leg: leg.left_s))
    right = axis.scale(run.column(lambda leg: leg.right_s))
    parts = [
        drawing.path(drawing.steps_way(left, right, y(mean)), f"line {look(lane)}", run.lanes[lane])
    ]
    if run.each > 1:
        least = run.of_lane(lane, lambda leg, rank: leg.thin(share_of(leg, rank)).least)
        most = run.of_lane(lane, lambda leg, rank: leg.thin(share_of(leg, rank)).most)
        band = drawing.band_way(left, right, y(least), y(most))
        parts.insert(0, drawing.path(band, f"band {look(lane)}"))
    return element("g", *parts, data_worker=lane)


def _told(run: Run, means: dict[int, FloatArray]) -> str:
    told = []
    for lane in run.drawn[:12]:
        known = means[lane][~np.isnan(means[lane])]
        if len(known):
            told.append(f"{run.lanes[lane]} from {known[0]:.0f} to {known[-1]:.0f}")
    return f"Samples per step, first and last: {', '.join(told)}"
