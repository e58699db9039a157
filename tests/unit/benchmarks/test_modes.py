"""The figures of the comparison of synchronisation modes."""

from __future__ import annotations

from typing import Any

import pytest
from benchmarks.modes import LEVELS, hl_changes, hl_speeds, table, trained

END: dict[str, Any] = {
    "reached": True,
    "time_s": 12.0,
    "epochs_s": [5.0, 7.0],
    "accuracy": [0.1, 0.8, 0.86],
    "updates": 80,
    "staleness": {"mean": 1.5, "maximum": 4},
    "shares": [10, 6],
}


def test_a_level_keeps_the_published_proportions() -> None:
    assert all(sum(cores) == 48 for cores in LEVELS.values())
    assert hl_speeds(8) == pytest.approx((0.1875, 0.1875, 0.125, 1.0))
    assert hl_speeds(1) == (0.375,) * 4


def test_the_schedule_goes_up_and_down_over_and_over() -> None:
    changes = hl_changes(4.0)

    assert [change.at_s for change in changes[:3]] == [4.0, 8.0, 12.0]
    assert changes[0].speeds == hl_speeds(2)
    assert changes[2].speeds == changes[3].speeds == hl_speeds(8)
    assert changes[7].speeds == hl_speeds(1)


def test_a_line_has_the_medians_of_the_seeds_and_the_number_that_missed() -> None:
    runs = [
        trained("asp", "uniform", seed, {**END, "time_s": time_s, "reached": seed < 2})
        for seed, time_s in enumerate((10.0, 30.0, 20.0))
    ]
    runs.append(trained("bsp", "uniform", 0, {**END, "staleness": None}))

    _, asp, bsp = table(runs).splitlines()

    assert "20.0 s" in asp
    assert "10.0 to 30.0" in asp
    assert "1.50, 4" in asp
    assert asp.endswith("10/6  (1 missed)")
    assert "0.00, 0" in bsp
    assert not bsp.endswith("missed)")
