"""Lightning Fabric with unequal batches comes to what one process does."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lightning", reason="lightning is not installed")

from evenstride.testing import RankPool
from tests.integrations import fabric_programs as programs
from tests.integrations.lightning_programs import BATCH, EPOCHS, EVALUATED, SAMPLES, alone
from tests.messages import check_message
from tests.multiproc.training import relative_error

FLOAT64 = 1e-12


def check_run(runs: list[dict[str, Any]], expected: dict[str, Any]) -> None:
    """Fail unless gradients and weights are those of one process, each sample once."""
    for run in runs:
        for gradient, of_one in zip(run["gradients"], expected["gradients"], strict=True):
            assert relative_error(gradient, of_one) <= FLOAT64
        assert relative_error(run["weights"], expected["weights"]) <= FLOAT64
    assert counted(runs, "seen") == Counter(dict.fromkeys(range(SAMPLES), EPOCHS))
    assert counted(runs, "evaluated") == Counter(range(EVALUATED))


def counted(runs: list[dict[str, Any]], name: str) -> Counter[int]:
    return Counter(index for run in runs for batch in run[name] for index in batch)


def test_unequal_shares_train_as_one_process_does(ranks: RankPool, tmp_path: Path) -> None:
    results = ranks.run(programs.exact, 2, str(tmp_path), timeout_s=100.0)

    check_run([of["plain"] for of in results], alone(2 * BATCH))
    check_run([of["pieces"] for of in results], alone(6 * BATCH))
    check_run([of["accumulated"] for of in results], alone(2 * BATCH, parts=2))
    assert [len(of["plain"]["seen"][0]) for of in results] == [6, 2]
    assert [[len(batch) for batch in of["pieces"]["seen"][:2]] for of in results] == [
        [4, 4],
        [3, 3],
    ]

    after = ranks.run(programs.resumed, 3, 3, str(tmp_path))

    assert results[0]["keys"] == ["model"], "as the loop gave them"
    for when in ("early", "late"):
        for run in after:
            assert (run[when]["epoch"], run[when]["step"]) == (0, 4)
            assert relative_error(run[when]["weights"], alone(2 * BATCH)["weights"]) <= FLOAT64
        rest = [of[when] for of in after]
        seen = counted([of["cut"] for of in results], "seen") + counted(rest, "seen")
        assert seen == Counter(dict.fromkeys(range(SAMPLES), EPOCHS))


def test_what_unequal_batches_do_not_allow_in_fabric_is_refused_alike(ranks: RankPool) -> None:
    results = ranks.run(programs.refusals, 2)

    assert results[0] == results[1]
    for name, text in results[0].items():
        check_message(text, *programs.FACTS[name])
