"""The commands of the pages run, and print what the pages show; what does not run says why."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from evenstride.sim.scenario.builtin_scenarios import SCENARIOS
from tests.docs.blocks import (
    OTHERS,
    PAGES,
    PROGRAMS,
    ROOT,
    Block,
    blocks,
    blocks_of,
    commands,
    printed,
    shown,
)
from tests.docs.table import ELSEWHERE, KNOWN, MADE_BY, NOT_RUN, RUN, SMALLER
from tests.docs.tutorial import PAGES as TUTORIAL
from tests.docs.tutorial import script

SHELL = [one for one in blocks("sh") if one.page not in {page.stem for page in TUTORIAL}]


SHOWN = {commands(one)[-1]: text for one, text in shown().items() if one in SHELL}


@pytest.mark.parametrize("block", SHELL, ids=lambda block: block.where)
def test_each_command_runs_or_says_why_not(block: Block) -> None:
    unknown = [command for command in commands(block) if command not in KNOWN]

    assert not unknown, f"{block.page}.md, line {block.line}: give {unknown} a line in table.py"


def test_the_table_names_only_what_is_there_and_names_it_once() -> None:
    there = {command for block in SHELL for command in commands(block)}
    there |= {command for page in [*PAGES, *OTHERS] for _, command in printed(page)}

    assert sorted(set(KNOWN) - there) == []
    assert len(KNOWN) == len(set(KNOWN))
    assert all(NOT_RUN.values()), "each has its reason"


@pytest.mark.parametrize("page", [*PAGES, *OTHERS], ids=lambda page: page.stem)
def test_no_command_hides_in_a_block_without_a_language(page: Path) -> None:
    command = rf"(\$ |\w+=\S+ )*({'|'.join(PROGRAMS)})\b"
    hidden = [
        one.where
        for one in blocks_of(page)
        if one.language in ("", "console", "bash", "shell") and re.match(command, one.text)
    ]
    indented = re.compile(rf"^ {{4}}{command}.*", re.MULTILINE)
    hidden += [one[0] for one in indented.finditer(page.read_text())]

    assert not hidden, f"write ```sh, and what is printed as ```text: {hidden}"


@pytest.mark.parametrize("command", ELSEWHERE)
def test_the_test_that_runs_it_is_there(command: str) -> None:
    path, words = ELSEWHERE[command]

    assert words in (ROOT / path).read_text()


def shorter(scenario: str) -> str:
    """Return a scenario with a tenth of its steps."""
    return re.sub(r"\b(steps|at): (\d+)0\b", r"\1: \2", scenario)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A reader's folder: the tutorial's script, scenarios, and runs."""
    here = tmp_path_factory.mktemp("reader")
    scenarios = here / "benchmarks" / "scenarios"
    scenarios.mkdir(parents=True)
    for name in ("reference", "h10", "slow-worker-swap"):
        text = (SCENARIOS / f"{name}.yaml").read_text()
        (scenarios / f"{name}.yaml").write_text(shorter(text))
    (here / "docs" / "images").mkdir(parents=True)
    (here / "examples").symlink_to(ROOT / "examples")
    (here / "prices.csv").write_text("type,usd_per_h\ng5.xlarge,1.0\n")
    (here / "train.py").write_text(script(steps=1))
    own = next(one for one in blocks("python") if one.page == "policy-of-your-own")
    (here / "my_policy.py").write_text(own.text.partition("\n\nstride = ")[0])
    scenario = next(one for one in blocks("yaml") if one.page == "scenarios")
    (here / "cluster.yaml").write_text(shorter(scenario.text))
    for run, trace in (("today", "adaptive"), ("adaptive", "adaptive"), ("uniform", "static")):
        (here / "runs" / run).mkdir(parents=True)
        shutil.copy(ROOT / f"tests/golden/{trace}.jsonl", here / "runs" / run / "trace.jsonl")
    (here / "runs" / "demo").mkdir()
    for policy, trace in (("adaptive", "adaptive"), ("uniform", "static")):
        shutil.copy(
            ROOT / f"tests/golden/{trace}.jsonl", here / "runs" / "demo" / f"{policy}.jsonl"
        )
    return here


def _run(command: str, folder: Path) -> str:
    python = shlex.quote(sys.executable)
    mine = re.sub(r"\bevenstride (?=[-a-z])", f"{python} -m evenstride ", command, count=1)
    mine = re.sub(r"^python ", f"{python} ", mine)
    done = subprocess.run(
        ["bash", "-c", mine],
        cwd=folder,
        env={**os.environ, "COLUMNS": "200", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout


@pytest.mark.timeout(300)
@pytest.mark.parametrize("command", RUN, ids=RUN)
def test_it_runs_and_prints_what_is_shown(command: str, folder: Path) -> None:
    printed = _run(command, folder)

    assert printed.strip()
    if command in SHOWN:
        assert printed == SHOWN[command]


def _run_smaller(command: str, folder: Path) -> str:
    long, short = SMALLER[command]
    assert long in command
    smaller = command.replace(long, short, 1)
    for made, maker in MADE_BY.items():  # in parallel, another process may have run the maker
        if made in smaller and maker != command and not (folder / made).exists():
            _run_smaller(maker, folder)
    return _run(smaller, folder)


@pytest.mark.timeout(500)  # of up to two commands, each with a deadline
@pytest.mark.parametrize("command", SMALLER, ids=list(SMALLER))
def test_it_runs_with_less_to_do(command: str, folder: Path) -> None:
    assert _run_smaller(command, folder).strip()
