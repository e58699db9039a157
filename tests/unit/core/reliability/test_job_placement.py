"""Jobs by the expected remaining life of a machine: what it takes, and when it is given back."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstride.core.reliability import (
    Bathtub,
    Exponential,
    Lifetime,
    TwoRates,
    chance_to_finish,
    place,
)
from evenstride.errors import ConfigError
from tests.messages import raises_message

HOUR_S = 3600.0
TUB = Bathtub(a=0.45, tau1_s=HOUR_S, tau2_s=0.8 * HOUR_S, b_s=24 * HOUR_S)
LIVES_S = TUB.quantile_s((np.arange(4000) + 0.5) / 4000)
RATES = TwoRates(0.7, 0.4 * HOUR_S, 9.0 * HOUR_S)


def placed(
    lifetime: Lifetime, age_h: float, work_h: list[float], start_s: float = 0.0
) -> int | None:
    return place(lifetime, age_h * HOUR_S, np.array(work_h) * HOUR_S, start_s)


@given(age_h=st.floats(0.0, 23.0), work_h=st.floats(0.1, 30.0))
def test_the_chance_to_finish_is_that_of_drawn_machines(age_h: float, work_h: float) -> None:
    old_s = LIVES_S[age_h * HOUR_S < LIVES_S]

    (chance,) = chance_to_finish(TUB, age_h * HOUR_S, np.array([work_h * HOUR_S]))

    drawn = (old_s > (age_h + work_h) * HOUR_S).mean()
    assert chance == pytest.approx(drawn, abs=3.0 / len(old_s))


def mean_to_finish_s(age_s: float, work_s: float, start_s: float) -> float:
    """Return the mean time to finish on a machine and then on new ones, over drawn machines."""

    def attempt(age_s: float) -> tuple[float, float]:
        left_s = LIVES_S[age_s < LIVES_S] - age_s
        return float((left_s >= work_s).mean()), float(np.minimum(left_s, work_s).mean())

    chance, spent_s = attempt(0.0)
    new_s = (start_s + spent_s) / chance
    if age_s == 0.0:
        return new_s
    chance, spent_s = attempt(age_s)
    return spent_s + (1.0 - chance) * new_s


@pytest.mark.parametrize("work_h", [1.0, 4.0, 10.0])
@pytest.mark.parametrize("start_s", [0.0, 600.0])
def test_a_machine_is_kept_while_the_job_finishes_no_later_than_on_a_new_one(
    work_h: float, start_s: float
) -> None:
    kept = []
    for age_h in np.arange(0.5, 24.0, 0.5).tolist():
        mine_s, new_s = (
            mean_to_finish_s(a, work_h * HOUR_S, start_s) for a in (age_h * HOUR_S, 0.0)
        )
        if abs(mine_s / new_s - 1.0) > 0.01:  # the drawn machines decide no closer case
            kept.append(mine_s < new_s)
            assert (placed(TUB, age_h, [work_h], start_s) is not None) == kept[-1], age_h
    assert set(kept) == {True, False}


def test_the_longest_job_that_fits_into_the_expected_life_is_taken() -> None:
    left_h = float(RATES.mean_left_s(2.0 * HOUR_S)) / HOUR_S

    assert placed(RATES, 2.0, [1.0, left_h - 0.1, left_h + 0.1]) == 1
    assert placed(RATES, 2.0, [left_h + 0.1, 1.0, left_h - 0.1]) == 2


def test_if_none_fits_the_shortest_is_taken() -> None:
    assert placed(RATES, 0.0, [20.0, 12.0, 15.0]) == 1


def test_a_machine_near_its_end_takes_short_jobs_only_and_is_then_given_back() -> None:
    assert placed(TUB, 21.5, [0.5, 6.0]) == 0
    assert placed(TUB, 21.5, [6.0]) is None
    assert placed(TUB, 30.0, [0.5]) is None


@given(age_h=st.floats(0.0, 50.0), work_h=st.floats(0.1, 20.0))
def test_a_machine_that_only_gets_safer_or_never_changes_is_always_kept(
    age_h: float, work_h: float
) -> None:
    assert placed(Exponential(3.0 * HOUR_S), age_h, [work_h]) == 0
    assert placed(RATES, age_h, [work_h]) == 0


def test_a_job_longer_than_any_life_is_still_tried() -> None:
    assert placed(TUB, 0.0, [48.0]) == 0


@pytest.mark.parametrize("work_h", [[], [1.0, 0.0]])
def test_no_jobs_and_finished_jobs_are_refused(work_h: list[float]) -> None:
    with raises_message(ConfigError):
        placed(TUB, 1.0, work_h)
