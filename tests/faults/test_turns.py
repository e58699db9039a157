"""A rank that is lost where all choose the next epoch's batch is named, and no rank waits on."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.faults.ranks import started

SCRIPT = Path(__file__).with_name("turn_script.py")
DEADLINE_S = 60.0
ELASTIC = {"TORCHELASTIC_RUN_ID": "job"}
FATES = {
    "killed": "its process",
    "stopped": "no heartbeat for",
    "raises": "ValueError: the data of this rank is broken",
    "restores": "SplitDiverged: ",
}


@pytest.mark.parametrize("fate", FATES)
@pytest.mark.parametrize("victim", [0, 1])
def test_the_others_name_it_and_end(tmp_path: Path, fate: str, victim: int) -> None:
    silent = {"EVENSTRIDE_SILENT_S": "6"} if fate == "stopped" else {}
    with started(SCRIPT, 2, tmp_path, [fate, str(victim)], **ELASTIC, **silent) as processes:
        code = processes[1 - victim].wait(DEADLINE_S)

    reported = (tmp_path / f"rank-{1 - victim}.log").read_text()
    assert code != 0, reported
    lines = [line for line in reported.splitlines() if "evenstride: " in line]
    assert f"rank {victim} is gone: " in lines[0] and FATES[fate] in lines[0], reported


def test_a_rank_that_restored_alone_says_so(tmp_path: Path) -> None:
    began_s = time.monotonic()
    with started(SCRIPT, 2, tmp_path, ["restores", "1"], **ELASTIC) as processes:
        for process in processes:
            process.wait(DEADLINE_S - (time.monotonic() - began_s))

    reported = (tmp_path / "rank-1.log").read_text()
    assert "SplitDiverged: rank 1 continues with the restored global batch of 12" in reported
    assert "load the same state on every rank" in reported
