"""The page: one file of HTML that asks nothing of any network."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from math import isnan
from typing import Any

from markupsafe import Markup

from evenstride._version import __version__
from evenstride.report.page import event_lists
from evenstride.report.page.charts.chart import Chart, listed
from evenstride.report.page.charts.closeup import (
    closeup_chart,
    last_window,
    usual_span_s,
    windows_of,
)
from evenstride.report.page.charts.curve_chart import curves_chart
from evenstride.report.page.charts.metric_charts import metrics_charts
from evenstride.report.page.charts.share_chart import shares_chart
from evenstride.report.page.charts.step_time_chart import steptime_chart, top_s
from evenstride.report.page.charts.worker_time_chart import times_chart
from evenstride.report.page.findings import cards_of, headline, part_name, rate_of, who_waited
from evenstride.report.page.page_runs import ReportedRun
from evenstride.report.page.page_tables import compared_table, workers_table
from evenstride.report.page.templates import asset, render
from evenstride.report.text_tables import shorten
from evenstride.report.wording import duration

GENERATOR = "evenstride report"
MARK = f'<meta name="generator" content="{GENERATOR}'
"""What a page of ours says of itself, near its beginning."""
_MOST_CLOSE = 6
_MOST_METRICS = 12
_MOST_OF_SECTIONS = 4_800_000  # bytes, so that the page of any number of runs is below 6 MB


def page_of(runs: Sequence[ReportedRun]) -> str:
    """Return the page of one or several runs.

    Cost:
        about a second for each run, and 20 ms for each of its workers.
    """
    told = [run for run in runs if run.legs]
    length_s = max((run.length_s for run in told), default=1.0)
    several = len(runs) > 1
    script = asset("page.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    sections = _sections(runs, length_s)
    made = render(
        "page.html",
        name=f"{len(runs)} runs" if several else runs[0].name,
        version=__version__,
        generator=f"{GENERATOR} {__version__}",
        digest=f"sha256-{digest}",
        style=asset("page.css"),
        script=script,
        runs=runs,
        compared=_side_by_side(runs, length_s) if several and told else None,
        sections=sections,
        left_out=[(run, headline(run)) for run in runs[len(sections) :]],
        page_data=_page_data(runs, length_s),
    )
    return str(made)


def _sections(runs: Sequence[ReportedRun], length_s: float) -> list[Markup]:
    """Return a part for each run, as far as a page has room; the first is always shown."""
    found, room = list[Markup](), _MOST_OF_SECTIONS
    for number, run in enumerate(runs):
        section = _section(run, number, length_s, alone=len(runs) == 1)
        room -= len(section.encode())
        if room <= 0 and number:
            break
        found.append(section)
    return found


def _section(run: ReportedRun, number: int, length_s: float, *, alone: bool) -> Markup:
    key = f"run{number}"
    lives, metrics = run.story.lives, metrics_charts(run, key)
    kept = event_lists.kept_table(run)
    return render(
        "run.html",
        run=run,
        key=key,
        number=number,
        alone=alone,
        headline=headline(run),
        cards=cards_of(run),
        who_waited=who_waited(run),
        workers=workers_table(run),
        alerts=event_lists.first_alerts(run),
        pauses=_pauses(run),
        charts=_charts(run, length_s, key, alone=alone) if run.legs else [],
        changes=event_lists.changes_table(run),
        kept=kept,
        kept_count=event_lists.counted(kept.count, "decision") if kept else "",
        incidents=event_lists.incidents_table(run),
        metrics=metrics[:_MOST_METRICS],
        more_metrics=len(metrics) - _MOST_METRICS,
        processes=event_lists.processes_of(run),
        more_processes=len(lives) - event_lists.MOST_LIVES,
    )


def _charts(run: ReportedRun, length_s: float, key: str, *, alone: bool) -> list[Chart]:
    windows = windows_of(run) if run.lockstep and len(run.lanes) > 1 else []
    curves = curves_chart(run, key)
    return [
        times_chart(run, length_s, key),
        *([closeup_chart(windows, key)] if windows else []),
        # With several runs, step times are shown side by side.
        *([steptime_chart(run, length_s, key, top_s([run]))] if alone else []),
        shares_chart(run, length_s, key),
        *([curves] if curves is not None else []),
    ]


def _pauses(run: ReportedRun) -> str:
    """Tell what is left out between processes, where there are several."""
    if not run.pauses:
        return ""
    told = []
    begun = {leg.generation.life: leg for leg in reversed(run.legs)}
    for (at_s, pause_s), leg in zip(run.pauses, list(reversed(begun.values()))[1:], strict=False):
        before = "" if isnan(pause_s) else f", {duration(pause_s)} after the one before stopped"
        told.append(f"{part_name(run, leg).split(',')[0]} begins at {duration(at_s)}{before}")
    return (
        "Processes follow one another on one axis, without the time between them. "
        f"{'; '.join(told[:8])}{'; and more' if len(told) > 8 else ''}."
    )


def _side_by_side(runs: Sequence[ReportedRun], length_s: float) -> dict[str, Any]:
    told = [run for run in runs if run.legs]
    close = [run for run in told if run.lockstep][:_MOST_CLOSE]
    charts: list[Chart] = []
    if close:
        windows = [last_window(run, usual_span_s(close)) for run in close]
        title = "The same time at the end of each run"
        charts.append(closeup_chart(windows, "compared", title=title))
    high_s = top_s(told)
    charts += [
        steptime_chart(run, length_s, f"run{number}", high_s, f"Step time: {run.name}")
        for number, run in enumerate(runs)
        if run.legs
    ]
    return {
        "told": _compared(told),
        "worst": [(run.name, " ".join(who_waited(run)[:1])) for run in told[:_MOST_CLOSE]],
        "table": compared_table(told),
        "charts": charts,
    }


def _compared(runs: Sequence[ReportedRun]) -> str:
    rates = [rate_of(run) for run in runs]
    if len(runs) < 2 or not all(rates):
        return "Only one of them has told of steps."
    best = max(range(len(runs)), key=rates.__getitem__)
    if best == 0:
        others = ", ".join(
            f"{rates[0] / rate:.2f} times that of {run.name}"
            for run, rate in zip(runs[1:], rates[1:], strict=True)
        )
        return f"{runs[0].name} trains the most samples per second: {others}."
    return (
        f"{runs[best].name} trains {rates[best] / rates[0]:.2f} times as many samples per second "
        f"as {runs[0].name}."
    )


def _page_data(runs: Sequence[ReportedRun], length_s: float) -> dict[str, object]:
    """Return what scripts need to know: the axis, and of each run its buckets and workers."""
    steps_s = [float(leg.durations_s.mean()) for run in runs for leg in run.legs]
    return {
        "length_s": length_s,
        "least_s": 4.0 * min(steps_s, default=1.0),
        "runs": [
            {
                "left": listed(run.column(lambda leg: leg.left_s), 6),
                "right": listed(run.column(lambda leg: leg.right_s), 6),
                "first": [int(leg.step_at(row)) for leg in run.legs for row in leg.first.tolist()],
                "last": [int(leg.step_at(row)) for leg in run.legs for row in leg.last.tolist()],
                "process": [leg.generation.life + 1 for leg in run.legs for _ in leg.first],
                "processes": len(run.story.lives),
                "workers": [[lane, shorten(run.lanes[lane])] for lane in run.drawn],
            }
            for run in runs
        ],
    }
