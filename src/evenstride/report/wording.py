"""Times, names and tables as people read them.

Nothing else is in them that a terminal or page might act on.
"""

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
"""Shown where there is no figure."""
MOST_NAME = 24
"""Longer names are shortened where a table would not fit otherwise."""
_GAP = 2  # characters between columns
_HIDDEN = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}


def duration(seconds: float | None) -> str:
    """Return a time with its unit, in three significant figures.

    >>> [duration(s) for s in (0.1333, 2.5, 1234.5, 7200.0, None)]
    ['133 ms', '2.5 s', '1234 s', '2 h', '–']
    """
    return NOTHING if seconds is None or not isfinite(seconds) else time_text(seconds)


def plain(text: object, most: int = 1000) -> str:
    """Return a text without control characters, cut to a length.

    Names of hosts, files and metrics are others' texts: one could hold a terminal's escape
    sequence, or characters that turn the direction of writing.

    >>> plain("host" + chr(27) + "[31m/0" + chr(10))
    'host�[31m/0�'
    """
    told = "".join("�" if unicodedata.category(c) in _HIDDEN else c for c in str(text))
    return told if len(told) <= most else f"{told[: most - 1]}…"


def not_measured_text(reason: str) -> str:
    """Return the sentences about a run whose steps could not be measured."""
    return (
        f"Not measured: {reason}. The shares stayed as they were set at the start, and evenstride "
        "does not know who worked and who waited."
    )


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of cells under headings."""

    headings: tuple[str, ...]  # one per column; a line break makes a heading of two lines
    rows: tuple[tuple[str, ...], ...]  # cells, as many as there are headings
    keys: int = 1  # columns at the left that name the row: text, and repeated in every part

    @property
    def widths(self) -> tuple[int, ...]:
        """Characters that each column needs."""
        from rich.cells import cell_len

        heads = [max(map(cell_len, heading.split("\n"))) for heading in self.headings]
        return tuple(
            max([head, *(cell_len(row[index]) for row in self.rows)])
            for index, head in enumerate(heads)
        )

    @property
    def width(self) -> int:
        """Characters of its longest line, if all columns are filled."""
        return sum(self.widths) + _GAP * (len(self.headings) - 1)

    def shortened(self) -> Table:
        """Return the table with long names cut in the middle.

        Names of a column that would then be the same stay as they are.
        """
        names = [list(column) for column in zip(*self.rows, strict=True)][: self.keys]
        for column in names:
            short = {name: shorten(name) for name in column}
            if len(set(short.values())) == len(short):
                column[:] = [short[name] for name in column]
        rows = zip(zip(*names, strict=True), self.rows, strict=True) if self.rows else ()
        return replace(self, rows=tuple((*keys, *row[self.keys :]) for keys, row in rows))

    def parts(self, width: int | None) -> Iterator[Table]:
        """Yield tables that are no wider than ``width`` and together have all columns.

        Long names are shortened first. A table that cannot be made so narrow has one column
        beside its keys.
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
        """Return the table of some of its columns."""
        headings = tuple(self.headings[index] for index in columns)
        rows = tuple(tuple(row[index] for index in columns) for row in self.rows)
        return replace(self, headings=headings, rows=rows)

    def text(self, width: int | None = None) -> str:
        """Return the table as lines, in parts if it is wider than ``width``."""
        return "\n\n".join("\n".join(part.lines()) for part in self.parts(width))

    def lines(self) -> list[str]:
        """Return the lines of the table, headings first, without colours."""
        from rich.console import Console

        file = StringIO()
        Console(file=file, width=max(self.width, 1), color_system=None).print(self.drawn())
        return [line.rstrip() for line in file.getvalue().splitlines()]

    def drawn(self) -> RichTable:
        """Return the table as rich draws it: never narrower than its cells."""
        from rich.table import Table as RichTable
        from rich.text import Text

        # Of a width of its own, as rich would cut cells to fit a narrow terminal.
        made = RichTable(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), width=self.width)
        for index, heading in enumerate(self.headings):
            side: Literal["left", "right"] = "left" if index < self.keys else "right"
            made.add_column(Text(heading), justify=side, vertical="bottom", no_wrap=True)
        for row in self.rows:
            best = ["bold green" if cell[1:].endswith("*") else "" for cell in row]
            made.add_row(*map(Text, row, best))
        return made


def shorten(name: str, most: int = MOST_NAME) -> str:
    """Return a name with its middle left out if it is longer than that.

    >>> shorten("eight-workers-of-four-kinds-and-noise")
    'eight-worker…s-and-noise'
    """
    if len(name) <= most:
        return name
    end = (most - 1) // 2
    return f"{name[: most - 1 - end]}…{name[-end:]}"
