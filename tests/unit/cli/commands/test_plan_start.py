"""``evenstride plan --start``: what it starts, and what it cannot start from here."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from evenstride.cli.start_files import StartFiles, commands_to_start
from evenstride.errors import ConfigError
from evenstride.planner.search.training_forecast import ClusterChoice
from evenstride.planner.workload.workload_profile import write_profile
from tests.messages import check_message, raises_message
from tests.unit.cli.commands.test_plan_stored import measured
from tests.unit.cli.conftest import Answer, Shell
from tests.unit.planner.kinds import kind

HERE = "type,usd_per_h\nsmall,1.0\n"
CLOUD = "type,usd_per_h,cloud,region\nsmall,1.0,aws,us-east-1\n"
Started = tuple[list[str], dict[str, str]]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Started]:
    """Keep what would replace this process; nothing named sky is installed."""
    found = list[Started]()

    def replaced(file: str, words: Sequence[str], variables: Mapping[str, str]) -> None:
        assert file == words[0]
        found.append((list(words), dict(variables)))

    monkeypatch.setattr(os, "execvpe", replaced)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    write_profile(measured(), tmp_path / "own.json")
    return found


def planned(shell: Shell, prices: str, *options: str) -> Answer:
    Path("prices.csv").write_text(prices)
    return shell("plan", "own.json", "--epochs", "20", "--catalog", "prices.csv", *options)


def test_a_machine_of_no_cloud_is_this_one(shell: Shell, started: list[Started]) -> None:
    answer = planned(shell, HERE, "--max-nodes", "1", "--start")

    assert not answer.code, answer.err
    ((words, variables),) = started
    assert words[:4] == [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    assert words[4:] == ["--nproc-per-node=1", "train.py", "--lr", "0.1"]
    assert (variables["EVENSTRIDE_EPOCHS"], variables["EVENSTRIDE_GLOBAL_BATCH"]) == ("20", "256")
    assert "starting: " in answer.out


def test_a_cloud_is_started_through_skypilot(
    shell: Shell, started: list[Started], tmp_path: Path
) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "sky").touch(mode=0o755)

    answer = planned(shell, CLOUD, "--sky", "tasks", "--start")

    assert not answer.code, answer.err
    assert started[0][0] == ["sky", "launch", "tasks/evenstride.yaml", "--yes"]


@pytest.mark.parametrize(
    ("prices", "options", "fact"),
    [
        (CLOUD, ("--max-nodes", "1"), "--sky"),
        (CLOUD, ("--sky", "tasks"), "install SkyPilot"),
        (HERE, ("--objective", "time"), "--max-nodes 1"),
        (HERE, ("--json",), "--json"),
    ],
)
def test_what_cannot_be_started_from_here_says_why(
    shell: Shell, started: list[Started], prices: str, options: tuple[str, ...], fact: str
) -> None:
    answer = planned(shell, prices, *options, "--start")

    assert answer.code == 2
    check_message(answer.err, fact)
    assert started == []


def test_two_tasks_of_skypilot_need_an_address_between_them() -> None:
    lines = ("sky launch a.yaml", "sky launch --env _EVENSTRIDE_HEAD=ADDRESS b.yaml")
    choice = ClusterChoice((kind("a"), kind("b")), (1, 1), 64)

    with raises_message(ConfigError, "--no-mixed"):
        commands_to_start(choice, ("train.py",), [StartFiles((), lines)])
