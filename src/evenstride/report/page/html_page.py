"""The report of runs: one self-contained HTML page, or JSON; and its file.

Names of hosts, files and metrics, reasons and facts are untrusted texts. Jinja escapes every
expression, and `shown` removes control characters.
"""

from __future__ import annotations

import base64
import hashlib
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import cache
from importlib.resources import files
from math import isfinite, isnan
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from evenstride._version import __version__
from evenstride.errors import ConfigError
from evenstride.report.analysis.key_findings import compared_findings
from evenstride.report.analysis.run_folder import is_trace
from evenstride.report.analysis.run_generation import Incident, RecordedDecision, RecordedGeneration
from evenstride.report.page.chart import (
    WIDTH,
    Chart,
    digits,
    listed,
    paths,
    x_labels,
    y_labels,
)
from evenstride.report.page.findings import (
    MOST_LIVES,
    alerts_of,
    cards_of,
    changes_table,
    compared_table,
    counted,
    figures_of,
    first_alerts,
    incidents_table,
    kept_table,
    part_name,
    processes_of,
    who_waited,
    workers_table,
)
from evenstride.report.page.page_runs import Leg, ReportedRun
from evenstride.report.page.series_charts import (
    courses_of,
    curves_chart,
    fitted_of,
    metrics_charts,
    shares_chart,
    steptime_chart,
    top_s,
)
from evenstride.report.page.worker_charts import (
    closeup_chart,
    last_window,
    times_chart,
    usual_span_s,
    windows_of,
)
from evenstride.report.wording import duration, plain, shorten

GENERATOR = "evenstride report"
MARK = f'<meta name="generator" content="{GENERATOR}'
"""Mark near the beginning of a page, by which a report is recognised."""
REPORT_NAME = "report.html"
_BEGINNING = 4096  # bytes of a file that hold the mark
_LONGEST = 400  # characters of one text on the page
_MOST_CLOSE = 6
_MOST_METRICS = 12
_MOST_OF_SECTIONS = 4_800_000  # bytes, so that a page of any number of runs is below 6 MB


def page_of(runs: Sequence[ReportedRun]) -> str:
    """Return the page of one or several runs.

    Cost:
        About 1 s for each run, and 20 ms for each of its workers.
    """
    recorded = [run for run in runs if run.legs]
    length_s = max((run.length_s for run in recorded), default=1.0)
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
        compared=_side_by_side(runs, length_s) if several and recorded else None,
        sections=sections,
        left_out=runs[len(sections) :],
        page_data=_page_data(runs, length_s),
    )
    return str(made)


def _sections(runs: Sequence[ReportedRun], length_s: float) -> list[Markup]:
    """Return the section of each run that a page has room for; always that of the first."""
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
    kept = kept_table(run)
    return render(
        "run.html",
        run=run,
        key=key,
        number=number,
        alone=alone,
        cards=cards_of(run),
        who_waited=who_waited(run),
        workers=workers_table(run),
        alerts=first_alerts(run),
        pauses=_pauses(run),
        charts=_charts(run, length_s, key, alone=alone) if run.legs else [],
        changes=changes_table(run),
        kept=kept,
        kept_count=counted(kept.count, "decision") if kept else "",
        incidents=incidents_table(run),
        metrics=metrics[:_MOST_METRICS],
        more_metrics=len(metrics) - _MOST_METRICS,
        processes=processes_of(run),
        more_processes=len(lives) - MOST_LIVES,
    )


def _charts(run: ReportedRun, length_s: float, key: str, *, alone: bool) -> list[Chart]:
    windows = windows_of(run) if run.lockstep and len(run.lanes) > 1 else []
    curves = curves_chart(run, key)
    return [
        times_chart(run, length_s, key),
        *([closeup_chart(windows, key)] if windows else []),
        # With several runs, the step times are in the comparison.
        *([steptime_chart(run, length_s, key, top_s([run]))] if alone else []),
        shares_chart(run, length_s, key),
        *([curves] if curves is not None else []),
    ]


def _pauses(run: ReportedRun) -> str:
    """Return when the later processes start, and the times between processes; empty for one."""
    if not run.pauses:
        return ""
    starts = []
    first = {leg.generation.life: leg for leg in reversed(run.legs)}
    for (at_s, pause_s), leg in zip(run.pauses, list(reversed(first.values()))[1:], strict=False):
        after = "" if isnan(pause_s) else f", {duration(pause_s)} after the end of the previous one"
        starts.append(f"{part_name(run, leg).split(',')[0]} starts at {duration(at_s)}{after}")
    return (
        "The axis shows one process after another, without the time between them. "
        f"{'; '.join(starts[:8])}{'; and more' if len(starts) > 8 else ''}."
    )


def _side_by_side(runs: Sequence[ReportedRun], length_s: float) -> dict[str, Any]:
    recorded = [run for run in runs if run.legs]
    close = [run for run in recorded if run.lockstep][:_MOST_CLOSE]
    charts: list[Chart] = []
    if close:
        windows = [last_window(run, usual_span_s(close)) for run in close]
        title = "The same time at the end of each run"
        charts.append(closeup_chart(windows, "compared", title=title))
    high_s = top_s(recorded)
    charts += [
        steptime_chart(run, length_s, f"run{number}", high_s, f"Step time: {run.name}")
        for number, run in enumerate(runs)
        if run.legs
    ]
    return {
        "findings": findings_of(recorded),
        "table": compared_table(recorded),
        "charts": charts,
    }


def findings_of(runs: Sequence[ReportedRun]) -> tuple[str, ...]:
    """Return the most important facts of one run or of a comparison, at most three sentences."""
    if len(runs) == 1:
        return runs[0].findings
    return compared_findings([(run.name, run.totals, run.findings) for run in runs])


