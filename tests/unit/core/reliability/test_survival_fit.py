"""Models of lifetimes are what they say, and are found again in what they made."""

from __future__ import annotations

from itertools import pairwise
from math import exp, inf, isclose, log

import numpy as np
import pytest
from scipy.integrate import quad
from scipy.optimize import minimize, minimize_scalar
from scipy.stats import CensoredData, ecdf

from evenstride.core.fleet import FloatArray
from evenstride.core.reliability.lifetimes import DAY_S, Bathtub, Exponential, Lifetime, TwoRates
from evenstride.core.reliability.survival_fit import (
    Lives,
    choose,
    distance,
    fit_bathtub,
    fit_exponential,
    fit_two_rates,
    kaplan_meier,
    log_likelihood,
    lowest,
)
from evenstride.errors import ConfigError
from tests.messages import check_message, raises_message

HOUR_S = 3600.0
TUB = Bathtub(0.45, HOUR_S, 0.8 * HOUR_S, 24 * HOUR_S)
UNLIMITED = Bathtub(0.45, HOUR_S, 0.8 * HOUR_S, 24 * HOUR_S, max_life_s=inf)
MIXED = TwoRates(0.7, 0.5 * HOUR_S, 10 * HOUR_S)
MODELS: dict[str, Lifetime] = {
    "exponential": Exponential(6 * HOUR_S),
    "two rates": MIXED,
    "bathtub": TUB,
    "bathtub without a limit": UNLIMITED,
}
AGES_S = np.array([0.0, 10.0, HOUR_S, 7.5 * HOUR_S, 20 * HOUR_S, 23.9 * HOUR_S])


def lived(lifetime: Lifetime, count: int, seed: int, watched_s: float = 60 * HOUR_S) -> Lives:
    """Return lives drawn from a model, watched for up to some time each, seen to the second."""
    rng = np.random.default_rng(seed)
    life_s = np.maximum(lifetime.quantile_s(rng.random(count)), 1.0)
    until_s = watched_s * rng.random(count)
    return Lives(np.minimum(life_s, until_s), life_s <= until_s)


@pytest.mark.parametrize("name", MODELS)
def test_the_hazard_is_the_falling_of_the_survival(name: str) -> None:
    model, step_s = MODELS[name], 1.0

    ages = AGES_S + step_s
    before, after = model.survival(ages - step_s), model.survival(ages + step_s)

    np.testing.assert_allclose(
        np.log(before / after) / (2 * step_s), model.hazard_per_s(ages), rtol=1e-4
    )


@pytest.mark.parametrize("name", MODELS)
def test_the_mean_that_is_left_is_the_area_under_the_survival(name: str) -> None:
    model = MODELS[name]

    for age_s in AGES_S:
        ends = [*np.linspace(age_s, 30 * HOUR_S, 31), 3000 * HOUR_S]
        ends = [end for end in ends if end < getattr(model, "end_s", inf)]
        ends.append(getattr(model, "end_s", ends[-1]))
        area = sum(
            quad(lambda t: float(model.survival(t)), low, high, limit=200)[0]
            for low, high in pairwise(ends)
        )
        wanted = area / float(model.survival(age_s))
        assert isclose(float(model.mean_left_s(age_s)), wanted, rel_tol=1e-6)


@pytest.mark.parametrize("name", MODELS)
def test_a_life_for_a_number_is_where_that_part_is_gone(name: str) -> None:
    model, parts = MODELS[name], np.array([0.0, 0.01, 0.3, 0.6, 0.85])

    ages = model.quantile_s(parts)

    assert ages[0] < 1e-3
    np.testing.assert_allclose(1.0 - model.survival(ages), parts, atol=1e-9)
    assert float(model.quantile_s(1.0)) == getattr(model, "end_s", inf)


def test_the_bathtub_is_as_published_up_to_its_origin() -> None:
    age = np.array([0.0, 2 * HOUR_S, 23 * HOUR_S])
    early, late = np.exp(-age / HOUR_S), np.exp((age - 24 * HOUR_S) / (0.8 * HOUR_S))

    np.testing.assert_allclose(TUB.published_cdf(age), 0.45 * (1 - early + late), rtol=1e-14)
    left = 1.0 - TUB.published_cdf(age)
    np.testing.assert_allclose(TUB.survival(age), left / left[0], rtol=1e-14)
    assert float(TUB.survival(0.0)) == 1.0


