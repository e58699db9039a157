"""Runs that never took place, whose truth is known."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from benchmarks.report_runs import Made, make

from evenstride.report.page.page_runs import ReportedRun, read_run

Making = Callable[..., ReportedRun]


@pytest.fixture
def made(tmp_path: Path) -> Making:
    """Make up a run, write its trace and read it."""

    def making(name: str = "today", **facts: object) -> ReportedRun:
        path = make(Made(**facts), tmp_path / name / "trace.jsonl")  # type: ignore[arg-type]
        return read_run(path, name)

    return making
