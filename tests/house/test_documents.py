"""The documents tell the truth where a machine can check it."""

from __future__ import annotations

import ast
import doctest
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *ROOT.glob("examples/*.md")])
_LINK = re.compile(r"\]\((?!https?:|mailto:)([^)#\s]*)(#[^)\s]*)?\)")
_PYTHON = re.compile(r"```python\n(.*?)```", re.DOTALL)
_COMMAND = re.compile(r"(?:^|`)make ([a-z-]+)", re.MULTILINE)


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


def anchors(path: Path) -> set[str]:
    headings = re.findall(r"^#+ +(.+)$", path.read_text(), re.MULTILINE)
    slugs = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings)
    return {"#" + slug.strip().replace(" ", "-") for slug in slugs}


@pytest.mark.parametrize("path", DOCUMENTS, ids=named)
def test_every_link_into_the_project_leads_somewhere(path: Path) -> None:
    for target, anchor in _LINK.findall(path.read_text()):
        there = (path.parent / target).resolve() if target else path

        assert there.exists(), f"{path.name} links to {target}, which is not there"
        if anchor:
            assert anchor in anchors(there), f"{path.name} links to {target}{anchor}"


@pytest.mark.parametrize("path", DOCUMENTS, ids=named)
def test_every_python_snippet_is_python(path: Path) -> None:
    for snippet in _PYTHON.findall(path.read_text()):
        if ">>>" not in snippet:
            ast.parse(snippet)


def test_the_bounds_beside_the_papers_claims_are_computed() -> None:
    outcome = doctest.testfile(str(ROOT / "docs" / "claims.md"), module_relative=False)

    assert outcome.attempted > 10
    assert outcome.failed == 0


@pytest.mark.parametrize("path", DOCUMENTS, ids=named)
def test_every_make_target_named_exists(path: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named_targets = set(_COMMAND.findall("\n".join(re.findall(r"`[^`]+`", path.read_text()))))

    assert named_targets <= targets
