"""Lifetimes are distributions, and saves are due as their hazards say."""

from __future__ import annotations

from dataclasses import replace
from math import exp, inf, isclose

import numpy as np
from benchmarks.spot_replay import SpotJob, Way, replay
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import lambertw

from evenstride.core.reliability.checkpoint_interval import (
    Observed,
    Saving,
    daly_s,
    due_in_s,
    expected_losses,
    next_save_in_s,
)
from evenstride.core.reliability.lifetimes import DAY_S, Bathtub, Exponential, Lifetime, TwoRates
from evenstride.core.reliability.survival_fit import (
    Lives,
    fit_exponential,
    kaplan_meier,
    log_likelihood,
)
from evenstride.sim.scenario.recordings import SpotTrace, machines

times_s = st.floats(60.0, 1e6)
parts = st.floats(0.01, 0.99)
mixtures = st.builds(
    lambda part, short_s, times: TwoRates(part, short_s, short_s * times),
    parts,
    times_s,
    st.floats(1.0, 50.0),
)
bathtubs = st.builds(
    lambda a, early, late, b_s, limit: Bathtub(a, early * b_s, late * b_s, b_s, limit),
    parts,
    st.floats(0.01, 2.0),
    st.floats(0.01, 0.5),
    times_s,
    st.sampled_from([DAY_S, inf]),
)
lifetimes: st.SearchStrategy[Lifetime] = st.one_of(
    st.builds(Exponential, times_s), mixtures, bathtubs
)
ages_s = st.lists(st.floats(0.0, 2e5), min_size=1, max_size=6).map(np.array)


@given(lifetimes, ages_s)
def test_survival_begins_with_all_and_never_rises(lifetime: Lifetime, ages: np.ndarray) -> None:
    left = lifetime.survival(np.sort(ages))

    assert float(lifetime.survival(0.0)) == 1.0
    assert ((left >= 0.0) & (left <= 1.0)).all()
    assert (np.diff(left) <= 1e-12).all()


@given(lifetimes, st.lists(st.floats(0.0, 1.0), min_size=1).map(np.array))
def test_a_life_drawn_is_where_its_part_is_gone(lifetime: Lifetime, parts: np.ndarray) -> None:
    ages = lifetime.quantile_s(parts)

    sooner = np.minimum(ages * (1.0 - 1e-6), 1e300)
    assert (1.0 - lifetime.survival(ages) >= parts - 1e-9).all()
    assert (1.0 - lifetime.survival(sooner) <= parts + 1e-9).all()


@given(lifetimes, ages_s)
def test_remaining_lifetime_is_positive_while_survival_is(
    lifetime: Lifetime, ages: np.ndarray
) -> None:
    alive = lifetime.survival(ages) > 1e-9

    assert (lifetime.mean_left_s(ages)[alive] > 0.0).all()
    assert (lifetime.hazard_per_s(ages)[alive] >= 0.0).all()


lives = st.lists(st.tuples(st.integers(1, 200), st.booleans()), min_size=2, max_size=40).map(
    lambda seen: Lives(
        np.array([10.0 * n - (5.0 if lost else 10.0) for n, lost in seen]),
        np.array([lost for _, lost in seen]),
        10.0,
    )
)


@given(lives, st.floats(0.5, 2.0))
def test_no_constant_rate_is_more_likely_than_the_fitted_one(seen: Lives, times: float) -> None:
    if not seen.deaths:
        return
    found = fit_exponential(seen)

    other = Exponential(float(found.lifetime.mean_left_s(0.0)) * times)
    assert log_likelihood(other, seen) <= found.log_likelihood + 1e-5


@given(lives)
def test_the_curve_of_a_record_falls_at_each_loss(seen: Lives) -> None:
    ages, left = kaplan_meier(seen)

    assert (np.diff(ages) > 0.0).all()
    assert (np.diff(np.concatenate([[1.0], left])) < 0.0).all()
    assert (left >= 0.0).all()


