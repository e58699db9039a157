"""The tables of the page about runs and their workers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from evenstride.report.page.findings import rate_of
from evenstride.report.page.page_runs import ReportedRun
from evenstride.report.page.worker_rows import RECENT, WorkerFigures, figures_of
from evenstride.report.text_tables import NOTHING
from evenstride.report.wording import duration

_MOST_ROWS = 256


@dataclass(frozen=True, slots=True)
class PageTable:
    """A table of the page.

    Args:
        headings: one per column.
        rows: cells; a row of one cell goes across all columns.
        told: what stands above it.
        text: columns that hold text; the others are figures.
        count: how many entries there are, of which the rows may show some.
    """

    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    told: str
    text: Sequence[int] = (0,)
    count: int = 0


_COMPARED = (
    *("run", "policy", "workers", "steps", "time", "samples/s", "against the first"),
    *("waiting", "speed-up over equal", "efficiency"),
)


def compared_table(runs: Sequence[ReportedRun]) -> PageTable:
    """Return a line for each of several runs, each compared with the first."""
    first = rate_of(runs[0])
    told = (
        "Samples per second of training steps, evaluation and saving apart. Waiting: of all "
        "workers' time. Speed-up and efficiency by each run's own fitted curves."
    )
    return PageTable(_COMPARED, [_compared(run, first) for run in runs], told, text=(0, 1))


def _compared(run: ReportedRun, first: float) -> Sequence[str]:
    totals, rate = run.totals, rate_of(run)
    speedup, part = totals.speedup_model, totals.efficiency_model
    return (
        run.name,
        run.policy,
        f"{len(run.lanes):,}",
        f"{totals.steps:,}",
        duration(totals.took_s),
        f"{rate:,.4g}",
        f"{rate / first:.2f}×" if first and rate else NOTHING,
        f"{totals.waiting_part:.1%}" if run.lockstep else NOTHING,
        NOTHING if speedup is None else f"{speedup:.2f}×",
        NOTHING if part is None else f"{part:.1%}",
    )


_WORKERS = (
    *("worker", "rank", "share", "busy", "wait", "speed, of its best", "since step"),
    *("kept others waiting", "part of the time", "slowest in steps", "state"),
)


def workers_table(run: ReportedRun) -> PageTable | None:
    """Return a line for each worker of the run; ``None`` if there are none."""
    if not run.legs:
        return None
    order = np.argsort(-run.caused_s, kind="stable").tolist()
    rows = [_worker(figures_of(run, lane), run.lockstep) for lane in order[:_MOST_ROWS]]
    if len(order) > _MOST_ROWS:
        rows.append([f"{len(order) - _MOST_ROWS:,} more workers are in the output of --json"])
    told = (
        f"Share: of the last split. Busy and wait: medians of the last {RECENT} steps. Kept "
        "others waiting: seconds of each of the others, on average, over the whole run."
    )
    return PageTable(_WORKERS, rows, told, text=(0, 10))


def _worker(one: WorkerFigures, lockstep: bool) -> Sequence[str]:
    waits = (duration(one.caused_s), f"{one.part:.1%}", f"{one.slowest_steps:,}")
    since = "the first" if one.since is None else f"{one.since:,}"
    return (
        one.worker,
        f"{one.rank}",
        f"{one.share:,}",
        duration(one.busy_s),
        duration(one.wait_s),
        *((NOTHING, NOTHING) if one.speed is None else (f"{one.speed:.2f}", since)),
        *(waits if lockstep else (NOTHING,) * 3),
        one.state or NOTHING,
    )
