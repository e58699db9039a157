"""How often to save: the published formulas, their exact form, and hazards that change."""

from __future__ import annotations

from math import exp, inf, isclose, nan, sqrt
from typing import Any

import numpy as np
import pytest
from scipy.special import lambertw

from evenstride.core.fleet import FloatArray
from evenstride.core.reliability.checkpoint_interval import (
    Observed,
    Saving,
    daly_s,
    due_in_s,
    expected_losses,
    next_save_in_s,
    saves_per_s,
    young_s,
)
from evenstride.core.reliability.lifetimes import DAY_S, Bathtub, Exponential, Lifetime, TwoRates
from evenstride.errors import ConfigError
from tests.messages import check_message, raises_message

HOUR_S = 3600.0
TUB = Bathtub(0.45, HOUR_S, 0.8 * HOUR_S, 24 * HOUR_S)


@pytest.mark.parametrize(
    ("mean_minutes", "published_minutes"), [(24 * 60, "117"), (6 * 60, "57"), (15, "9.1")]
)
def test_dalys_figures_come_out(mean_minutes: float, published_minutes: str) -> None:
    """The captions of figures 3 to 5 of the paper, for a dump of 5 minutes."""
    digits = len(published_minutes.partition(".")[2])

    assert f"{daly_s(5.0, mean_minutes):.{digits}f}" == published_minutes


def test_a_save_longer_than_two_lives_is_followed_by_one_life() -> None:
    assert daly_s(200.0, 100.0) == 100.0
    assert daly_s(2000.0, 100.0) == 100.0


def test_youngs_is_the_first_term() -> None:
    assert young_s(2.0, 100.0) == 20.0
    assert isclose(daly_s(1e-6, 1e6), young_s(1e-6, 1e6), rel_tol=1e-5)


@pytest.mark.parametrize("save_s", [1e-3, 1.0, 30.0, 3000.0, 1e6])
def test_at_a_constant_rate_the_density_is_the_exact_one(save_s: float) -> None:
    exact_s = HOUR_S * (1 + lambertw(-exp(-save_s / HOUR_S - 1)).real)

    assert isclose(1 / float(saves_per_s(save_s, np.array(1 / HOUR_S))), exact_s, rel_tol=1e-7)


def test_the_exact_one_is_where_least_is_lost() -> None:
    save_s, rate = 300.0, 1 / 900.0
    best_s = 1 / float(saves_per_s(save_s, np.array(rate)))

    def cost(train_s: float) -> float:
        return (exp(rate * (train_s + save_s)) - 1) / (rate * train_s)

    assert cost(best_s) < min(cost(0.99 * best_s), cost(1.01 * best_s))


def test_no_hazard_needs_no_saves_and_an_infinite_one_all() -> None:
    assert saves_per_s(1.0, np.array([0.0, inf])).tolist() == [0.0, inf]


def test_hazards_of_machines_add_up() -> None:
    alone = due_in_s(Exponential(HOUR_S), np.zeros(1), 5.0, 1e5)

    together = due_in_s(Exponential(8 * HOUR_S), np.arange(8.0) * 1000, 5.0, 1e5)

    assert isclose(alone, together, rel_tol=1e-9)


def kept_s(lifetime: Lifetime, save_s: float, from_s: float, interval: FloatArray) -> float:
    """Return the mean training time that is saved, of a machine that saves after each interval."""
    ends = from_s + np.cumsum(interval + save_s)
    return float((interval * lifetime.survival(ends)).sum() / lifetime.survival(from_s))


def by_rule(lifetime: Lifetime, save_s: float, from_s: float) -> FloatArray:
    """Return the intervals of a machine that saves as we say, until no machine can be left."""
    found, age = [], from_s
    while float(lifetime.survival(age)) > 1e-9 and age < 30 * DAY_S:
        found.append(max(due_in_s(lifetime, np.array([age]), save_s, 4 * HOUR_S), save_s))
        age += found[-1] + save_s
    return np.array(found)


def best_kept_s(lifetime: Lifetime, save_s: float, from_s: float, end_s: float) -> float:
    """Return the most that can be kept, by dynamic programming over moments ``save_s`` apart."""
    moments = np.arange(from_s, end_s + save_s, save_s)
    alive = lifetime.survival(moments)
    best = np.zeros(len(moments))
    for now in range(len(moments) - 3, -1, -1):
        after = np.arange(now + 2, len(moments))
        best[now] = ((after - now - 1) * save_s * alive[after] + best[after]).max()
    return float(best[0] / alive[0])


