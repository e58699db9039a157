"""The benchmarks of own time and of decisions."""

from __future__ import annotations

import json
import sys

import pytest
from benchmarks import decisions, overhead


def _rank(own_s: list[float], moved: list[bool]) -> dict[str, object]:
    rounds = len(own_s)
    times = {name: [0.011] * rounds for name in ("plain", "again", "evenstride", "traced")}
    own = {"evenstride": own_s, "traced": own_s, "threads": [each / 4 for each in own_s]}
    return {"times": times, "own": own, "tiny": [2e-4] * rounds, "moved": moved, "trace_s": 1e-6}


def test_own_time_is_that_of_the_worse_rank_apart_for_rounds_in_which_splits_move() -> None:
    moved = [True, False, False]
    ranks = [_rank([4e-4, 1e-4, 8e-5], moved), _rank([1e-4, 6e-5, 9e-5], [False] * 3)]

    result = overhead.judge("conv", 2, ranks)

    assert result.own_ratio == {"settled": pytest.approx(0.475), "moving": pytest.approx(2.0)}
    of_training = {"settled": pytest.approx(0.35625), "moving": pytest.approx(1.5)}
    assert result.training_ratio == of_training
    assert result.rounds == {"settled": 2, "moving": 1}
    assert not result.within_budget, "moving is above 1.0"
    assert result.verdict == "met"


def test_without_a_move_only_the_settled_budget_counts(capsys: pytest.CaptureFixture[str]) -> None:
    result = overhead.judge("perceptron", 0, [_rank([9e-5], [False])])
    overhead.report(result)

    assert result.within_budget
    assert "moving: not seen" in capsys.readouterr().out


def test_each_decision_is_given_in_both_sorts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(decisions, "SORTS", 1)
    monkeypatch.setattr(
        sys, "argv", ["decisions.py", "--workers", "2,3", "--rounds", "6", "--json"]
    )
    decisions.main()
    found = json.loads(capsys.readouterr().out)

    assert list(found) == ["2", "3"]
    assert [cost["phase"] for cost in found["2"]] == ["fresh", "settled"]
    assert all(cost["decision_s"] > 0 and cost["sorts"] > 0 for cost in found["3"])
    assert found["2"][0]["moves"] > 0, "speeds are unequal"
