from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstride.core.allocation.integer_splits import equal_finish
from evenstride.core.fleet import Fleet, IntArray, Worker
from evenstride.core.policies import policy_from_spec
from evenstride.core.policies.lb_bsp import LbBspGpu, PiecewiseCurves
from evenstride.core.policy import Keep, Move
from evenstride.errors import ConfigError
from tests.messages import check_message, raises_message
from tests.unit.core.policies.plant import (
    LBB_FINISH_S,
    LBB_FIXED_S,
    LBB_PER_SAMPLE_S,
    LBB_SPLIT,
    Plant,
    PolicyDriver,
    workers,
)


def test_a_step_goes_from_the_slowest_to_the_fastest() -> None:
    plant = Plant("lb-bsp-gpu", 120, [0.0] * 3, [0.001, 0.002, 0.004])

    assert plant.exchange(4) == (40, 40, 40)
    check_message(plant.kept, "5 steps")
    assert plant.exchange() == (60, 40, 20)
    assert plant.reasons[-1] == "20 samples from host/2 to host/0"


def test_what_goes_back_goes_half_as_far_and_after_twice_as_long() -> None:
    driver = PolicyDriver(LbBspGpu(window=1, most_window=3), Fleet(workers(2), 80))

    moves = [
        driver.ask((40, 40), (0.1, 0.2)),
        driver.ask((60, 20), (0.2, 0.1)),
        driver.ask((50, 30), (0.1, 0.2)),
        driver.ask((50, 30), (0.1, 0.2)),
        driver.ask((55, 25), (0.1, 0.2), steps=3),
        driver.ask((60, 20), (0.2, 0.1), steps=3),
    ]

    shares = [move.shares if isinstance(move, Move) else None for move in moves]
    assert shares == [(60, 20), (50, 30), None, (55, 25), (60, 20), (58, 22)]
    assert (driver.state.step, driver.state.window) == (2, 3)


def test_a_step_never_falls_under_one_sample() -> None:
    driver = PolicyDriver(LbBspGpu(window=1, most_window=1), Fleet(workers(2), 10))
    decision = driver.opening
    for turn in range(12):
        slow = turn % 2
        following = driver.ask(decision.shares, (0.1 + slow, 0.2))
        assert isinstance(following, Move)
        moved = abs(following.shares[0] - decision.shares[0])
        decision = following

    assert moved == driver.state.step == 1


def test_the_balance_is_found_and_kept() -> None:
    plant = Plant("lb-bsp-gpu", 512, LBB_FIXED_S, LBB_PER_SAMPLE_S)

    plant.run(400)

    assert plant.step_s() < 1.03 * LBB_FINISH_S


def test_the_leader_has_room_and_the_straggler_keeps_its_least() -> None:
    members = (Worker("a", max_share=35), Worker("b"), Worker("c", min_share=25))
    plant = Plant("lb-bsp-gpu", 90, [0.0] * 3, [0.0001, 0.001, 0.004], members=members)

    assert plant.exchange(5) == (35, 30, 25)
    assert plant.run(20) == (35, 30, 25)
    check_message(plant.kept)


def test_nothing_moves_when_no_one_with_room_is_faster() -> None:
    members = (Worker("a", max_share=30), Worker("b"))
    plant = Plant("lb-bsp-gpu", 60, [0.0] * 2, [0.0001, 0.001], members=members)

    assert plant.run(10) == (30, 30)
    check_message(plant.kept)


def test_a_window_in_which_nothing_could_move_is_over_all_the_same() -> None:
    members = (Worker("a"), Worker("b"), Worker("c", min_share=30))
    driver = PolicyDriver(LbBspGpu(window=2), Fleet(members, 90))
    for _ in range(100):
        decision = driver.ask((30, 30, 30), (0.1, 0.1, 0.4))
    assert isinstance(decision, Keep)

    driver.ask((30, 30, 30), (0.1, 0.5, 0.4))
    decision = driver.ask((30, 30, 30), (0.1, 0.5, 0.4))

    assert isinstance(decision, Move), "worker b is the slowest of this window"


def test_a_split_outside_the_bounds_is_brought_inside_first() -> None:
    driver = PolicyDriver(LbBspGpu(window=1), Fleet(workers(3), 60))

    decision = driver.ask((20, 40, 0), (0.1, 0.2, 0.1))

    assert isinstance(decision, Move)
    assert decision.shares == (20, 39, 1)
    check_message(decision.reason)


@pytest.mark.parametrize("version", [2018, 2020])
def test_times_at_an_earlier_share_do_not_count(version: int) -> None:
    driver = PolicyDriver(LbBspGpu(version=version), Fleet(workers(2), 60))

    decision = driver.ask((30, 30), (0.1, 0.9), reported=(7, 30), steps=50)

    assert isinstance(decision, Keep)
    assert "0 of 5 steps" in decision.reason


