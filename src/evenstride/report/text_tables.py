"""Tables of text, for a terminal of any width and for files."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

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
        heads = [max(map(len, heading.split("\n"))) for heading in self.headings]
        return tuple(
            max(head, *(len(row[index]) for row in self.rows)) if self.rows else head
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

    def lines(self) -> Iterator[str]:
        """Yield the lines of the table, headings first."""
        widths = self.widths
        tall = max(heading.count("\n") + 1 for heading in self.headings)
        # Headings stand on the line, so the short ones begin further down.
        heads = [[""] * (tall - 1 - h.count("\n")) + h.split("\n") for h in self.headings]
        for cells in (*zip(*heads, strict=True), *self.rows):
            aligned = [
                f"{cell:<{width}}" if index < self.keys else f"{cell:>{width}}"
                for index, (cell, width) in enumerate(zip(cells, widths, strict=True))
            ]
            yield (" " * _GAP).join(aligned).rstrip()

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
