"""What cannot be saved or asked for is refused, at the start or at the first save."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from evenstride.errors import ConfigError
from evenstride.runtime.checkpoint import CheckpointError
from tests.unit.runtime.checkpoint.kept import Count, MemoryStorage, Runs


def test_a_state_that_cannot_be_loaded_again_is_refused_at_the_start(runs: Runs) -> None:
    class Bad(Count):
        def state_dict(self) -> Any:
            return {"fn": [lambda: 0]}

    with pytest.raises(ConfigError, match=r"extra/bad/state/fn/0 is a builtins.function"):
        runs(MemoryStorage(), extra={"bad": Bad()})


def test_a_state_that_becomes_so_is_refused_at_the_first_save(runs: Runs) -> None:
    count = Count()
    run = runs(MemoryStorage(), extra={"count": count}, every=2)
    count.state["n"][0] = Count()  # type: ignore[assignment]

    with pytest.raises(ConfigError, match=r"extra/count/state/n/0 is a .*Count"):
        run.train(3)


def test_a_state_that_becomes_so_later_is_a_save_that_failed(
    runs: Runs, caplog: pytest.LogCaptureFixture
) -> None:
    count = Count()
    run = runs(MemoryStorage(), extra={"count": count}, every=2)
    run.train(3)
    run.settle()
    count.state["n"][0] = Count()  # type: ignore[assignment]

    run.train(3)

    with pytest.raises(CheckpointError, match=r"of step 6 could not be saved .*Count, which could"):
        run.checkpoint.close()
    assert "was not saved" in caplog.text


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"every": 0}, "every=0 says nothing"),
        ({"every": "often"}, "every='often' says nothing"),
        ({"keep": 0}, "keep=0 checkpoints cannot be kept"),
        ({"scheduler": 3}, "scheduler/0 is a int without"),
        ({"extra": {"a/b": Count()}}, "use others, without '/'"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused(runs: Runs, settings: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        runs(MemoryStorage(), **settings)


def test_an_optimizer_of_another_model_is_refused(runs: Runs) -> None:
    with pytest.raises(ConfigError, match="parameters that are not the model's"):
        runs(MemoryStorage(), optimizer=lambda _: torch.optim.SGD(nn.Linear(1, 1).parameters()))
