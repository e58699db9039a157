"""A rank that dies, hangs or fails is named by every survivor, before its process ends."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.ending import end
from tests.faults.ranks import started

SCRIPT = Path(__file__).with_name("script.py")
WORLD_SIZE = 3
DEADLINE_S = 60.0


def _survivors_logs(
    folder: Path, arguments: list[str], victim: int, **variables: str
) -> dict[int, str]:
    """Run the script and return the survivors' output once all of them have ended."""
    with started(SCRIPT, WORLD_SIZE, folder, arguments, **variables) as processes:
        end_s = time.monotonic() + DEADLINE_S
        for rank, process in enumerate(processes):
            if rank != victim:
                process.wait(max(0.0, end_s - time.monotonic()))
    return {
        rank: (folder / f"rank-{rank}.log").read_text()
        for rank in range(WORLD_SIZE)
        if rank != victim
    }


FATES = {
    "killed": "its process",
    "raises": "ValueError: the data of this rank is broken",
    "stopped": "no heartbeat since",
    "spins": "still in compute of step 25",
    "leaves": "its program ended early",
    "stays": "it left the training loop in step 25; all ranks must leave it after the same step",
    "runs short": "OutOfMemory: rank 1 ran out of memory in step 25 with a batch of",
}
# Only the timeout of the process group ends the wait for a rank whose connections stay open.
KEPT_OPEN = ("stopped", "spins", "stays")


@pytest.mark.parametrize(
    ("fate", "victim"),
    [
        ("killed", 0),
        ("killed", 1),
        ("raises", 1),
        ("stopped", 0),
        ("spins", 1),
        ("leaves", 0),
        ("stays", 0),
        ("runs short", 1),
    ],
)
def test_every_survivor_names_the_lost_rank_in_one_line(
    tmp_path: Path, fate: str, victim: int
) -> None:
    timeout_s = "8" if fate in KEPT_OPEN else "60"
    logs = _survivors_logs(tmp_path, [fate, str(victim), "25", timeout_s], victim)

    for rank, text in logs.items():
        lines = _ours(text)
        assert len(lines) == 1, f"rank {rank}: {text}"
        assert f"rank {victim} is gone: " in lines[0]
        assert FATES[fate] in lines[0]
        assert f"rank {rank} cannot finish step" in lines[0]


def test_under_an_elastic_launcher_survivors_of_a_hung_rank_end_by_themselves(
    tmp_path: Path,
) -> None:
    elastic = {"TORCHELASTIC_RUN_ID": "job", "EVENSTRIDE_SILENT_S": "6"}

    logs = _survivors_logs(tmp_path, ["stopped", "1", "25", "3600"], 1, **elastic)

    for rank, text in logs.items():
        named, ended = _ours(text)
        assert "rank 1 is gone: no heartbeat for" in named, rank
        assert "this process ends so that its launcher can restart it" in ended


def test_survivors_under_torchrun_name_the_lost_rank_before_it_ends_them(tmp_path: Path) -> None:
    launcher = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--local-addr=127.0.0.1",
        f"--nproc-per-node={WORLD_SIZE}",
        "--redirects=3",
        f"--log-dir={tmp_path}",
    ]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, *launcher, str(SCRIPT), "killed", "1", "25", "60"],
        env={**environment, "RES_OPTIONS": "timeout:1 attempts:1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        process.wait(DEADLINE_S)
    finally:
        end(process, 10.0)

    for rank in (0, 2):
        (log,) = tmp_path.glob(f"*/attempt_0/{rank}/stderr.log")
        lines = _ours(log.read_text())
        assert len(lines) == 1, log.read_text()
        assert "rank 1 is gone: its process" in lines[0]


def _ours(text: str) -> list[str]:
    """Return our own lines; torch may have put its rank prefix in front of them."""
    return [line for line in text.splitlines() if "evenstride: " in line]
