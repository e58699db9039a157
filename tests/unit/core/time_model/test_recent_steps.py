"""Which steps are kept, and in what order."""

from __future__ import annotations

import numpy as np

from evenstride.core.time_model.estimates import RecentSteps
from evenstride.core.time_model.kalman import with_recent
from evenstride.core.time_model.observation import Measurements, Observation


def seen(*rows: tuple[int, int, int, tuple[float, ...]]) -> Measurements:
    return Measurements.of(
        Observation(worker, share, first, times, (0.0,) * len(times))
        for worker, share, first, times in rows
    )


def test_steps_stay_in_order_whatever_the_order_of_the_reports() -> None:
    recent = with_recent(RecentSteps.none(2), seen((1, 8, 3, (0.3, 0.4)), (0, 4, 3, (0.1, 0.2))))
    recent = with_recent(recent, seen((0, 5, 5, (0.5,))))

    assert recent.end == 6
    assert recent.time_s.tolist() == [[0.1, 0.3], [0.2, 0.4], [0.5, 0.0]]
    assert recent.share.tolist() == [[4, 8], [4, 8], [5, 0]]


def test_only_the_latest_steps_are_kept() -> None:
    recent = RecentSteps.none(1)
    for step in range(0, 400, 8):
        recent = with_recent(recent, seen((0, 4, step, tuple(np.arange(step, step + 8) + 1.0))))

    assert recent.end == 400
    assert recent.time_s[:, 0].tolist() == list(np.arange(240, 400) + 1.0)


def test_nothing_is_kept_across_a_gap_and_of_very_many_workers() -> None:
    recent = with_recent(RecentSteps.none(1), seen((0, 4, 0, (1.0,))))
    recent = with_recent(recent, seen((0, 4, 900, (2.0,))))

    assert recent.time_s.tolist() == [[2.0]]
    many = with_recent(RecentSteps.none(1000), seen((0, 4, 0, (1.0,))))
    assert len(many.share) == 0


def test_reports_of_steps_that_are_no_longer_kept_are_left_out() -> None:
    recent = with_recent(RecentSteps.none(1), seen((0, 4, 0, tuple(np.arange(400) + 1.0))))

    late = with_recent(recent, seen((0, 4, 100, (0.5,))))

    assert late.time_s.tolist() == recent.time_s.tolist()
