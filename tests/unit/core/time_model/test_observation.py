"""The communication of a step, as all workers' reports tell it."""

from __future__ import annotations

import pytest

from evenstride.core.time_model.observation import Measurements, Observation, communication_s


def _waits(worker: int, first_step: int, *wait_s: float, share: int = 5) -> Observation:
    return Observation(worker, share, first_step, (1.0,) * len(wait_s), wait_s)


def test_it_is_the_least_wait_within_a_step_and_the_median_of_the_steps() -> None:
    # Each is the slowest of one step, so the usual wait of both is far longer than what is left.
    reported = Measurements.of((_waits(0, 7, 0.1, 0.9, 0.8), _waits(1, 7, 0.9, 0.2, 0.3)))

    assert communication_s(reported, (5, 5)) == pytest.approx(0.2)


def test_steps_without_reports_of_all_workers_do_not_count() -> None:
    reported = Measurements.of(
        (_waits(0, 7, 0.5, 0.9), _waits(1, 8, 0.2, 0.8), _waits(1, 5, 0.7, 0.7))
    )

    assert communication_s(reported, (5, 5)) == pytest.approx(0.2), (
        "step 8 alone was reported by both"
    )


def test_a_single_step_is_read_at_once() -> None:
    assert communication_s(Measurements.of((_waits(0, 3, 0.4), _waits(1, 3, 0.3))), (5, 5)) == 0.3


def test_nothing_is_said_before_every_worker_with_a_share_has_reported() -> None:
    reported = Measurements.of((_waits(0, 3, 0.4),))

    assert communication_s(reported, (5, 5)) is None
    assert communication_s(reported, (5, 0)) == 0.4
    assert communication_s(Measurements.of(()), (5, 5)) is None
