"""``evenstride top``: a run, live."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

if TYPE_CHECKING:
    from rich.console import Console

    from evenstride.report.analysis.live_view import View
    from evenstride.report.analysis.run_timeline import RunTimeline

_MOST_PART = 0.04
"""Of a core: what looks take together at most, as those at long runs are further apart."""


def top(
    run: Annotated[Path, typer.Argument(help="A run's folder, or its trace file.", metavar="RUN")],
    once: Annotated[
        bool, typer.Option("--once", help="Print how it stands and end, for scripts.")
    ] = False,
    interval: Annotated[
        float,
        typer.Option(min=0.2, max=3600.0, help="Seconds between two looks; more on long runs."),
    ] = 2.0,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object, as --once does.")
    ] = False,
) -> None:
    """Show a run while it trains: who is busy, who waits, who slowed down, what was decided.

    RUN is a run's folder or its trace file, which a run writes where EVENSTRIDE_TRACE or
    Stride(trace=...) says. It works on a run that has ended as well, and wherever the file is:
    ssh -t HOST evenstride top runs/today. Without a terminal it prints once.

    Examples:
        evenstride top runs/today

        evenstride top runs/today --once

        evenstride top runs/today --json
    """
    from rich.console import Console

    from evenstride.report.analysis.run_timeline import RunTimeline

    console = Console(highlight=False, soft_wrap=False)
    if as_json:
        _print_json(RunTimeline(run))
    elif once or not console.is_terminal:
        _print(RunTimeline(run), console)
    else:
        with suppress(KeyboardInterrupt):  # which is how one leaves
            _watch(_awaited(run, console, interval), console, interval)


def _awaited(run: Path, console: Console, interval: float) -> RunTimeline:
    """Return the story of a run, whose trace may not be there yet: a run writes it as it begins."""
    from evenstride.errors import TraceError
    from evenstride.report.analysis.run_timeline import RunTimeline
    from evenstride.report.wording import plain

    with console.status("") as status:
        while True:
            try:
                return RunTimeline(run)
            except TraceError as error:
                status.update(f"Waiting for it, Ctrl-C ends: {escape(plain(error))}")
            time.sleep(interval)


def _look(story: RunTimeline) -> View | None:
    from evenstride.report.analysis.live_view import view_of

    story.read()
    return view_of(story, time.time())


def _print_json(story: RunTimeline) -> None:
    view = _look(story)
    if view is None:
        _refuse_empty(story)
    else:
        typer.echo(json.dumps(_plain(view.to_dict()), allow_nan=False))


def _print(story: RunTimeline, console: Console) -> None:
    from evenstride.cli.render.dashboard import dashboard

    view = _look(story)
    if view is None:
        _refuse_empty(story)
    else:
        console.print(dashboard(view, console, live=False))


def _refuse_empty(story: RunTimeline) -> None:
    from evenstride.report.analysis.run_timeline import nothing_to_show

    raise nothing_to_show(story)


def _watch(story: RunTimeline, console: Console, interval: float) -> None:
    from rich.live import Live

    with console.status("reading the trace"):  # of a long run it takes seconds
        _followed(story)
    with Live(console=console, auto_refresh=False, vertical_overflow="crop") as live:
        while _looked(story, console, live.update):
            time.sleep(interval)


def _followed(story: RunTimeline) -> tuple[View | None, list[str]]:
    """Return how a run stands, and what was lost: a trace may be moved or removed meanwhile.

    Then how it stood is shown on, and a file that comes in its place is read.
    """
    from evenstride.errors import TraceError
    from evenstride.report.analysis.live_view import view_of
    from evenstride.report.wording import plain

    lost = []
    try:
        story.read()
    except TraceError as error:
        lost = [plain(error)]
    view = view_of(story, time.time())
    return view and replace(view, unread=(*lost, *view.unread)), lost


def _looked(story: RunTimeline, console: Console, update: Callable[..., None]) -> bool:
    """Look once, and draw; return whether the run goes on.

    A look at a long run takes longer, and the next one comes the later for it.
    """
    from rich.text import Text

    from evenstride.cli.render.dashboard import dashboard
    from evenstride.report.wording import plain

    began_s = time.process_time()
    view, lost = _followed(story)
    if view is None:
        told = "; ".join([*lost, *story.unread]) or "the workers have not met yet"
        update(Text(f"{plain(story.path)}: waiting for the run ({told})"), refresh=True)
    else:
        update(dashboard(view, console, live=not view.ended), refresh=True)
    spent_s = time.process_time() - began_s
    time.sleep(spent_s / _MOST_PART)
    return view is None or not view.ended


def _plain(value: object) -> object:
    """Return a value with what JSON does not know as null."""
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return None if isinstance(value, float) and not abs(value) <= sys.float_info.max else value
