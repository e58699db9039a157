"""The examples for other frameworks come to what one process does on the union batches."""

from __future__ import annotations

from collections import Counter
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from evenstride.testing import RankPool
from tests.messages import check_message
from tests.multiproc import recipes
from tests.multiproc.recipes import BATCH, CUT_AFTER, EPOCHS, SAMPLES, STEPS_IN_EPOCH
from tests.multiproc.training import relative_error


def needs(name: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(
        find_spec(name) is None, reason=f"{name} is not installed: pip install evenstride[recipes]"
    )


def check_exact(runs: list[dict[str, Any]], alone: dict[str, Any]) -> None:
    """Fail unless all ranks came to one process's weights, each sample once in each epoch."""
    for run in runs:
        assert relative_error(run["weights"], alone["weights"]) <= 1e-9
    assert runs[0]["losses"] == pytest.approx(alone["losses"], abs=1e-4), "rank 0 prints them"
    loaded = Counter(index for run in runs for index in run["loaded"])
    assert loaded == Counter(dict.fromkeys(range(SAMPLES), EPOCHS))
    fewer, more = (len(run["loaded"]) for run in runs)
    assert fewer < 0.5 * more, "the shares are unequal"


def check_resumed(
    runs: list[dict[str, Any]], alone: dict[str, Any], after: int = CUT_AFTER
) -> None:
    """Fail unless the second of two runs went on where the first was cut, to the same end."""
    check_exact(runs, alone)
    epochs, steps = divmod(after, STEPS_IN_EPOCH)
    assert sum(run["rest"] for run in runs) == (EPOCHS - epochs) * SAMPLES - steps * BATCH


@needs("lightning")
def test_fabric_trains_as_one_process_does(ranks: RankPool, tmp_path: Path) -> None:
    reported = ranks.run(recipes.fabric, 2, str(tmp_path))

    alone = reported[0]["alone"]
    check_exact([of["whole"] for of in reported], alone)
    check_exact([of["pieces"] for of in reported], alone)
    check_resumed([of["resumed"] for of in reported], alone)


@needs("lightning")
def test_a_trainer_trains_as_one_process_does(ranks: RankPool, tmp_path: Path) -> None:
    reported = ranks.run(recipes.trainer, 2, str(tmp_path))

    alone = reported[0]["alone"]
    check_exact([of["whole"] for of in reported], alone)
    check_resumed([of["resumed"] for of in reported], alone)
    check_resumed([of["next epoch"] for of in reported], alone, after=STEPS_IN_EPOCH)
    check_exact([of["twice"] for of in reported], reported[0]["twice alone"])
    for of in reported:
        assert of["resharded"]["error"].startswith("TypeError")
        assert "use_distributed_sampler=False" in of["resharded"]["error"]
        check_message(of["pieces"]["error"], "ConfigError")


@needs("lightning")
@pytest.mark.parametrize("by_datamodule", [False, True], ids=["module", "datamodule"])
def test_every_entry_point_of_a_trainer_works_and_sees_each_sample_once(
    ranks: RankPool, tmp_path: Path, by_datamodule: bool
) -> None:
    run = partial(recipes.stages, by_datamodule=by_datamodule)
    reported = ranks.run(run, 2, str(tmp_path), timeout_s=100.0)

    for name in ("test after fit", "validate", "test", "predict"):
        seen = sorted(index for of in reported for index in of[name]["loaded"])
        assert seen == list(range(SAMPLES // 4)), name
        if name != "predict":
            assert reported[0][name]["came"] == reported[1][name]["came"], name
    for of in reported:
        assert of["predict"]["came"] == len(of["predict"]["loaded"])
        assert of["resume"]["weights"] == of["fit"]["weights"] != of["saved"]
        assert len(of["resume"]["loaded"]) < len(of["fit"]["loaded"])
