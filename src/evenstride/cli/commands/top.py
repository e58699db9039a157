"""``evenstride top``: the current state of runs, live or printed once."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console, Group
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from evenstride.errors import TraceError
from evenstride.report.wording import NOTHING, duration, not_measured_text, plain

if TYPE_CHECKING:
    from evenstride.report.analysis.live_view import View, WorkerView
    from evenstride.report.analysis.run_timeline import RunTimeline

# Largest fraction of a core that refreshes use together; on long runs they are further apart.
_MOST_PART = 0.04
_OTHER_LINES = 3  # headings, the line on other workers, and the cursor
_WIDE, _MIDDLE, _NARROW = 118, 92, 78  # widths in columns from which more is shown
_SLOW, _LOW = 0.9, 0.7  # of its own best speed
_QUIET_S = 60.0
_GIB = float(1 << 30)


def top(
    run: Annotated[
        Path,
        typer.Argument(
            help="A run's folder, a folder that holds several runs, or a trace file.",
            metavar="PATH",
        ),
    ],
    once: Annotated[
        bool, typer.Option("--once", help="Print the current state and end, for scripts.")
    ] = False,
    everything: Annotated[
        bool, typer.Option("--all", help="Show decisions, gains, causes of waits and all alerts.")
    ] = False,
    interval: Annotated[
        float,
        typer.Option(min=0.2, max=3600.0, help="Seconds between refreshes; more on long runs."),
    ] = 2.0,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object and end, as with --once.")
    ] = False,
) -> None:
    """Show a run while it trains: busy and waiting times, speeds and shares of its workers.

    A run writes its trace where EVENSTRIDE_TRACE or Stride(trace=...) names a folder. Finished
    runs work, too. For a run on another machine: ssh -t HOST evenstride top runs/today. Without a
    terminal, the command prints once.

    Examples:
        evenstride top runs/today

        evenstride top runs/today --once --all

        evenstride top runs/demo --json
    """
    from evenstride.report.analysis.run_folder import traces_at

    console = Console(highlight=False, soft_wrap=False)
    if as_json:
        traces = traces_at(run)
        data = [view.to_dict() for view in _current(traces)]
        found = data[0] if len(traces) == 1 else {"runs": data}
        typer.echo(json.dumps(_for_json(found), allow_nan=False))
    elif once or not console.is_terminal:
        views = _current(traces_at(run))
        console.print(screen(views, console, live=False, everything=everything))
    else:
        with suppress(KeyboardInterrupt):  # the usual way to leave
            _watch(_awaited(run, console, interval), console, interval, everything=everything)


def _current(traces: Sequence[Path]) -> list[View]:
    """Return the current state of the runs that have one; raise `TraceError` if none has."""
    from evenstride.report.analysis.live_view import view_of
    from evenstride.report.analysis.run_timeline import RunTimeline, nothing_to_show

    timelines = [RunTimeline(trace) for trace in traces]
    for one in timelines:
        one.read()
    views = [view for one in timelines if (view := view_of(one, time.time())) is not None]
    if not views:
        raise nothing_to_show(timelines[0])
    return views


def _awaited(run: Path, console: Console, interval: float) -> list[RunTimeline]:
    """Return the runs at a path. Wait for a trace, which a run writes when it starts."""
    from evenstride.report.analysis.run_folder import traces_at
    from evenstride.report.analysis.run_timeline import RunTimeline

    with console.status("") as status:
        while True:
            try:
                return [RunTimeline(trace) for trace in traces_at(run)]
            except TraceError as error:
                status.update(f"Waiting for the run, Ctrl-C ends: {escape(plain(error))}")
            time.sleep(interval)


def _watch(
    runs: Sequence[RunTimeline], console: Console, interval: float, *, everything: bool
) -> None:
    from rich.live import Live

    with console.status("reading the trace"):  # takes seconds on a long run
        for one in runs:
            _followed(one)
    with Live(console=console, auto_refresh=False, vertical_overflow="crop") as live:
        while _refreshed(runs, console, live.update, everything=everything):
            time.sleep(interval)


def _followed(run: RunTimeline) -> tuple[View | None, list[str]]:
    """Return the current state of a run, and what could not be read.

    If its trace was moved or removed, the last state stays, and a new file in its place is read.
    """
    from evenstride.report.analysis.live_view import view_of

    lost = []
    try:
        run.read()
    except TraceError as error:
        lost = [plain(error)]
    view = view_of(run, time.time())
    return view and replace(view, unread=(*lost, *view.unread)), lost


def _refreshed(
    runs: Sequence[RunTimeline],
    console: Console,
    update: Callable[..., None],
    *,
    everything: bool,
) -> bool:
    """Read and draw once; return whether a run goes on.

    A refresh of a long run takes longer, and the next one is delayed in proportion.
    """
    began_s = time.process_time()
    found = [_followed(one) for one in runs]
    views = [view for view, _ in found if view is not None]
    live = len(views) < len(runs) or not all(view.ended for view in views)
    if views:
        update(screen(views, console, live=live, everything=everything), refresh=True)
    else:
        lost = "; ".join([*found[0][1], *runs[0].unread]) or "its workers have not started yet"
        update(Text(f"{plain(runs[0].path)}: waiting for the run ({lost})"), refresh=True)
    time.sleep((time.process_time() - began_s) / _MOST_PART)
    return live


def _for_json(value: object) -> object:
    """Return a value with None in place of numbers that JSON does not have."""
    if isinstance(value, dict):
        return {key: _for_json(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_for_json(one) for one in value]
    return None if isinstance(value, float) and not abs(value) <= sys.float_info.max else value


def screen(views: Sequence[View], console: Console, *, live: bool, everything: bool) -> Group:
    """Return what is drawn: the dashboard of one run, or an overview of several."""
    if len(views) == 1:
        return dashboard(views[0], console, live=live, everything=everything)
    from evenstride.report.analysis.key_findings import compared_findings
    from evenstride.report.analysis.run_folder import run_names

    names = run_names([Path(view.run) for view in views])
    facts = [(name, one.totals, one.findings) for name, one in zip(names, views, strict=True)]
    parts = [dashboard(one, console, live=False, everything=True) for one in views]
    return Group(
        *map(_line, compared_findings(facts)),
        _overview(names, views),
        *(parts if everything and not live else [_line("give one of the runs to see its workers")]),
    )


def _overview(names: Sequence[str], views: Sequence[View]) -> Table:
    table = Table(box=None, pad_edge=False, expand=False)
    for heading in ("run", "policy"):
        table.add_column(heading, overflow="fold")
    for heading in ("step", "each", "efficiency", "waiting", "state"):
        table.add_column(heading, justify="right", no_wrap=True)
    for name, view in zip(names, views, strict=True):
        totals = view.totals
        efficiency = totals.efficiency_model
        table.add_row(
            Text(name),
            Text(view.policy),
            f"{view.step:,}",
            duration(view.step_s),
            NOTHING if efficiency is None else f"{efficiency:.2f}",
            f"{totals.waiting_part:.0%}" if view.lockstep else NOTHING,
            "ended" if view.ended else "running",
        )
    return table


def dashboard(view: View, console: Console, *, live: bool, everything: bool = False) -> Group:
    """Return the drawing of a run for the size and encoding of a console.

    A ``live`` drawing is refreshed, so it must fit the height.
    """
    above = [*map(_line, _head(view, everything=everything))]
    below = [*map(_line, _tail(view, live=live, everything=everything))]
    room = len(view.workers)
    if live:
        lines = sum(len(console.render_lines(one, pad=False)) for one in (*above, *below))
        room = max(console.height - lines - _OTHER_LINES, 3)
    shown, left_out = _shown(view.workers, room)
    more = f"and {left_out} more workers, which made the others wait less"
    rest = [_line(more)] if left_out else []
    return Group(*above, _table(view, shown, console), *rest, *below)


def _line(text: str | Text) -> Text:
    line = Text(text) if isinstance(text, str) else text
    line.overflow, line.no_wrap = "fold", False
    return line


def _head(view: View, *, everything: bool) -> Iterator[str | Text]:
    yield Text(f"{view.run}", style="bold")
    parts = [f"policy {view.policy}", f"sync {view.sync}", f"global batch {view.global_batch:,}"]
    if view.lives > 1:
        parts.append(f"process {view.lives} of the run")
    if view.generation > view.lives:
        parts.append(f"generation {view.generation}")
    yield ", ".join(parts)
    epoch = "" if view.epoch is None else f", epoch {view.epoch:.2f}"
    step = f", {duration(view.step_s)} each" if view.step_s else ""
    yield f"step {view.step:,}{step}{epoch}; {_state(view)}"
    yield from view.findings
    if everything:
        yield from _gains(view)


def _state(view: View) -> str:
    if view.ended:
        return "ended"
    if view.heard_s is None:
        return "running"
    last = f"last record {duration(view.heard_s)} ago"
    return f"{last}: it may have stopped" if view.heard_s > _QUIET_S else last


def _gains(view: View) -> Iterator[str | Text]:
    totals = view.totals
    if view.not_measured:
        yield not_measured_text(view.not_measured)
    elif not view.lockstep:
        yield "workers do not wait for each other in this mode"
    elif totals.efficiency_model is None or totals.speedup_model is None:
        yield "efficiency unknown: not all workers are measured yet"
    else:
        saved = totals.saved_s or 0.0
        gain = f"{duration(saved)} saved" if saved >= 0 else f"{duration(-saved)} lost"
        yield Text.assemble(
            ("efficiency ", ""),
            (f"{totals.efficiency_model:.2f}", "bold"),
            (f", {totals.speedup_model:.2f} times as fast as the equal split ", ""),
            (f"(bound {totals.bound_model:.2f}); {duration(totals.took_s)} of steps, {gain}", ""),
            (f"; {totals.waiting_part:.0%} of the workers' time waiting", ""),
        )


def _shown(workers: tuple[WorkerView, ...], room: int) -> tuple[list[WorkerView], int]:
    """Return the workers that fit, the costliest ones in rank order, and the number left out."""
    if len(workers) <= room:
        return list(workers), 0
    worst = sorted(workers, key=lambda one: (-one.caused_s, one.rank))[: room - 1]
    return sorted(worst, key=lambda one: one.rank), len(workers) - len(worst)


def _table(view: View, workers: list[WorkerView], console: Console) -> Table:
    table = Table(box=None, pad_edge=False, expand=False)
    wide, middle = console.width >= _WIDE, console.width >= _MIDDLE
    table.add_column("rank", justify="right", no_wrap=True)
    if middle:
        table.add_column("worker", no_wrap=True, overflow="ellipsis", max_width=28)
    states = any(one.state != "serving" for one in workers)
    if states:
        table.add_column("state", no_wrap=True)
    narrow = console.width < _NARROW
    for heading in ("share", "busy") if narrow else ("share", "busy", "waits"):
        table.add_column(heading, justify="right", no_wrap=True)
    if not narrow:
        table.add_column("busy, waiting", no_wrap=True)
    table.add_column("own speed", no_wrap=True)
    memory = wide and any(one.peak_bytes for one in workers)
    if memory:
        table.add_column("memory", justify="right", no_wrap=True)
    kept = view.lockstep and not narrow and not view.not_measured
    if kept:
        table.add_column("others waited", justify="right", no_wrap=True)
    longest_s = max((_total_s(one) for one in workers), default=0.0)
    for one in workers:
        cells: list[str | Text] = [str(one.rank)]
        cells += [one.name] if middle else []
        cells += [one.state] if states else []
        cells += [f"{one.share:,}", duration(one.busy_s)]
        if not narrow:
            cells += [duration(one.wait_s), _bar(one, longest_s, console, 28 if wide else 14)]
        cells += [_own_speed(one)]
        cells += [_memory(one)] if memory else []
        cells += [duration(one.caused_s)] if kept else []
        table.add_row(*(Text(c) if isinstance(c, str) else c for c in cells))
    return table


def _total_s(one: WorkerView) -> float:
    return (one.busy_s or 0.0) + (one.wait_s or 0.0)


def _bar(one: WorkerView, longest_s: float, console: Console, width: int) -> Text:
    """Return a bar of the busy time and the waiting time, readable without colours."""
    if one.busy_s is None or longest_s <= 0.0:
        return Text("")
    full, empty = ("█", "░") if _unicode(console) else ("#", ".")
    whole = round(width * _total_s(one) / longest_s)
    busy = min(round(width * one.busy_s / longest_s), whole)
    return Text.assemble((full * busy, "blue"), (empty * (whole - busy), "yellow"))


def _unicode(console: Console) -> bool:
    return console.encoding.lower().startswith("utf")


def _own_speed(one: WorkerView) -> Text:
    if one.speed is None:
        return Text("unknown")
    style = "bold red" if one.speed < _LOW else "yellow" if one.speed < _SLOW else ""
    since = f" since {one.since:,}" if one.since is not None and one.speed < _SLOW else ""
    return Text(f"{one.speed:.2f}{since}", style=style)


def _memory(one: WorkerView) -> str:
    if one.peak_bytes is None:
        return ""
    limit = f" of {one.limit_bytes / _GIB:.1f}" if one.limit_bytes else ""
    return f"{one.peak_bytes / _GIB:.1f}{limit} GiB"


def _tail(view: View, *, live: bool, everything: bool) -> Iterator[str | Text]:
    if everything:
        yield from _decisions(view, live=live)
        yield from view.blames[: 2 if live else len(view.blames)]
    for alert in view.alerts[: len(view.alerts) if everything and not live else 1]:
        yield Text(f"alert: {alert}", style="bold")
    for sentence in view.unread[: 2 if live else len(view.unread)]:
        yield Text(f"not read: {sentence}", style="italic")
    if not everything and not live:
        yield Text("--all shows decisions and causes of waits", style="dim")
    if live and not view.ended:
        yield Text("Ctrl-C leaves; the run goes on", style="dim")


def _decisions(view: View, *, live: bool) -> Iterator[str]:
    if view.decision is not None:
        what = "kept" if view.decision.shares is None else "set"
        yield f"last decision, step {view.decision.step:,}: shares {what} ({view.decision.reason})"
    changes = [one for one in view.changes if one is not view.decision]
    for change in changes[: 1 if live else len(changes)]:
        shares = "/".join(map(str, (change.shares or ())[:8]))
        more = "/..." if len(change.shares or ()) > 8 else ""
        yield f"before, step {change.step:,}: {shares}{more} ({change.reason})"
