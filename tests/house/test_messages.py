"""The golden file of messages holds existing tests only, in the order that `write` gives."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import messages
from tests.messages import (
    GOLDEN,
    Golden,
    defined,
    key,
    normalised,
    read,
    shown,
    without_test,
    write,
)


def test_every_text_has_its_test(request: pytest.FixtureRequest) -> None:
    golden = request.config.pluginmanager.get_plugin("golden messages")
    assert isinstance(golden, Golden)

    gone = without_test(read(), golden.collected)

    assert not gone, f"these tests no longer exist: {gone}; drop their texts with: make regen"


def test_a_test_has_a_name_of_its_own_in_the_file() -> None:
    kept = {test.partition("[")[0] for test in read()}

    twice = {test: where for test, where in defined().items() if len(where) > 1 and test in kept}

    assert not twice, "rename one of them: names in the file have no folders"


def test_texts_of_a_test_that_is_gone_or_has_other_cases_are_found() -> None:
    here = f"test_messages.py::{test_lines_and_control_characters_are_distinguished.__name__}"

    assert without_test([here]) == []
    assert without_test([f"{here}_no_more"]) == [f"{here}_no_more"]
    assert without_test([f"{here}[old]"], [f"{here}[new]"]) == [f"{here}[old]"]
    assert without_test([f"{here}[old]"], [f"{here}[old]"]) == []


def test_a_test_is_named_without_folders_and_modules() -> None:
    case = "[<class 'evenstride.core.lifetimes.Exponential'>-evenstride.Stride]"

    assert key(f"tests/unit/core/test_a.py::test_b{case}") == (
        "test_a.py::test_b[<class 'Exponential'>-evenstride.Stride]"
    )


def test_the_file_is_as_it_would_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = read()
    monkeypatch.setattr(messages, "GOLDEN", tmp_path / "messages.txt")

    write(texts)

    whole = (tmp_path / "messages.txt").read_text("utf-8")
    assert whole == GOLDEN.read_text("utf-8"), "the file was edited or merged; run: make regen"
    assert read() == texts


def test_what_differs_from_run_to_run_is_left_out(tmp_path: Path) -> None:
    text = f"{tmp_path / 'run'} of process 4711 is at 127.0.0.1:29500, after 30 s"

    assert normalised(text) == "<tmp>/run of process <pid> is at 127.0.0.1:<port>, after 30 s"
    assert normalised("took 0.31 s", varies=[r"0\.\d+"]) == "took <varies> s"


def test_lines_and_control_characters_are_distinguished() -> None:
    assert shown("one\ntwo") != shown("one two")
    assert shown("a\x1b[0m") == r"- a\x1b[0m"
    assert shown(f"{'word ' * 30}\n\nend").splitlines()[1:] == [
        "  " + "word " * 10 + "word",
        "|",
        "| end",
    ]
