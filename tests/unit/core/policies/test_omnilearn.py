from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstride.core.fleet import Fleet, Worker
from evenstride.core.policies import policy_from_spec
from evenstride.core.policies.dynamic_batching import OmniLearn, spread_equally
from evenstride.core.policy import Keep, Move
from evenstride.errors import ConfigError
from tests.messages import check_message
from tests.unit.core.policies.plant import Plant, PolicyDriver, workers


def test_it_decides_at_the_end_of_an_epoch_on_its_mean_times() -> None:
    plant = Plant("omnilearn:b_max=96", 120, [0.0, 0.0], [0.001, 0.003])

    assert plant.run(99) == (60, 60)
    # Candidates 120 and 40; 24 too many above 96, and then 16 too many in all.
    assert plant.exchange() == (88, 32)


@pytest.mark.parametrize("equal", [32, 320])
def test_its_upper_bound_is_three_equal_shares(equal: int) -> None:
    driver = PolicyDriver(OmniLearn(epoch_steps=1), Fleet(workers(4), 4 * equal))

    decision = driver.ask((equal,) * 4, (0.1, 1.0, 1.0, 1.0))

    # Candidates are 7.75 equal shares, which the bound cuts off at 3, and 0.775 for the others.
    assert isinstance(decision, Move)
    parts = np.array(decision.shares) / equal
    assert parts == pytest.approx([2.66875, 0.44375, 0.44375, 0.44375], abs=1 / equal)


def test_a_worker_inside_the_dead_band_keeps_its_share_apart_from_what_is_spread() -> None:
    driver = PolicyDriver(OmniLearn(epoch_steps=1), Fleet(workers(3), 150))

    decision = driver.ask((50, 50, 50), (0.05, 0.055, 0.10))

    # The mean is 0.0683: candidates are 68.3, 62.1 (19.5 % off: kept) and 34.2, 2.5 too many.
    assert isinstance(decision, Move)
    assert decision.shares == (68, 49, 33)


def test_all_inside_the_dead_band_keep_theirs() -> None:
    plant = Plant("omnilearn:epoch_steps=1", 120, [0.0, 0.0], [0.001, 0.0012])

    assert plant.run(3) == (60, 60)
    check_message(plant.kept, "20%")


def test_the_band_is_a_part_of_the_new_share() -> None:
    driver = PolicyDriver(OmniLearn(epoch_steps=1, dead_band=0.2), Fleet(workers(2), 100))

    # Candidates 70 and 38.9: 28.6 % of 70 is a change, 28.6 % of 38.9 is one as well.
    assert isinstance(driver.ask((50, 50), (0.05, 0.09)), Move)
    # Candidates 62.45 and 41.7: 19.9 % of 62.45 is none, 19.9 % of 41.7 is none.
    assert isinstance(driver.ask((50, 50), (1.0, 1.498)), Keep)


def test_what_the_clamps_cut_off_is_spread_equally() -> None:
    assert spread_equally(np.array([10.0, 50.0, 120.0]), 16, 96, 180).tolist() == [22, 56, 102]


@given(
    candidate=st.lists(st.floats(0, 1000), min_size=1, max_size=9),
    b_min=st.integers(0, 50),
    above=st.integers(0, 50),
    total=st.integers(1, 1000),
)
def test_spreading_keeps_the_sum(
    candidate: list[float], b_min: int, above: int, total: int
) -> None:
    spread = spread_equally(np.array(candidate), b_min, b_min + above, total)

    assert float(spread.sum()) == pytest.approx(total, abs=1e-6)


def test_spreading_leaves_no_worker_with_less_than_nothing() -> None:
    driver = PolicyDriver(OmniLearn(epoch_steps=1, b_min=0), Fleet(workers(3), 102))

    decision = driver.ask((2, 50, 50), (0.2, 0.01, 0.01))

    assert isinstance(decision, Move)
    assert decision.shares[0] == 1


@pytest.mark.parametrize("batch", [4, 20, 1000])
def test_no_batch_is_infeasible_because_of_its_clamps(batch: int) -> None:
    plant = Plant("omnilearn:epoch_steps=1", batch, [0.0] * 4, [0.001, 0.001, 0.002, 0.004])

    for _ in range(20):
        shares = plant.exchange()
        assert sum(shares) == batch
        assert min(shares) >= 1
    assert shares[0] >= shares[3]


def test_bounds_of_the_workers_hold() -> None:
    members = (Worker("a", max_share=50), Worker("b", min_share=40), Worker("c"))
    plant = Plant("omnilearn:epoch_steps=1", 150, [0.0] * 3, [0.001, 0.01, 0.001], members=members)

    plant.run(10)

    assert plant.control.shares[0] == 50
    assert plant.control.shares[1] == 40


@pytest.mark.parametrize("lag", [1, 3, 8])
def test_steps_at_the_earlier_shares_do_not_count(lag: int) -> None:
    spec = "omnilearn:epoch_steps=10,b_max=96"
    plant = Plant(spec, 120, [0.0, 0.0], [0.001, 0.003], lag=lag)

    plant.run(60)

    assert plant.control.shares == (88, 32)
    assert len(plant.reasons) == 2


def test_a_worker_without_a_share_gets_its_least() -> None:
    driver = PolicyDriver(OmniLearn(epoch_steps=1), Fleet(workers(3), 120))

    decision = driver.ask((40, 80, 0), (0.08, 0.04, 0.01))

    assert isinstance(decision, Move)
    assert decision.shares[2] == 1


@pytest.mark.parametrize(
    ("setting", "complaint"),
    [
        (
            "epoch_steps=-1",
            ("epoch_steps", "-1"),
        ),
        ("b_min=-1", ("b_min", "-1", "16")),
        ("b_max=15", ("b_min is 16", "b_max", "15")),
        ("b_min=5,b_max=4", ("b_min is 5", "b_max")),
    ],
)
def test_settings_that_make_no_sense_are_refused(setting: str, complaint: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        policy_from_spec(f"omnilearn:{setting}")

    check_message(str(caught.value), *complaint)
