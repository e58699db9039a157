from __future__ import annotations

from math import isnan, nan

import numpy as np
import pytest

from evenstride.core.fleet import Fleet, Worker
from evenstride.core.policies import policy_from_spec
from evenstride.core.policies.lb_bsp import LbBspCpu
from evenstride.core.policy import Keep, Move
from evenstride.core.predictors import PREDICTOR_NAMES
from evenstride.core.time_model.observation import Observation
from evenstride.errors import ConfigError
from tests.messages import check_message, raises_message
from tests.unit.core.policies.plant import (
    LBB_FIXED_S,
    LBB_PER_SAMPLE_S,
    LBB_SPLIT,
    Plant,
    PolicyDriver,
    workers,
)

every_predictor = pytest.mark.parametrize("name", PREDICTOR_NAMES)


@every_predictor
def test_the_first_speeds_give_proportional_shares(name: str) -> None:
    plant = Plant(f"lb-bsp-cpu:predictor={name}", 120, [0.0] * 3, [0.001, 0.002, 0.002])

    assert plant.run(3) == (60, 30, 30)
    assert len(plant.reasons) == 2


@every_predictor
@pytest.mark.parametrize("lag", [1, 3, 8])
def test_fixed_times_are_balanced_after_a_while(name: str, lag: int) -> None:
    fixed_s, per_sample_s = [0.02, 0.02, 0.05], [0.001, 0.002, 0.004]
    plant = Plant(f"lb-bsp-cpu:predictor={name}", 300, fixed_s, per_sample_s, lag=lag)

    plant.run(30 * lag)

    assert plant.step_s() < 1.02 * plant.best_s()


@every_predictor
def test_a_change_of_speed_is_followed(name: str) -> None:
    plant = Plant(f"lb-bsp-cpu:predictor={name}", 120, [0.0] * 2, [0.001, 0.001])
    plant.run(30)

    plant.per_sample_s = np.array([0.003, 0.001])
    plant.run(30)

    assert plant.control.shares[0] == pytest.approx(30, abs=2)


def test_speed_alone_gives_a_gpu_of_much_fixed_time_too_much_at_first() -> None:
    plant = Plant("lb-bsp-cpu:predictor=last", 512, LBB_FIXED_S, LBB_PER_SAMPLE_S)

    first = plant.exchange()

    assert first[3] == 34, "in proportion to the measured speeds; 20 would be right"
    assert plant.run(30) == pytest.approx(LBB_SPLIT, abs=2)


def test_steps_reported_together_are_processed_one_by_one_in_order() -> None:
    together, apart = (PolicyDriver(LbBspCpu("ema"), Fleet(workers(2), 120)) for _ in range(2))
    other = Observation(1, 60, 0, (0.06,), (0.0,))
    reported = [
        Observation(0, 60, 4, (0.1,), (0.0,)),
        Observation(0, 60, 2, (0.2, 0.3), (0.0,) * 2),
    ]

    one = together.decide((60, 60), [*reported, other], 5)
    for step, time_s in ((2, 0.2), (3, 0.3), (4, 0.1)):
        also = [other] if step == 4 else []
        two = apart.decide((60, 60), [Observation(0, 60, step, (time_s,), (0.0,)), *also], 5)

    assert isinstance(one, Move)
    assert one == two


def test_steps_at_an_earlier_share_tell_the_speed_at_theirs() -> None:
    driver = PolicyDriver(LbBspCpu("last"), Fleet(workers(2), 120))

    decision = driver.ask((60, 60), (0.01, 0.06), reported=(10, 60))

    assert isinstance(decision, Keep)
    check_message(decision.reason)


def test_it_waits_for_everyone_with_a_share() -> None:
    driver = PolicyDriver(LbBspCpu(), Fleet(workers(3), 12))

    decision = driver.decide((6, 6, 0), [Observation(0, 6, 1, (0.1,), (0.0,))])

    assert isinstance(decision, Keep)
    check_message(decision.reason)


def test_a_worker_without_a_share_gets_its_least() -> None:
    members = (Worker("a"), Worker("b"), Worker("c", min_share=4))
    driver = PolicyDriver(LbBspCpu(), Fleet(members, 120))

    decision = driver.ask((40, 80, 0), (0.04, 0.08, 0.01))

    assert isinstance(decision, Move)
    assert decision.shares == (58, 58, 4)


def test_unmodelled_and_impossible_times_are_left_out() -> None:
    driver = PolicyDriver(LbBspCpu("last"), Fleet(workers(2), 12))

    assert isinstance(driver.ask((6, 6), (0.1, 0.9), modelled=False), Keep)
    assert isinstance(driver.ask((6, 6), (nan, -1.0)), Keep)
    assert np.isnan(driver.state.predictor).all()


def test_the_newest_loads_are_remembered_for_the_next_step() -> None:
    driver = PolicyDriver(LbBspCpu(), Fleet(workers(2), 12))
    assert all(isnan(load) for load in driver.state.loads.ravel())

    driver.ask((6, 6), (0.1, 0.1), loads=(0.75, 0.25))
    assert driver.state.predictor.loads.tolist() == [[[0.0, 0.0]] * 4] * 2, "not known before it"
    driver.ask((6, 6), (0.1, 0.1), step=2)

    assert driver.state.predictor.loads[0, :2].tolist() == [[0.25, -0.25], [0.0, 0.0]]


def test_no_step_is_learned_with_loads_that_were_read_after_it() -> None:
    driver = PolicyDriver(LbBspCpu(), Fleet(workers(1), 6))
    driver.ask((6,), (0.1,), loads=(0.25, 0.5))

    four = Observation(0, 6, 1, (0.1,) * 4, (0.0,) * 4, cpu_load=0.75, memory_load=0.5)
    driver.decide((6,), [four], 5)

    assert driver.state.predictor.loads[0, :, 0].tolist() == [0.25 - 0.5] * 4
    assert driver.state.loads[0].tolist() == [0.75]


def test_load_that_slows_a_worker_down_is_answered_before_the_slow_step() -> None:
    # Worker 0 has half its speed whenever its machine is busy, which is known a step before.
    driver = PolicyDriver(LbBspCpu(), Fleet(workers(2), 120))
    before, busy = [], False
    for step in range(400):
        seconds = (0.12 if busy else 0.06, 0.06)
        busy = (step // 8) % 3 == 0
        load = 0.9 if busy else 0.1
        seen = [
            Observation(0, 60, step, seconds[:1], (0.0,), cpu_load=load, memory_load=0.5),
            Observation(1, 60, step, seconds[1:], (0.0,), cpu_load=0.1, memory_load=0.5),
        ]
        decision = driver.decide((60, 60), seen, step)
        if step > 200 and busy and (step - 1) // 8 % 3 != 0:
            before.append(decision)

    given = [move.shares[0] for move in before if isinstance(move, Move)]
    assert len(given) == len(before) > 5
    assert given == pytest.approx([40] * len(given), abs=4), "its next step is the first slow one"


def test_an_unknown_predictor_is_refused_with_the_available_ones() -> None:
    with raises_message(ConfigError, "'oracle'"):
        policy_from_spec("lb-bsp-cpu:predictor=oracle")
