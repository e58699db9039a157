"""``evenstride plan --start`` on this machine: from a stored profile to a training process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from evenstride.planner.workload.model_store import keep
from tests.unit.cli.commands.test_plan_stored import measured

SCRIPT = """
import os, sys
print("trains", sys.argv[1:], os.environ["EVENSTRIDE_GLOBAL_BATCH"], os.environ["WORLD_SIZE"])
"""
DEADLINE_S = 120


@pytest.mark.slow
def test_one_command_plans_and_starts_a_job_that_was_measured_before(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "prices.csv").write_text("type,usd_per_h\nsmall,1.0\n")
    keep(measured(), tmp_path / "store")
    options = ["--epochs", "20", "--catalog", "prices.csv", "--max-nodes", "1", "--store", "store"]
    script = ["--script", "train.py --lr 0.1"]

    ended = subprocess.run(
        [sys.executable, "-m", "evenstride", "plan", *script, *options, "--start"],
        cwd=tmp_path,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )

    assert not ended.returncode, ended.stderr
    assert "the whole job: from the stored model of the same job" in " ".join(ended.stdout.split())
    assert ended.stdout.splitlines()[-1] == "trains ['--lr', '0.1'] 256 1"
