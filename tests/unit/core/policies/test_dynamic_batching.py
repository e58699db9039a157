from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstride.core.fleet import Fleet, Shares, Worker
from evenstride.core.policies import policy_from_spec
from evenstride.core.policies.dynamic_batching import DynamicBatching, proportional_step
from evenstride.core.policy import Keep, Move
from evenstride.core.time_model.observation import Observation
from evenstride.errors import ConfigError
from tests.messages import check_message, raises_message
from tests.unit.core.policies.plant import Plant, PolicyDriver, workers


@pytest.mark.parametrize(
    ("cores", "growth"), [((9, 12, 18), 1.08), ((4, 11, 24), 1.66), ((2, 17, 20), 2.64)]
)
def test_the_literal_rule_lets_the_global_batch_grow(cores: tuple[int, ...], growth: float) -> None:
    after = proportional_step(np.full(3, 13.0), 13.0 / np.array(cores))

    assert float(after.sum()) / 39 == pytest.approx(growth, abs=0.005)


def test_a_fixed_time_makes_the_literal_rule_approach_the_balance_in_steps() -> None:
    cores, batches = np.array([2.0, 17.0, 20.0]), np.full(3, 13.0)
    spreads = []

    for _ in range(4):
        times_s = 0.3 + batches / cores  # fixed: 30 % of the balanced time of the samples
        spreads.append(float(np.ptp(times_s) / times_s.mean()))
        batches = proportional_step(batches, times_s)
        batches *= 39 / batches.sum()

    assert spreads == pytest.approx([1.99, 0.27, 0.055, 0.012], rel=0.03)


positive = st.floats(0.001, 100.0)


@given(b=st.tuples(positive, positive), t=st.tuples(positive, positive))
def test_with_two_workers_the_literal_rule_is_the_two_worker_formula(
    b: tuple[float, float], t: tuple[float, float]
) -> None:
    throughput = b[0] / t[0]
    change = -throughput * (t[0] - (t[0] + t[1]) / 2)

    after = proportional_step(np.array(b), np.array(t))

    assert float(after[0]) == pytest.approx(b[0] + change)


def test_it_acts_at_every_step_outside_its_dead_band() -> None:
    plant = Plant("dynamic-batching", 120, [0.1, 0.1], [0.001, 0.005])

    shares = [plant.exchange()[0] for _ in range(3)]

    assert 60 < shares[0] < shares[1] < shares[2] < 100
    assert len(plant.reasons) == 4


def test_a_window_makes_it_wait() -> None:
    plant = Plant("dynamic-batching:window=10", 120, [0.0, 0.0], [0.001, 0.003])

    assert plant.exchange(9) == (60, 60)
    check_message(plant.kept, "10 steps")
    assert plant.exchange(1) == (90, 30)


@pytest.mark.parametrize("steps", [1, 4, 37])
def test_steps_reported_together_are_averaged_and_lead_to_one_change(steps: int) -> None:
    plant = Plant("dynamic-batching", 120, [0.0, 0.0], [0.001, 0.003])

    assert plant.exchange(steps) == (90, 30)
    assert len(plant.reasons) == 2


def test_steps_reported_together_weigh_as_if_reported_one_by_one() -> None:
    together, apart = (
        PolicyDriver(DynamicBatching(window=3), Fleet(workers(2), 120)) for _ in range(2)
    )
    times_s = (0.05, 0.06, 0.10)
    other = (Observation(1, 60, 0, (0.06,) * 3, (0.0,) * 3),)

    one = together.decide((60, 60), (Observation(0, 60, 0, times_s, (0.0,) * 3), *other), 3)
    for step, time_s in enumerate(times_s):
        reported = [Observation(0, 60, step, (time_s,), (0.0,))]
        two = apart.decide((60, 60), [*reported, *(other if step == 2 else ())], step + 1)

    assert isinstance(one, Move)
    assert one == two


def test_times_at_an_earlier_share_do_not_count() -> None:
    driver = PolicyDriver(DynamicBatching(), Fleet(workers(2), 120))

    decision = driver.ask((60, 60), (0.1, 0.9), reported=(7, 60), steps=50)

    assert isinstance(decision, Keep)
    assert decision.reason.startswith("0 of 1 steps")


@pytest.mark.parametrize("time_s", [math.nan, math.inf, 0.0, -1.0])
def test_impossible_times_do_not_count(time_s: float) -> None:
    driver = PolicyDriver(DynamicBatching(), Fleet(workers(2), 120))

    assert isinstance(driver.ask((60, 60), (time_s, 0.1)), Keep)
    assert isinstance(driver.ask((60, 60), (0.3, 0.1), modelled=False), Keep)
    assert isinstance(driver.ask((60, 60), (0.3, 0.1)), Move)