@pytest.mark.parametrize("from_s", [0.0, HOUR_S, 12 * HOUR_S, 20 * HOUR_S])
@pytest.mark.parametrize("save_s", [30.0, 120.0])
def test_on_a_bathtub_next_to_no_schedule_keeps_more(from_s: float, save_s: float) -> None:
    ours_s = kept_s(TUB, save_s, from_s, by_rule(TUB, save_s, from_s))

    best_s = best_kept_s(TUB, save_s, from_s, DAY_S)
    left_s = float(TUB.mean_left_s(from_s))
    assert best_s - ours_s < 0.01 * left_s
    steady = np.full(400, young_s(save_s, float(TUB.mean_left_s(0.0))))
    assert ours_s > kept_s(TUB, save_s, from_s, steady)


def test_on_machines_that_settle_it_keeps_nearly_all_that_can_be_kept() -> None:
    mixed = TwoRates(0.7, 0.5 * HOUR_S, 10 * HOUR_S)

    ours_s = kept_s(mixed, 60.0, 0.0, by_rule(mixed, 60.0, 0.0))

    best_s = best_kept_s(mixed, 60.0, 0.0, 120 * HOUR_S)
    assert best_s - ours_s < 0.01 * float(mixed.mean_left_s(0.0))


def test_the_last_save_ends_before_the_limit_takes_all_away() -> None:
    calm = Bathtub(0.05, HOUR_S, 0.1 * HOUR_S, 30 * HOUR_S)  # nearly all reach 24 h

    due_s = due_in_s(calm, np.array([DAY_S - 1800.0]), 60.0, HOUR_S)

    assert 1800.0 - 60.0 - HOUR_S / 96 < due_s < 1800.0 - 60.0


def test_a_limit_that_comes_during_the_longest_save_is_seen() -> None:
    calm = Bathtub(0.05, HOUR_S, 0.1 * HOUR_S, 30 * HOUR_S)
    longest_s, save_s = 600.0, 60.0

    due_s = due_in_s(calm, np.array([DAY_S - longest_s - 30.0]), save_s, longest_s)

    assert longest_s - 30.0 - longest_s / 96 < due_s <= longest_s - 30.0


def test_too_late_to_save_before_the_limit_is_now() -> None:
    assert due_in_s(TUB, np.array([DAY_S - 10.0]), 60.0, HOUR_S) == 0.0


def test_machines_older_than_the_model_allows_count_with_its_mean() -> None:
    old = np.array([2 * DAY_S])

    mean_s = float(TUB.mean_left_s(0.0))

    assert isclose(expected_losses(TUB, old, old + mean_s), 1.0)
    constant_s = due_in_s(Exponential(mean_s), old, 20.0, 1e5)
    assert isclose(due_in_s(TUB, old, 20.0, 1e5), constant_s, rel_tol=1e-9)


def test_expected_losses_are_the_hazard_summed_up() -> None:
    ages = np.array([0.0, 100.0])

    assert isclose(expected_losses(Exponential(50.0), ages, np.array([10.0, 120.0])), 0.6)


@pytest.mark.parametrize(("failures", "hours"), [(0, 0.0), (0, 240.0), (3, 2.0), (50, 100.0)])
def test_the_rate_is_the_mean_of_what_is_seen_and_a_loss_per_day(
    failures: int, hours: float
) -> None:
    seen = Observed(failures, hours * HOUR_S / DAY_S)

    next_save = next_save_in_s(1.0, np.zeros(4), seen, Saving(longest_s=1e6))

    rate = 4 * (failures + 1) / (hours * HOUR_S + DAY_S)
    assert isclose(next_save.in_s, 1 / float(saves_per_s(1.0, np.array(rate))), rel_tol=1e-9)


def test_the_reason_says_what_counted() -> None:
    reported = next_save_in_s(20.0, np.zeros(8)).reason

    check_message(reported, "644 s", "20 s", "0.06")


def test_losses_expected_are_those_of_this_run() -> None:
    reported = next_save_in_s(1.0, np.zeros(8), Observed(9, 1.0))

    assert f", {5 * 8 * reported.in_s / DAY_S:.2g} losses expected until then" in reported.reason


def test_a_model_worth_more_losses_is_outweighed_later() -> None:
    saving = Saving(prior_failures=4.0)

    assert saving.factor(Observed()) == 1.0
    assert saving.factor(Observed(8, 2.0)) == 2.0


