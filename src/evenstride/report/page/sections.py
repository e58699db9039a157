"""The part of the page that is about one run, in the order of what a reader asks."""

from __future__ import annotations

from math import isnan

from evenstride.report.page.closeup import closeup_chart, windows_of
from evenstride.report.page.curves import curves_chart
from evenstride.report.page.frame import TimeAxis
from evenstride.report.page.lists import (
    alerts_part,
    decisions_part,
    facts_part,
    incidents_part,
)
from evenstride.report.page.markup import Child, Markup, element
from evenstride.report.page.metrics import metrics_charts
from evenstride.report.page.runs import Run
from evenstride.report.page.shares import shares_chart
from evenstride.report.page.steptime import steptime_chart, top_s
from evenstride.report.page.times import times_chart
from evenstride.report.page.words import cards_of, headline, part_name, who_waited
from evenstride.report.page.workers import workers_table
from evenstride.report.words import duration


def run_section(run: Run, number: int, axis: TimeAxis, *, alone: bool) -> Markup:
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


def _unread(run: Run) -> Markup | None:
    if not run.story.unread:
        return None
    told = [element("li", one) for one in run.story.unread]
    head = element("h3", "What could not be read of the trace")
    return element("div", head, element("ul", told), class_="notice", role="note")


def _cards(run: Run) -> Markup | None:
    cards = [
        element(
            "div", element("dt", one.name), element("dd", one.value, element("small", one.told))
        )
        for one in cards_of(run)
    ]
    return element("dl", cards, class_="cards") if cards else None


def _who(run: Run) -> Markup | None:
    told = [element("li", one) for one in who_waited(run)]
    if not told:
        return None
    return _part("Who made the others wait", element("ul", told, class_="who"), workers_table(run))


def _alerts(run: Run) -> Markup | None:
    return _part("Alerts", alerts_part(run))


def _charts(run: Run, axis: TimeAxis, key: str, *, alone: bool) -> list[Markup | None]:
    if not run.legs:
        return []
    windows = windows_of(run) if run.lockstep and len(run.lanes) > 1 else []
    return [
        element("div", class_="tools", data_run=int(key[3:])),
        _pauses(run),
        times_chart(run, axis, key),
        closeup_chart(windows, key) if windows else None,
        steptime_chart(run, axis, key, top_s([run])) if alone else None,
        shares_chart(run, axis, key),
        curves_chart(run, key),
    ]


def _pauses(run: Run) -> Markup | None:
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
