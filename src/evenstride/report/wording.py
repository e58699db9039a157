"""Times, names and tables as text, without control characters."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from io import StringIO
from math import isfinite
from typing import TYPE_CHECKING, Literal

from evenstride.core.formatting import time_text

if TYPE_CHECKING:
    from rich.table import Table as RichTable

NOTHING = "–"
"""Stands for a missing figure."""
MOST_NAME = 24
"""Longest name in a table that would not fit otherwise."""
_GAP = 2  # characters between columns
_HIDDEN = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}


def duration(seconds: float | None) -> str:
    """Return a time with its unit and three significant digits.

    >>> [duration(s) for s in (0.1333, 2.5, 1234.5, 7200.0, None)]
    ['133 ms', '2.5 s', '1234 s', '2 h', '–']
    """
    return NOTHING if seconds is None or not isfinite(seconds) else time_text(seconds)


def plain(text: object, most: int = 1000) -> str:
    """Return a text without control characters, cut to a length.

    Names of hosts, files and metrics are untrusted. They may hold escape sequences of terminals,
    or characters that reverse the writing direction.

    >>> plain("host" + chr(27) + "[31m/0" + chr(10))
    'host�[31m/0�'
    """
    found = "".join("�" if unicodedata.category(c) in _HIDDEN else c for c in str(text))
    return found if len(found) <= most else f"{found[: most - 1]}…"


def not_measured_text(reason: str) -> str:
    """Return the sentences about a run whose steps were not measured."""
    return (
        f"Not measured: {reason}. The shares stay as they were set at the start, and the waiting "
        "times of the workers are unknown."
    )


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of cells under headings."""

    headings: tuple[str, ...]  # one per column; may have two lines
    rows: tuple[tuple[str, ...], ...]  # one cell per heading
    keys: int = 1  # columns on the left that name the row; each part of the table repeats them

    @property
    def widths(self) -> tuple[int, ...]:
        """Width of each column in characters."""
        from rich.cells import cell_len

        heads = [max(map(cell_len, heading.split("\n"))) for heading in self.headings]
        return tuple(
            max([head, *(cell_len(row[index]) for row in self.rows)])
            for index, head in enumerate(heads)
        )

    @property
    def width(self) -> int:
        """Width of the table in characters."""
        return sum(self.widths) + _GAP * (len(self.headings) - 1)

    def shortened(self) -> Table:
        """Return the table with long names cut in the middle.

        The names of a column stay unchanged if two of them would become equal.
        """
        names = [list(column) for column in zip(*self.rows, strict=True)][: self.keys]
        for column in names:
            short = {name: shorten(name) for name in column}
            if len(set(short.values())) == len(short):
                column[:] = [short[name] for name in column]
        rows = zip(zip(*names, strict=True), self.rows, strict=True) if self.rows else ()
        return replace(self, rows=tuple((*keys, *row[self.keys :]) for keys, row in rows))

    def parts(self, width: int | None) -> Iterator[Table]:
        """Yield tables of at most ``width`` characters that together have all columns.

        Long names are shortened first. A part with one column besides its keys may be wider.
        """
        table = self if width is None or self.width <= width else self.shortened()
        widths, first = table.widths, self.keys
        while first < len(widths):
            used, after = sum(widths[: self.keys]) + _GAP * self.keys, first
            while after < len(widths):
                used += widths[after]
                if width is not None and used > width and after > first:
                    break
                used, after = used + _GAP, after + 1
            yield table.part((*range(self.keys), *range(first, after)))
            first = after

    def part(self, columns: Sequence[int]) -> Table:
        """Return a table with some of the columns."""
        headings = tuple(self.headings[index] for index in columns)
        rows = tuple(tuple(row[index] for index in columns) for row in self.rows)
        return replace(self, headings=headings, rows=rows)

    def text(self, width: int | None = None) -> str:
        """Return the table as text, in parts if it is wider than ``width``."""
        return "\n\n".join("\n".join(part.lines()) for part in self.parts(width))

    def lines(self) -> list[str]:
        """Return the lines of the table without colours, the headings first."""
        from rich.console import Console

        file = StringIO()
        Console(file=file, width=max(self.width, 1), color_system=None).print(self.drawn())
        return [line.rstrip() for line in file.getvalue().splitlines()]

    def drawn(self) -> RichTable:
        """Return the table for rich, never narrower than its cells."""
        from rich.table import Table as RichTable
        from rich.text import Text

        # With a fixed width, because rich cuts cells to fit a narrow terminal.
        made = RichTable(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), width=self.width)
        for index, heading in enumerate(self.headings):
            side: Literal["left", "right"] = "left" if index < self.keys else "right"
            made.add_column(Text(heading), justify=side, vertical="bottom", no_wrap=True)
        for row in self.rows:
            best = ["bold green" if cell[1:].endswith("*") else "" for cell in row]
            made.add_row(*map(Text, row, best))
        return made


def shorten(name: str, most: int = MOST_NAME) -> str:
    """Return a name, without its middle if it is longer than ``most``.

    >>> shorten("eight-workers-of-four-kinds-and-noise")
    'eight-worker…s-and-noise'
    """
    if len(name) <= most:
        return name
    end = (most - 1) // 2
    return f"{name[: most - 1 - end]}…{name[-end:]}"
