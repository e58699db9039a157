"""The time of each worker: over the whole run in buckets of steps, and a few steps up close.

Windows of several runs cover the same number of seconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from evenstride.core.fleet import FloatArray
from evenstride.report.page.chart import Chart, ChartMark, ChartPanel, listed, unit_of
from evenstride.report.page.page_runs import MOST_LANES, Leg, ReportedRun
from evenstride.report.wording import duration, plain

_MOST_CHANGES = 6  # of a worker's speed in one generation; more are not drawn
_STEPS = 8  # up close
_MOST_WORKERS = 12  # up close
_TRIES = 20  # to find steps without a pause between them
STATES = (
    ("busy", "busy: data loading and compute"),
    ("waiting", "waiting for a slower worker"),
    ("communication", "communication, and the rest of the wait"),
    ("apart", "outside of steps: evaluation, saving, or not recorded"),
)


def parts_of(leg: Leg, rank: int) -> FloatArray:
    """Return the fractions of a worker's time in each bucket, ``(4, buckets)``.

    The rows are busy, waiting for slower workers, the rest of the wait, and the longest wait for
    others in a single step, as a fraction of that step. Unknown values are NaN.
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
    """Return a chart with a lane for each worker; the run must have at least one step."""
    parts = {lane: _parts(run, lane) for lane in run.drawn}
    shown = STATES if run.lockstep else tuple(one for one in STATES if one[0] != "waiting")
    entries = [(f"bar {state}", text) for state, text in shown]
    if run.each > 1 and run.lockstep:
        entries.append(("line peak", "the step of the bar with the longest wait"))
    if any(len(_changes_s(run, lane)) for lane in run.drawn):
        entries.append(("line mark", "a lasting change of its speed"))
    return Chart(
        key=f"{key}-times",
        title="Where each worker's time went",
        words=tuple(_words(run)),
        panels=tuple(_lane(run, lane, of) for lane, of in parts.items()),
        x_high=length_s,
        x_name="time in s",
        legend=tuple(entries),
        axis=run.axis(length_s),
        rows=tuple(_row(run, lane, of) for lane, of in parts.items()),
    )


def _words(run: ReportedRun) -> list[str]:
    bar = "One bar is one step."
    if run.each > 1:
        bar = f"One bar is {run.each:,} steps; the last of a generation may have fewer."
    words = [f"{bar} The height of a colour is its fraction of the time."]
    if len(run.lanes) > MOST_LANES:
        words.append(
            f"{MOST_LANES} of {len(run.lanes):,} workers are drawn: those that made the others "
            "wait longest."
        )
    return words


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
        title=f"{run.lanes[lane]}: {_summary(run, busy, waiting, rest)}",
        height=30.0,
        name=run.lanes[lane],
        worker=lane,
    )


def _changes_s(run: ReportedRun, lane: int) -> FloatArray:
    """Return the changes of a worker's speed, on the run's axis."""
    found: list[float] = []
    for leg in run.legs:
        rank = leg.rank(lane)
        phases = () if rank is None else leg.phases(rank)
        if len(phases) <= _MOST_CHANGES + 1:
            found += [float(leg.opens_s[phase.first]) for phase in phases[1:]]
    return np.array(found)


def _parts(run: ReportedRun, lane: int) -> FloatArray:
    ranks = [(leg, leg.rank(lane)) for leg in run.legs]
    gone = np.nan
    return np.hstack(
        [np.full((4, leg.buckets), gone) if k is None else parts_of(leg, k) for leg, k in ranks]
    )


def _summary(run: ReportedRun, busy: FloatArray, waiting: FloatArray, rest: FloatArray) -> str:
    spent_s = run.column(lambda leg: leg.right_s - leg.left_s)
    known = ~np.isnan(busy)
    if not known.any():
        return "nothing recorded"
    parts = [
        float(np.average(one[known], weights=spent_s[known] + 1e-12))
        for one in (busy, waiting, rest)
    ]
    text = f"busy {parts[0]:.0%} of the time"
    return f"{text}, waiting for slower workers {parts[1]:.0%}" if run.lockstep else text


def _row(run: ReportedRun, lane: int, parts: FloatArray) -> dict[str, Any]:
    busy, waiting, rest, longest = (listed(one, 3) for one in 100 * parts)
    columns = [["busy", "%", busy]]
    if run.lockstep:
        columns.append(["waiting", "%", waiting])
        if run.each > 1:
            columns.append(["most in one step", "%", longest])
    columns.append(["communication", "%", rest])
    return {"name": run.lanes[lane], "worker": lane, "parts": columns}


@dataclass(frozen=True, slots=True, eq=False)
class Window:
    """Steps of one leg that are drawn up close: their first and last row, and a description."""

    run: ReportedRun
    leg: Leg
    first: int
    last: int
    text: str

    @property
    def begin_s(self) -> float:
        return float(self.leg.ends_s[self.first] - self.leg.durations_s[self.first])

    @property
    def steps(self) -> int:
        return self.last - self.first + 1

    @property
    def waiting(self) -> float:
        """Fraction of the workers' time in which they waited for slower ones."""
        rows = slice(self.first, self.last + 1)
        waited_s = float(self.leg.waits.waited_s[rows].sum())
        workers = len(self.leg.generation.workers)
        return waited_s / max(float(self.leg.durations_s[rows].sum()) * workers, 1e-12)


def windows_of(run: ReportedRun) -> list[Window]:
    """Return the steps with the longest waits, and the last steps."""
    worst = max((_worst(run, leg) for leg in run.legs), key=lambda one: one.waiting, default=None)
    if worst is None:
        return []
    leg = run.legs[-1]
    span_s = float(worst.leg.ends_s[worst.last]) - worst.begin_s
    last = last_window(run, span_s)
    same = last.leg is worst.leg and last.first <= worst.last
    return [last] if same or leg.generation.steps < _STEPS else [worst, last]


