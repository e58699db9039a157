"""The choice among the best, and the message if no cluster fits."""

import sys
from dataclasses import replace

import pytest

from evenstride.cli.arguments import seconds
from evenstride.core.gradients.noise_scale import Interval
from evenstride.planner.search.branch_and_bound import Space, search
from evenstride.planner.search.selection import (
    NothingFits,
    Objective,
    Wishes,
    at_most,
    choose,
    knee,
)
from evenstride.planner.search.training_forecast import TrainingForecast
from tests.messages import check_message, raises_message
from tests.unit.planner.kinds import exactly, kind, task

ONE = search(Space((kind("a"),), (256,), most_machines=1), task()).outlooks[0]


def outlooks(*figures: tuple[float, float]) -> list[TrainingForecast]:
    """Return outlooks of these hours and dollars."""
    return [replace(ONE, time_s=exactly(3600 * h), cost_usd=exactly(usd)) for h, usd in figures]


SOME = outlooks((1, 40), (2, 20), (4, 15), (9, 12))


def test_time_and_cost_are_the_ends() -> None:
    assert choose(SOME, Wishes(Objective.TIME)).outlook is SOME[0]
    assert choose(SOME, Wishes(Objective.COST)).outlook is SOME[3]


def test_limits_cut_and_set_the_aim() -> None:
    by_deadline = choose(SOME, Wishes(deadline_s=5 * 3600))
    by_budget = choose(SOME, Wishes(budget_usd=18))

    assert by_deadline.outlook is SOME[2]
    assert by_deadline.reason == "the cheapest within 5 h"
    assert by_budget.outlook is SOME[2]
    assert by_budget.reason == "the fastest within 18 USD"


def test_without_limits_the_knee_is_chosen_and_needs_no_extra(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for extra in ("kneed", "gpuhunt"):
        monkeypatch.setitem(sys.modules, extra, None)

    chosen = choose(SOME, Wishes())

    assert chosen.outlook is SOME[1]
    check_message(chosen.reason)


def test_a_knee_of_two_points_is_the_cheaper_one() -> None:
    assert knee([1.0, 2.0], [10.0, 5.0]) == 1
    assert knee([1.0], [10.0]) == 0


def test_a_deadline_that_cannot_be_kept_says_by_how_much() -> None:
    with raises_message(NothingFits, "30", "--deadline"):
        choose(SOME, Wishes(deadline_s=1800))


def test_a_budget_that_cannot_be_kept_says_by_how_much() -> None:
    with raises_message(NothingFits, "10", "USD", "12"):
        choose(SOME, Wishes(budget_usd=10))


def test_limits_that_cannot_be_kept_together_name_both_ways_out() -> None:
    with raises_message(NothingFits, "20", "USD", "18"):
        choose(SOME, Wishes(deadline_s=2 * 3600, budget_usd=18))


def test_a_way_out_of_one_limit_keeps_to_the_other() -> None:
    """Doing as the message says is enough."""
    hasty = Wishes(deadline_s=600, budget_usd=18)
    with raises_message(NothingFits, "10", "--deadline", "40"):
        choose(SOME, hasty)
    assert choose(SOME, replace(hasty, deadline_s=3600, budget_usd=40)).outlook is SOME[0]
    assert choose(SOME, replace(hasty, deadline_s=4 * 3600)).outlook is SOME[2]

    poor = Wishes(deadline_s=4 * 3600, budget_usd=10)
    with raises_message(NothingFits, "12", "--deadline"):
        choose(SOME, poor)
    both = Wishes(deadline_s=1, budget_usd=1)
    with raises_message(NothingFits, "1 s", "--budget", "40"):
        choose(SOME, both)


@pytest.mark.parametrize("hours", [1e-4, 0.0123456, 0.5, 1.234567, 12_345.6])
def test_a_deadline_that_is_named_is_enough(hours: float) -> None:
    with pytest.raises(NothingFits) as refused:
        choose(outlooks((hours, 1)), Wishes(deadline_s=1e-3))
    named = str(refused.value).partition("raise --deadline to ")[2].partition(",")[0]

    assert hours * 3600 <= seconds(named, "--deadline") <= 1.02 * hours * 3600


def test_an_empty_list_is_refused() -> None:
    with raises_message(NothingFits):
        choose([], Wishes())


def test_confidence_looks_at_the_end_of_the_interval() -> None:
    unsure = replace(SOME[1], time_s=Interval(7200.0, 3600.0, 14400.0))
    some = [SOME[0], unsure]

    assert choose(some, Wishes(deadline_s=2.5 * 3600)).outlook is unsure
    sure = choose(some, Wishes(deadline_s=2.5 * 3600, confidence=0.9))
    assert sure.outlook is SOME[0]
    check_message(sure.reason, "2.5", "90%")


def test_a_quantile_is_that_of_its_side() -> None:
    one = Interval(100.0, 50.0, 300.0)

    assert at_most(one, 0.5) == 100.0
    assert at_most(one, 0.975) == pytest.approx(300.0)
    assert at_most(one, 0.025) == pytest.approx(50.0)
    assert 100 < at_most(one, 0.8) < 300
    assert at_most(Interval(100.0, 50.0, float("inf")), 0.8) == float("inf")
