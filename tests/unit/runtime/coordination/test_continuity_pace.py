"""How often to save follows from the losses that a run has seen over all its lives."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from evenstride.core.reliability.checkpoint_interval import (
    Observed,
    Saving,
    daly_s,
    expected_losses,
    next_save_in_s,
)
from evenstride.core.reliability.lifetimes import Bathtub
from evenstride.runtime.coordination.run_lifecycle import Pace
from evenstride.runtime.failures.peers import Peer
from evenstride.testing import FakeClock

DAY_S = 86_400.0


def _peers(machines: int, ranks: int = 2) -> list[Peer]:
    return [Peer(k, "h", f"machine {k // ranks}", k, up_s=5.0) for k in range(machines * ranks)]


def test_before_any_loss_each_machine_is_taken_to_be_lost_once_a_day() -> None:
    for machines in (1, 4):
        interval_s = Pace(_peers(machines), FakeClock(100.0)).interval_s(2.0)
        assert interval_s == pytest.approx(daly_s(2.0, DAY_S / machines), rel=0.01)


def test_losses_make_saves_more_frequent_and_calm_makes_them_rarer() -> None:
    clock = FakeClock(100.0)
    pace = Pace(_peers(2), clock)
    at_first = pace.interval_s(2.0)
    clock.now_s += 5 * DAY_S
    assert pace.observed.expected == pytest.approx(10.0)
    assert pace.interval_s(2.0) > 3 * at_first

    again = Pace(_peers(2), FakeClock(100.0))
    again.recall(pace.remember(), lost=True)
    assert again.observed.failures == 1
    assert again.observed.expected == pytest.approx(10.0)
    for _ in range(30):
        again.recall(again.remember(), lost=True)
    assert again.interval_s(2.0) < at_first


def test_a_worker_that_left_as_announced_was_not_lost() -> None:
    pace = Pace(_peers(1), FakeClock(100.0))
    pace.recall({"failures": 2, "expected": 0.5}, lost=False)
    assert pace.observed.failures == 2


def test_losses_of_lives_before_and_those_expected_in_this_one_are_added_up() -> None:
    clock = FakeClock(100.0)
    pace = Pace(_peers(2), clock)
    pace.recall({"failures": 2, "expected": 0.5}, lost=True)
    clock.now_s += DAY_S

    assert pace.observed.failures == 3
    assert pace.observed.expected == pytest.approx(0.5 + 2.0)


def test_ages_go_on_from_when_the_ranks_met() -> None:
    """A machine that lives a day at most is saved by its age, and losses by that model."""
    tub, met_s, now_s = Bathtub(0.45, 3600.0, 2880.0, DAY_S), 5.0, 22 * 3600.0
    clock = FakeClock(100.0)
    pace = Pace(_peers(1), clock)
    pace.save_by(Saving(tub))
    clock.now_s += now_s - met_s

    expected = expected_losses(tub, np.array([met_s]), np.array([now_s]))
    assert pace.observed.expected == pytest.approx(expected)
    planned = next_save_in_s(10.0, np.array([now_s]), Observed(0, expected), Saving(tub))
    assert pace.interval_s(10.0) == pytest.approx(planned.in_s)


@pytest.mark.parametrize(
    "junk",
    [
        None,
        3,
        {},
        {"failures": -1, "expected": 1.0},
        {"failures": 1, "expected": -1.0},
        {"failures": 1, "expected": float("inf")},
        {"failures": 1, "expected": float("nan")},
    ],
)
def test_an_invalid_count_is_left_out(junk: Any) -> None:
    pace = Pace(_peers(1), FakeClock(100.0))
    pace.recall(junk, lost=True)
    assert pace.observed.failures == 0
    assert pace.observed.expected == 0.0


def test_a_save_that_takes_no_time_still_has_an_interval() -> None:
    assert Pace(_peers(1), FakeClock(100.0)).interval_s(0.0) > 0
