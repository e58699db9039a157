"""How long steps took, and when, from what workers tell and the moments that are known."""

from __future__ import annotations

import numpy as np
import pytest

from evenstride.core.time_model.observation import Measurements, Observation
from evenstride.report.analysis.run_generation import (
    RecordedGeneration,
    StepTable,
    durations_s,
    spans_s,
)

NAMES = ("a/0", "b/1")


def text(
    *observations: Observation, lockstep: bool = True, ended_s: float = 0.0, steps: int = 0
) -> RecordedGeneration:
    """Return a generation with some recorded steps, the last of which ended at a given time."""
    found = RecordedGeneration(0, 0, 12, NAMES, StepTable(0, 2), lockstep)
    found.table.add(Measurements.of(observations))
    found.anchors = [(0.0, 0), (ended_s, steps)] if steps else [(0.0, 0)]
    return found


def seen(rank: int, *spent_s: float, first: int = 0, modelled: bool = True) -> Observation:
    """Return steps of one worker, half of each spent at work."""
    half_s = tuple(one / 2 for one in spent_s)
    return Observation(rank, 6, first, half_s, half_s, modelled=modelled)


def test_a_step_is_as_long_as_for_its_workers_on_average() -> None:
    """Who ends one step late by 1 s is that much shorter in the next: the clock has 12 s."""
    found = durations_s(text(seen(0, 5.0, 3.0, 4.0), seen(1, 4.0, 4.0, 4.0)))

    assert found.tolist() == pytest.approx([4.5, 3.5, 4.0])


def test_workers_that_have_not_reported_do_not_count() -> None:
    late = text(seen(0, 5.0, 3.0, 4.0), seen(1, 3.0))

    assert durations_s(late).tolist() == pytest.approx([4.0, 3.0, 4.0])


def test_a_step_that_no_worker_reported_takes_the_median() -> None:
    later = Observation(0, 6, 3, (1.0,), (0.0,))

    assert durations_s(text(seen(0, 5.0, 3.0), later)).tolist() == [5.0, 3.0, 3.0, 1.0]
    assert durations_s(text()).tolist() == []


def test_workers_that_do_not_keep_step_have_no_mean() -> None:
    found = durations_s(text(seen(0, 5.0, 3.0), seen(1, 4.0, 4.0), lockstep=False))

    assert found.tolist() == [5.0, 4.0]


@pytest.mark.parametrize(
    ("ended_s", "modelled", "begins_s"),
    [
        (8.2, True, [0.1, 4.2]),  # a little off the clock: no pause
        (8.2, False, [0.0, 4.2]),  # before the first of a pass
        (10.0, True, [2.0, 6.0]),  # a pause, and it is not known where
        (7.2, True, [0.0, 3.6]),  # shorter by the clock than they say
    ],
)
def test_what_no_step_accounts_for_lies_where_it_may(
    ended_s: float, modelled: bool, begins_s: list[float]
) -> None:
    first = (seen(rank, 4.0) for rank in range(2))
    second = (seen(rank, 4.0, first=1, modelled=modelled) for rank in range(2))
    found_s, ends_s = spans_s(text(*first, *second, ended_s=ended_s, steps=2))

    assert found_s.tolist() == pytest.approx(begins_s)
    assert ends_s[-1] == pytest.approx(ended_s)
    assert (np.diff(np.ravel([found_s, ends_s], order="F")) >= 0.0).all()


def test_a_short_time_next_to_a_known_pause_belongs_to_no_single_step() -> None:
    paused = Observation(0, 6, 0, (2.0, 2.0), (2.0, 2.0), outside_s=1.0)
    found_s, ends_s = spans_s(text(paused, seen(1, 4.0, 4.0), ended_s=9.2, steps=2))

    assert found_s.tolist() == pytest.approx([1.1, 5.2])
    assert ends_s.tolist() == pytest.approx([5.1, 9.2])
