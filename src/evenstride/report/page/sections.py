"""The part of the page that is about one run, in the order of what a reader asks."""

from __future__ import annotations

from math import isnan

from evenstride.report.page.charts.chart_frame import TimeAxis
from evenstride.report.page.charts.closeup import closeup_chart, windows_of
from evenstride.report.page.charts.curve_chart import curves_chart
from evenstride.report.page.charts.draw_svg import draw_svg
from evenstride.report.page.charts.metric_charts import metrics_charts
from evenstride.report.page.charts.share_chart import shares_chart
from evenstride.report.page.charts.step_time_chart import steptime_chart, top_s
from evenstride.report.page.charts.worker_time_chart import times_chart
from evenstride.report.page.event_lists import (
    alerts_part,
    decisions_part,
    facts_part,
    incidents_part,
)
from evenstride.report.page.findings import cards_of, headline, part_name, who_waited
from evenstride.report.page.markup import Child, Markup, element
from evenstride.report.page.page_runs import ReportedRun
from evenstride.report.page.worker_rows import workers_table
from evenstride.report.wording import duration


def run_section(run: ReportedRun, number: int, axis: TimeAxis, *, alone: bool) -> Markup:
    """Return everything about one run.

    Args:
        run: any.
        number: of it on the page, from 0.
        axis: that its charts share with those of the other runs.
        alone: whether it is the only one; else step times are shown with the others'.
    """
    key = f"run{number}"
    return element(
        "section",
        element("h2", "What it came to" if alone else run.name),
        _unread(run),
        element("p", headline(run), class_="sum"),
        _cards(run),
        _who(run),
        _alerts(run),
        *_charts(run, axis, key, alone=alone),
        _part("Decisions", *decisions_part(run)),
        _part("Membership and incidents", incidents_part(run)),
        _part("Loss and metrics", metrics_charts(run, key)),
        _part("Facts of the run", *facts_part(run)),
        id=key,
    )


def _unread(run: ReportedRun) -> Markup | None:
    if not run.story.unread:
        return None
    told = [element("li", one) for one in run.story.unread]
    head = element("h3", "What could not be read of the trace")
    return element("div", head, element("ul", told), class_="notice", role="note")


def _cards(run: ReportedRun) -> Markup | None:
    cards = [
        element(
            "div", element("dt", one.name), element("dd", one.value, element("small", one.told))
        )
        for one in cards_of(run)
    ]
    return element("dl", cards, class_="cards") if cards else None


def _who(run: ReportedRun) -> Markup | None:
    told = [element("li", one) for one in who_waited(run)]
    if not told:
        return None
    return _part("Who made the others wait", element("ul", told, class_="who"), workers_table(run))


def _alerts(run: ReportedRun) -> Markup | None:
    return _part("Alerts", alerts_part(run))


def _charts(run: ReportedRun, axis: TimeAxis, key: str, *, alone: bool) -> list[Markup | None]:
    if not run.legs:
        return []
    windows = windows_of(run) if run.lockstep and len(run.lanes) > 1 else []
    return [
        element("div", class_="tools", data_run=int(key[3:])),
        _pauses(run),
        times_chart(run, axis, key),
        closeup_chart(windows, key) if windows else None,
        draw_svg(steptime_chart(run, axis.scale, key, top_s([run]))) if alone else None,
        draw_svg(shares_chart(run, axis.scale, key)),
        draw_svg(curves) if (curves := curves_chart(run, key)) else None,
    ]


def _pauses(run: ReportedRun) -> Markup | None:
    """Tell what is left out between processes, where there are several."""
    if not run.pauses:
        return None
    told = []
    begun = {leg.generation.life: leg for leg in reversed(run.legs)}
    for (at_s, pause_s), leg in zip(run.pauses, list(reversed(begun.values()))[1:], strict=False):
        before = "" if isnan(pause_s) else f", {duration(pause_s)} after the one before stopped"
        told.append(f"{part_name(run, leg).split(',')[0]} begins at {duration(at_s)}{before}")
    return element(
        "p",
        "Processes follow one another on one axis, without the time between them. "
        f"{'; '.join(told[:8])}{'; and more' if len(told) > 8 else ''}.",
        class_="how",
    )


def _part(title: str, *inside: Child) -> Markup | None:
    if all(one is None for one in inside):
        return None
    return element("div", element("h3", title), *inside, class_="part")
