"""Which line of a script a warning names."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from evenstride.runtime.usage_errors import line_with, range_behind, user_line

SCRIPTS = {
    "for epoch in range(9):\n    look(3)": ("2", "range(9)"),
    "for epoch in range(0, 9):\n    look(3)": ("2", "range(0, 9)"),
    "for fold in range(5):\n  for epoch in range(9):\n    look(3)": ("3", "range(9)"),
    "for epoch in reversed(range(1, 2)):\n    look(3)": ("2", "reversed(range(1, 2))"),
    "for epoch in range(3, 9):\n    look(3)": None,
    "for epoch in range(9):\n    look(0)": None,
    "for epoch in range(9 - stride.epoch):\n    look(3)": None,
    "first = stride.epoch\nfor epoch in range(9 - first):\n    look(3)": None,
    "for epoch in [1, 2]:\n    look(3)": None,
    "while True:\n    look(3)\n    break": None,
    "for epoch in range(2):\n    pass\nlook(3)": None,
    "for epoch, _ in enumerate(range(2)):\n    look(3)": None,
}


class Run:
    """A `Stride` in some epoch."""

    epoch = 3


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_range_that_is_behind_the_run_is_found(tmp_path: Path, script: str) -> None:
    found: list[Any] = []
    path = tmp_path / "train.py"
    path.write_text(f"stride = Run()\n{script}\n")
    scope = {"Run": Run, "look": _looker(found)}

    exec(compile(path.read_text(), str(path), "exec"), scope)

    expected = SCRIPTS[script]
    assert found[0] == (expected and (f"{path}:{expected[0]}", expected[1]))


def _looker(found: list[Any]) -> Callable[[int], None]:
    def look(epoch: int) -> None:
        found.append(range_behind(epoch))

    return look


def test_the_line_of_a_script_without_source_is_still_reported() -> None:
    scope: dict[str, Any] = {"line": user_line, "find": line_with, "behind": range_behind}
    text = "place = line()\nfound = find('clip')\nfor e in range(1):\n    loop = behind(2)"

    exec(compile(ast.parse(text), "<nowhere>", "exec"), scope)

    assert scope["place"] == "<nowhere>:1"
    assert scope["found"] == "<nowhere>:2"
    assert scope["loop"] is None


def test_a_line_is_found_by_the_first_pattern_that_any_has() -> None:
    found = line_with("no such words as " + "these", r"a_mark\(", "found")
    a_mark = len  # what follows is looked for
    assert a_mark(found)

    assert Path(found.rpartition(":")[0]).name == Path(__file__).name
    line = Path(__file__).read_text().splitlines()[int(found.rpartition(":")[2]) - 1]
    assert "a_mark(" in line
