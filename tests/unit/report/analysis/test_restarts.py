"""Steps of a training that earlier processes kept."""

from __future__ import annotations

from typing import Any

import pytest

from evenstride.report.analysis.run_generation import RecordedGeneration, StepTable
from evenstride.report.analysis.run_timeline import LeaderProcess, kept_before


def begins(step: int, epochs: float, batch: int = 10, samples: int = 1000) -> dict[str, Any]:
    return {
        "kind": "pass",
        "step": step,
        "epochs": epochs,
        "samples": samples,
        "global_batch": batch,
    }


def life(*passes: dict[str, Any], first: int = 0) -> LeaderProcess:
    """Return a process that formed its group before a step, and recorded none."""
    formed = RecordedGeneration(0, 0, 10, ("a/0",), StepTable(first, 1))
    return LeaderProcess({"global_batch": 10}, [formed], notes=[*passes])


@pytest.mark.parametrize(
    ("epochs", "kept"),
    [
        (2.0, 200),  # where the first one ended
        (1.5, 150),  # back to a checkpoint
        (0.4, 40),
        (0.0, 0),  # all over again
    ],
)
def test_a_process_goes_on_where_its_first_pass_says(epochs: float, kept: int) -> None:
    first = life(begins(0, 0.0), begins(100, 1.0))

    assert kept_before([first, life(begins(0, epochs))]) == (0, kept)


def test_a_later_process_goes_back_behind_the_one_before() -> None:
    first = life(begins(0, 0.0), begins(100, 1.0), begins(200, 2.0))

    lives = [first, life(begins(0, 2.5)), life(begins(0, 1.2)), life(begins(0, 2.2, batch=20))]
    assert kept_before(lives) == (0, 250, 120, 220)


def test_steps_are_counted_by_the_batches_that_were_trained() -> None:
    first = life(begins(0, 0.0), begins(100, 1.0, batch=20), begins(150, 2.0, batch=40))

    assert kept_before([first, life(begins(0, 1.5))]) == (0, 125)
    assert kept_before([first, life(begins(0, 2.4))]) == (0, 160)


def test_a_pass_without_a_batch_has_that_of_its_header() -> None:
    withheld = {name: value for name, value in begins(0, 0.0).items() if name != "global_batch"}

    assert kept_before([life(withheld), life(begins(0, 0.5, batch=20))]) == (0, 50)


def test_the_last_step_of_an_epoch_is_one_whatever_it_has() -> None:
    first = life(begins(0, 0.0, samples=1005))

    assert kept_before([first, life(begins(0, 1.0, samples=1005))]) == (0, 101)


@pytest.mark.parametrize(
    "bad",
    [
        {"epochs": float("nan")},
        {"epochs": 10**400},
        {"epochs": 1e300},
        {"step": None},
        {"step": 10**400},
        {"step": -5},
        {"samples": 0},
        {"samples": -1000},
        {"global_batch": "x"},
    ],
)
def test_an_impossible_pass_is_ignored(bad: dict[str, Any]) -> None:
    first = life({**begins(100, 1.0), **bad}, begins(0, 0.0))

    assert kept_before([first, life(begins(0, 0.5))]) == (0, 50)


def test_a_process_without_a_pass_continues_at_the_end() -> None:
    lives = [life(begins(0, 0.0), first=70), life(first=30), life(first=5)]

    assert kept_before(lives) == (0, 70, 100)
    assert kept_before([]) == ()
