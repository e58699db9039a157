"""Two ranks train to a loss, and ``evenstride plan`` says what that takes on rented machines."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from evenstride.cli.main import main
from evenstride.planner.workload.target_runs import reached
from evenstride.testing import RankPool
from tests.multiproc.reaching import Run, to_loss

TARGET = 1.0


def planned(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Any:
    """Return what ``evenstride plan`` prints."""
    monkeypatch.setattr(sys, "argv", ["evenstride", "plan", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    reported = capsys.readouterr()
    assert not ended.value.code, reported.err
    return json.loads(reported.out)


def test_what_two_ranks_trained_to_a_loss_is_planned_with(
    ranks: RankPool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    batches, expected = (16, 64), {}
    for batch in batches:
        run = Run(str(tmp_path / str(batch) / "trace.jsonl"), batch, epochs=20)
        seen = ranks.run(to_loss, 2, run)
        assert seen[0] == seen[1]
        epochs, losses = zip(*seen[0], strict=True)
        expected[batch] = float(np.interp(-TARGET, [-loss for loss in losses], epochs))
    (tmp_path / "prices.csv").write_text("type,usd_per_h,vcpus\nbox,0.1,2\n")

    arguments = [str(tmp_path / str(batch)) for batch in batches]
    arguments += ["--target-loss", str(TARGET), "--as", "box", "--json"]
    arguments += ["--catalog", str(tmp_path / "prices.csv")]
    found = planned(arguments, monkeypatch, capsys)

    assert [one["batch"] for one in found["trainings"]] == list(batches)
    for one in found["trainings"]:
        assert one["epochs"] == pytest.approx(expected[one["batch"]])
        assert 1 / 8 < one["gamma"] < 1
    assert any("fitted to runs at 2 batches" in why for why in found["caveats"])
    assert found["candidates"][found["chosen"]]["cluster"].endswith("x box")


def test_a_run_that_does_not_evaluate_comes_to_its_training_loss(
    ranks: RankPool, tmp_path: Path
) -> None:
    """Of fresh samples in all steps of an early epoch, which is what evaluation measures, too."""
    run = Run(str(tmp_path / "trace.jsonl"), 16, epochs=20, metric=None)
    epochs, losses = zip(*ranks.run(to_loss, 2, run)[0], strict=True)

    found = reached(tmp_path / "trace.jsonl", TARGET)

    assert found.of == "training loss"
    evaluated = float(np.interp(-TARGET, [-loss for loss in losses], epochs))
    assert found.reaching.epochs == pytest.approx(evaluated, rel=0.25)
