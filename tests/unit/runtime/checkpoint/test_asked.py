"""Unsafe states and invalid arguments are refused, at the start or at the first save."""

from __future__ import annotations

from datetime import timedelta
from math import inf, nextafter
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from evenstride.core.reliability.checkpoint_interval import Saving
from evenstride.core.reliability.lifetimes import Exponential
from evenstride.errors import ConfigError
from evenstride.runtime.checkpoint import CheckpointError
from evenstride.runtime.checkpoint.save.preparing import SaveInterval, parse_every
from tests.messages import raises_message
from tests.unit.runtime.checkpoint.kept import Count, MemoryStorage, Runs


def test_a_state_that_cannot_be_loaded_again_is_refused_at_the_start(runs: Runs) -> None:
    class Bad(Count):
        def state_dict(self) -> Any:
            return {"fn": [lambda: 0]}

    with raises_message(ConfigError):
        runs(MemoryStorage(), extra={"bad": Bad()})


def test_a_state_that_becomes_unsafe_is_refused_at_the_first_save(runs: Runs) -> None:
    count = Count()
    run = runs(MemoryStorage(), extra={"count": count}, every=2)
    count.state["n"][0] = Count()  # type: ignore[assignment]

    with raises_message(ConfigError):
        run.train(3)


def test_a_state_that_becomes_unsafe_later_fails_the_save(
    runs: Runs, caplog: pytest.LogCaptureFixture
) -> None:
    count = Count()
    run = runs(MemoryStorage(), extra={"count": count}, every=2)
    run.train(3)
    run.settle()
    count.state["n"][0] = Count()  # type: ignore[assignment]

    run.train(3)

    with raises_message(CheckpointError, "step 6"):
        run.checkpoint.close()
    assert "was not saved" in caplog.text


@pytest.mark.parametrize(
    ("settings", "facts"),
    [
        ({"every": 0}, ()),
        ({"every": "often"}, ("'often'",)),
        ({"keep": 0}, ()),
        ({"scheduler": 3}, ()),
        ({"extra": {"a/b": Count()}}, ("'/'",)),
    ],
    ids=["every 0", "every often", "keep 0", "a number as scheduler", "a name with a slash"],
)
def test_invalid_input_is_refused(
    runs: Runs, settings: dict[str, Any], facts: tuple[str, ...]
) -> None:
    with raises_message(ConfigError, *facts):
        runs(MemoryStorage(), **settings)


@pytest.mark.parametrize(
    ("every", "shown"),
    [
        (1, "every step"),
        (3, "every 3 steps"),
        ("30s", "every 30 s"),
        ("5min", "every 300 s"),
        (timedelta(milliseconds=1500), "every 1.5 s"),
        ("auto", "auto"),
        (
            Saving(Exponential(3600.0)),
            "auto, by Saving(lifetime=Exponential(mean_s=3600.0), prior_failures=1.0, "
            "most_part=0.1, longest_s=3600.0)",
        ),
    ],
    ids=str,
)
def test_the_interval_is_shown_in_the_users_terms(every: Any, shown: str) -> None:
    assert str(parse_every(every)) == shown


@given(seconds=st.floats(1e-6, 1e9))
def test_different_intervals_are_shown_differently(seconds: float) -> None:
    one, other = SaveInterval(interval_s=seconds), SaveInterval(interval_s=nextafter(seconds, inf))

    assert str(one) != str(other)


def test_a_custom_model_has_the_same_text_on_all_ranks() -> None:
    class Own:
        def __init__(self) -> None:
            self.survival = self.hazard_per_s = self.mean_left_s = self.quantile_s = len

    first, second = (str(parse_every(Saving(Own()))) for _ in range(2))  # type: ignore[arg-type]
    assert "Own object" in first
    assert first == second


def test_an_optimizer_of_another_model_is_refused(runs: Runs) -> None:
    with raises_message(ConfigError):
        runs(MemoryStorage(), optimizer=lambda _: torch.optim.SGD(nn.Linear(1, 1).parameters()))
