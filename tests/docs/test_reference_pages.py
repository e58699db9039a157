"""The generated parts of the reference are those of the code."""

from __future__ import annotations

import re

import pytest
from tools.reference_pages import PARTS, changed_pages, described

from tests.docs.blocks import ROOT

PAGES = ROOT / "docs" / "reference"


def test_the_pages_are_what_the_script_writes() -> None:
    changed = [path.name for path in changed_pages()]

    assert changed == [], "run make pages"


def test_every_part_is_on_a_page_once() -> None:
    text = "".join(path.read_text() for path in PAGES.glob("*.md"))

    assert sorted(re.findall(r"<!-- begin ([\w-]+) -->", text)) == sorted(PARTS)


def test_every_public_variable_is_on_the_page_on_configuration() -> None:
    sources = (ROOT / "src").rglob("*.py")
    read = {
        name
        for path in sources
        for name in re.findall(r"(?<!_)EVENSTRIDE_[A-Z_]*[A-Z]", path.read_text())
    }
    page = (PAGES / "configuration.md").read_text()

    assert set(re.findall(r"^\| `(EVENSTRIDE_\w+)`", page, re.MULTILINE)) == read


def test_arguments_are_read_from_a_docstring() -> None:
    def function(first: int, second: str = "b") -> None:
        """Do something.

        Args:
            first: a number, in ``s``
                or minutes.
            second: a text: any.

        Raises:
            ValueError: never.
        """
        del first, second

    assert list(described(function)) == [
        ("first", " a number, in `s`\n        or minutes."),
        ("second", " a text: any."),
    ]


@pytest.mark.parametrize("command", ["estimate", "lab", "plan"])
def test_a_command_has_usage_options_and_examples(command: str) -> None:
    page = (PAGES / "command-line.md").read_text()
    section = page.split(f"\n## {command}\n")[1].split("\n## ")[0]

    assert f"evenstride {command} [OPTIONS]" in section
    assert "| `--json` |" in section
    assert "Examples:" in section
