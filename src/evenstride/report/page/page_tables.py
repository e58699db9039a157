"""The tables of the page."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from evenstride.report.page.findings import rate_of
from evenstride.report.page.markup import Child, Markup, element, together
from evenstride.report.page.page_runs import ReportedRun
from evenstride.report.text_tables import NOTHING
from evenstride.report.wording import duration


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


_COMPARED = (
    *("run", "policy", "workers", "steps", "time", "samples/s", "against the first"),
    *("waiting", "speed-up over equal", "efficiency"),
)


def compared_table(runs: Sequence[ReportedRun]) -> Markup:
    """Return a line for each of several runs, each compared with the first."""
    first = rate_of(runs[0])
    rows = [_compared(run, first) for run in runs]
    told = (
        "Samples per second of training steps, evaluation and saving apart. Waiting: of all "
        "workers' time. Speed-up and efficiency by each run's own fitted curves."
    )
    return table(_COMPARED, rows, told=told, text=(0, 1))


def _compared(run: ReportedRun, first: float) -> Sequence[Child]:
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
