"""Tables of text, for a terminal of any width and for files."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from io import StringIO
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from rich.table import Table as RichTable

_GAP = 2
NOTHING = "–"
"""Shown where there is no figure."""
MOST_NAME = 24
"""Longer names are shortened where the table would not fit otherwise."""


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of cells under headings.

    Args:
        headings: one per column; a line break makes a heading of two lines.
        rows: cells, as many as there are headings.
        keys: columns at the left that name the row: text, and repeated in every part.
    """

    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    keys: int = 1

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
            yield table._columns((*range(self.keys), *range(first, after)))
            first = after

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

    def _columns(self, columns: tuple[int, ...]) -> Table:
        return replace(
            self,
            headings=tuple(self.headings[index] for index in columns),
            rows=tuple(tuple(row[index] for index in columns) for row in self.rows),
        )


def shorten(name: str, most: int = MOST_NAME) -> str:
    """Return a name with its middle left out if it is longer than that.

    >>> shorten("eight-workers-of-four-kinds-and-noise")
    'eight-worker…s-and-noise'
    """
    if len(name) <= most:
        return name
    end = (most - 1) // 2
    return f"{name[: most - 1 - end]}…{name[-end:]}"
