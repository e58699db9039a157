"""Processes are killed while workers train over parameter servers: nothing hangs or is lost."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import Counter
from itertools import chain
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import evenstride
from evenstride.runtime.launching.rank_environment import LOCAL
from tests.ending import TORCHRUN_S, end
from tests.faults.ranks import PYTHON_PATH, started
from tests.faults.served_script import BATCH, EPOCHS, SAMPLES, loss_of, rows, trained

SCRIPT = Path(__file__).with_name("served_script.py")
WORLD_SIZE, DEADLINE_S = 3, 60.0


def _run(folder: Path, sync: str, fate: str = "none", step: int = 0) -> list[int]:
    """Run the script on three ranks and return their exit codes; no process outlives it."""
    arguments = [str(folder), sync, fate, str(step)]
    try:
        with started(SCRIPT, WORLD_SIZE, folder, arguments, TEST_FOLDER=str(folder)) as processes:
            end_s = time.monotonic() + DEADLINE_S
            return [process.wait(max(end_s - time.monotonic(), 0.1)) for process in processes]
    finally:
        _await_servers(folder)


def _await_servers(folder: Path) -> None:
    """Wait for the servers that the ranks of a folder have started; they end by themselves."""
    servers = [
        process
        for process in psutil.process_iter(["environ"])
        if (process.info["environ"] or {}).get("TEST_FOLDER") == str(folder)
    ]
    _, alive = psutil.wait_procs(servers, timeout=DEADLINE_S)
    for process in alive:
        process.kill()
    assert not alive, "a parameter server outlived its run"


def _ends(folder: Path) -> dict[int, Any]:
    """Return what each rank that came to its end wrote there."""
    paths = sorted(folder.glob("end-*.json"))
    return {int(path.stem.partition("-")[2]): json.loads(path.read_text()) for path in paths}


def _trained(folder: Path) -> list[Counter[int]]:
    """Return how often each sample was in an update that was made, by epoch."""
    texts = chain.from_iterable(p.read_text().splitlines() for p in folder.glob("trained-*.jsonl"))
    lines = [json.loads(text) for text in texts]
    return [
        Counter(chain.from_iterable(line["ids"] for line in lines if line["epoch"] == epoch))
        for epoch in range(EPOCHS)
    ]


def _logs(folder: Path) -> dict[int, str]:
    return {rank: (folder / f"rank-{rank}.log").read_text() for rank in range(WORLD_SIZE)}


@pytest.mark.timeout(2 * DEADLINE_S)
@pytest.mark.parametrize(("fate", "code"), [("worker", -9), ("raises", 1)])
def test_the_others_train_the_samples_of_a_worker_that_ended(
    tmp_path: Path, fate: str, code: int
) -> None:
    codes = _run(tmp_path, "ssp(staleness=1)", fate, 9)

    assert codes == [0, code, 0], _logs(tmp_path)
    # What it had made counts; what it had in hand was handed out again.
    assert _trained(tmp_path) == [Counter(range(SAMPLES))] * EPOCHS
    ends = _ends(tmp_path)
    assert set(ends) == {0, 2}
    assert ends[0]["weights"] == ends[2]["weights"]
    assert ends[0]["staleness"]["handed_out_again"] > 0
    assert "no checkpoint is saved, because worker(s) 1 are lost" in _logs(tmp_path)[0]
    if fate == "worker":  # one that raises tells the servers itself, and the run may end sooner
        assert "rank 1 is gone" in _logs(tmp_path)[0]
        assert "the other ranks continue" in _logs(tmp_path)[2]


@pytest.mark.timeout(3 * DEADLINE_S)
@pytest.mark.parametrize("sync", ["bsp-ps", "asp"])
def test_a_server_that_is_killed_is_named_and_the_run_goes_on_from_the_last_save(
    tmp_path: Path, sync: str
) -> None:
    codes = _run(tmp_path, sync, "server", 2)

    assert all(code not in (0, -9) for code in codes), _logs(tmp_path)
    for log in _logs(tmp_path).values():
        assert "parameter server0 is lost" in log
        assert "continues from its newest checkpoint" in log
    done = _trained(tmp_path)[0]
    assert done == Counter(range(SAMPLES))

    for path in tmp_path.glob("trained-*.jsonl"):
        lines = path.read_text().splitlines()
        kept = [line for line in lines if json.loads(line)["epoch"] == 0]
        path.write_text("".join(f"{line}\n" for line in kept))
    assert _run(tmp_path, sync) == [0, 0, 0], _logs(tmp_path)

    assert _trained(tmp_path) == [Counter(range(SAMPLES))] * EPOCHS
    ends = _ends(tmp_path)
    assert all(end["restored"] for end in ends.values())
    if sync == "bsp-ps":
        weights, steps = alone()
        assert ends[0]["step"] == steps
        assert torch.allclose(
            torch.tensor(ends[0]["weights"][0], dtype=torch.float64), weights, rtol=1e-9, atol=0
        )


@pytest.mark.timeout(2 * DEADLINE_S)
@pytest.mark.parametrize("sync", ["bsp-ps", "asp"])
def test_a_server_that_hangs_is_named_and_ended(tmp_path: Path, sync: str) -> None:
    codes = _run(tmp_path, sync, "stopped", 2)

    assert all(code not in (0, -9) for code in codes), _logs(tmp_path)
    for log in _logs(tmp_path).values():
        assert "parameter server0 has not answered for 2 s: it hangs" in log


@pytest.mark.timeout(3 * DEADLINE_S)
@pytest.mark.parametrize("sync", ["bsp-ps", "asp"])
def test_under_launch_a_run_whose_server_an_http_request_ended_goes_on_from_the_last_save(
    tmp_path: Path, sync: str
) -> None:
    arguments = [str(SCRIPT), str(tmp_path), sync, "http", "2"]
    command = [sys.executable, "-c", "from evenstride.cli.main import main; main()", "launch"]
    process = subprocess.Popen(
        [*command, "--per-node", str(WORLD_SIZE), *arguments],
        env={**os.environ, **LOCAL, "PYTHONPATH": PYTHON_PATH, "TEST_FOLDER": str(tmp_path)},
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        _, log = process.communicate(timeout=2 * DEADLINE_S)
    finally:
        end(process, TORCHRUN_S)
        _await_servers(tmp_path)

    assert process.returncode == 0, log
    assert "parameter server0 is lost" in log
    ends = _ends(tmp_path)
    assert set(ends) == set(range(WORLD_SIZE))
    assert all(end["restored"] for end in ends.values())
    if sync == "bsp-ps":
        weights, steps = alone()
        assert ends[0]["step"] == steps
        found = torch.tensor(ends[0]["weights"][0], dtype=torch.float64)
        assert torch.allclose(found, weights, rtol=1e-9, atol=0)


def alone() -> tuple[torch.Tensor, int]:
    """Return the weights of one process that was not disturbed, and its steps."""
    stride, (model, optimizer) = evenstride.Stride(global_batch=BATCH), trained()
    loader = stride.loader(rows())
    for _ in range(EPOCHS):
        for _, x in loader:
            stride.scale(loss_of(model, x)).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
    stride.close()
    return next(model.parameters()).detach(), stride.step


@pytest.mark.timeout(2 * DEADLINE_S)
def test_a_worker_that_is_killed_ends_synchronous_training(tmp_path: Path) -> None:
    codes = _run(tmp_path, "bsp-ps", "worker", 9)

    assert codes[1] == -9
    assert all(code not in (0, -9) for code in (codes[0], codes[2])), _logs(tmp_path)
    for rank in (0, 2):
        assert "rank 1 is gone" in _logs(tmp_path)[rank]


@pytest.mark.timeout(2 * DEADLINE_S)
@pytest.mark.parametrize("sync", ["bsp-ps", "asp"])
def test_a_worker_that_is_killed_before_all_have_met_is_missed_in_every_mode(
    tmp_path: Path, sync: str
) -> None:
    codes = _run(tmp_path, sync, "early")

    assert codes[1] == -9
    assert all(code not in (0, -9) for code in (codes[0], codes[2])), _logs(tmp_path)
    for rank in (0, 2):
        assert "rank 1 is gone" in _logs(tmp_path)[rank]
