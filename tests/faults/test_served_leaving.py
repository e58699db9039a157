"""A worker leaves while the others train without common steps: they go on, and wait for nothing."""

from __future__ import annotations

import json
import signal
import time
from collections import Counter
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from tests.faults.leaving_script import SIGNALS
from tests.faults.ranks import PYTHON_PATH, started
from tests.faults.served_script import EPOCHS, SAMPLES

SCRIPT = Path(__file__).with_name("leaving_script.py")
WORLD_SIZE, DEADLINE_S = 3, 80.0


def _run(folder: Path, fate: str) -> list[int | None]:
    """Run the script and return the exit codes; ``None`` of a rank that hangs, and is killed."""
    hangs = SIGNALS[fate] is signal.SIGSTOP
    variables = {"TORCHELASTIC_RUN_ID": "test", "PYTHONPATH": PYTHON_PATH}
    if hangs:  # it is found by its heartbeat, which others watch once they have waited for 3 s
        variables["EVENSTRIDE_SILENT_S"] = "6"
    with started(SCRIPT, WORLD_SIZE, folder, [str(folder), fate], **variables) as processes:
        end_s = time.monotonic() + DEADLINE_S
        return [
            None if hangs and rank == 1 else process.wait(max(end_s - time.monotonic(), 0.1))
            for rank, process in enumerate(processes)
        ]


def _log(folder: Path, rank: int) -> str:
    return (folder / f"rank-{rank}.log").read_text()


def _ends(folder: Path, rank: int) -> list[dict[str, Any]]:
    ends: list[dict[str, Any]] = json.loads((folder / f"end-{rank}.json").read_text())
    return ends


def _trained(folder: Path) -> list[Counter[int]]:
    """Return how often each sample was in an update that was made, by epoch."""
    texts = chain.from_iterable(p.read_text().splitlines() for p in folder.glob("trained-*.jsonl"))
    lines = [json.loads(text) for text in texts]
    return [
        Counter(chain.from_iterable(line["ids"] for line in lines if line["epoch"] == epoch))
        for epoch in range(EPOCHS)
    ]


@pytest.mark.timeout(2 * DEADLINE_S)
@pytest.mark.parametrize("fate", SIGNALS)
def test_the_others_continue_without_waiting(tmp_path: Path, fate: str) -> None:
    codes = _run(tmp_path, fate)

    logs = "\n".join(_log(tmp_path, rank) for rank in range(WORLD_SIZE))
    one = None if SIGNALS[fate] is signal.SIGSTOP else -SIGNALS[fate]
    assert codes == [0, one, 0], logs
    assert ("no heartbeat" in logs) == (one is None), logs
    assert _trained(tmp_path) == [Counter(range(SAMPLES))] * EPOCHS
    first, second, saved = _ends(tmp_path, 0), _ends(tmp_path, 2), int(fate == "averaging")
    for end in first + second:
        assert end["save"] == "None", "it only warns"
        assert end["mean"].startswith("WorkerLost: worker(s) 1 are gone"), end
    for mine, theirs in zip(first[1:], second[1:], strict=True):  # who is there is settled by then
        assert Counter(mine["seen"] + theirs["seen"]) == Counter(range(SAMPLES))
    assert (
        _log(tmp_path, 0).count("no checkpoint is saved, because worker(s) 1 are lost")
        == EPOCHS - saved
    )
    assert len(list((tmp_path / "saved").glob("*/manifest.json"))) == saved
    # Rank 0 warns at its fifth step. If the others train most of the first epoch, `save` may come
    # before that, and there is nothing to warn of.
    warned = logs.count("step() does not save in this")
    assert warned == 1 or (saved and not warned), "rank 0 warns once"
