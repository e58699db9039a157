"""What those who serve measured, numbered as in their fleet."""

from __future__ import annotations

import pytest

from evenstride.core.control.state import Roster
from evenstride.core.fleet import Worker
from evenstride.core.time_model.observation import Measurements, Observation

WORKERS = tuple(Worker(f"h/{k}") for k in range(3))


def _measured(*ranks: int) -> Measurements:
    return Measurements.of(Observation(rank, 4, 10, (0.1 * (5 + rank),), (0.0,)) for rank in ranks)


def test_reports_of_workers_without_samples_and_unknown_ranks_are_left_out() -> None:
    inward = Roster(WORKERS, (0, 2)).inward(_measured(2, 1, 0, 3, -1, 2))

    assert inward.worker.tolist() == [1, 0, 1]
    assert inward.busy_s.tolist() == pytest.approx([0.7, 0.5, 0.7])


def test_if_all_workers_serve_ranks_are_not_renumbered() -> None:
    roster = Roster.whole(WORKERS)

    assert roster.all_serve
    assert not Roster(WORKERS, (0, 2)).all_serve
    assert roster.inward(_measured(0, 2)) == _measured(0, 2)
    assert roster.spread((5, 6, 7), 0) == (5, 6, 7)
