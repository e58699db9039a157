"""Progress of long commands on stderr: a table, a bar or a status. stdout has the result."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from rich.console import Console
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from evenstride.report.wording import MOST_NAME, shorten
from evenstride.trace.read import LineTail

EVERY_S = 10.0
"""Seconds between lines without a terminal."""
_BAR = 16
_FIXED = _BAR + 38  # columns of the bar, the counts and the time


@dataclass(frozen=True, slots=True)
class WorkerRow:
    """The latest measurements of one worker."""

    name: str
    share: int = 0
    busy_s: float = 0.0
    wait_s: float = 0.0


class LiveTable:
    """Shows the workers of a run in a live table on a terminal, and plain lines elsewhere."""

    def __init__(self, speeds: tuple[float, ...]) -> None:
        self._console = Console(file=sys.stderr)
        self._speeds = speeds
        self._tail: LineTail | None = None
        self._rows: list[WorkerRow] = []
        self._step, self._title = 0, ""
        self._live: Live | None = None

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live = Live(console=self._console, refresh_per_second=8, transient=True)
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def say(self, text: str) -> None:
        """Print a permanent line."""
        self._console.print(
            text, highlight=False, markup=False, soft_wrap=not self._console.is_terminal
        )

    def follow(self, trace: Path, title: str) -> None:
        """Show the workers of the run that writes this trace."""
        self._tail, self._title, self._step = LineTail(trace), title, 0
        self._rows = []

    def refresh(self) -> None:
        """Read new records of the trace, and draw."""
        for record in self._tail.records() if self._tail else []:
            self._take(record)
        if self._live is not None and self._rows:
            self._live.update(self._table())

    def _take(self, record: dict[str, Any]) -> None:
        event = record.get("event", {})
        if event.get("type") == "FleetFormed":
            self._rows = [WorkerRow(worker["name"]) for worker in event["workers"]]
        elif event.get("type") == "Exchanged":
            self._step = event["step"]
            for seen in event["observations"]:
                self._rows[seen["worker"]] = replace(
                    self._rows[seen["worker"]],
                    share=seen["share"],
                    busy_s=seen["busy_s"][-1],
                    wait_s=seen["wait_s"][-1],
                )

    def _table(self) -> Table:
        table = Table(title=f"{self._title}, step {self._step}", title_justify="left")
        for heading in ("worker", "speed", "samples", "busy", "waiting"):
            table.add_column(heading, justify="left" if heading == "worker" else "right")
        for row, speed in zip(self._rows, self._speeds, strict=False):
            table.add_row(
                row.name,
                f"{speed:g}",
                str(row.share),
                f"{row.busy_s * 1e3:.0f} ms",
                f"{row.wait_s * 1e3:.0f} ms",
            )
        return table


class Advance:
    """A progress bar on a terminal, and occasional lines elsewhere."""

    def __init__(self, total: int, what: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._total, self._what, self._clock = total, what, clock
        self._done, self._about = 0, what
        self._printed_s = clock()
        console = Console(file=sys.stderr)
        self._bar = Progress(
            BarColumn(_BAR),
            MofNCompleteColumn(),
            TextColumn(f"{what},", markup=False),
            TimeElapsedColumn(),
            TextColumn("elapsed:"),
            TextColumn("{task.description}", markup=False),
            console=console,
            transient=True,
        )
        self._live = console.is_terminal

    def __enter__(self) -> Self:
        if self._live:
            self._bar.start()
            self._task = self._bar.add_task(self._what, total=self._total)
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._bar.stop()

    @property
    def text(self) -> str:
        return f"{self._done} of {self._total} {self._what}"

    def begin(self, about: str) -> None:
        """Start the next item and show its description."""
        self._about = about
        if self._live:
            room = self._bar.console.width - _FIXED
            self._bar.update(self._task, description=shorten(about, max(room, MOST_NAME)))

    def step(self) -> None:
        self._done += 1
        if self._live:
            self._bar.update(self._task, advance=1)
            return
        now_s = self._clock()
        if self._done < self._total and now_s - self._printed_s >= EVERY_S:
            self._printed_s = now_s
            print(f"{self.text} ({self._about})", file=sys.stderr)


@contextmanager
def waiting(what: str, about_s: float) -> Iterator[Callable[[float], None]]:
    """Yield a function that shows the elapsed seconds of an operation of about ``about_s``."""
    console = Console(file=sys.stderr)
    if not console.is_terminal:
        print(f"{what}, about {about_s:.0f} s", file=sys.stderr)
        yield lambda _: None
        return
    with console.status(what) as status:
        yield lambda elapsed_s: status.update(f"{what}: {elapsed_s:.0f} s of about {about_s:.0f} s")
