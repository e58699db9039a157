"""``plan --online`` refuses what cannot be before it starts anything."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from evenstride.cli import plan_online
from evenstride.cli.plan_request import TrainingLength
from evenstride.core.convergence.batch_laws import MeasuredTraining
from evenstride.planner.workload.target_runs import LOSS
from tests.messages import check_message
from tests.unit.cli.conftest import Shell

GOOD = ("--workers", "1,2", "--epochs", "3")
TRAINED = ("--workers", "1,2", "--trained", "64:30", "--trained", "256:20")


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
        ((*GOOD, "--trained", "64:30", "--trained", "256:20"), ("--epochs", "--trained")),
        ((*TRAINED, "--batches", "64,1024"), ("1024", "from 64 to 256")),
        (TRAINED, ("--batches", "from 64 to 256")),
        (("--workers", "1", "--trained", "64:30", "--batches", "64"), ("--epochs", "64")),
        (("--workers", "1", "--trained", "64", "--batches", "64"), ("'64'",)),
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


def test_earlier_trainings_show_the_epochs_at_the_smallest_batch() -> None:
    request = plan_online.request_of(
        ("train.py",),
        workers="1,2",
        batches="128,256",
        length=TrainingLength(None, ("64:30", "1024:12"), None, LOSS),
        objective=None,
        usd_per_h=1.0,
        speeds=None,
        folder=None,
        probe_steps=40,
        restore=False,
    )

    assert request.trained == (MeasuredTraining(64, 30.0), MeasuredTraining(1024, 12.0))
    # By Scavenger's law, a line in 1 / sqrt(B), because epochs fall.
    assert request.epochs == pytest.approx(12 + 18 * (128**-0.5 - 1 / 32) / (1 / 8 - 1 / 32))
    # A search with other trainings cannot continue this one; one without does not mention them.
    assert request.to_plain()["trained"] == [[64, 30.0], [1024, 12.0]]
    assert "trained" not in replace(request, trained=()).to_plain()
