"""Where a run's trace is, and the message where it is missing."""

from __future__ import annotations

from pathlib import Path

import pytest

from evenstride.errors import TraceError
from evenstride.trace.read import trace_path
from tests.messages import check_message


def refusal(path: Path) -> str:
    with pytest.raises(TraceError) as reported:
        trace_path(path)
    return str(reported.value)


def test_a_missing_path_is_distinguished_from_a_folder_without_a_trace(tmp_path: Path) -> None:
    check_message(refusal(tmp_path / "runs"))
    check_message(refusal(tmp_path))


def test_runs_below_a_folder_are_named(tmp_path: Path) -> None:
    for number in range(8):
        (tmp_path / f"run-{number}").mkdir()
        (tmp_path / f"run-{number}" / "trace.jsonl").touch()
    reported = refusal(tmp_path)

    check_message(reported, tmp_path / "run-0", tmp_path / "run-1")
    assert reported.endswith("run-5 and 2 more")
    assert trace_path(tmp_path / "run-3") == tmp_path / "run-3" / "trace.jsonl"
