"""The report's benchmark, on a short run."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from benchmarks import report


def test_it_prints_time_and_size_and_keeps_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["report.py", "--steps", "400", "--keep", str(tmp_path)])
    monkeypatch.setattr(report, "MOST_S", 1e9)  # how long it takes is not tested here

    with pytest.raises(SystemExit) as end:
        report.main()
    printed = json.loads(capfd.readouterr().out)
    assert end.value.code in (None, 0, False)
    assert (printed["steps"], printed["kept"]) == (400, True)
    assert printed["page_bytes"] == (tmp_path / "report.html").stat().st_size
    assert (tmp_path / "trace.jsonl").stat().st_size == printed["trace_bytes"]

    monkeypatch.setattr(report, "MOST_BYTES", 1000)
    with pytest.raises(SystemExit) as end:
        report.main()
    assert end.value.code
