"""The files of the project and their functions, for the tests of style rules."""

from __future__ import annotations

import ast
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
Function = ast.FunctionDef | ast.AsyncFunctionDef


def python_files() -> list[Path]:
    """Return every Python file of the project."""
    folders = ("src", "tests", "examples", "benchmarks", "tools")
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def functions(path: Path) -> Iterator[Function]:
    """Yield the functions and methods in a file."""
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, Function):
            yield node


def body_lines(function: Function, lines: list[str]) -> int:
    """Return the number of lines in a function's body, without docstring and blank lines."""
    body = function.body[1:] if ast.get_docstring(function) is not None else function.body
    if not body:
        return 0
    inside = lines[body[0].lineno - 1 : body[-1].end_lineno]
    return sum(bool(line.strip()) for line in inside)


def tracked_files() -> list[Path]:
    """Return the files under version control. Skip the test outside a git checkout."""
    git = shutil.which("git")
    if git is None or not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    command = [git, "-C", str(ROOT), "ls-files", "-z"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"git cannot list the files: {done.stderr.strip()}")
    return [ROOT / name for name in done.stdout.split("\0") if (ROOT / name).is_file()]
