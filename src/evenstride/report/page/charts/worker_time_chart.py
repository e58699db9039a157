"""Where the time of each worker went, over the whole run: its Gantt chart in buckets of steps."""

from __future__ import annotations

from typing import Any

import numpy as np

from evenstride.core.fleet import FloatArray
from evenstride.report.page.charts import svg
from evenstride.report.page.charts.chart_frame import TimeAxis, figure, legend, listed, plot
from evenstride.report.page.markup import Markup, data_island, element, together
from evenstride.report.page.page_runs import MOST_LANES, Leg, ReportedRun
from evenstride.report.text_tables import shorten

HEIGHT = 30.0
_MOST_CHANGES = 6
"""Of a worker's speed in one generation; more are noise to a reader."""
TITLE = "Where each worker's time went"
STATES = (
    ("busy", "busy: its own data and compute"),
    ("waiting", "waiting for a slower worker"),
    ("communication", "communication, and the rest of the wait"),
    ("apart", "apart from steps: evaluation, saving, or nothing was told"),
)


def parts_of(leg: Leg, rank: int) -> FloatArray:
    """Return what a worker did in each bucket, as parts of its time, ``(4, buckets)``.

    Returns:
        Busy, waiting for slower workers, the rest of the wait, and the longest wait for others of
        a single step, as a part of that step. Not a number where nothing is known.
    """
    table = leg.generation.table
    waited_s = leg.waits.waited_s[:, rank]
    rest_s = np.maximum(np.nan_to_num(table.wait_s[:, rank]) - waited_s, 0.0)
    sums = np.stack([leg.sums(one) for one in (table.busy_s[:, rank], waited_s, rest_s)])
    whole_s = np.maximum(leg.right_s - leg.left_s, sums.sum(axis=0))
    longest = leg.thin(waited_s / np.maximum(leg.durations_s, 1e-12)).most
    found = np.vstack([sums / np.maximum(whole_s, 1e-12), np.minimum(longest, 1.0)])
    found[:, sums[0] == 0.0] = np.nan
    return np.asarray(found)


def times_chart(run: ReportedRun, axis: TimeAxis, key: str) -> Markup:
    """Return the chart: a lane for each worker.

    Args:
        run: with at least one step.
        axis: of it.
        key: begins the ids of what is made.
    """
    lanes = [_lane(run, lane, axis) for lane in run.drawn]
    rows = [element("div", *lanes, class_="lanes"), plot(Markup(""), None, None, axis.labels(run))]
    shown = STATES if run.lockstep else tuple(one for one in STATES if one[0] != "waiting")
    entries = [(f"bar {state}", told) for state, told in shown]
    if run.each > 1 and run.lockstep:
        entries.append(("line peak", "the one step of the bar in which it waited most"))
    if any(len(_changes_s(run, lane)) for lane in run.drawn):
        entries.append(("line mark", "its speed changed, and stayed so for a while"))
    name = f"{key}-times"
    return figure(name, TITLE, _words(run), *rows, legend(*entries), _data(run, name))


def _words(run: ReportedRun) -> list[str]:
    told = ["The height of a colour is its part of the time; full height is all of it."]
    if run.each > 1:
        told[0] = (
            f"One bar stands for {run.each:,} steps (the last of a generation for fewer). "
            + told[0]
        )
    else:
        told[0] = f"One bar is one step. {told[0]}"
    if len(run.lanes) > MOST_LANES:
        told.append(
            f"{MOST_LANES} of {len(run.lanes):,} workers are drawn: those who kept the others "
            "waiting longest."
        )
    return told


def _lane(run: ReportedRun, lane: int, axis: TimeAxis) -> Markup:
    left = axis.scale(run.column(lambda leg: leg.left_s))
    right = axis.scale(run.column(lambda leg: leg.right_s))
    busy, waiting, rest, longest = np.hstack([_parts(leg, leg.rank(lane)) for leg in run.legs])
    top, bottom = np.zeros(len(busy)), np.full(len(busy), HEIGHT)
    top[np.isnan(busy)] = bottom[np.isnan(busy)] = np.nan
    above = HEIGHT * (1.0 - busy)
    drawn = [
        svg.path(svg.band_way(left, right, bottom, top), "bar apart"),
        svg.path(svg.band_way(left, right, bottom, above), "bar busy"),
        svg.path(svg.band_way(left, right, above, above - HEIGHT * rest), "bar communication"),
    ]
    if run.lockstep:
        wait = svg.band_way(left, right, HEIGHT * waiting, top)
        drawn.append(svg.path(wait, "bar waiting"))
        if run.each > 1:
            drawn.append(svg.path(svg.steps_way(left, right, HEIGHT * longest), "line peak"))
    pauses = axis.scale([at_s for at_s, _ in run.pauses])
    drawn.append(svg.path(svg.upright_way(pauses, HEIGHT), "pause"))
    marks = axis.scale(_changes_s(run, lane))
    drawn.append(svg.path(svg.upright_way(marks, HEIGHT), "mark"))
    told = f"{run.lanes[lane]}: {_summary(run, busy, waiting, rest)}"
    return element(
        "div",
        element("div", shorten(run.lanes[lane]), class_="name", title=run.lanes[lane]),
        element("div", svg.drawing(HEIGHT, told, *drawn), class_="area"),
        class_="lane",
        data_worker=lane,
    )


def _changes_s(run: ReportedRun, lane: int) -> FloatArray:
    """Return when a worker's speed changed, on the run's axis."""
    found: list[float] = []
    for leg in run.legs:
        rank = leg.rank(lane)
        phases = () if rank is None else leg.phases(rank)
        if len(phases) <= _MOST_CHANGES + 1:
            found += [float(leg.opens_s[phase.first]) for phase in phases[1:]]
    return np.array(found)


def _parts(leg: Leg, rank: int | None) -> FloatArray:
    return np.full((4, leg.buckets), np.nan) if rank is None else parts_of(leg, rank)


def _summary(run: ReportedRun, busy: FloatArray, waiting: FloatArray, rest: FloatArray) -> str:
    spent_s = run.column(lambda leg: leg.right_s - leg.left_s)
    there = ~np.isnan(busy)
    if not there.any():
        return "nothing was told"
    parts = [
        float(np.average(one[there], weights=spent_s[there] + 1e-12))
        for one in (busy, waiting, rest)
    ]
    told = f"busy {parts[0]:.0%} of the time"
    return f"{told}, waiting for slower workers {parts[1]:.0%}" if run.lockstep else told


def _data(run: ReportedRun, name: str) -> Markup:
    rows: list[dict[str, Any]] = []
    for lane in run.drawn:
        busy, waiting, rest, longest = 100 * np.hstack(
            [_parts(leg, leg.rank(lane)) for leg in run.legs]
        )
        parts = [["busy", "%", listed(busy, 3)]]
        if run.lockstep:
            parts.append(["waiting", "%", listed(waiting, 3)])
            if run.each > 1:
                parts.append(["most in one step", "%", listed(longest, 3)])
        parts.append(["communication", "%", listed(rest, 3)])
        rows.append({"name": run.lanes[lane], "worker": lane, "parts": parts})
    return together(data_island(f"{name}-data", rows))
