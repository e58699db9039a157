"""``evenstride report``: what happened in runs, as one HTML page."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from evenstride.cli.terminal_text import say
from evenstride.errors import ConfigError, TraceError

if TYPE_CHECKING:
    from evenstride.report.page.page_runs import ReportedRun

_MOST_RUNS = 200


def report(
    runs: Annotated[
        list[Path],
        typer.Argument(
            help="Folders of runs, folders that hold several runs, or trace files.",
            metavar="PATH [PATH ...]",
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "--output",
            "-o",
            help="The page. Default: report.html in the first folder.",
        ),
    ] = None,
    figures: Annotated[
        Path | None,
        typer.Option(help="Folder for the charts as PNG and SVG (needs matplotlib)."),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Overwrite a file that is not a report.")
    ] = False,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="Print one JSON object with the page's figures and all lists."),
    ] = False,
) -> None:
    """Write an HTML page on runs: which worker delayed the others, since when, and why.

    The command prints the most important findings. The page needs no network and no other file.
    It compares several runs. A run that still trains is shown up to its latest record. The page
    lists the parts of a trace that could not be read.

    Examples:
        evenstride report runs/today

        evenstride report runs/demo

        evenstride report runs/uniform runs/adaptive -o compared.html --figures figures
    """
    from evenstride.report.analysis.run_folder import traces_at
    from evenstride.report.page.html_page import (
        REPORT_NAME,
        check_folder,
        check_place,
        findings_of,
        page_of,
        place_of,
        run_data,
        write_page,
    )
    from evenstride.report.wording import plain

    first = traces_at(runs[0])
    place = place_of(first[0], runs[0] / REPORT_NAME if out is None and len(first) > 1 else out)
    check_place(place, force=force)
    if figures is not None:
        from evenstride.report.suite_figures import check_plotting

        check_plotting()
        check_folder(figures)
    found = _read(_each_once(runs))
    write_page(page_of(found), place)
    drawn: list[Path] = []
    if figures is not None:
        from evenstride.report.page.paper_figures import figures_of

        drawn = figures_of(found, figures)
    for run in found:
        for sentence in run.story.unread:
            say(f"{run.name}: {sentence}", err=True)
    if as_json:
        files = {"page": str(place), "figures": [str(path) for path in drawn]}
        typer.echo(json.dumps({**files, "runs": [run_data(run) for run in found]}))
        return
    say("\n".join(findings_of(found)))
    typer.echo(f"report {plain(place)}")
    for path in drawn:
        typer.echo(f"figure {plain(path)}")


def _each_once(paths: Sequence[Path]) -> list[Path]:
    """Return the traces of all paths without repetitions; refuse too many for one page."""
    from evenstride.report.analysis.run_folder import traces_at
    from evenstride.report.wording import plain

    found: dict[Path, Path] = {}
    for trace in (trace for path in paths for trace in traces_at(path)):
        if found.setdefault(trace.resolve(), trace) is not trace:
            say(f"{plain(trace)} is given twice and shown once", err=True)
    if len(found) > _MOST_RUNS:
        raise ConfigError(
            f"{len(found)} runs are too many for one page: expected 1 to {_MOST_RUNS}; give fewer "
            "runs, or write several pages"
        )
    return list(found.values())


def _read(traces: Sequence[Path]) -> list[ReportedRun]:
    """Return the runs, each with a distinct name."""
    from evenstride.report.analysis.run_folder import run_names
    from evenstride.report.analysis.run_timeline import nothing_to_show
    from evenstride.report.page.page_runs import read_run

    names = run_names(traces)
    try:
        found = [
            read_run(path, name, len(traces)) for path, name in zip(traces, names, strict=True)
        ]
    except OSError as error:
        raise TraceError(f"cannot read {error.filename} ({error.strerror})") from None
    if not any(run.story.generations for run in found):
        raise nothing_to_show(found[0].story)
    return found