def _page_data(runs: Sequence[ReportedRun], length_s: float) -> dict[str, object]:
    """Return the data of the page's script: the axis, and buckets and workers of each run."""
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


def render(template: str, **values: Any) -> Markup:
    """Return a rendered template of this folder; all texts in ``values`` are escaped."""
    return Markup(environment().get_template(template).render(values))


def asset(name: str) -> Markup:
    """Return a file of this folder unchanged, such as the style sheet."""
    return Markup(files(__package__).joinpath(name).read_text(encoding="utf-8"))


@cache
def environment() -> Environment:
    """Return the template environment, which escapes texts and refuses undefined names."""
    made = Environment(
        loader=PackageLoader(__package__, "."),
        autoescape=True,
        finalize=shown,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    made.globals |= {"paths": paths, "x_labels": x_labels, "y_labels": y_labels}
    made.globals["width"] = WIDTH
    made.filters["shorten"] = shorten
    made.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "allow_nan": False}
    return made


def shown(value: object) -> object:
    """Return the text of a value before it is escaped. `Markup` is HTML already."""
    if value is None:
        return ""
    if isinstance(value, float):
        return digits(value)
    return value if isinstance(value, Markup) else plain(value, _LONGEST)


def run_data(run: ReportedRun) -> dict[str, Any]:
    """Return a run as JSON types. Infinite numbers and NaN become ``None``."""
    data = {
        "name": run.name,
        "trace": str(run.story.path),
        "policy": run.policy,
        "sync": run.sync,
        "lockstep": run.lockstep,
        "ended": run.story.ended,
        "headline": " ".join(run.findings),
        "not_measured": next((one.not_measured for one in reversed(run.story.generations)), ""),
        "who_waited": who_waited(run),
        "samples_per_s": run.totals.samples_per_s,
        "totals": run.totals.to_dict(),
        "workers": [asdict(figures_of(run, lane)) for lane in range(len(run.lanes))],
        "generations": [_leg(leg) for leg in run.legs],
        "decisions": _of_generations(run, lambda one: one.decisions),
        "incidents": _of_generations(run, lambda one: one.incidents),
        "alerts": alerts_of(run),
        "curves": [
            {
                "worker": run.lanes[one.lane],
                "fixed_s": one.fixed_s,
                "per_sample_s": one.per_sample_s,
            }
            for one in fitted_of(run)
        ],
        "metrics": {
            one.name: {"steps": one.steps.tolist(), "values": one.values.tolist()}
            for one in courses_of(run)
        },
        "processes": [{"header": life.header, "summary": life.summary} for life in run.story.lives],
        "unread": list(run.story.unread),
    }
    found: dict[str, Any] = finite(data)
    return found


def _of_generations(
    run: ReportedRun, of: Callable[[RecordedGeneration], Sequence[RecordedDecision | Incident]]
) -> list[dict[str, Any]]:
    return [
        {"process": one.life + 1, **asdict(entry)}
        for one in run.story.generations
        for entry in of(one)
    ]


def _leg(leg: Leg) -> dict[str, Any]:
    one = leg.generation
    return {
        "process": one.life + 1,
        "generation": one.number,
        "first_step": one.first,
        "steps": one.steps,
        "global_batch": one.global_batch,
        "workers": list(one.workers),
        "blames": [asdict(blame) for blame in leg.blames],
        "phases": [
            [asdict(phase) for phase in leg.phases(rank)] for rank in range(len(one.workers))
        ],
    }


def finite(value: Any) -> Any:
    """Return JSON types with ``None`` in place of infinite numbers and NaN."""
    if isinstance(value, dict):
        return {str(key): finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [finite(one) for one in value]
    return None if isinstance(value, float) and not isfinite(value) else value


def place_of(trace: Path, given: Path | None) -> Path:
    """Return the file of a report: the given one, or ``report.html`` next to the trace."""
    return trace.parent / REPORT_NAME if given is None else given


def check_place(path: Path, *, force: bool) -> None:
    """Raise `ConfigError` if a report would overwrite a file that is not a report."""
    if path.is_dir():
        raise ConfigError(
            f"{path} is a folder; name a file for the report, such as {path / REPORT_NAME}"
        )
    if path.exists() and not path.is_file():
        raise ConfigError(f"{path} is not a regular file; name another file for the report")
    if is_trace(path):
        raise ConfigError(f"{path} is the trace of a run; name another file for the report")
    if force or not path.exists():
        return
    try:
        with path.open("rb") as file:
            ours = MARK.encode() in file.read(_BEGINNING)
    except OSError as error:
        raise ConfigError(f"cannot read {path} ({error.strerror})") from None
    if not ours:
        raise ConfigError(
            f"{path} exists and is not a report of evenstride; name another file with -o, or "
            "overwrite it with --force"
        )


def check_folder(path: Path) -> None:
    """Raise `ConfigError` unless figures can be written into a folder, which may not exist yet."""
    nearest = path.absolute()
    while not os.path.lexists(nearest):
        nearest = nearest.parent
    if not nearest.is_dir():
        raise ConfigError(f"{nearest} is not a folder, so {path} cannot be one; name another one")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise ConfigError(f"{nearest} is not writable; name another folder for figures than {path}")


def write_page(text: str, path: Path) -> None:
    """Write a page atomically; raise `ConfigError` if it cannot be written."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        aside.write_text(text, encoding="utf-8")
        aside.replace(path)
    except OSError as error:
        with suppress(OSError):
            aside.unlink()
        raise ConfigError(f"cannot write {path} ({error.strerror})") from None