@given(st.floats(1.0, 1e6), st.floats(0.01, 100.0), st.integers(1, 64))
def test_at_a_constant_rate_it_is_the_exact_interval_and_dalys(
    mean_s: float, save_s: float, workers: int
) -> None:
    cost = save_s / mean_s
    exact_s = mean_s * (1 + lambertw(-exp(-cost - 1)).real)

    found_s = due_in_s(Exponential(mean_s * workers), np.zeros(workers), save_s, 10 * mean_s)

    if 1e-6 < cost < 30.0:  # beyond, our oracle loses its digits
        assert isclose(found_s, exact_s, rel_tol=1e-6)
    if cost < 0.5:
        assert isclose(found_s, daly_s(save_s, mean_s), rel_tol=0.01)


@given(lifetimes, ages_s, st.floats(0.1, 1000.0), st.floats(100.0, 1e5))
def test_a_machine_more_never_makes_a_save_later(
    lifetime: Lifetime, ages: np.ndarray, save_s: float, longest_s: float
) -> None:
    one_less = due_in_s(lifetime, ages[:-1], save_s, longest_s) if len(ages) > 1 else longest_s

    assert due_in_s(lifetime, ages, save_s, longest_s) <= one_less * (1 + 1e-9)


@given(
    lifetimes,
    ages_s,
    st.floats(0.01, 1000.0),
    st.integers(0, 50),
    st.floats(0.0, 100.0),
)
def test_bounds_are_kept_and_a_loss_more_never_makes_a_save_later(
    lifetime: Lifetime, ages: np.ndarray, save_s: float, failures: int, expected: float
) -> None:
    saving = Saving(lifetime)

    now = next_save_in_s(save_s, ages, Observed(failures, expected), saving)
    then = next_save_in_s(save_s, ages, Observed(failures + 1, expected), saving)

    assert now.in_s >= 10.0 * save_s * (1 - 1e-12)
    assert now.in_s <= max(saving.longest_s, 10.0 * save_s)
    assert then.in_s <= now.in_s * (1 + 1e-9)
    assert now.reason.startswith("next save in ")
    assert np.isfinite(now.in_s)


@given(lifetimes, ages_s, st.floats(0.0, 1e5), st.floats(0.0, 1e5))
def test_expected_losses_add_up(
    lifetime: Lifetime, ages: np.ndarray, first_s: float, second_s: float
) -> None:
    middle, last = ages + first_s, ages + first_s + second_s
    if not (lifetime.survival(last) > 1e-9).all():
        return

    apart = expected_losses(lifetime, ages, middle) + expected_losses(lifetime, middle, last)

    assert isclose(apart, expected_losses(lifetime, ages, last), rel_tol=1e-6, abs_tol=1e-6)


up = st.lists(st.integers(0, 3), min_size=2, max_size=40).filter(lambda counts: max(counts) > 0)
ways = st.builds(
    Way,
    st.just("any"),
    st.booleans(),
    st.booleans(),
    st.none() | st.floats(1.0, 500.0) | st.just(Saving(Exponential(1000.0))),
)
jobs = st.builds(
    SpotJob,
    samples=st.integers(1, 5000),
    global_batch=st.integers(1, 50),
    fixed_s=st.just((0.1, 0.0, 0.3)),
    per_sample_s=st.tuples(*[st.floats(0.01, 3.0)] * 3),
    size=st.just(1),
    save_s=st.floats(0.1, 50.0),
    restart_s=st.floats(0.0, 150.0),
    regroup_s=st.floats(0.0, 60.0),
)


@given(up, st.sampled_from([7.0, 60.0, 195.0]), jobs, ways, st.integers(1, 3))
def test_whatever_is_lost_every_sample_is_trained_once(
    counts: list[int], gap_s: float, job: SpotJob, way: Way, size: int
) -> None:
    recorded = machines([SpotTrace("made/up", gap_s, np.array(counts))])
    job = replace(job, size=min(size, max(counts)))

    (found,) = replay(recorded, job, [way])

    end_s = gap_s * len(counts)
    parts = (found.train_s, found.save_s, found.restart_s, found.wait_s)
    assert found.lost == 0
    assert found.committed <= job.samples
    assert found.finished == (found.committed == job.samples)
    assert found.finished or isclose(found.total_s, end_s)
    assert found.total_s <= end_s * (1 + 1e-9)
    assert min(parts) >= -1e-6
    assert found.machine_s <= found.total_s * max(counts) * (1 + 1e-9)
    if not found.losses:
        assert found.recomputed == found.interrupted == 0