def test_saving_takes_a_tenth_at_most_and_says_so() -> None:
    reported = next_save_in_s(20.0, np.zeros(8), Observed(100, 1.0))

    assert reported.in_s == 200.0
    check_message(reported.reason, "10%")


def test_a_limit_too_soon_for_a_save_is_reported() -> None:
    reported = next_save_in_s(60.0, np.array([DAY_S - 100.0]), saving=Saving(TUB)).reason

    check_message(reported)


def test_no_interval_is_longer_than_the_longest_and_it_says_so() -> None:
    reported = next_save_in_s(20.0, np.zeros(8), Observed(0, 1000.0))

    assert reported.in_s == 3600.0
    check_message(reported.reason, "3600 s")


def test_a_save_that_takes_long_is_made_seldom_whatever_the_longest() -> None:
    reported = next_save_in_s(1000.0, np.zeros(8))

    assert reported.in_s == 10_000.0
    check_message(reported.reason, "1e+04 s", "1000 s", "10%")


def test_equal_shortest_and_longest_intervals_are_reported_once() -> None:
    reported = next_save_in_s(360.0, np.zeros(8))

    assert reported.in_s == 3600.0
    check_message(reported.reason, "360 s", "10%")


def test_ages_matter_where_hazards_change() -> None:
    saving = Saving(TUB, longest_s=1e5)

    young, settled, old = (
        next_save_in_s(10.0, np.full(4, hours * HOUR_S), saving=saving).in_s
        for hours in (0.0, 8.0, 22.0)
    )

    assert max(young, old) < 500.0 < settled / 5


def test_ten_thousand_machines_are_bounded_by_what_saving_may_take() -> None:
    assert next_save_in_s(1.0, np.linspace(0, HOUR_S, 10_000)).in_s == 10.0


@pytest.mark.parametrize(
    ("change", "reported"),
    [
        ({"most_part": 0.0}, ("0.0",)),
        ({"most_part": 1.5}, ("1.5",)),
        ({"prior_failures": 0.0}, ("prior_failures", "0.0")),
        ({"longest_s": inf}, ("longest_s",)),
    ],
)
def test_impossible_rules_are_refused(change: dict[str, float], reported: tuple[str, ...]) -> None:
    with raises_message(ConfigError, *reported):
        Saving(**change)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "reported"),
    [
        ({"lifetime": 5}, ()),
        ({"lifetime": None}, ()),
        ({"lifetime": Exponential}, ()),
        ({"lifetime": "spot"}, ("TwoRates",)),
        ({"most_part": "0.1"}, ("'0.1'",)),
        ({"most_part": True}, ()),
        ({"prior_failures": None}, ("prior_failures",)),
        ({"longest_s": "1h"}, ("longest_s", "'1h'")),
        ({"longest_s": nan}, ("longest_s",)),
    ],
    ids=str,
)
def test_an_invalid_rule_is_refused_when_it_is_created(
    change: dict[str, Any], reported: tuple[str, ...]
) -> None:
    with raises_message(ConfigError, *reported):
        Saving(**change)


def test_numbers_of_any_kind_and_models_of_ones_own_are_rules() -> None:
    class Mine:
        def __getattr__(self, name: str) -> Any:
            return getattr(Exponential(HOUR_S), name)

    mine = Saving(Mine(), np.float32(2.0), np.float64(0.5), 1800)  # type: ignore[arg-type]
    plain = Saving(Exponential(HOUR_S), 2.0, 0.5, 1800.0)

    planned, same = (next_save_in_s(5.0, np.zeros(3), saving=saving) for saving in (mine, plain))
    assert planned == same


def test_saving_may_take_as_long_as_training() -> None:
    assert next_save_in_s(20.0, np.zeros(8), Observed(10**6), Saving(most_part=1.0)).in_s >= 20.0


@pytest.mark.parametrize(("save_s", "workers"), [(0.0, 3), (-1.0, 3), (inf, 3), (1.0, 0)])
def test_impossible_saves_are_refused(save_s: float, workers: int) -> None:
    with raises_message(ConfigError, workers):
        next_save_in_s(save_s, np.zeros(workers))


def test_youngs_square_root_is_what_density_is_for_cheap_saves() -> None:
    rates = np.array([1e-6, 1e-5, 1e-4])

    np.testing.assert_allclose(saves_per_s(1e-3, rates), [sqrt(r / 2e-3) for r in rates], rtol=1e-3)
