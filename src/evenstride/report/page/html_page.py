"""The page: one file of HTML that asks nothing of any network."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from importlib.resources import files

from evenstride._version import __version__
from evenstride.report.page.charts import svg
from evenstride.report.page.charts.axes import Scale
from evenstride.report.page.charts.chart_frame import TimeAxis, buckets
from evenstride.report.page.charts.closeup import closeup_chart, last_window, usual_span_s
from evenstride.report.page.charts.draw_svg import draw_svg
from evenstride.report.page.charts.step_time_chart import steptime_chart, top_s
from evenstride.report.page.findings import headline, rate_of, who_waited
from evenstride.report.page.markup import Child, Markup, data_island, element, together
from evenstride.report.page.page_runs import ReportedRun
from evenstride.report.page.page_tables import compared_table
from evenstride.report.page.sections import run_section
from evenstride.report.text_tables import shorten

GENERATOR = "evenstride report"
"""What a page of ours says of itself, near its beginning."""
MARK = f'<meta name="generator" content="{GENERATOR}'
_MOST_CLOSE = 6
_MOST_OF_SECTIONS = 4_800_000  # bytes, so that the page of any number of runs is below 6 MB


def page_of(runs: Sequence[ReportedRun]) -> str:
    """Return the page of one or several runs.

    Args:
        runs: at least one; with several, they are compared first.

    Cost:
        about a second for each run, and 20 ms for each of its workers.
    """
    told = [run for run in runs if run.legs]
    axis = TimeAxis("time", Scale(0.0, max((run.length_s for run in told), default=1.0), svg.WIDTH))
    several = len(runs) > 1
    name = f"{len(runs)} runs" if several else runs[0].name
    main = [_side_by_side(runs, axis)] if several and told else []
    main += _sections(runs, axis)
    head = element(
        "header",
        element("p", f"evenstride {__version__}: report of", class_="of"),
        element("h1", name),
        _contents(runs) if several else None,
    )
    body = together(
        element("a", "To the report", href="#report", class_="skip"),
        _stripes(),
        head,
        element("main", *main, id="report"),
        data_island("page-data", _data(runs, axis)),
        _script(),
    )
    return f"<!DOCTYPE html>\n{element('html', _head(name), element('body', body), lang='en')}\n"


def _sections(runs: Sequence[ReportedRun], axis: TimeAxis) -> list[Markup]:
    """Return a part for each run; once they are too much for a page, the rest are short."""
    found, room = list[Markup](), _MOST_OF_SECTIONS
    for number, run in enumerate(runs):
        if room > 0:
            found.append(run_section(run, number, axis, alone=len(runs) == 1))
            room -= len(found[-1].encode())
        if room <= 0 and number:  # the first one is shown, whatever it takes
            found[number:] = [_left_out(run, number)]
    return found


def _left_out(run: ReportedRun, number: int) -> Markup:
    told = (
        "There is no room for the charts and lists of this run on a page of so many; give fewer "
        "runs to see them."
    )
    return element(
        "section",
        element("h2", run.name),
        element("p", headline(run), class_="sum"),
        element("p", told, class_="how"),
        id=f"run{number}",
    )


def _head(name: str) -> Markup:
    policy = (
        f"default-src 'none'; style-src 'unsafe-inline'; script-src '{_digest()}'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    equiv = {"http_equiv": "Content-Security-Policy"}
    viewport = "width=device-width, initial-scale=1"
    return element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", name_="generator", content=f"{GENERATOR} {__version__}"),
        element("meta", **equiv, content=policy),
        element("meta", name_="viewport", content=viewport),
        element("meta", name_="referrer", content="no-referrer"),
        element("title", f"{name}: evenstride report"),
        element("link", rel="icon", href="data:,"),
        element("style", _file("page.css")),
    )


def _file(name: str) -> Markup:
    return Markup(files("evenstride.report.page").joinpath(name).read_text(encoding="utf-8"))


def _digest() -> str:
    digest = hashlib.sha256(_file("page.js").encode()).digest()
    return f"sha256-{base64.b64encode(digest).decode()}"


def _script() -> Markup:
    return element("script", _file("page.js"))


def _stripes() -> Markup:
    """Return the pattern of waiting: level stripes, which look alike however wide a drawing is."""
    pattern = element(
        "pattern",
        element("rect", id="stripes-paper", width=8, height=5),
        element("rect", id="stripes-ink", width=8, height=2.5),
        id="stripes",
        patternUnits="userSpaceOnUse",
        width=8,
        height=5,
    )
    return element(
        "svg", element("defs", pattern), class_="defs", aria_hidden="true", focusable="false"
    )


def _contents(runs: Sequence[ReportedRun]) -> Markup:
    entries: list[Child] = [element("li", element("a", "side by side", href="#compared"))]
    entries += [
        element("li", element("a", run.name, href=f"#run{number}"))
        for number, run in enumerate(runs)
    ]
    return element("nav", element("ul", entries), aria_label="Contents")


def _side_by_side(runs: Sequence[ReportedRun], axis: TimeAxis) -> Markup:
    told = [run for run in runs if run.legs]
    close = [run for run in told if run.lockstep][:_MOST_CLOSE]
    charts: list[Markup] = []
    if close:
        span_s = usual_span_s(close)
        windows = [last_window(run, span_s) for run in close]
        charts.append(
            closeup_chart(windows, "compared", title="The same time at the end of each run")
        )
    high_s = top_s(told)
    charts += [
        draw_svg(steptime_chart(run, axis.scale, f"run{number}", high_s, f"Step time: {run.name}"))
        for number, run in enumerate(runs)
        if run.legs
    ]
    return element(
        "section",
        element("h2", "Side by side"),
        element("p", _compared(told), class_="sum"),
        element("ul", [_worst(run) for run in told[:_MOST_CLOSE]], class_="who"),
        compared_table(told),
        *charts,
        id="compared",
    )


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


def _worst(run: ReportedRun) -> Markup:
    """Return who cost most in a run, as an entry of a list."""
    return element("li", element("b", run.name), f": {' '.join(who_waited(run)[:1])}")


def _data(runs: Sequence[ReportedRun], axis: TimeAxis) -> dict[str, object]:
    shortest_s = min(
        (float(leg.durations_s.mean()) for run in runs for leg in run.legs), default=1.0
    )
    return {
        "length_s": axis.scale.high,
        "least_s": 4.0 * shortest_s,
        "runs": [
            {**buckets(run), "workers": [[lane, shorten(run.lanes[lane])] for lane in run.drawn]}
            for run in runs
        ],
    }
