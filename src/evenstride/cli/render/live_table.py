"""What goes on in a run, per worker: a live table on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.live import Live
from rich.table import Table

from evenstride.trace.follow import LineTail


@dataclass(frozen=True, slots=True)
class WorkerRow:
    """One worker as last heard of."""

    name: str
    share: int = 0
    busy_s: float = 0.0
    wait_s: float = 0.0


class LiveTable:
    """Shows a run while it goes on, on stderr, so that stdout keeps the result."""

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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def say(self, text: str) -> None:
        """Print a line that stays."""
        self._console.print(
            text, highlight=False, markup=False, soft_wrap=not self._console.is_terminal
        )

    def follow(self, trace: Path, title: str) -> None:
        """Show the workers of the run that writes this trace from now on."""
        self._tail, self._title, self._step = LineTail(trace), title, 0
        self._rows = []

    def refresh(self) -> None:
        """Take in what the trace has to tell, and draw."""
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
