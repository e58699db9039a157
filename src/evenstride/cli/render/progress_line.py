"""How far a long command is, on stderr, so that stdout keeps the result."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from evenstride.report.text_tables import MOST_NAME, shorten

EVERY_S = 10.0
"""Seconds between lines where there is no terminal."""
_BAR = 16
_BESIDE = _BAR + 38
"""Columns that the bar, the counts and the time take beside what it is about."""


class Advance:
    """A bar on a terminal, and elsewhere a line now and then."""

    def __init__(self, total: int, what: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._total, self._what, self._clock = total, what, clock
        self._done, self._about = 0, what
        self._told_s = clock()
        console = Console(file=sys.stderr)
        columns = (
            *(BarColumn(_BAR), MofNCompleteColumn(), TextColumn(f"{what},", markup=False)),
            *(TimeElapsedColumn(), TextColumn("elapsed:")),
            TextColumn("{task.description}", markup=False),
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

    @property
    def told(self) -> str:
        """How many are done."""
        return f"{self._done} of {self._total} {self._what}"

    def begin(self, about: str) -> None:
        """Begin with the next one, which may take long, and tell what it is about."""
        self._about = about
        if self._live:
            room = self._bar.console.width - _BESIDE
            self._bar.update(self._task, description=shorten(about, max(room, MOST_NAME)))

    def step(self) -> None:
        """It is done."""
        self._done += 1
        if self._live:
            self._bar.update(self._task, advance=1)
            return
        now_s = self._clock()
        if self._done < self._total and now_s - self._told_s >= EVERY_S:
            self._told_s = now_s
            print(f"{self.told} ({self._about})", file=sys.stderr)


@contextmanager
def waiting(what: str, about_s: float) -> Iterator[Callable[[float], None]]:
    """Yield what is told, over and over, for how many seconds there has been waiting."""
    console = Console(file=sys.stderr)
    if not console.is_terminal:
        print(f"{what}, some {about_s:.0f} s", file=sys.stderr)
        yield lambda _: None
        return
    with console.status(what) as status:
        yield lambda elapsed_s: status.update(f"{what}: {elapsed_s:.0f} s of some {about_s:.0f}")
