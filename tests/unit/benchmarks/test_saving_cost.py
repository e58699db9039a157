"""The benchmark of saving without ranks: its options, its figures from findings, and its output."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from benchmarks import saving
from benchmarks.saving import Block, Held
from hypothesis import given
from hypothesis import strategies as st

PARTS_S = dict.fromkeys(saving.PARTS, (0.25, 0.5))


def rank(slower: float = 1.01, drift: float = 1.0, failed: int = 0, slow: float = 1.0) -> Any:
    """Return the findings of a rank with steps of 1 s.

    Args:
        slower: Factor of a step with checkpoints.
        drift: Factor of the machine's times from block to block.
        failed: Failed saves.
        slow: Factor of this rank's copies.
    """
    rounds = []
    for number in range(4):
        first = 1.0 + (drift - 1.0) * 2 * number
        middle, last = first + (drift - 1.0), first + 2 * (drift - 1.0)
        steps = (first, middle * slower, last)
        rounds.append(tuple(Block(30, step_s, 2.0 * step_s) for step_s in steps))
    report = {"saved": 9, "failed": failed, "save_s": 4.5, "written_bytes": 900.0}
    return {
        "batch": 32,
        "parameters": 2_000_000,
        "first": Held(0.5 * slow, 0.0),
        "later": [Held(0.1 * slow, 0.0), Held(0.2 * slow, 0.01)] * 4,
        "rounds": rounds,
        "report": report,
        "parts_s": PARTS_S,
    }


def test_the_cost_is_a_block_with_checkpoints_over_the_two_around_it() -> None:
    found = saving.judge([rank(1.01), rank(1.01, slow=3.0)])

    assert found["cost"] == pytest.approx(0.01)
    assert found["control"] == pytest.approx(0.0)
    assert found["processor_save_s"] == pytest.approx(30 * 2.0 * 0.01)
    assert found["processor_step_s"] == pytest.approx(2.0)
    assert found["step_s"] == pytest.approx(1.0)
    assert found["interval_steps"] == 30
    assert found["verdict"] == "met"


def test_a_steady_drift_is_in_the_control_and_not_in_the_cost() -> None:
    found = saving.judge([rank(1.01, drift=1.1)])

    assert found["cost"] == pytest.approx(0.01)
    assert found["control"] > 0.1


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [(0.0, 0.02, "met"), (0.01, 0.021, "unresolved"), (0.021, 0.04, "over"), (-0.1, 0.0, "met")],
)
def test_an_interval_is_judged_by_two_percent(low: float, high: float, verdict: str) -> None:
    assert saving.verdict((low, high), (-0.02, 0.01)) == verdict
    assert saving.verdict((low, high), (-0.021, 0.01)) == "unresolved"


@given(st.lists(st.floats(-1.0, 1.0), min_size=1, max_size=9))
def test_an_interval_lies_within_the_values(values: list[float]) -> None:
    low, high = saving.interval(values)

    assert min(values) <= low <= high <= max(values)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--every", "often"], "'often'"),
        (["--every", "auto"], "expected a duration"),
        (["--every", "0s"], "'0s'"),
        (["--rounds", "2"], "too few"),
        (["--ranks", "0"], "at least 1"),
        (["--parameters", "2"], "at least 3"),
        (["--step-s", "0"], "above 0"),
    ],
)
def test_invalid_measurements_are_refused(
    arguments: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        saving.parse(arguments)

    assert end.value.code == 2
    assert problem in capsys.readouterr().err


@pytest.mark.parametrize(("failed", "code"), [(0, 0), (1, 1)])
def test_a_run_saves_below_the_folder_and_leaves_nothing_there(
    failed: int,
    code: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def ranks(work: Any, count: int, asked: saving.Asked, timeout_s: float) -> list[Any]:
        assert work is saving.measure
        assert Path(asked.folder).parent == tmp_path / "new"
        assert timeout_s == asked.limit_s
        return [rank(failed=failed)] * count

    monkeypatch.setattr(saving, "run_ranks", ranks)

    assert saving.main(["--json", "--folder", str(tmp_path / "new"), "--ranks", "3"]) == code

    printed = json.loads(capsys.readouterr().out)
    assert printed["checkpoint_bytes"] == 300
    assert printed["filesystem"]
    assert {"load", "torch", "machine", "every_s"} <= printed.keys()
    assert list((tmp_path / "new").iterdir()) == []
