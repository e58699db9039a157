"""Documents, docstrings, comments and messages use the field's words, in sentences one can read."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.house.sources import ROOT
from tests.house.wording import dialect_in, files, long_sentences_in, names_in, problems, prose_of

PLACES = [
    *sorted(path for path in (ROOT / "src" / "evenstride").iterdir() if path.name[0] != "_"),
    *(ROOT / name for name in ("docs", "examples", "benchmarks", "tools")),
    *sorted(ROOT.glob("*.md")),
]


@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.name)
def test_the_wording_is_plain(place: Path) -> None:
    assert [problem for path in files([place]) for problem in problems(path)] == []


def of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: str) -> Path:
    monkeypatch.setattr("tests.house.wording.ROOT", tmp_path)
    path = tmp_path / name
    path.write_text(text)
    return path


LONG = " ".join(["word"] * 41) + "."


def test_dialect_is_found_in_pages_but_not_in_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "Ranks are\ntold.\n\n```python\nnobody = 1\n```\nA `told` one. *Not*: nobody.\n"
    page = of(tmp_path, monkeypatch, "page.md", text)

    assert [hit for one in prose_of(page) for hit in dialect_in(one)] == ["page.md:2: told"]


def test_dialect_is_found_in_docstrings_comments_messages_and_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (
        '"""What is told."""\n# Anew, each time.\ntold = f"there is none of {len(())} here"\n'
        'KEY = "told"\n'
    )
    module = of(tmp_path, monkeypatch, "module.py", text)

    hits = [hit for one in prose_of(module) for hit in dialect_in(one)]
    assert hits == ["module.py:1: told", "module.py:3: there is none", "module.py:2: Anew"]
    assert list(names_in(module)) == ["module.py:3: told"]


@pytest.mark.parametrize("text", [f"{LONG}\n", f"- {LONG}\n", f"| a | {LONG} |\n"])
def test_a_long_sentence_is_found(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = of(tmp_path, monkeypatch, "page.md", text)

    (hit,) = (hit for one in prose_of(page) for hit in long_sentences_in(one))
    assert "41 words" in hit


def test_two_sentences_are_counted_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    half = " ".join(["word"] * 25)
    page = of(tmp_path, monkeypatch, "page.md", f"{half}. {half}!\n- {half}\n- {half}\n")

    assert not [hit for one in prose_of(page) for hit in long_sentences_in(one)]
