"""The tables of the page."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from evenstride.core.fleet import FloatArray, IntArray
from evenstride.report.page.markup import Child, Markup, element, together
from evenstride.report.page.runs import Leg, Run
from evenstride.report.page.words import rate_of
from evenstride.report.tables import NOTHING
from evenstride.report.words import duration

_RECENT = 20
_MOST_ROWS = 256


def table(
    headings: Sequence[str],
    rows: Iterable[Sequence[Child]],
    *,
    told: str,
    text: Sequence[int] = (0,),
) -> Markup:
    """Return a table that may be scrolled sideways.

    Args:
        headings: one per column.
        rows: cells; a row of one cell goes across all columns.
        told: what stands above it.
        text: columns that hold text; the others are figures.
    """
    kinds = [None if n in text else "n" for n in range(len(headings))]
    heads = [
        element("th", one, scope="col", class_=kind)
        for one, kind in zip(headings, kinds, strict=True)
    ]
    body = [_row(row, kinds) for row in rows]
    made = element("table", element("thead", element("tr", heads)), element("tbody", body))
    held = element("div", made, class_="scroll", tabindex=0, role="region", aria_label=told)
    return together(element("p", told, class_="how"), held)


def _row(row: Sequence[Child], kinds: Sequence[str | None]) -> Markup:
    if len(row) == 1:
        return element("tr", element("td", row[0], colspan=len(kinds), class_="cut"))
    return element(
        "tr", [element("td", one, class_=kind) for one, kind in zip(row, kinds, strict=True)]
    )


_WORKERS = (
    *("worker", "rank", "share", "busy", "wait", "speed, of its best", "since step"),
    *("kept others waiting", "part of the time", "slowest in steps", "state"),
)


def workers_table(run: Run) -> Markup | None:
    """Return a line for each worker of the run; ``None`` if there are none.

    Args:
        run: any.
    """
    if not run.legs:
        return None
    order = np.argsort(-run.caused_s, kind="stable").tolist()
    rows: list[Sequence[Child]] = [_worker(run, lane) for lane in order[:_MOST_ROWS]]
    if len(order) > _MOST_ROWS:
        rows.append([f"{len(order) - _MOST_ROWS:,} more workers are in the output of --json"])
    told = (
        f"Share: of the last step. Busy and wait: medians of the last {_RECENT} steps. Kept others "
        "waiting: seconds of each of the others, on average, over the whole run."
    )
    return table(_WORKERS, rows, told=told, text=(0, 10))


def _worker(run: Run, lane: int) -> Sequence[Child]:
    leg = next(one for one in reversed(run.legs) if one.rank(lane) is not None)
    rank = leg.rank(lane)
    assert rank is not None
    held, recent = leg.generation.table, slice(-_RECENT, None)
    speed, since = _speed(leg, rank)
    slowest = sum(
        b.slowest_steps for one in run.legs for b in one.blames if one.lanes[b.rank] == lane
    )
    caused_s = float(run.caused_s[lane])
    waits = (duration(caused_s), f"{caused_s / max(run.totals.took_s, 1e-12):.1%}", f"{slowest:,}")
    return (
        run.lanes[lane],
        f"{rank}",
        f"{max(_latest(held.share[:, rank]), 0):,}",
        duration(_median(held.busy_s[recent, rank])),
        duration(_median(held.wait_s[recent, rank])),
        speed,
        since,
        *(waits if run.lockstep else (NOTHING,) * 3),
        _state(run, leg, rank),
    )


def _speed(leg: Leg, rank: int) -> tuple[str, str]:
    phases = leg.phases(rank)
    if not phases:
        return NOTHING, NOTHING
    since = f"{leg.step_at(phases[-1].first):,}" if len(phases) > 1 else "the first"
    return f"{phases[-1].speed:.2f}", since


def _state(run: Run, leg: Leg, rank: int) -> str:
    if leg is not run.legs[-1]:
        return "gone"
    standing = leg.generation.standing
    return standing[rank] if rank < len(standing) else NOTHING


def _median(values: FloatArray) -> float | None:
    known = values[~np.isnan(values)]
    return float(np.median(known)) if len(known) else None


_COMPARED = (
    *("run", "policy", "workers", "steps", "time", "samples/s", "against the first"),
    *("waiting", "speed-up over equal", "efficiency"),
)


def compared_table(runs: Sequence[Run]) -> Markup:
    """Return a line for each of several runs, each compared with the first."""
    first = rate_of(runs[0])
    rows = [_compared(run, first) for run in runs]
    told = (
        "Samples per second of training steps, evaluation and saving apart. Waiting: of all "
        "workers' time. Speed-up and efficiency by each run's own fitted curves."
    )
    return table(_COMPARED, rows, told=told, text=(0, 1))


def _compared(run: Run, first: float) -> Sequence[Child]:
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


def _latest(shares: IntArray) -> int:
    """Return the share of the last step that was told of."""
    known = shares[shares >= 0]
    return int(known[-1]) if len(known) else 0
