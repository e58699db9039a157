"""``evenstride top``: a run, live, drawn for terminals of any width and for plain files."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
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
from evenstride.report.wording import duration, not_measured_text, plain

if TYPE_CHECKING:
    from evenstride.report.analysis.live_view import View, WorkerView
    from evenstride.report.analysis.run_timeline import RunTimeline

# Of a core: what looks take together at most, as those at long runs are further apart.
_MOST_PART = 0.04
_BESIDE = 3  # headings, workers that are left out, and the cursor
_WIDE, _MIDDLE, _NARROW = 118, 92, 78  # columns from which on more is shown
_SLOW, _LOW = 0.9, 0.7  # of its own best
_QUIET_S = 60.0
_GIB = float(1 << 30)


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
    console = Console(highlight=False, soft_wrap=False)
    if as_json:
        typer.echo(json.dumps(_for_json(_standing(run).to_dict()), allow_nan=False))
    elif once or not console.is_terminal:
        console.print(dashboard(_standing(run), console, live=False))
    else:
        with suppress(KeyboardInterrupt):  # which is how one leaves
            _watch(_awaited(run, console, interval), console, interval)


def _standing(run: Path) -> View:
    from evenstride.report.analysis.live_view import view_of
    from evenstride.report.analysis.run_timeline import RunTimeline, nothing_to_show

    story = RunTimeline(run)
    story.read()
    view = view_of(story, time.time())
    if view is None:
        raise nothing_to_show(story)
    return view


def _awaited(run: Path, console: Console, interval: float) -> RunTimeline:
    """Return the story of a run, whose trace may not be there yet: a run writes it as it begins."""
    from evenstride.report.analysis.run_timeline import RunTimeline

    with console.status("") as status:
        while True:
            try:
                return RunTimeline(run)
            except TraceError as error:
                status.update(f"Waiting for it, Ctrl-C ends: {escape(plain(error))}")
            time.sleep(interval)


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
    from evenstride.report.analysis.live_view import view_of

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


def _for_json(value: object) -> object:
    """Return a value with what JSON does not know as null."""
    if isinstance(value, dict):
        return {key: _for_json(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_for_json(one) for one in value]
    return None if isinstance(value, float) and not abs(value) <= sys.float_info.max else value


def dashboard(view: View, console: Console, *, live: bool) -> Group:
    """Return what is drawn of a run on a console, whose size and encoding count.

    ``live`` is drawn again and again, so that it has to fit the height.
    """
    above, below = [*map(_line, _head(view))], [*map(_line, _tail(view, live=live))]
    room = len(view.workers)
    if live:
        lines = sum(len(console.render_lines(one, pad=False)) for one in (*above, *below))
        room = max(console.height - lines - _BESIDE, 3)
    shown, left_out = _shown(view.workers, room)
    more = f"and {left_out} more workers, none of which kept others waiting longer"
    rest = [_line(more)] if left_out else []
    return Group(*above, _table(view, shown, console), *rest, *below)


def _line(text: str | Text) -> Text:
    line = Text(text) if isinstance(text, str) else text
    line.overflow, line.no_wrap = "fold", False
    return line


def _head(view: View) -> Iterator[str | Text]:
    yield Text(f"{view.run}", style="bold")
    parts = [f"policy {view.policy}", f"sync {view.sync}", f"global batch {view.global_batch:,}"]
    if view.lives > 1:
        parts.append(f"process {view.lives} of the run")
    if view.generation > view.lives:
        parts.append(f"group {view.generation}")
    yield ", ".join(parts)
    epoch = "" if view.epoch is None else f", epoch {view.epoch:.2f}"
    step = f", {duration(view.step_s)} each" if view.step_s else ""
    yield f"step {view.step:,}{step}{epoch}; {_state(view)}"
    yield from _gains(view)


def _state(view: View) -> str:
    if view.ended:
        return "ended"
    if view.heard_s is None:
        return "running"
    told = f"heard of {duration(view.heard_s)} ago"
    return f"{told}: it may have stopped" if view.heard_s > _QUIET_S else told


def _gains(view: View) -> Iterator[str | Text]:
    totals = view.totals
    if view.not_measured:
        yield not_measured_text(view.not_measured)
    elif not view.lockstep:
        yield "workers do not keep step in this mode: nobody waits for another"
    elif totals.efficiency_model is None or totals.speedup_model is None:
        yield "efficiency not known yet: every worker has to be measured first"
    else:
        saved = totals.saved_s or 0.0
        told = f"{duration(saved)} saved" if saved >= 0 else f"{duration(-saved)} lost"
        yield Text.assemble(
            ("efficiency ", ""),
            (f"{totals.efficiency_model:.2f}", "bold"),
            (f", {totals.speedup_model:.2f} times as fast as equal batches would be ", ""),
            (f"(bound {totals.bound_model:.2f}); {duration(totals.took_s)} taken, {told}", ""),
            (f"; {totals.waiting_part:.0%} of workers' time waiting", ""),
        )


def _shown(workers: tuple[WorkerView, ...], room: int) -> tuple[list[WorkerView], int]:
    """Return the workers that there is room for: those who cost most, in rank order."""
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
        table.add_column("kept others", justify="right", no_wrap=True)
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
    """Return a bar: its own work in full, its waiting in outline; colour only repeats it."""
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
        return Text("not known")
    style = "bold red" if one.speed < _LOW else "yellow" if one.speed < _SLOW else ""
    since = f" since {one.since:,}" if one.since is not None and one.speed < _SLOW else ""
    return Text(f"{one.speed:.2f}{since}", style=style)


def _memory(one: WorkerView) -> str:
    if one.peak_bytes is None:
        return ""
    limit = f" of {one.limit_bytes / _GIB:.1f}" if one.limit_bytes else ""
    return f"{one.peak_bytes / _GIB:.1f}{limit} GiB"


def _tail(view: View, *, live: bool) -> Iterator[str | Text]:
    if view.decision is not None:
        what = "kept" if view.decision.shares is None else "set"
        yield f"last decision, step {view.decision.step:,}: shares {what} ({view.decision.reason})"
    changes = [one for one in view.changes if one is not view.decision]
    for change in changes[: 1 if live else len(changes)]:
        shares = "/".join(map(str, (change.shares or ())[:8]))
        more = "/..." if len(change.shares or ()) > 8 else ""
        yield f"before, step {change.step:,}: {shares}{more} ({change.reason})"
    yield from view.blames[: 2 if live else len(view.blames)]
    for alert in view.alerts[: 1 if live else len(view.alerts)]:
        yield Text(f"alert: {alert}", style="bold")
    for sentence in view.unread[: 2 if live else len(view.unread)]:
        yield Text(f"not read: {sentence}", style="italic")
    if live and not view.ended:
        yield Text("Ctrl-C leaves; the run goes on", style="dim")