def last_window(run: ReportedRun, span_s: float) -> Window:
    """Return the last steps of a run that fit into a time, at least one.

    Steps before an evaluation or a save are returned instead if one lies among the last steps.
    """
    leg = run.legs[-1]
    begins_s = leg.ends_s - leg.durations_s
    pause, step_s = _pauses(leg), float(np.median(leg.durations_s))
    whole = np.flatnonzero(leg.generation.table.whole)
    end = last = int(whole[-1]) if len(whole) else leg.generation.steps - 1
    latest = _first(begins_s, leg.ends_s[end] - span_s, end)
    for _ in range(_TRIES):
        first = _first(begins_s, leg.ends_s[last] - span_s, last)
        # A pause before the first step counts if the steps do not fill the time because of it.
        short = leg.ends_s[last] - begins_s[first] < span_s - 1.5 * step_s
        between = np.flatnonzero(pause[first + (not short) : last + 1]) - short
        if not len(between):
            text = "last steps" if last == end else "steps near the end"
            return Window(run, leg, first, last, text)
        last = first + int(between[0])
        if last < 0 or leg.ends_s[last] - begins_s[0] < span_s:
            break
    return Window(run, leg, latest, end, "last steps")


def _pauses(leg: Leg) -> npt.NDArray[np.bool_]:
    """Return whether an evaluation, a save or another pause precedes each step."""
    free_s = leg.ends_s - leg.durations_s - leg.opens_s
    return np.asarray(free_s > 0.5 * float(np.median(leg.durations_s)))


def _first(begins_s: FloatArray, from_s: float, last: int) -> int:
    """Return the first step that starts at a time or later."""
    return min(int(np.searchsorted(begins_s, from_s - 1e-6)), last)


def usual_span_s(runs: Sequence[ReportedRun]) -> float:
    """Return the time of eight steps at the end of the run with the longest steps."""
    return (_STEPS + 0.5) * max(float(np.median(run.legs[-1].durations_s[-50:])) for run in runs)


def _worst(run: ReportedRun, leg: Leg) -> Window:
    """Return the consecutive steps with the longest waits.

    The first step is left out if there are others, because its time is not representative.
    """
    steps = leg.generation.steps
    count = min(_STEPS, steps)
    waited_s = np.append(0.0, np.cumsum(leg.waits.waited_s.sum(axis=1)))
    begins = np.arange(1 if steps > count else 0, steps - count + 1)
    paused = np.append(0, np.cumsum(_pauses(leg)))
    free = begins[paused[begins + count] == paused[begins + 1]]
    begins = free if len(free) else begins
    first = int(begins[np.argmax(waited_s[begins + count] - waited_s[begins])])
    return Window(run, leg, first, first + count - 1, "steps with the longest waits")


def closeup_chart(windows: Sequence[Window], key: str, *, title: str = "Steps up close") -> Chart:
    """Return a chart of one or more windows, one below the other, on the same scale."""
    span_s = max(float(one.leg.ends_s[one.last]) - one.begin_s for one in windows)
    unit_s, unit = unit_of(span_s)
    words = ["Each box is a step of a worker. Widths are times, all on the same scale."]
    if any(len(one.leg.generation.workers) > _MOST_WORKERS for one in windows):
        words.append(f"{_MOST_WORKERS} workers are drawn: those that made the others wait longest.")
    return Chart(
        key=f"{key}-closeup",
        title=title,
        words=tuple(words),
        panels=tuple(lane for one in windows for lane in _lanes(one, unit_s)),
        x_high=span_s / unit_s,
        x_name=f"{unit} since the first step shown",
        legend=tuple((f"bar {state}", text) for state, text in STATES),
    )


def _lanes(one: Window, unit_s: float) -> Iterator[ChartPanel]:
    worst = sorted(one.leg.blames, key=lambda blame: -blame.caused_s)[:_MOST_WORKERS]
    step_s = float(np.median(one.leg.durations_s[one.first : one.last + 1]))
    numbers = f"{one.leg.step_at(one.first):,} to {one.leg.step_at(one.last):,}"
    heading = (
        one.run.name,
        f", {one.text}: {one.steps} steps ({numbers}) of {duration(step_s)}; workers wait "
        f"{one.waiting:.0%} of their time",
    )
    for number, rank in enumerate(sorted(blame.rank for blame in worst)):
        name = plain(one.leg.generation.workers[rank])
        yield ChartPanel(
            marks=_boxes(one, rank, unit_s),
            title=f"{name}: {one.steps} steps to scale",
            height=22.0,
            y_low=-0.11,
            y_high=1.11,
            name=name,
            heading=None if number else heading,
        )


def _boxes(one: Window, rank: int, unit_s: float) -> tuple[ChartMark, ...]:
    rows = slice(one.first, one.last + 1)
    durations_s = one.leg.durations_s[rows]
    begin_s = one.leg.ends_s[rows] - durations_s - one.begin_s
    busy_s = begin_s + np.nan_to_num(one.leg.generation.table.busy_s[rows, rank])
    free_s = busy_s + one.leg.waits.waited_s[rows, rank]
    end_s = np.maximum(begin_s + durations_s, free_s)

    def boxes(style: str, left_s: FloatArray, right_s: FloatArray) -> ChartMark:
        low = np.zeros(len(left_s))
        return ChartMark("boxes", style, left_s / unit_s, low, right_s / unit_s, low + 1.0)

    return (
        boxes("bar apart", begin_s[:1], end_s[-1:]),
        boxes("bar busy outlined", begin_s, busy_s),
        boxes("bar waiting outlined", busy_s, free_s),
        boxes("bar communication outlined", free_s, end_s),
    )
