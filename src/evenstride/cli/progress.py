"""How far a long command is, on stderr, so that stdout keeps the result."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

EVERY_S = 10.0
"""Seconds between lines where there is no terminal."""


class Advance:
    """A bar on a terminal, and elsewhere a line now and then.

    Args:
        total: how many things there are to do.
        what: they are, in the plural.
        clock: seconds that pass.
    """

    def __init__(self, total: int, what: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._total, self._what, self._clock = total, what, clock
        self._done = 0
        self._told_s = clock()
        console = Console(file=sys.stderr)
        columns = (
            *(TextColumn("{task.description}", markup=False), BarColumn(bar_width=30)),
            *(MofNCompleteColumn(), TimeElapsedColumn()),
        )
        self._bar = Progress(*columns, console=console, transient=True)
        self._live = console.is_terminal

    def __enter__(self) -> Self:
        if self._live:
            self._bar.start()
            self._task = self._bar.add_task(self._what, total=self._total)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._live:
            self._bar.stop()

    def step(self, about: str) -> None:
        """One more is done; tell what it was about."""
        self._done += 1
        if self._live:
            self._bar.update(self._task, advance=1, description=about)
            return
        now_s = self._clock()
        if self._done < self._total and now_s - self._told_s >= EVERY_S:
            self._told_s = now_s
            print(f"{self._done} of {self._total} {self._what} ({about})", file=sys.stderr)
