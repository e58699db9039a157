"""The split for speeds that come back sooner than decisions take effect."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from evenstride.core.allocation.recurring_speeds import RecurringSpeeds, RecurringSplit
from evenstride.core.arrays import FloatArray, IntArray
from evenstride.core.fleet import Fleet, Worker
from evenstride.core.policies.adaptive import Adaptive, AdaptiveState
from evenstride.core.policies.measured_splits import Hold, Supervisor, Tried
from evenstride.core.policy import Situation
from evenstride.core.time_model.estimates import Estimate
from evenstride.core.time_model.kalman import learn_times
from evenstride.core.time_model.observation import Measurements

FLEET = Fleet(tuple(Worker(str(rank)) for rank in range(4)), 256)
EQUAL = np.full(4, 64)
Slow = Callable[[int], float]


def planned(
    slow: Slow, steps: int, lag: int, shares: IntArray = EQUAL, apart: int = 2
) -> RecurringSplit | None:
    """Return the plan after some steps in which worker 0 takes ``slow`` times its usual time."""
    rng, estimate = np.random.default_rng(0), Estimate.unknown(4)
    for step in range(steps):
        factor = np.array([slow(step), 1.0, 1.0, 1.0]) * np.exp(0.02 * rng.standard_normal(4))
        busy_s: FloatArray = (0.005 + 0.001 * shares) * factor
        reported = shares, np.full(4, step), np.ones(4, dtype=np.int64)
        estimate = learn_times(estimate, Measurements(np.arange(4), *reported, busy_s, np.zeros(4)))
    speeds = RecurringSpeeds.of(estimate, estimate)
    return None if speeds is None else speeds.next_split(FLEET, shares, lag, apart)


def every(period: int) -> Slow:
    return lambda step: 2.0 if step >= 10 and step % period < period // 2 else 1.0


def test_a_speed_that_is_gone_when_a_decision_takes_effect_gets_one_split() -> None:
    plan = planned(every(8), 120, lag=4)

    assert plan is not None
    # Worker 0 ends with the others when it is slow. (The fixed part of its time is not known.)
    assert 16 <= plan.shares[0] <= 38
    assert plan.shares.sum() == 256
    assert plan.gain > 0.1


def test_a_speed_that_lasts_longer_than_the_lag_is_followed() -> None:
    assert planned(every(60), 160, lag=1) is None
    # Each of its steps is like the one before, but that is no period.
    assert planned(lambda step: every(60)(step) ** 2, 153, lag=1, apart=1) is None


def test_the_split_for_all_speeds_is_left_when_they_last_longer() -> None:
    in_force = np.array([34, 74, 74, 74])  # the split for all speeds
    plan = planned(every(60), 160, lag=40, shares=in_force)
    assert plan is not None
    assert plan.shares.tolist() == in_force.tolist()

    assert planned(every(60), 160, lag=1, shares=in_force) is None


def test_one_split_must_save_a_tenth_and_half_of_that_later() -> None:
    in_force = np.array([34, 74, 74, 74])

    # It saves 4 % at a lag of 1, 7 % at 2 and 12 % at 4.
    assert [planned(every(24), 160, lag) is not None for lag in (1, 2, 4)] == [False, False, True]
    kept = [planned(every(24), 160, lag, shares=in_force) is not None for lag in (1, 2, 4)]
    assert kept == [False, True, True]


def test_a_speed_that_has_come_to_stay_is_followed() -> None:
    passing = every(8)

    assert planned(lambda step: passing(step) if step < 100 else 1.0, 103, lag=4) is not None
    assert planned(lambda step: passing(step) if step < 100 else 1.0, 115, lag=4) is None


def test_one_change_and_rare_spikes_do_not_recur() -> None:
    rng = np.random.default_rng(1)
    spikes = np.where(rng.random(160) < 0.05, 3.0, 1.0)

    assert planned(lambda step: 2.0 if step >= 100 else 1.0, 130, lag=4) is None
    assert planned(lambda step: float(spikes[step]), 160, lag=4) is None


def test_with_a_period_the_next_steps_are_known() -> None:
    rng, estimate = np.random.default_rng(0), Estimate.unknown(4)
    for step in range(100):
        factor = np.array([every(10)(step) ** 2, 1.0, 1.0, 1.0])
        factor *= np.exp(0.02 * rng.standard_normal(4))
        reported = EQUAL, np.full(4, step), np.ones(4, dtype=np.int64)
        seen = Measurements(np.arange(4), *reported, 0.069 * factor, np.zeros(4))
        estimate = learn_times(estimate, seen)
    speeds = RecurringSpeeds.of(estimate, estimate)
    assert speeds is not None
    plans = [speeds.next_split(FLEET, EQUAL, lag, 1) for lag in (1, 7)]

    # The next step is slow for worker 0, the one after six more is not.
    assert [plan is not None and plan.how for plan in plans] == ["every 10 steps"] * 2
    slow, usual = (plan.shares for plan in plans if plan is not None)
    assert slow[0] < 40
    assert usual[0] > 60


def every_second(step: int) -> float:
    return 2.0 if step % 2 else 1.0


def test_speeds_that_alternate_from_the_first_step_on_are_known_after_thirty() -> None:
    # A lag of whole periods: what is measured now comes back, but not as soon as the next step.
    plans = [planned(every_second, 32, lag, apart=1) for lag in (1, 2, 19, 20)]

    assert [plan is not None and plan.how for plan in plans] == ["every 2 steps"] * 4
    # The next step, of number 32, is a fast one.
    shares = [plan.shares[0] for plan in plans if plan is not None]
    assert min(shares[0], shares[2]) > 60
    assert max(shares[1], shares[3]) < 40


def test_short_spells_need_no_more_steps_at_a_long_lag() -> None:
    rng = np.random.default_rng(2)
    slow = np.repeat(np.arange(60) % 2, rng.integers(1, 3, 60))

    assert planned(lambda step: 1.0 + slow[step], 60, lag=20) is not None
    assert planned(every(30), 60, lag=20) is None


def alternated(shares: Callable[[int], IntArray], steps: int) -> Estimate:
    """Return what is known after worker 0 was slow in every second step."""
    rng, estimate = np.random.default_rng(0), Estimate.unknown(4)
    for step in range(steps):
        factor = np.array([every_second(step), 1.0, 1.0, 1.0])
        busy_s = (0.01 + 0.001 * shares(step)) * factor * np.exp(0.02 * rng.standard_normal(4))
        reported = shares(step), np.full(4, step), np.ones(4, dtype=np.int64)
        estimate = learn_times(estimate, Measurements(np.arange(4), *reported, busy_s, np.zeros(4)))
    return estimate


def test_where_each_speed_has_its_own_share_the_split_stays() -> None:
    fast, slow = np.array([64, 64, 64, 64]), np.array([31, 75, 75, 75])
    estimate = alternated(lambda step: slow if step % 2 else fast, 200)
    speeds = RecurringSpeeds.of(estimate, estimate)

    # Worker 0 takes as long with 31 samples as with 64, which any curve explains.
    assert speeds is not None
    plans = [speeds.next_split(FLEET, fast, lag, 1) for lag in (1, 2)]
    assert [plan is not None for plan in plans] == [True, True]
    for plan, best in zip(plans, (fast, slow), strict=True):
        assert plan is not None
        assert np.abs(plan.shares - best).max() <= 3


def test_no_split_is_planned_that_may_be_worse_than_equal_shares() -> None:
    estimate = alternated(lambda _: EQUAL, 60)
    speeds = RecurringSpeeds.of(estimate, estimate)

    assert speeds is not None
    assert 1.0 < speeds.longer < speeds.by_noise < 1.1
    assert speeds.next_split(FLEET, EQUAL, 2, 1) is not None
    assert speeds.next_split(FLEET, EQUAL, 4, 8) is not None
    # Lately, steps have taken twice as long as these curves say.
    wrong = replace(speeds, longer=2.0)
    assert wrong.next_split(FLEET, EQUAL, 2, 1) is None
    assert wrong.next_split(FLEET, EQUAL, 4, 8) is None


def burst(workers: int, usual: float, seed: int) -> RecurringSpeeds:
    """Return what is known of equal workers that halve their speed at random, 5 steps each time."""
    rng, estimate = np.random.default_rng(seed), Estimate.unknown(workers)
    shares, slow = np.full(workers, 64), np.zeros(workers, dtype=bool)
    for step in range(150):
        slow = np.where(slow, rng.random(workers) < 0.8, rng.random(workers) < 1.0 / usual)
        factor = (1.0 + slow) * np.exp(0.02 * rng.standard_normal(workers))
        reported = shares, np.full(workers, step), np.ones(workers, dtype=np.int64)
        busy_s = (0.005 + 0.001 * shares) * factor
        seen = Measurements(np.arange(workers), *reported, busy_s, np.zeros(workers))
        estimate = learn_times(estimate, seen)
    speeds = RecurringSpeeds.of(estimate, estimate)
    assert speeds is not None
    return speeds


@pytest.mark.parametrize("seed", range(4))
def test_equal_workers_that_are_slow_at_random_get_equal_shares(seed: int) -> None:
    fleet = Fleet(tuple(Worker(str(rank)) for rank in range(8)), 512)
    uneven = np.array([36, 68, 68, 68, 68, 68, 68, 68])
    plans = [burst(8, 12, seed).next_split(fleet, now, 4, 4) for now in (np.full(8, 64), uneven)]

    for plan in plans:
        assert plan is not None
        assert np.abs(plan.shares - 64).max() <= 1


def test_all_workers_that_are_slow_again_and_again_count() -> None:
    slow = burst(8, 20, 1).slow.mean(axis=0)

    # Alone, the rarely slow ones would count as spikes.
    assert len(slow) >= 7
    assert (slow < 0.19).any()
    assert (slow > 0.19).any()


def test_a_worker_that_is_slow_with_more_samples_has_one_speed() -> None:
    more = np.array([65, 64, 64, 63])
    cliff = alternated(lambda step: more if step % 2 else EQUAL, 60)
    none = alternated(lambda step: EQUAL if step % 2 else more, 60)

    # Worker 0 is slow in each second step: where it has 65 samples, or where it has 64.
    assert RecurringSpeeds.of(cliff, cliff) is None
    assert RecurringSpeeds.of(none, none) is not None


def test_they_end_the_wait_after_a_worse_split() -> None:
    estimate, zeros = alternated(lambda _: EQUAL, 40), np.zeros(4)
    kept = Tried(EQUAL, (-2.6,) * 5, np.full((3, 4), 0.074), 5, zeros)
    hold = Hold(30, 1000, "steps measured longer", kept, -2.5)
    state = AdaptiveState(supervisor=Supervisor(better=kept, hold=hold))
    situation = Situation(FLEET, (64,) * 4, 40, Measurements.of(()), estimate, lag=2)

    state, decision = Adaptive().decide(state, situation)

    assert decision.reason.startswith("speeds change back and forth every 2 steps")
    assert state.after(situation).supervisor.hold is None
    # Unless too much has been lost: then no curves are trusted.
    lost = AdaptiveState(supervisor=Supervisor(kept, equal=kept, hold=hold, regret_s=2.0))
    _, decision = Adaptive().decide(lost, situation)
    assert decision.reason.startswith("steps measured longer; the shares stay until step 1000")


def test_a_split_beyond_a_known_cliff_is_not_used() -> None:
    estimate = alternated(lambda _: EQUAL, 40)
    cliffs = np.array([[64.0], [65.0], [9.0]])
    seen = estimate.seen.shaped(np.array([2]), np.array([1]), cliffs)
    behind = replace(estimate, seen=seen)

    def reason(known: Estimate) -> str:
        situation = Situation(FLEET, (64,) * 4, 40, Measurements.of(()), known, lag=2)
        return Adaptive().decide(AdaptiveState(), situation)[1].reason

    assert reason(estimate).startswith("speeds change back and forth")
    assert not reason(behind).startswith("speeds change back and forth")
