"""Where a report goes, and that it overwrites nothing of anybody else's."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from evenstride.errors import ConfigError
from evenstride.report.page.html_page import (
    check_folder,
    check_place,
    page_of,
    place_of,
    write_page,
)
from tests.messages import raises_message
from tests.unit.report.conftest import Making


def test_a_report_is_written_next_to_its_trace_by_default(tmp_path: Path) -> None:
    assert place_of(tmp_path / "trace.jsonl", None) == tmp_path / "report.html"
    assert place_of(tmp_path / "trace.jsonl", Path("x.html")) == Path("x.html")


def test_a_report_is_overwritten_and_nothing_else(made: Making, tmp_path: Path) -> None:
    ours, theirs = tmp_path / "ours.html", tmp_path / "theirs.html"
    write_page(page_of([made(steps=10)]), ours)
    theirs.write_text("<!DOCTYPE html><title>evenstride report</title>")

    check_place(ours, force=False)
    check_place(theirs, force=True)
    check_place(tmp_path / "new.html", force=False)
    with raises_message(ConfigError, "theirs.html", "--force"):
        check_place(theirs, force=False)
    with raises_message(ConfigError):
        check_place(tmp_path, force=True)


def test_a_page_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("kept")

    with raises_message(ConfigError):
        write_page("new", tmp_path / "file" / "report.html")

    write_page("new", tmp_path / "deep" / "report.html")
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["deep", "file", "report.html"]


def test_traces_and_special_files_are_never_overwritten(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"kind":"header","format":1}\n')
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)

    for place in (trace, pipe):
        with raises_message(ConfigError):
            check_place(place, force=True)


def test_a_folder_for_figures_is_one_or_can_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("kept")

    check_folder(tmp_path)
    check_folder(tmp_path / "not" / "there" / "yet")
    for place in (tmp_path / "file", tmp_path / "file" / "deeper" / "still"):
        with raises_message(ConfigError):
            check_folder(place)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file"]


@pytest.mark.skipif(os.geteuid() == 0, reason="nothing is forbidden to this user")
def test_a_folder_that_may_not_be_written_into_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)

    with pytest.raises(ConfigError, match="may not be written into"):
        check_folder(tmp_path / "figures")
