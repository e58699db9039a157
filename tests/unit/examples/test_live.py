"""The parts of the live mode example that work without torchft."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[3] / "examples" / "live.py"


def test_its_help_needs_no_torchft(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "torchft", None)  # as if it were not installed
    monkeypatch.setattr(sys, "argv", ["live.py", "--help"])

    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(EXAMPLE), run_name="__main__")

    assert end.value.code == 0
    assert "--lighthouse" in capsys.readouterr().out
