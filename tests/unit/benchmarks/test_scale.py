"""The benchmark of many ranks, with a few."""

from __future__ import annotations

import json
import sys

import psutil
import pytest
from benchmarks import scale
from benchmarks.scale import Scene


def test_a_few_ranks_exchange_and_nothing_is_left_running() -> None:
    seen = dict[str, Scene]()
    before = psutil.Process().children(recursive=True)

    found = scale.measure(4, 0.1, ["exchange"], seen.__setitem__)

    assert list(seen) == ["start", "exchange"]
    assert found["named"] == 0, "no rank was lost"
    assert found["scenes"]["exchange"]["requests"] >= 3, "woken, replied, and read the decision"
    assert found["scenes"]["start"]["leader_requests"] > 0
    assert found["decision_s"] > 0
    assert psutil.Process().children(recursive=True) == before


def test_figures_are_printed_as_json_or_scene_by_scene(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    scene = Scene(2.5, 3.0, 400.0, 500.0, 0.006, 7, 0.008, 0.009, 1.5)

    def measure(ranks: int, seconds: float, wanted: list[str], tell: object) -> object:
        if tell is scale.show:
            scale.show("exchange", scene)
        return {"scenes": wanted, "named": ranks - 1, "decision_s": seconds}

    monkeypatch.setattr(scale, "measure", measure)
    monkeypatch.setattr(scale, "prepare", lambda: None)
    arguments = ["scale.py", "--ranks", "3,12", "--scenes", "exchange,loss", "--seconds", "0.5"]

    monkeypatch.setattr(sys, "argv", [*arguments, "--json"])
    scale.main()
    found = json.loads(capsys.readouterr().out)
    monkeypatch.setattr(sys, "argv", arguments)
    scale.main()
    printed = capsys.readouterr().out

    assert list(found) == ["3", "12"]
    assert found["12"]["scenes"] == ["exchange", "loss"]
    for part in ("--- 12 ranks", "2.5", "0.40", "6.00", "11 of 11", "500.0 ms"):
        assert part in printed


def test_an_unknown_scene_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["scale.py", "--scenes", "exchange,war"])

    with pytest.raises(SystemExit):
        scale.main()

    assert "unknown scenes war; expected start, " in capsys.readouterr().err
