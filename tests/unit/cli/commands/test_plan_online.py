"""``plan --online`` refuses what cannot be before it starts anything."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.messages import check_message
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
        (("--epochs", "3"), ("--workers",)),
        (
            ("--workers", "0,1", "--epochs", "3"),
            ("--workers", "'0,1'", "1,2,4"),
        ),
        (("--workers", "1,2"), ("--epochs", "--online")),
        (("--workers", "1,2", "--epochs", "0"), ("--epochs",)),
        ((*GOOD, "--batches", "64,"), ("--batches", "'64,'")),
        ((*GOOD, "--objective", "best"), ()),
        ((*GOOD, "--usd-per-h", "0"), ("--usd-per-h",)),
        ((*GOOD, "--speeds", "1"), ("--workers", "--speeds")),
        ((*GOOD, "--speeds", "1,1.5"), ("1.5",)),
        (("--epochs", "3", "--speeds", "1,1,1"), ()),
        (("--workers", "4", "--epochs", "3", "--batches", "2"), ("4 workers",)),
        ((*GOOD, "--deadline", "6h"), ("--deadline",)),
        ((*GOOD, "--spot"), ("--spot",)),
    ],
)
def test_an_invalid_search_is_refused(
    shell: Shell, tmp_path: Path, options: tuple[str, ...], text: tuple[str, ...]
) -> None:
    (tmp_path / "train.py").write_text("")

    check_message(
        shell("plan", "--online", *options, "--", "train.py", "--lr", "0.1").refusal(), *text
    )
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]


def test_a_missing_script_is_refused(shell: Shell, tmp_path: Path) -> None:
    answer = shell("plan", "--online", *GOOD, "--", "nowhere.py")

    check_message(answer.refusal(), "nowhere.py")
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
    check_message(answer.err, "--folder", "'my runs/1'")


def test_options_of_a_search_are_refused_without_online(shell: Shell) -> None:
    text = shell("plan", "profile.json", "--workers", "1,2").refusal()

    assert "--workers needs --online" in text
