"""``evenstride report``: what happened in runs, as one page to read, send and print."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from evenstride.cli.render.terminal_text import say
from evenstride.errors import ConfigError, TraceError

if TYPE_CHECKING:
    from evenstride.report.page.page_runs import ReportedRun

_MOST_RUNS = 200

_Runs = Annotated[
    list[Path],
    typer.Argument(help="Folders of runs, or their trace files.", metavar="RUN [RUN ...]"),
]
_Out = Annotated[
    Path | None,
    typer.Option(
        "--out",
        "--output",
        "-o",
        help="The page; report.html in the first run's folder if not given.",
    ),
]
_Figures = Annotated[
    Path | None,
    typer.Option(help="Folder for the charts as PNG and SVG, too (needs matplotlib)."),
]
_Force = Annotated[bool, typer.Option("--force", help="Overwrite a file that is no report.")]
_AsJson = Annotated[
    bool,
    typer.Option("--json", help="Print one JSON object: the page's figures, with whole lists."),
]


def report(
    runs: _Runs,
    out: _Out = None,
    figures: _Figures = None,
    force: _Force = False,
    as_json: _AsJson = False,
) -> None:
    """Write what happened in runs as one HTML page: who waited for whom, since when, and why.

    The page needs no network and no other file. With several runs it compares them first. What
    could not be read of a trace is told on the page; a run that still trains is shown as far as
    it is.

    Examples:
        evenstride report runs/today

        evenstride report runs/uniform runs/adaptive -o compared.html --figures figures
    """
    from evenstride.report.page.html_page import page_of
    from evenstride.report.page.output_files import check_folder, check_place, place_of, write_page
    from evenstride.report.page.page_json import run_data
    from evenstride.report.wording import plain
    from evenstride.trace.read import trace_path

    place = place_of(trace_path(runs[0]), out)
    check_place(place, force=force)
    if figures is not None:
        from evenstride.report.suite_figures import check_plotting

        check_plotting()
        check_folder(figures)
    found = _read(_few(_each_once(runs)))
    write_page(page_of(found), place)
    drawn = [] if figures is None else _draw(found, figures)
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


def _draw(runs: Sequence[ReportedRun], folder: Path) -> list[Path]:
    from evenstride.report.page.charts.paper_figures import figures_of

    return figures_of(runs, folder)


def _each_once(paths: Sequence[Path]) -> list[Path]:
    """Return the runs without those that were given before; tell of these on stderr."""
    from evenstride.report.wording import plain
    from evenstride.trace.read import trace_path

    found: dict[Path, Path] = {}
    for path in paths:
        trace = trace_path(path).resolve()
        if trace in found:
            say(f"{plain(path)} was given before, and is shown once", err=True)
        else:
            found[trace] = path
    return list(found.values())


def _few(paths: Sequence[Path]) -> Sequence[Path]:
    """Return the runs if they find room on one page.

    Raises:
        ConfigError: there are too many.
    """
    if len(paths) > _MOST_RUNS:
        raise ConfigError(
            f"{len(paths)} runs were given, and a page has room for 1 to {_MOST_RUNS}; give fewer, "
            "or write several pages"
        )
    return paths


def _read(paths: Sequence[Path]) -> list[ReportedRun]:
    """Return the runs, each under a name that no other one has.

    Raises:
        TraceError: there is no such file, or none of them tells of any workers.
    """
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
