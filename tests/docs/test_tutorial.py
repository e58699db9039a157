"""The tutorials, followed to the letter on smaller data: each command runs, each result agrees."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.blocks import blocks_of, commands
from tests.docs.tutorial import PAGES, script, script_for_gpus
from tests.ending import run_to_end

pytestmark = pytest.mark.timeout(500)  # of up to five commands, each with a deadline
DEADLINE_S = 240.0
LAB = "evenstride lab --speeds 0.5,0.2 --steps 90 --out runs/lab -- train.py"
# What is replaced in a command, so that it takes seconds; none of them changes what it is about.
SHORTER = {
    "--speeds 0.5,0.2 --steps 90": "--speeds 1,1 --steps 90 --repeats 1 --no-calibrate",
    "EVENSTRIDE_MAX_STEPS=40": "EVENSTRIDE_MAX_STEPS=5",
}
# A script that ends right after a collective may abort on Python 3.11: a thread of Gloo needs the
# interpreter, which has begun to end. Scripts with a Stride wait for such threads by themselves.
WAIT = """
from evenstride.runtime.engines.process_groups import let_threads_finish
let_threads_finish()
"""


def printed_on(page: Path) -> list[str]:
    """Return a page's commands in order."""
    return [line for one in blocks_of(page) if one.language == "sh" for line in commands(one)]


def ran(command: str, folder: Path) -> str:
    """Return what a command prints, which must end well; no process outlives it."""
    for long, short in SHORTER.items():
        command = command.replace(long, short)
    mine = shlex.quote(sys.executable)
    command = re.sub(r"\bevenstride (?=[-a-z])", f"{mine} -m evenstride ", command, count=1)
    launcher = f"{mine} -m torch.distributed.run --standalone --local-addr=127.0.0.1 "
    code, output = run_to_end(
        ["bash", "-c", command.replace("torchrun ", launcher)],
        DEADLINE_S,
        {"RES_OPTIONS": "timeout:1 attempts:1"},
        cwd=folder,
        stdin=subprocess.DEVNULL,
    )
    assert code == 0, f"{command}\n{output}"
    return output


def epochs(output: str) -> list[int]:
    """Return the epochs that a run printed."""
    return [int(number) for number in re.findall(r"^epoch (\d+):", output, re.MULTILINE)]


def last(output: str) -> float:
    """Return the number of the last epoch's line."""
    return float(re.findall(r"^epoch \d+: \w+ ([\d.]+)", output, re.MULTILINE)[-1])


def test_the_pages_have_the_commands_that_are_followed_here() -> None:
    assert printed_on(PAGES[0]) == [
        "torchrun --nproc-per-node 2 train.py",
        LAB,
        "evenstride top runs/lab/adaptive-1 --once",
        "evenstride report runs/lab/uniform-1 runs/lab/adaptive-1 -o lab.html",
        'grep "made the others wait" runs/lab/uniform-1/workers.log',
    ]
    assert printed_on(PAGES[1]) == [
        "EVENSTRIDE_MAX_STEPS=40 torchrun --nproc-per-node 2 train.py",
        "torchrun --nproc-per-node 3 train.py",
        "rm -r runs/saved",
        "torchrun --nproc-per-node 2 train.py",
    ]


def test_the_script_to_start_from_trains(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(script(0) + WAIT)

    printed = ran(printed_on(PAGES[0])[0], tmp_path)

    assert epochs(printed) == [1, 2, 3, 4, 5, 6]
    assert "evenstride" not in printed


def test_four_lines_on_they_train_in_the_lab_and_leave_logs_and_traces(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(script(1))

    lab, top, _ = (ran(command, tmp_path) for command in printed_on(PAGES[0])[1:4])

    assert "speed-up over the equal split" in lab
    for policy in ("uniform", "adaptive"):
        log = (tmp_path / "runs" / "lab" / f"{policy}-1" / "workers.log").read_text()
        assert epochs(log) == [1, 2, 3, 4, 5, 6]
        assert f"steps of 1024 samples on 2 worker(s), policy {policy}" in log
    assert "policy adaptive" in top
    assert (tmp_path / "lab.html").stat().st_size > 10_000


def test_the_log_has_the_line_that_is_looked_for(tmp_path: Path) -> None:
    shown = [one.text for one in blocks_of(PAGES[0]) if one.language == "text"][-1]
    log = tmp_path / "runs" / "lab" / "uniform-1" / "workers.log"
    log.parent.mkdir(parents=True)
    log.write_text(f"epoch 1: loss 1.500\n{shown}evenstride itself took 1 ms per step\n")

    assert ran(printed_on(PAGES[0])[-1], tmp_path) == shown


def test_the_script_for_gpus_is_the_balanced_one_with_a_device() -> None:
    text = script_for_gpus()

    compile(text, "train.py", "exec")
    assert 'dist.init_process_group("nccl")' in text
    assert "stride.scale(loss).backward()" in text


def test_a_run_that_was_stopped_goes_on_with_other_workers_to_the_same_end(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(script(3))
    stop, go_on, forget, whole = printed_on(PAGES[1])

    ran(stop, tmp_path)
    continued = ran(go_on, tmp_path)
    ran(forget, tmp_path)
    in_one_go = ran(whole, tmp_path)

    assert epochs(continued) == [3, 4, 5, 6], "from the middle of the third"
    assert "7 steps of 1024 samples on 3 worker(s)" in continued
    assert epochs(in_one_go) == [1, 2, 3, 4, 5, 6]
    assert last(continued) == pytest.approx(last(in_one_go), abs=1e-9 + 1 / 512)


def test_the_script_for_spot_nodes_only_trains_longer() -> None:
    assert script(4).replace(", 200)", ", 6)") == script(3)