def test_a_machine_that_reaches_the_limit_is_preempted_there() -> None:
    at_once = float(TUB.survival(np.nextafter(DAY_S, 0.0)))

    assert TUB.end_s == DAY_S
    assert isclose(at_once, 1.0 - 2 * 0.45, rel_tol=1e-6)
    assert float(TUB.survival(DAY_S)) == 0.0
    assert float(TUB.quantile_s(1.0 - at_once / 2)) == DAY_S


def test_without_a_limit_all_are_gone_where_the_curve_reaches_one() -> None:
    assert DAY_S < UNLIMITED.end_s < 25 * HOUR_S
    assert isclose(float(UNLIMITED.published_cdf(UNLIMITED.end_s)), 1.0)
    assert float(UNLIMITED.survival(UNLIMITED.end_s)) == 0.0


def test_beyond_the_end_no_machine_is_left_and_nothing_overflows() -> None:
    far = np.array([DAY_S, 1e9, 1e15])

    assert TUB.survival(far).tolist() == [0.0] * 3
    assert TUB.hazard_per_s(far).tolist() == [inf] * 3
    assert TUB.mean_left_s(far).tolist() == [0.0] * 3


def test_two_equal_rates_are_one() -> None:
    ages = np.array([0.0, 1.0, 10.0])

    np.testing.assert_allclose(
        TwoRates(0.3, 2.0, 2.0).survival(ages), Exponential(2.0).survival(ages)
    )


def test_a_surviving_machine_is_of_the_long_lived_kind() -> None:
    mean = 0.7 / MIXED.short_s + 0.3 / MIXED.long_s

    assert isclose(float(MIXED.hazard_per_s(0.0)), mean)
    assert isclose(float(MIXED.hazard_per_s(1e6 * HOUR_S)), 1 / MIXED.long_s)
    assert isclose(float(MIXED.mean_left_s(1e6 * HOUR_S)), MIXED.long_s)


@pytest.mark.parametrize(
    ("make", "reported"),
    [
        (lambda: Exponential(0.0), ("0.0 s",)),
        (lambda: Exponential(inf), ()),
        (lambda: TwoRates(1.0, 1.0, 2.0), ("1.0 s",)),
        (lambda: TwoRates(0.5, 3.0, 2.0), ()),
        (lambda: TwoRates(0.5, 3.0, inf), ()),
        (lambda: Bathtub(1.0, 1.0, 1.0, 1.0), ("1.0",)),
        (lambda: Bathtub(0.5, 1.0, 0.0, 1.0), ("tau2_s", "0.0")),
        (lambda: Bathtub(0.5, inf, 1.0, 1.0), ("tau1_s",)),
        (lambda: Bathtub(0.5, 1.0, 1.0, 1.0, -1.0), ("max_life_s", "-1.0")),
        (lambda: Lives(np.zeros(0), np.zeros(0, bool)), ()),
        (lambda: Lives(np.ones(2), np.ones(1, bool)), ()),
        (lambda: Lives(-np.ones(1), np.zeros(1, bool)), ()),
        (lambda: Lives(np.ones(1), np.ones(1, bool), 0.0), ("0.0 s",)),
        (lambda: Lives(np.ones(1), np.ones(1, bool), 3.0), ()),
    ],
)
def test_invalid_input_is_refused(make: object, reported: tuple[str, ...]) -> None:
    assert callable(make)
    with raises_message(ConfigError, *reported):
        make()


def test_the_curve_of_the_record_is_that_of_kaplan_and_meier() -> None:
    lives = lived(MIXED, 300, seed=1)
    ages = np.round(lives.age_s / 600) * 600 + 300  # so that some are equal
    lives = Lives(ages, lives.lost)

    found, left = kaplan_meier(lives)

    theirs = ecdf(CensoredData(uncensored=ages[lives.lost], right=ages[~lives.lost])).sf
    np.testing.assert_allclose(left, theirs.evaluate(found), rtol=1e-12)
    assert lives.deaths == np.count_nonzero(lives.lost) > 100


