"""The tutorial, followed to the letter on smaller data: each command runs, each step is as told."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.blocks import blocks_of, commands, shown
from tests.docs.tutorial import PAGE, script
from tests.ending import TORCHRUN_S, end

pytestmark = pytest.mark.timeout(300)  # of up to five commands, each with a deadline
DEADLINE_S = 100.0
LAB = "evenstride lab --speeds 0.5,0.2 --steps 90 --repeats 1 --out runs/lab -- train.py"
# What is replaced in a command, so that it takes seconds; none of them changes what it is about.
SHORTER = {
    "--speeds 0.5,0.2 --steps 90": "--speeds 1,1 --steps 90 --no-calibrate",
    "EVENSTRIDE_MAX_STEPS=40": "EVENSTRIDE_MAX_STEPS=5",
}
NOT_RUN = {"pip install .": "installs from the network"}


def told() -> list[str]:
    """Return the page's commands in order, but for those that are not run."""
    inside = [one for one in blocks_of(PAGE) if one.language == "sh"]
    return [line for one in inside for line in commands(one) if line not in NOT_RUN]


def ran(command: str, folder: Path) -> str:
    """Return what a command prints, which must end well; no process outlives it."""
    for long, short in SHORTER.items():
        command = command.replace(long, short)
    mine = shlex.quote(sys.executable)
    command = re.sub(r"\bevenstride (?=[-a-z])", f"{mine} -m evenstride ", command, count=1)
    launcher = f"{mine} -m torch.distributed.run --standalone --local-addr=127.0.0.1 "
    process = subprocess.Popen(
        ["bash", "-c", command.replace("torchrun ", launcher)],
        cwd=folder,
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "RES_OPTIONS": "timeout:1 attempts:1",
        },
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=DEADLINE_S)
    finally:
        end(process, TORCHRUN_S)
    assert process.returncode == 0, f"{command}\n{output}"
    return output


def epochs(output: str) -> list[int]:
    """Return the epochs that a run told of."""
    return [int(number) for number in re.findall(r"^epoch (\d+):", output, re.MULTILINE)]


def last(output: str) -> float:
    """Return the number of the last epoch's line."""
    return float(re.findall(r"^epoch \d+: \w+ ([\d.]+)", output, re.MULTILINE)[-1])


def test_the_page_has_the_commands_that_are_followed_here() -> None:
    assert told() == [
        "evenstride --version",
        "torchrun --nproc-per-node 2 train.py",
        "evenstride estimate 0.5,0.2",
        "torchrun --nproc-per-node 2 train.py",
        LAB,
        "tail -n 4 runs/lab/uniform-1/workers.log",
        "tail -n 4 runs/lab/adaptive-1/workers.log",
        "evenstride top runs/lab/adaptive-1 --once",
        "evenstride report runs/lab/uniform-1 runs/lab/adaptive-1 -o lab.html",
        "EVENSTRIDE_MAX_STEPS=40 torchrun --nproc-per-node 2 train.py",
        "torchrun --nproc-per-node 3 train.py",
        "rm -r runs/saved",
        "torchrun --nproc-per-node 2 train.py",
    ]


SHOWN = {commands(one)[0]: text for one, text in shown().items() if one.page == PAGE.stem}


@pytest.mark.parametrize("command", ["evenstride --version", "evenstride estimate 0.5,0.2"])
def test_what_needs_no_training_prints_what_the_page_shows(command: str, tmp_path: Path) -> None:
    assert ran(command, tmp_path) == SHOWN[command]


def test_the_script_to_start_from_trains(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(script(0))

    printed = ran(told()[1], tmp_path)

    assert epochs(printed) == [1, 2, 3, 4, 5, 6]
    assert "evenstride" not in printed


def test_four_lines_on_they_train_in_the_lab_and_leave_logs_and_traces(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(script(1))

    lab, *looks = (ran(command, tmp_path) for command in told()[4:9])

    assert "speed-up over the equal split" in lab
    for policy, tail in zip(("uniform", "adaptive"), looks, strict=False):
        log = (tmp_path / "runs" / "lab" / f"{policy}-1" / "workers.log").read_text()
        assert epochs(log) == [1, 2, 3, 4, 5, 6]
        assert f"steps of 1024 samples on 2 worker(s), policy {policy}" in log
        assert "evenstride itself took" in tail
    assert "policy adaptive" in looks[2]
    assert (tmp_path / "lab.html").stat().st_size > 10_000


def test_a_run_that_was_stopped_goes_on_with_other_workers_to_the_same_end(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(script(3))
    stop, go_on, forget, whole = told()[9:]

    ran(stop, tmp_path)
    continued = ran(go_on, tmp_path)
    ran(forget, tmp_path)
    in_one_go = ran(whole, tmp_path)

    assert epochs(continued) == [3, 4, 5, 6], "from the middle of the third"
    assert "7 steps of 1024 samples on 3 worker(s)" in continued
    assert epochs(in_one_go) == [1, 2, 3, 4, 5, 6]
    assert last(continued) == pytest.approx(last(in_one_go), abs=1e-9 + 1 / 512)