@pytest.mark.parametrize("time_s", [5e-324, 1e7])
def test_absurd_but_possible_times_give_shares_all_the_same(time_s: float) -> None:
    driver = PolicyDriver(DynamicBatching(), Fleet(workers(2), 120))

    decision = driver.ask((60, 60), (time_s, 0.1))

    assert isinstance(decision, Move)
    assert sorted(decision.shares) == [1, 119]


@pytest.mark.parametrize("lag", [1, 3, 8])
def test_late_decisions_lead_to_the_same_balance(lag: int) -> None:
    plant = Plant("dynamic-batching", 120, [0.01, 0.03], [0.001, 0.003], lag=lag)

    plant.run(20 * lag)

    assert plant.step_s() < 1.05 * plant.best_s()
    assert len(plant.reasons) <= 8, "no change is made twice"


def test_it_keeps_inside_its_dead_band() -> None:
    plant = Plant("dynamic-batching", 120, [0.0, 0.0], [0.001, 0.00108])

    assert plant.run(20) == (60, 60)
    assert "within the 5% dead-band" in plant.kept


def test_bounds_that_leave_no_room_are_said() -> None:
    members = (Worker("a", max_share=60), Worker("b", min_share=60))
    plant = Plant("dynamic-batching", 120, [0.0] * 2, [0.001, 0.003], members=members)

    assert plant.exchange() == (60, 60)
    check_message(plant.kept, "0.0%", "5%")


def _raised(policy: DynamicBatching) -> PolicyDriver:
    """Return a policy in which worker 0 was raised from 60 samples a 0.06 s to 80."""
    driver = PolicyDriver(policy, Fleet(workers(2), 120))
    assert driver.ask((60, 60), (0.06, 0.12)) == Move(
        (80, 40), "step times differ: largest change 50.0% of a share"
    )
    return driver


def test_a_loss_of_throughput_after_a_raise_becomes_a_bound() -> None:
    driver = _raised(DynamicBatching())

    decision = driver.ask((80, 40), (0.11, 0.08), steps=5)  # from 1000 to 727 samples a second

    assert driver.state.learned_most.tolist() == [60, 0]
    assert isinstance(decision, Move)
    assert decision.shares == (60, 60)
    check_message(driver.ask((60, 60), (0.01, 0.12), steps=9).reason)


@pytest.mark.parametrize(
    ("times_s", "steps", "why"),
    [
        ((0.099, 0.08), 5, "a loss of 19 %"),
        ((0.3, 0.08), 4, "not proven"),
        ((0.07, 0.08), 5, "a gain"),
        ((0.08, 0.4), 5, "a loss of the worker that was lowered"),
    ],
)
def test_no_bound_is_learned_from(times_s: tuple[float, float], steps: int, why: str) -> None:
    driver = _raised(DynamicBatching())

    driver.ask((80, 40), times_s, steps=steps)

    assert driver.state.learned_most.tolist() == [0, 0], why


def test_a_later_slow_down_is_no_loss_by_the_raise() -> None:
    driver = _raised(DynamicBatching())
    driver.ask((80, 40), (0.08, 0.08), steps=5)

    driver.ask((80, 40), (0.80, 0.08), steps=50)

    assert driver.state.learned_most.tolist() == [0, 0]


def test_with_a_proof_of_one_step_a_spike_is_enough_as_published() -> None:
    driver = _raised(DynamicBatching(proof=1))

    driver.ask((80, 40), (0.24, 0.08))

    assert driver.state.learned_most.tolist() == [60, 0]


@pytest.mark.parametrize(("learned", "shares"), [((70, 70), (70, 50)), ((70, 40), (90, 30))])
def test_learned_bounds_are_heeded_unless_they_leave_too_little_room(
    learned: Shares, shares: Shares
) -> None:
    driver = PolicyDriver(DynamicBatching(), Fleet(workers(2), 120))
    driver.state = replace(driver.state, learned_most=np.array(learned))

    decision = driver.ask((60, 60), (0.06, 0.18))

    assert isinstance(decision, Move)
    assert decision.shares == shares


def test_a_worker_without_a_share_gets_its_least() -> None:
    members = (Worker("a"), Worker("b"), Worker("c", min_share=4))
    driver = PolicyDriver(DynamicBatching(), Fleet(members, 120))

    decision = driver.ask((40, 80, 0), (0.04, 0.04, 0.01))
    assert isinstance(decision, Keep), "the others finish together"

    decision = driver.ask((40, 80, 0), (0.08, 0.04, 0.01))
    assert isinstance(decision, Move)
    assert decision.shares[2] == 4


@pytest.mark.parametrize("spec", ["dynamic-batching:window=0", "dynamic-batching:proof=0"])
def test_settings_that_make_no_sense_are_refused(spec: str) -> None:
    with raises_message(ConfigError):
        policy_from_spec(spec)