def test_the_constant_rate_is_the_most_likely_one() -> None:
    lives = lived(Exponential(6 * HOUR_S), 300, seed=2)
    coarse = Lives(np.floor(lives.age_s / 1800) * 1800 + 900, lives.lost, 1800.0)

    found = fit_exponential(coarse)

    best = minimize_scalar(
        lambda x: -log_likelihood(Exponential(float(np.exp(x))), coarse), (8.0, 12.0), tol=1e-12
    )
    assert isinstance(found.lifetime, Exponential)
    assert isclose(found.lifetime.mean_s, exp(best.x), rel_tol=1e-6)
    assert isclose(found.log_likelihood, -best.fun, rel_tol=1e-12)
    assert isclose(found.aic, 2.0 + 2.0 * best.fun)


def test_for_exact_ages_it_is_losses_per_time() -> None:
    lives = lived(Exponential(6 * HOUR_S), 300, seed=3)

    found = fit_exponential(Lives(lives.age_s, lives.lost, 1e-6)).lifetime

    assert isinstance(found, Exponential)
    assert isclose(found.mean_s, lives.age_s.sum() / lives.deaths, rel_tol=1e-9)
    assert abs(found.mean_s / (6 * HOUR_S) - 1) < 0.1


def test_of_machines_seen_for_whole_numbers_of_looks_it_is_the_geometric_rate() -> None:
    looks = np.array([1, 3, 2, 9])

    found = fit_exponential(Lives((looks - 0.5) * 60.0, np.ones(4, bool), 60.0)).lifetime

    assert isinstance(found, Exponential)
    assert isclose(exp(-60.0 / found.mean_s), 1.0 - 1.0 / looks.mean())


def test_all_gone_at_once_still_has_a_rate() -> None:
    found = fit_exponential(Lives(np.full(3, 30.0), np.ones(3, bool), 60.0))

    assert float(found.lifetime.survival(60.0)) < 1e-3


def test_without_losses_a_fit_is_refused() -> None:
    with raises_message(ConfigError):
        fit_exponential(Lives(np.ones(5), np.zeros(5, bool)))


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("limit_s", [DAY_S, inf])
def test_the_bathtub_is_found_again(seed: int, limit_s: float) -> None:
    true = Bathtub(0.45, HOUR_S, 0.8 * HOUR_S, 23 * HOUR_S, limit_s)
    lives = lived(true, 800, seed)

    found = fit_bathtub(lives, limit_s)

    tub = found.lifetime
    assert isinstance(tub, Bathtub)
    assert found.log_likelihood >= log_likelihood(true, lives)
    assert abs(tub.a - 0.45) < 0.05
    assert abs(log(tub.tau1_s / true.tau1_s)) < 0.25
    assert abs(log(tub.tau2_s / true.tau2_s)) < 0.25
    assert abs(tub.b_s - true.b_s) < 0.05 * true.b_s
    assert found.distance < 0.1


def test_nothing_near_the_fitted_bathtub_is_more_likely() -> None:
    lives = lived(TUB, 300, seed=5)
    found = fit_bathtub(lives, DAY_S)
    tub = found.lifetime
    assert isinstance(tub, Bathtub)

    def unlikely(point: FloatArray) -> float:
        try:
            near = Bathtub(*(np.array([tub.a, tub.tau1_s, tub.tau2_s, tub.b_s]) * np.exp(point)))
        except ConfigError:
            return 1e9
        return min(-log_likelihood(near, lives), 1e9)

    theirs = minimize(unlikely, np.zeros(4), method="Powell", bounds=[(-0.5, 0.5)] * 4)
    assert -theirs.fun <= found.log_likelihood + 0.01


