"""A few steps, true to time: who works, who waits. For several runs, the same seconds of each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from evenstride.core.fleet import FloatArray
from evenstride.report.page.charts.chart import Chart, ChartMark, ChartPanel
from evenstride.report.page.charts.worker_time_chart import STATES
from evenstride.report.page.page_runs import Leg, ReportedRun
from evenstride.report.wording import duration, plain

_STEPS = 8
_MOST_WORKERS = 12
_TRIES = 20


@dataclass(frozen=True, slots=True, eq=False)
class Window:
    """Steps of one leg that are shown up close: their first and last row, and why these."""

    run: ReportedRun
    leg: Leg
    first: int
    last: int
    told: str

    @property
    def begin_s(self) -> float:
        return float(self.leg.ends_s[self.first] - self.leg.durations_s[self.first])

    @property
    def steps(self) -> int:
        return self.last - self.first + 1

    @property
    def waiting(self) -> float:
        """Part of the workers' time that they spent waiting for slower ones."""
        rows = slice(self.first, self.last + 1)
        waited_s = float(self.leg.waits.waited_s[rows].sum())
        workers = len(self.leg.generation.workers)
        return waited_s / max(float(self.leg.durations_s[rows].sum()) * workers, 1e-12)


def windows_of(run: ReportedRun) -> list[Window]:
    """Return the steps of a run that are worth a look: where most was waited, and the last."""
    worst = max((_worst(run, leg) for leg in run.legs), key=lambda one: one.waiting, default=None)
    if worst is None:
        return []
    leg = run.legs[-1]
    span_s = float(worst.leg.ends_s[worst.last]) - worst.begin_s
    last = last_window(run, span_s)
    same = last.leg is worst.leg and last.first <= worst.last
    return [last] if same or leg.generation.steps < _STEPS else [worst, last]


def last_window(run: ReportedRun, span_s: float) -> Window:
    """Return the last steps of a run that fit into a time, and at least one.

    Where an evaluation or a save lies between them, those before it that fill the time as well.
    """
    leg = run.legs[-1]
    begins_s = leg.ends_s - leg.durations_s
    pause, step_s = _pauses(leg), float(np.median(leg.durations_s))
    whole = np.flatnonzero(leg.generation.table.whole)
    end = last = int(whole[-1]) if len(whole) else leg.generation.steps - 1
    latest = _first(begins_s, leg.ends_s[end] - span_s, end)
    for _ in range(_TRIES):
        first = _first(begins_s, leg.ends_s[last] - span_s, last)
        # A pause before the first of them counts where they do not fill the time for it.
        short = leg.ends_s[last] - begins_s[first] < span_s - 1.5 * step_s
        between = np.flatnonzero(pause[first + (not short) : last + 1]) - short
        if not len(between):
            told = "its last steps" if last == end else "steps near its end"
            return Window(run, leg, first, last, told)
        last = first + int(between[0])
        if last < 0 or leg.ends_s[last] - begins_s[0] < span_s:
            break
    return Window(run, leg, latest, end, "its last steps")


def _pauses(leg: Leg) -> npt.NDArray[np.bool_]:
    """Return before which steps there was an evaluation, a save or the like."""
    free_s = leg.ends_s - leg.durations_s - leg.opens_s
    return np.asarray(free_s > 0.5 * float(np.median(leg.durations_s)))


def _first(begins_s: FloatArray, from_s: float, last: int) -> int:
    """Return the first step that begins at a moment or later."""
    return min(int(np.searchsorted(begins_s, from_s - 1e-6)), last)


def usual_span_s(runs: Sequence[ReportedRun]) -> float:
    """Return the time of eight steps at the end of the run whose steps are the longest."""
    return (_STEPS + 0.5) * max(float(np.median(run.legs[-1].durations_s[-50:])) for run in runs)


def _worst(run: ReportedRun, leg: Leg) -> Window:
    """Return the steps in a row in which most was waited, of those all workers told of.

    The first step is left out where there are others: it says nothing.
    """
    steps = leg.generation.steps
    count = min(_STEPS, steps)
    waited_s = np.append(0.0, np.cumsum(leg.waits.waited_s.sum(axis=1)))
    begins = np.arange(1 if steps > count else 0, steps - count + 1)
    paused = np.append(0, np.cumsum(_pauses(leg)))
    free = begins[paused[begins + count] == paused[begins + 1]]
    begins = free if len(free) else begins
    first = int(begins[np.argmax(waited_s[begins + count] - waited_s[begins])])
    return Window(run, leg, first, first + count - 1, "where workers waited most")


def closeup_chart(windows: Sequence[Window], key: str, *, title: str = "Steps up close") -> Chart:
    """Return at least one window, several below each other with the same scale."""
    span_s = max(float(one.leg.ends_s[one.last]) - one.begin_s for one in windows)
    unit_s, unit = (1.0, "s") if span_s >= 2.0 else (1e-3, "ms")
    words = ["True to time, each box a step of a worker. All have the same scale."]
    if any(len(one.leg.generation.workers) > _MOST_WORKERS for one in windows):
        words.append(f"Of the workers, the {_MOST_WORKERS} who kept the others waiting longest.")
    return Chart(
        key=f"{key}-closeup",
        title=title,
        words=tuple(words),
        panels=tuple(lane for one in windows for lane in _lanes(one, unit_s)),
        x_high=span_s / unit_s,
        x_name=f"{unit} since the first step shown",
        legend=tuple((f"bar {state}", told) for state, told in STATES),
    )


def _lanes(one: Window, unit_s: float) -> Iterator[ChartPanel]:
    worst = sorted(one.leg.blames, key=lambda blame: -blame.caused_s)[:_MOST_WORKERS]
    step_s = float(np.median(one.leg.durations_s[one.first : one.last + 1]))
    numbers = f"{one.leg.step_at(one.first):,} to {one.leg.step_at(one.last):,}"
    heading = (
        one.run.name,
        f", {one.told}: {one.steps} steps ({numbers}) of {duration(step_s)}; workers wait "
        f"{one.waiting:.0%} of their time",
    )
    for number, rank in enumerate(sorted(blame.rank for blame in worst)):
        name = plain(one.leg.generation.workers[rank])
        yield ChartPanel(
            marks=_boxes(one, rank, unit_s),
            told=f"{name}: {one.steps} steps, true to time",
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
