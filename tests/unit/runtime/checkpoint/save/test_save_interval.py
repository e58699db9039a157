"""The interval between saves, as users may set it."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from evenstride.core.reliability.checkpoint_interval import Saving
from evenstride.core.reliability.lifetimes import Exponential
from evenstride.errors import ConfigError
from evenstride.runtime.checkpoint.save.preparing import SaveInterval, parse_every
from evenstride.runtime.checkpoint.save.save_statistics import left_out
from tests.messages import raises_message


@pytest.mark.parametrize(
    ("every", "interval_s"),
    [
        ("5sec", 5.0),
        ("0.5s", 0.5),
        ("2m", 120.0),
        ("2min", 120.0),
        ("1h", 3600.0),
        (" 5 min ", 300.0),
        (timedelta(seconds=90), 90.0),
        (timedelta(days=1, seconds=1), 86_401.0),
    ],
    ids=str,
)
def test_a_duration_is_seconds(every: Any, interval_s: float) -> None:
    cadence = parse_every(every)

    assert cadence == SaveInterval(interval_s=interval_s)
    assert cadence.by_clock


def test_auto_uses_a_clock_and_keeps_its_model() -> None:
    saving = Saving(Exponential(3600.0))

    assert parse_every("auto") == SaveInterval(auto=True)
    assert parse_every(saving) == SaveInterval(auto=True, saving=saving)
    assert parse_every("auto").by_clock
    assert not parse_every(3).by_clock


@pytest.mark.parametrize(
    "every",
    [True, False, 0, -1, 1.5, None, "", "5", "0s", "0.0min", "5 days", "-5s", timedelta(), "s5"],
    ids=repr,
)
def test_an_invalid_interval_is_refused(every: Any) -> None:
    with raises_message(ConfigError):
        parse_every(every)


def test_after_failures_more_saves_are_skipped_up_to_a_limit() -> None:
    assert [left_out(failures) for failures in (0, 1, 2, 3, 4, 5, 50)] == [0, 0, 1, 3, 7, 7, 7]
