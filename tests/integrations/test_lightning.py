"""Lightning's Trainer with unequal batches comes to what one process does."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lightning", reason="lightning is not installed")

from evenstride.testing import RankPool
from tests.integrations import lightning_programs as programs
from tests.integrations import lightning_refusals
from tests.integrations.lightning_programs import BATCH, EPOCHS, EVALUATED, SAMPLES, alone
from tests.messages import check_message
from tests.multiproc.training import relative_error

FLOAT64 = 1e-12


def check_run(runs: list[dict[str, Any]], expected: dict[str, Any]) -> None:
    """Fail unless gradients, losses and weights are those of one process, each sample once."""
    for run in runs:
        assert len(run["gradients"]) == len(expected["gradients"])
        for gradient, of_one in zip(run["gradients"], expected["gradients"], strict=True):
            assert relative_error(gradient, of_one) <= FLOAT64
        assert run["logged"] == pytest.approx(expected["losses"], rel=1e-9), "over all ranks"
        assert relative_error(run["weights"], expected["weights"]) <= FLOAT64
        assert run["metrics"]["val_loss"] == pytest.approx(expected["evaluated"], rel=1e-9)
        assert run["metrics"]["val_squares"] == pytest.approx(expected["evaluated"], rel=1e-5)
        steps = len(expected["gradients"])
        assert (run["steps"], run["batches"], run["planned"]) == (steps, steps, steps)
    seen = Counter(index for run in runs for batch in run["seen"] for index in batch)
    assert seen == Counter(dict.fromkeys(range(SAMPLES), EPOCHS))


def test_unequal_shares_train_as_one_process_does(ranks: RankPool) -> None:
    results = ranks.run(programs.exact, 2, timeout_s=100.0)

    check_run([of["pieces"] for of in results], alone(2 * BATCH))
    check_run([of["whole"] for of in results], alone(2 * BATCH))
    check_run([of["accumulated"] for of in results], alone(3 * 2 * BATCH))
    sizes = {
        name: [[len(batch) for batch in of[name]["seen"]] for of in results]
        for name in ("pieces", "whole", "accumulated")
    }
    assert [found[:2] for found in sizes["pieces"]] == [[3, 3], [2, 2]]
    assert [found[0] for found in sizes["whole"]] == [6, 2]
    assert sizes["accumulated"][0][:5] == [4, 4, 4, 3, 3]
    assert sizes["accumulated"][1][:2] == [3, 3]
    for of in results:
        assert relative_error(of["wrong"], alone(2 * BATCH)["gradients"][0]) > 0.05
        assert of["restored"] == 3
        assert of["summary"] == "Summary"


def test_one_process_trains_alone(ranks: RankPool) -> None:
    (run,) = ranks.run(programs.plain, 1)

    check_run([run], alone(8))
    assert [len(batch) for batch in run["without"][:3]] == [BATCH] * 3


@pytest.mark.parametrize("world_size", [1, 3])
def test_a_run_continues_within_an_epoch_on_another_number_of_processes(
    ranks: RankPool, tmp_path: Path, world_size: int
) -> None:
    before = ranks.run(programs.cut, 2, str(tmp_path), 5, timeout_s=100.0)
    expected = alone(12)
    assert before[0]["saved"] == ["last.ckpt", "step=5.ckpt"]

    after = ranks.run(programs.resumed, world_size, world_size, str(tmp_path / "step=5.ckpt"))

    for run in after:
        assert relative_error(run["weights"], expected["weights"]) <= FLOAT64
        assert (run["steps"], run["epochs"]) == (len(expected["gradients"]), EPOCHS)
        assert run["gradients"][0] == pytest.approx(expected["gradients"][5], rel=1e-9)
    seen = Counter(index for run in after for batch in run["seen"] for index in batch)
    assert sum(seen.values()) == SAMPLES - 12
    assert max(seen.values()) == 1
    evaluated = sorted(index for run in after for batch in run["evaluated"] for index in batch)
    assert evaluated == list(range(EVALUATED)), "once, without padding"


def test_features_of_the_trainer_work_with_unequal_batches(ranks: RankPool, tmp_path: Path) -> None:
    results = ranks.run(programs.features, 2, str(tmp_path), timeout_s=110.0)
    first, expected = results[0], alone(2 * BATCH)

    for name, of_one in {
        "clipped": alone(2 * BATCH, clip=0.05, cosine=True),
        "limited": alone(2 * BATCH, first=3 * 2 * BATCH),
        "overfitted": alone(2 * BATCH, first=2 * 2 * BATCH, shuffle=False),
        "reloaded": expected,
        "in another order": alone(2 * BATCH, seed=5),
    }.items():
        for of in results:
            assert relative_error(of[name]["weights"], of_one["weights"]) <= FLOAT64, name
            assert of[name]["steps"] == len(of_one["gradients"]), name
    for of in results:
        assert (of["stopped"]["epochs"], of["ended"]["steps"]) == (2, 8)
        assert of["checked"]["validations"] == 4, "after each of two updates in two epochs"
        assert relative_error(of["rounded"]["weights"], expected["weights"]) < 1e-2
        assert of["rounded"]["weights"] != pytest.approx(expected["weights"], rel=1e-9)
    assert first["rates"] == sorted(first["rates"], reverse=True)
    assert len(first["rates"]) == len(expected["gradients"])
    assert first["bar"] == [len(expected["gradients"]) // EPOCHS] * 2, "n and total"


def test_every_stage_sees_each_sample_once(ranks: RankPool, tmp_path: Path) -> None:
    results = ranks.run(programs.stages, 2, str(tmp_path), timeout_s=100.0)

    for of in results:
        for name in ("validated", "tested", "tested after training"):
            assert of[name] == pytest.approx(of["expected"], rel=1e-9), name
        assert of["weights only"] == "no position", "nothing to resume from"
    predicted = sorted(index for of in results for index in of["predicted"])
    assert predicted == list(range(EVALUATED))
    assert results[0]["best"] == results[1]["best"] != ""


def test_manual_optimization_steps_two_optimizers(ranks: RankPool) -> None:
    results = ranks.run(programs.by_hand, 2)

    for of in results:
        assert relative_error(of["weights"], of["alone"]) <= FLOAT64
    assert [len(of["seen"][0]) for of in results] == [6, 2], "the share in one batch"


def test_what_unequal_batches_do_not_allow_is_refused_alike_on_every_rank(
    ranks: RankPool,
) -> None:
    results = ranks.run(lightning_refusals.refusals, 2, timeout_s=110.0)

    assert results[0] == results[1]
    for name, text in results[0].items():
        check_message(text, *lightning_refusals.FACTS[name])
