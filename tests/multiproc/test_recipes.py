"""The examples for other frameworks come to what one process does on the union batches."""

from __future__ import annotations

from collections import Counter
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


@needs("accelerate")
def test_accelerate_trains_as_one_process_does(ranks: RankPool, tmp_path: Path) -> None:
    reported = ranks.run(recipes.accelerate, 2, str(tmp_path))

    alone = reported[0]["alone"]
    check_exact([of["whole"] for of in reported], alone)
    check_exact([of["pieces"] for of in reported], alone)
    check_resumed([of["resumed"] for of in reported], alone)
    for of in reported:
        check_message(of["prepared"]["error"], "UsageError")
        evaluated = of["evaluation prepared"]["error"]
        check_message(evaluated, "UsageError", "stride.loader")
