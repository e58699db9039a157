"""``plan --online`` refuses what cannot be before it starts anything."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.unit.cli.conftest import Shell

GOOD = ("--workers", "1,2", "--epochs", "3")


@pytest.fixture(autouse=True)
def nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    def started(*_: Any) -> None:
        pytest.fail("it was not refused in time")

    monkeypatch.setattr("evenstride.lab.online.online_search.ground", started)
    monkeypatch.setattr("evenstride.lab.online.online_search.usable_cpus", lambda: 2)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (("--epochs", "3"), "give --workers"),
        (
            ("--workers", "0,1", "--epochs", "3"),
            "--workers is '0,1'; give whole numbers above 0, such as 1,2,4",
        ),
        (("--workers", "1,2"), "--epochs is missing; plan --online needs"),
        (("--workers", "1,2", "--epochs", "0"), "--epochs is 0"),
        ((*GOOD, "--batches", "64,"), "--batches is '64,'"),
        ((*GOOD, "--objective", "best"), "give one of time, cost, knee"),
        ((*GOOD, "--usd-per-h", "0"), "--usd-per-h is 0"),
        ((*GOOD, "--speeds", "1"), "--workers asks for 2 and --speeds names 1"),
        ((*GOOD, "--speeds", "1,1.5"), "a speed of 1.5 cannot be"),
        (("--epochs", "3", "--speeds", "1,1,1"), "sum to 3 cores"),
        (("--workers", "4", "--epochs", "3", "--batches", "2"), "fewer samples than the 4 workers"),
        ((*GOOD, "--deadline", "6h"), "--deadline is about machines to rent"),
        ((*GOOD, "--spot"), "--spot is about machines to rent"),
    ],
)
def test_what_cannot_be_searched_for_is_refused(
    shell: Shell, tmp_path: Path, options: tuple[str, ...], text: str
) -> None:
    (tmp_path / "train.py").write_text("")

    assert text in shell("plan", "--online", *options, "--", "train.py", "--lr", "0.1").refusal()
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]


def test_a_script_that_is_not_there_is_refused(shell: Shell, tmp_path: Path) -> None:
    answer = shell("plan", "--online", *GOOD, "--", "nowhere.py")

    assert "there is no script nowhere.py" in answer.refusal()
    assert list(tmp_path.iterdir()) == []


def test_a_search_that_is_interrupted_says_how_to_go_on(
    shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("evenstride.lab.online.online_search.ground", interrupted)
    (tmp_path / "train.py").write_text("")

    answer = shell("plan", "--online", *GOOD, "--folder", "my runs/1", "--", "train.py")

    assert answer.code == 130
    assert "the same command with --folder 'my runs/1' goes on" in answer.err


def test_what_is_for_a_search_means_nothing_without_one(shell: Shell) -> None:
    text = shell("plan", "profile.json", "--workers", "1,2").refusal()

    assert "--workers is for plan --online" in text