def test_two_rates_are_found_again_and_nothing_near_is_more_likely() -> None:
    lives = lived(MIXED, 1000, seed=4)

    found = fit_two_rates(lives)

    mixed = found.lifetime
    assert isinstance(mixed, TwoRates)
    assert abs(mixed.part - 0.7) < 0.05
    assert abs(log(mixed.short_s / MIXED.short_s)) < 0.15
    assert abs(log(mixed.long_s / MIXED.long_s)) < 0.15

    def unlikely(point: FloatArray) -> float:
        near = np.array([mixed.part, mixed.short_s, mixed.long_s]) * np.exp(point)
        return -log_likelihood(TwoRates(*near), lives)

    theirs = minimize(unlikely, np.zeros(3), method="Nelder-Mead")
    assert -theirs.fun <= found.log_likelihood + 1e-4


@pytest.mark.parametrize(
    ("true", "kind"),
    [
        (Exponential(5 * HOUR_S), Exponential),
        (MIXED, TwoRates),
        (TUB, Bathtub),
    ],
)
def test_the_model_that_made_the_lives_is_chosen(true: Lifetime, kind: type[object]) -> None:
    lives = lived(true, 500, seed=6)

    chosen = choose(lives, DAY_S if kind is Bathtub else inf)

    assert isinstance(chosen.fit.lifetime, kind)
    check_message(chosen.reason)
    assert f"AIC {chosen.fit.aic:.0f}, against" in chosen.reason
    assert f"over {lives.deaths} losses" in chosen.reason
    assert len(chosen.others) == 2
    assert chosen.fit.aic < min(other.aic for other in chosen.others) + 2.0


def test_a_simpler_model_stands_unless_another_is_clearly_better() -> None:
    chosen = choose(lived(Exponential(5 * HOUR_S), 40, seed=37))

    best = min(other.aic for other in chosen.others)
    assert best < chosen.fit.aic < best + 2.0
    assert isinstance(chosen.fit.lifetime, Exponential)


def test_of_few_losses_only_a_rate_is_said() -> None:
    lives = Lives(np.full(9, HOUR_S), np.ones(9, bool))

    chosen = choose(lives)

    assert chosen.others == ()
    check_message(chosen.reason)


@pytest.mark.parametrize("fit", [fit_two_rates, fit_bathtub])
def test_of_few_losses_no_more_than_a_rate_is_fitted(fit: object) -> None:
    assert callable(fit)
    with raises_message(ConfigError, "10"):
        fit(Lives(np.full(9, HOUR_S), np.ones(9, bool)))


def test_lives_longer_than_the_limit_are_refused() -> None:
    with raises_message(ConfigError, "90000 s", "86400 s"):
        fit_bathtub(Lives(np.full(12, 90_000.0), np.ones(12, bool)), DAY_S)


def test_the_distance_is_the_largest_step_between_the_curves() -> None:
    lives = Lives(np.array([10.0, 20.0]), np.array([True, True]), 1e-9)

    far = distance(Exponential(10.0), lives)

    assert isclose(far, 1 - exp(-1.0), rel_tol=1e-6)
    assert distance(Exponential(10.0), Lives(np.ones(1), np.zeros(1, bool))) == 0.0


def test_impossible_lifetimes_are_infinitely_unlikely() -> None:
    assert log_likelihood(TUB, Lives(np.array([2 * DAY_S]), np.array([True]))) == -inf


@pytest.mark.parametrize("start", [[-1.2, 1.0], [2.0, 2.0], [0.0, 0.0], [-1.0, -2.0]])
def test_the_simplex_finds_the_end_of_a_bent_valley(start: list[float]) -> None:
    def valley(at: FloatArray) -> float:
        return float((1 - at[0]) ** 2 + 100 * (at[1] - at[0] ** 2) ** 2)

    np.testing.assert_allclose(lowest(valley, np.array(start), 500), [1.0, 1.0], atol=1e-4)


def test_the_simplex_closes_in_where_no_step_is_lower() -> None:
    def steep(at: FloatArray) -> float:
        return float(np.abs(at).sum() ** 0.1) if (at <= 0).all() or (at >= 0).all() else inf

    assert np.abs(lowest(steep, np.array([0.3, 0.4]), 300)).max() < 0.4
