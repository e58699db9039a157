"""Limits on the sizes of files and functions, and patterns that no file may contain."""

from __future__ import annotations

import ast
import re

import pytest

from tests.house.sources import ROOT, body_lines, functions, python_files, tracked_files

MOST_LINES, MOST_BODY_LINES = 600, 40

# Written so that this file does not match its own patterns.
FOLDERS = ("home", "work", "root", "Users")
FORBIDDEN = {
    "a path of one machine": re.compile(rf"(?<![\w.])/(?:{'|'.join(FOLDERS)})/"),
    "an open end": re.compile(r"\b(?:TO[D]O|FIX[M]E|X[X]X)\b"),
}


def test_no_file_is_longer_than_the_limit() -> None:
    lines = {path: len(path.read_text().splitlines()) for path in python_files()}

    long = {str(path.relative_to(ROOT)): n for path, n in lines.items() if n > MOST_LINES}
    assert not long, f"split these files, the limit is {MOST_LINES} lines: {long}"
    assert len(lines) > 80


def test_no_function_is_longer_than_a_screen() -> None:
    sizes = {
        f"{path.relative_to(ROOT)}:{function.lineno} {function.name}": body_lines(function, lines)
        for path in python_files()
        for lines in [path.read_text().splitlines()]
        for function in functions(path)
    }

    long = {name: size for name, size in sizes.items() if size > MOST_BODY_LINES}
    assert not long, f"split these functions, the limit is {MOST_BODY_LINES} lines: {long}"
    assert len(sizes) > 400


def test_a_body_is_counted_without_its_docstring_and_blank_lines() -> None:
    docstring = '    """One.\n\n    Two.\n    """\n'
    source = f"def f(a,\n      b):\n{docstring}    x = (\n\n    a)\n\n    return x\n"

    (function,) = (node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef))

    assert body_lines(function, source.splitlines()) == 3


@pytest.mark.parametrize("name", FORBIDDEN)
def test_no_tracked_file_contains(name: str) -> None:
    found = []
    for path in tracked_files():
        try:
            lines = path.read_text().splitlines()
        except UnicodeDecodeError:
            continue
        found += [
            f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
            for number, line in enumerate(lines, start=1)
            if FORBIDDEN[name].search(line)
        ]

    assert not found, f"{name}:\n" + "\n".join(found)


@pytest.mark.parametrize("folder", FOLDERS)
@pytest.mark.parametrize("before", ["", "see ", "'", "="])
def test_a_path_of_one_machine_is_recognised(before: str, folder: str) -> None:
    assert FORBIDDEN["a path of one machine"].search(f"{before}/{folder}/.name")


@pytest.mark.parametrize("text", ["# TO" + "DO: later", "FIX" + "ME", "XX" + "X"])
def test_an_open_end_is_recognised(text: str) -> None:
    assert FORBIDDEN["an open end"].search(text)


@pytest.mark.parametrize(
    "text",
    [
        "TODOS",
        *(f"https://example.org/{folder}/2020" for folder in FOLDERS),
        *(f"a/{folder}/b" for folder in FOLDERS),
        *(f"./{folder}/b" for folder in FOLDERS),
        *(f"{folder}/{folder}" for folder in FOLDERS),
    ],
)
def test_what_only_looks_similar_is_allowed(text: str) -> None:
    assert not any(pattern.search(text) for pattern in FORBIDDEN.values())
