"""Workers of the lab, played by light stand-ins or by numbers."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from evenstride.lab.comparison.lab_session import LabPlan
from tests.unit.lab.stage import Stage, interpreter


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    """Workers played by the stand-in."""
    folder = Path(tempfile.mkdtemp())
    monkeypatch.setattr("sys.executable", str(interpreter(folder)))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    monkeypatch.setattr("evenstride.lab.processes.local_launch.pin", lambda *_: None)
    made = Stage(folder)
    yield made
    made.close()
    shutil.rmtree(folder)


@pytest.fixture
def plan(tmp_path: Path) -> LabPlan:
    """Two policies, two runs each, on workers at full and at half speed."""
    script = tmp_path / "train.py"
    script.write_text("")
    return LabPlan(
        command=(str(script), "--lr", "0.1"),
        speeds=(1.0, 0.5),
        policies=("uniform", "adaptive"),
        steps=120,
        repeats=2,
        changes=(),
        folder=tmp_path / "runs",
        calibrate=True,
    )