@pytest.mark.parametrize("lag", [1, 3, 8])
def test_the_profile_leads_to_the_published_split(lag: int) -> None:
    plant = Plant("lb-bsp-gpu:version=2018", 512, LBB_FIXED_S, LBB_PER_SAMPLE_S, lag=lag)

    plant.run(25 + 5 * lag)

    assert plant.control.shares == LBB_SPLIT
    assert plant.step_s() == pytest.approx(LBB_FINISH_S, rel=0.005)


def test_the_profile_is_taken_once() -> None:
    plant = Plant("lb-bsp-gpu:version=2018", 100, [0.01] * 2, [0.001, 0.002])
    before = plant.run(30)

    plant.per_sample_s = np.array([0.002, 0.001])

    assert plant.run(100) == before
    check_message(plant.kept)


def test_the_profile_has_splits_in_which_neighbours_get_more_and_less_by_turns() -> None:
    plant = Plant("lb-bsp-gpu:version=2018,profile_steps=1", 64, [0.01] * 4, [0.001] * 4)

    splits = [plant.exchange() for _ in range(5)]

    assert splits[:4] == [(8, 24, 8, 24), (24, 8, 24, 8), (4, 28, 4, 28), (28, 4, 28, 4)]
    assert splits[4] == (16, 16, 16, 16)


points = st.lists(
    st.tuples(st.integers(0, 60), st.floats(1e-9, 100.0)), min_size=5, max_size=5
).map(lambda found: (np.array([b for b, _ in found]), np.array([t for _, t in found])))


def _curves(drawn: list[tuple[IntArray, np.ndarray]]) -> PiecewiseCurves:
    shares, times_s = (np.stack(column, axis=1) for column in zip(*drawn, strict=True))
    return PiecewiseCurves.through(shares, times_s, 60)


@given(drawn=st.lists(points, min_size=1, max_size=4))
def test_curves_rise_whatever_was_measured(drawn: list[tuple[IntArray, np.ndarray]]) -> None:
    curves = _curves(drawn)

    times_s = np.stack([curves.at(np.full(len(drawn), share)) for share in range(62)])

    assert np.isfinite(times_s).all()
    assert (np.diff(times_s, axis=0) > 0).all()


@given(
    drawn=st.lists(points, min_size=1, max_size=4),
    share=st.integers(0, 70),
    part=st.sampled_from([1.0, 1.0 - 2**-53]) | st.floats(0, 1.2),
)
def test_the_capacity_is_the_largest_share_in_time(
    drawn: list[tuple[IntArray, np.ndarray]], share: int, part: float
) -> None:
    curves = _curves(drawn)
    deadline_s = part * float(curves.at(np.full(len(drawn), share))[0])

    capacity = curves.capacity(deadline_s)

    assert (curves.at(capacity + 1) > deadline_s).all()
    assert ((curves.at(capacity) <= deadline_s) | (capacity == 0)).all()


def test_points_that_fall_keep_the_first_and_make_the_rest_all_but_flat() -> None:
    curves = PiecewiseCurves.through(np.array([[10], [40]]), np.array([[0.5], [0.1]]), 100)

    at = [float(curves.at(np.array([share]))[0]) for share in (0, 10, 40, 100)]
    assert at == pytest.approx([0.5] * 4, abs=0.01)
    assert at == sorted(at)


def test_curves_go_through_rising_points_and_on_along_the_outermost_two() -> None:
    shares, times_s = np.array([[40], [10], [20]]), np.array([[0.50], [0.10], [0.15]])

    curves = PiecewiseCurves.through(shares, times_s, 100)

    at = [float(curves.at(np.array([share]))[0]) for share in (0, 10, 15, 20, 30, 40, 70)]
    assert at == pytest.approx([0.0, 0.10, 0.125, 0.15, 0.325, 0.50, 0.90])


def test_one_point_gives_a_line_through_the_origin_and_equal_shares_their_mean() -> None:
    curves = PiecewiseCurves.through(np.array([[10], [10]]), np.array([[0.1], [0.3]]), 100)

    at = [float(curves.at(np.array([share]))[0]) for share in (0, 5, 10, 40)]
    assert at == pytest.approx([0.0, 0.1, 0.2, 0.8])


def test_a_bend_in_the_curve_is_respected() -> None:
    # Worker 0 needs three times as long for each sample beyond 60.
    shares = np.array([[20, 20], [60, 60], [100, 100]])
    times_s = np.array([[0.2, 0.2], [0.6, 0.6], [1.8, 1.0]])
    curves = PiecewiseCurves.through(shares, times_s, 150)

    best = equal_finish(curves, np.array([1, 1]), np.array([150, 150]), 150)

    assert best.tolist() == [67, 83]


@pytest.mark.parametrize(
    ("setting", "complaint"),
    [
        ("version=2019", ("2018", "2020")),
        ("window=0", ()),
        ("most_window=0", ()),
        ("profile_steps=0", ()),
    ],
)
def test_settings_that_make_no_sense_are_refused(setting: str, complaint: tuple[str, ...]) -> None:
    with raises_message(ConfigError, *complaint):
        policy_from_spec(f"lb-bsp-gpu:{setting}")
