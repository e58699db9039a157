from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstride.core.allocation.integer_splits import apportion
from evenstride.core.fleet import Fleet, Worker
from evenstride.core.policies import policy_from_spec
from evenstride.core.policies.dbs import Dbs, published_rounding
from evenstride.core.policy import Keep, Move, follows_epochs
from evenstride.errors import ConfigError
from tests.messages import check_message, raises_message
from tests.unit.core.policies.plant import Plant, PolicyDriver, workers


def test_the_published_rounding_of_the_published_case() -> None:
    assert published_rounding(np.array([13.7, 16.5, 19.6, 14.2]), 64).tolist() == [14, 16, 20, 14]


def test_the_published_rounding_may_come_out_short() -> None:
    assert published_rounding(np.array([10.4, 10.3, 10.3]), 31).tolist() == [10, 10, 10]


def test_only_the_largest_remainders_are_raised() -> None:
    assert published_rounding(np.array([1.6, 1.7, 1.7]), 5).tolist() == [1, 2, 2]


@given(speeds=st.lists(st.floats(0.01, 100), min_size=1, max_size=9), total=st.integers(1, 500))
def test_the_published_rounding_gives_at_most_the_batch_and_at_most_a_sample_off(
    speeds: list[float], total: int
) -> None:
    ideal = np.array(speeds) * (total / sum(speeds))

    rounded = published_rounding(ideal, total)

    assert total - len(speeds) <= int(rounded.sum()) <= total
    assert float(np.abs(rounded - ideal).max()) < 1


@given(speeds=st.lists(st.floats(0.01, 100), min_size=1, max_size=9), spare=st.integers(0, 500))
def test_units_that_the_rounding_leaves_over_go_to_the_largest_remainders(
    speeds: list[float], spare: int
) -> None:
    fleet = Fleet(workers(len(speeds)), len(speeds) + spare)
    driver = PolicyDriver(Dbs(epoch_steps=1), fleet)

    decision = driver.ask(driver.opening.shares, np.array(driver.opening.shares) / np.array(speeds))

    shares = decision.shares if isinstance(decision, Move) else driver.opening.shares
    exact = apportion(np.array(speeds), fleet.global_batch, fleet.lower, fleet.upper)
    assert sum(shares) == fleet.global_batch
    assert float(np.abs(exact - np.array(shares)).max()) <= 1, "ties apart they are the same"


def test_it_decides_at_the_end_of_an_epoch_and_only_there() -> None:
    plant = Plant("dbs", 120, [0.0, 0.0], [0.001, 0.003])

    assert plant.run(99) == (60, 60)
    check_message(plant.kept, "100 steps")
    assert plant.exchange() == (90, 30)
    plant.per_sample_s = np.array([0.003, 0.001])
    assert plant.run(99) == (90, 30)
    assert plant.exchange() == (30, 90)


def test_an_exchange_that_comes_late_still_ends_the_epoch() -> None:
    plant = Plant("dbs:epoch_steps=10", 120, [0.0, 0.0], [0.001, 0.003])

    assert plant.exchange(7) == (60, 60)
    assert plant.exchange(7) == (90, 30)


def test_a_fixed_time_is_approached_epoch_by_epoch() -> None:
    plant = Plant("dbs:epoch_steps=2", 120, [0.03, 0.03], [0.001, 0.002])

    shares = [plant.exchange(2)[0] for _ in range(4)]

    assert shares == sorted(shares)
    assert 60 < shares[0] < shares[-1] < 90
    assert plant.step_s() < 1.02 * plant.best_s()


@pytest.mark.parametrize("lag", [1, 3, 8])
def test_steps_at_the_earlier_shares_do_not_count(lag: int) -> None:
    plant = Plant("dbs:epoch_steps=10", 120, [0.0, 0.0], [0.001, 0.003], lag=lag)

    plant.run(50)

    assert plant.control.shares == (90, 30)
    assert len(plant.reasons) == 2


def test_a_worker_without_a_measured_step_is_waited_for() -> None:
    driver = PolicyDriver(Dbs(epoch_steps=1), Fleet(workers(2), 12))

    decision = driver.ask((6, 6), (0.1, 0.1), reported=(6, 5))

    assert isinstance(decision, Keep)
    check_message(decision.reason)


def test_steps_that_are_not_modelled_do_not_count() -> None:
    driver = PolicyDriver(Dbs(epoch_steps=1), Fleet(workers(2), 12))

    assert isinstance(driver.ask((6, 6), (0.1, 0.9), modelled=False), Keep)


def test_without_reports_it_decides_nothing() -> None:
    driver = PolicyDriver(Dbs(epoch_steps=1), Fleet(workers(2), 12))

    assert isinstance(driver.decide((6, 6), (), 500), Keep)
    check_message(driver.decide((6, 6), (), 500).reason, "1 steps")


def test_equal_speeds_keep_the_shares() -> None:
    plant = Plant("dbs:epoch_steps=1", 12, [0.1, 0.1], [0.01, 0.01])

    assert plant.exchange() == (6, 6)
    check_message(plant.kept)


def test_bounds_hold_and_a_worker_without_a_share_gets_its_least() -> None:
    members = (Worker("a", max_share=70), Worker("b"), Worker("c", min_share=4))
    driver = PolicyDriver(Dbs(epoch_steps=1), Fleet(members, 120))

    decision = driver.ask((40, 80, 0), (0.004, 0.08, 0.01))

    assert isinstance(decision, Move)
    assert decision.shares == (70, 46, 4)


def test_a_negative_number_of_steps_is_refused() -> None:
    with raises_message(ConfigError, "epoch_steps", "-1"):
        policy_from_spec("dbs:epoch_steps=-1")


@pytest.mark.parametrize("policy", ["dbs", "omnilearn:b_min=1"])
def test_an_epoch_is_that_of_the_data_where_it_is_known(policy: str) -> None:
    plant = Plant(policy, 120, [0.0, 0.0], [0.001, 0.003], epoch_steps=20)

    assert plant.run(19) == (60, 60)
    check_message(plant.kept)
    after_one = plant.exchange()
    assert after_one != (60, 60)
    plant.per_sample_s = np.array([0.003, 0.001])
    assert plant.run(19) == after_one
    assert plant.exchange() != after_one


@pytest.mark.parametrize(
    ("policy", "follows", "partition"),
    [
        ("dbs", True, "epoch"),
        ("dbs:epoch_steps=50", False, "step"),
        ("omnilearn", True, None),
        ("adaptive", False, None),
    ],
)
def test_policies_by_epoch_say_so(policy: str, follows: bool, partition: str | None) -> None:
    made = policy_from_spec(policy)

    assert follows_epochs(made) is follows
    assert getattr(made, "partition", None) == partition


def test_steps_that_are_asked_for_count_instead_of_the_epochs_of_the_data() -> None:
    plant = Plant("dbs:epoch_steps=50", 120, [0.0, 0.0], [0.001, 0.003], epoch_steps=20)

    assert plant.run(49) == (60, 60)
    check_message(plant.kept, "50 steps")
    assert plant.exchange() == (90, 30)
