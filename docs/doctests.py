"""Shows the examples of docstrings as code: for the site, which reads them with Griffe."""

from __future__ import annotations

from itertools import groupby
from typing import Any

import griffe


class Doctests(griffe.Extension):  # type: ignore[misc]
    """Puts fences around the examples of every docstring."""

    def on_object(self, *, obj: Any, **_: Any) -> None:
        """Change an object's docstring before it is parsed."""
        if obj.docstring:
            obj.docstring.value = fenced(obj.docstring.value)


def fenced(text: str) -> str:
    """Return a docstring with a fence around each example, of the example's own indentation."""
    parts = list[str]()
    for blank, group in groupby(text.split("\n"), key=lambda line: not line.strip()):
        lines = list(group)
        first = next((n for n, line in enumerate(lines) if line.lstrip().startswith(">>> ")), None)
        if not blank and first is not None:
            indent = lines[first][: len(lines[first]) - len(lines[first].lstrip())]
            lines = [*lines[:first], f"{indent}```pycon", *lines[first:], f"{indent}```"]
        parts += lines
    return "\n".join(parts)
