"""``evenstride report``: what happened in runs, as one page to read, send and print."""

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
        typer.Argument(help="Folders of runs, or their trace files.", metavar="RUN [RUN ...]"),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "--output",
            "-o",
            help="The page; report.html in the first run's folder if not given.",
        ),
    ] = None,
    figures: Annotated[
        Path | None,
        typer.Option(help="Folder for the charts as PNG and SVG, too (needs matplotlib)."),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Overwrite a file that is no report.")
    ] = False,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="Print one JSON object: the page's figures, with whole lists."),
    ] = False,
) -> None:
    """Write what happened in runs as one HTML page: who waited for whom, since when, and why.

    The page needs no network and no other file. With several runs it compares them first. What
    could not be read of a trace is told on the page; a run that still trains is shown as far as
    it is.

    Examples:
        evenstride report runs/today

        evenstride report runs/uniform runs/adaptive -o compared.html --figures figures
    """
    from evenstride.report.page.html_page import (
        check_folder,
        check_place,
        page_of,
        place_of,
        run_data,
        write_page,
    )
    from evenstride.report.wording import plain
    from evenstride.trace.read import trace_path

    place = place_of(trace_path(runs[0]), out)
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
        told = {"page": str(place), "figures": [str(path) for path in drawn]}
        typer.echo(json.dumps({**told, "runs": [run_data(run) for run in found]}))
        return
    typer.echo(f"report {plain(place)}")
    for path in drawn:
        typer.echo(f"figure {plain(path)}")


def _each_once(paths: Sequence[Path]) -> list[Path]:
    """Return the runs without those given before, which it tells of; refuse too many for a page."""
    from evenstride.report.wording import plain
    from evenstride.trace.read import trace_path

    found: dict[Path, Path] = {}
    for path in paths:
        trace = trace_path(path).resolve()
        if trace in found:
            say(f"{plain(path)} was given before, and is shown once", err=True)
        else:
            found[trace] = path
    if len(found) > _MOST_RUNS:
        raise ConfigError(
            f"{len(found)} runs were given, and a page has room for 1 to {_MOST_RUNS}; give fewer, "
            "or write several pages"
        )
    return list(found.values())


def _read(paths: Sequence[Path]) -> list[ReportedRun]:
    """Return the runs, each under a name that no other one has."""
    from evenstride.report.analysis.run_timeline import nothing_to_show
    from evenstride.report.page.page_runs import read_run
    from evenstride.trace.read import trace_path

    names = _names([trace_path(path) for path in paths])
    try:
        found = [read_run(path, name, len(paths)) for path, name in zip(paths, names, strict=True)]
    except OSError as error:
        raise TraceError(f"cannot read {error.filename} ({error.strerror})") from None
    if not any(run.story.generations for run in found):
        raise nothing_to_show(found[0].story)
    return found


def _names(traces: Sequence[Path]) -> list[str]:
    """Return short names of traces: their folders, with as much before as tells them apart."""
    from evenstride.trace.read import TRACE_NAME

    parts = [
        path.resolve().parent.parts
        if path.name == TRACE_NAME
        else (*path.resolve().parent.parts, path.stem)
        for path in traces
    ]
    lengths = range(1, max(map(len, parts)) + 1)
    tried = [["/".join(one[-length:]) for one in parts] for length in lengths]
    names = max(tried, key=lambda names: len(set(names)))  # the first of them, so the shortest
    seen: dict[str, int] = {}
    told = []
    for name in names:
        seen[name] = seen.get(name, 0) + 1
        told.append(name if seen[name] == 1 else f"{name} ({seen[name]})")
    return told
