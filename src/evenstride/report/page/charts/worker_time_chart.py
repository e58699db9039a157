"""Where the time of each worker went, over the whole run: its Gantt chart in buckets of steps."""

from __future__ import annotations

from typing import Any

import numpy as np

from evenstride.core.fleet import FloatArray
from evenstride.report.page.charts.chart import Chart, ChartMark, ChartPanel, listed
from evenstride.report.page.page_runs import MOST_LANES, Leg, ReportedRun

_MOST_CHANGES = 6  # of a worker's speed in one generation; more are noise to a reader
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


def times_chart(run: ReportedRun, length_s: float, key: str) -> Chart:
    """Return the chart of a run with at least one step: a lane for each worker."""
    parts = {
        lane: np.hstack([_parts(leg, leg.rank(lane)) for leg in run.legs]) for lane in run.drawn
    }
    shown = STATES if run.lockstep else tuple(one for one in STATES if one[0] != "waiting")
    entries = [(f"bar {state}", told) for state, told in shown]
    if run.each > 1 and run.lockstep:
        entries.append(("line peak", "the one step of the bar in which it waited most"))
    if any(len(_changes_s(run, lane)) for lane in run.drawn):
        entries.append(("line mark", "its speed changed, and stayed so for a while"))
    return Chart(
        key=f"{key}-times",
        title="Where each worker's time went",
        words=tuple(_words(run)),
        panels=tuple(_lane(run, lane, of) for lane, of in parts.items()),
        x_high=length_s,
        x_name="time in s",
        legend=tuple(entries),
        run=run,
        rows=tuple(_row(run, lane, of) for lane, of in parts.items()),
    )


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


def _lane(run: ReportedRun, lane: int, parts: FloatArray) -> ChartPanel:
    left, right = run.edges_s
    busy, waiting, rest, longest = parts
    bottom = np.where(np.isnan(busy), np.nan, 0.0)
    found = [
        ChartMark("band", "bar apart", left, bottom, right, bottom + 1.0),
        ChartMark("band", "bar busy", left, bottom, right, busy),
        ChartMark("band", "bar communication", left, busy, right, busy + rest),
    ]
    if run.lockstep:
        found.append(ChartMark("band", "bar waiting", left, 1.0 - waiting, right, bottom + 1.0))
        if run.each > 1:
            found.append(ChartMark("stairs", "line peak", left, 1.0 - longest, right))
    changes_s = _changes_s(run, lane)
    ends = np.zeros(len(changes_s))
    found.append(ChartMark("upright", "mark", changes_s, ends, top=ends + 1.0))
    return ChartPanel(
        marks=tuple(found),
        told=f"{run.lanes[lane]}: {_summary(run, busy, waiting, rest)}",
        height=30.0,
        name=run.lanes[lane],
        worker=lane,
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


def _row(run: ReportedRun, lane: int, parts: FloatArray) -> dict[str, Any]:
    busy, waiting, rest, longest = (listed(one, 3) for one in 100 * parts)
    told = [["busy", "%", busy]]
    if run.lockstep:
        told.append(["waiting", "%", waiting])
        if run.each > 1:
            told.append(["most in one step", "%", longest])
    told.append(["communication", "%", rest])
    return {"name": run.lanes[lane], "worker": lane, "parts": told}
