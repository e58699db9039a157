"""Lightning's Trainer with further options comes to what one process does."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("lightning", reason="lightning is not installed")

from evenstride.testing import RankPool
from tests.integrations import lightning_programs as programs
from tests.integrations.lightning_programs import BATCH, EPOCHS, alone
from tests.multiproc.training import relative_error

FLOAT64 = 1e-12


def test_options_of_ddp_the_loader_and_the_stride_are_exact(
    ranks: RankPool, tmp_path: Path
) -> None:
    results = ranks.run(programs.options, 2, str(tmp_path), timeout_s=110.0)
    expected = alone(2 * BATCH)

    for of in results:
        steps, epochs = len(expected["gradients"]), EPOCHS
        assert of.pop("twice") == {"steps": steps, "epochs": epochs}
        for name, run in of.items():
            assert relative_error(run["weights"], expected["weights"]) <= FLOAT64, name
            assert run["steps"] == steps, name
        assert of["searched"]["before"] > 0


def test_states_of_the_end_of_an_epoch_or_run_are_continued_from(
    ranks: RankPool, tmp_path: Path
) -> None:
    results = ranks.run(programs.saved_at_ends, 2, str(tmp_path), timeout_s=100.0)
    expected = alone(2 * BATCH)

    for of in results:
        for name, run in of.items():
            assert relative_error(run["weights"], expected["weights"]) <= FLOAT64, name
            assert run["steps"] == len(expected["gradients"]), name
    assert [len(results[0][name]["gradients"]) for name in ("step=6", "step=12", "limited")] == [
        6,
        0,
        4,
    ]
