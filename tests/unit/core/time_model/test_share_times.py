"""Times at each share: a change of speed, a cold start, or a cliff."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from evenstride.core.time_model.estimates import Estimate
from evenstride.core.time_model.kalman import learn_times
from evenstride.core.time_model.observation import Measurements, Observation


def _after(estimate: Estimate, *seen: tuple[int, float]) -> Estimate:
    for share, time_s in seen:
        one = Observation(0, share, 1, (time_s,), (0.0,))
        estimate = learn_times(estimate, Measurements.of((one,)))
    return estimate


def _at(estimate: Estimate, share: int) -> float:
    return float(estimate.model.at(np.array([share]))[0])


CALM = _after(Estimate.unknown(1), *[(40, 0.2)] * 6, *[(50, 0.24)] * 6)


def test_two_steps_far_above_the_curve_show_a_cliff() -> None:
    after = _after(CALM, (60, 1.4), (60, 1.4))

    assert _at(after, 50) == pytest.approx(0.24, rel=0.02)
    # Beyond it, times are in proportion to the share.
    assert _at(after, 51) == pytest.approx(1.4 * 51 / 60, rel=0.02)
    assert _at(after, 120) == pytest.approx(2.8, rel=0.02)
    assert after.model.capacity(1.0).tolist() == [50]
    assert after.model.capacity(1.5).tolist() == [64]
    assert after.model.capacity(2.8001).tolist() == [120]


def test_the_smallest_slow_share_is_kept_for_later_runs() -> None:
    after = _after(CALM, *[(60, 1.4)] * 2, *[(80, 2.2)] * 2)

    assert after.seen.cliffs[:, 0] == pytest.approx([50, 60, 1.4], rel=0.02)
    # The time at the present share is newer.
    assert _at(after, 80) == pytest.approx(2.2, rel=0.02)
    assert _at(after, 90) == pytest.approx(2.2 * 90 / 80, rel=0.02)


def test_a_normal_time_between_both_sides_of_a_known_cliff_leaves_the_cliff() -> None:
    new = Estimate.unknown(1)
    cliff = np.array([[32.0], [64.0], [0.64]])
    seen = new.seen.shaped(np.array([0]), np.array([1]), cliff)

    after = _after(replace(new, seen=seen), *[(48, 0.048)] * 4)

    assert _at(after, 64) == pytest.approx(0.64, rel=0.02)
    assert after.seen.cliffs[1:, 0] == pytest.approx([64, 0.64], rel=0.02)


def test_one_such_step_is_not_enough_for_a_worker_alone() -> None:
    after = _after(CALM, (60, 1.4))

    assert after.seen.unclear.tolist() == [True]
    assert _at(after, 60) == pytest.approx(0.28, rel=0.05)


def test_a_normal_second_step_shows_a_cold_start() -> None:
    after = _after(CALM, (60, 1.4), (60, 0.28))

    assert not after.seen.unclear.any()
    assert _at(after, 60) == pytest.approx(0.28, rel=0.05)


def test_fewer_samples_that_take_longer_are_another_speed() -> None:
    after = _after(CALM, *[(45, 0.44)] * 3)

    assert after.seen.limits_s is None
    assert _at(after, 50) == pytest.approx(0.48, rel=0.08)


def test_a_slow_down_at_the_same_share_is_no_cliff() -> None:
    after = _after(CALM, *[(50, 0.48)] * 3, *[(45, 0.44)] * 3)

    assert after.seen.limits_s is None
    assert _at(after, 45) == pytest.approx(0.44, rel=0.05)


def test_a_cliff_moves_with_the_speed() -> None:
    after = _after(CALM, (60, 1.4), (60, 1.4), (50, 0.24), *[(50, 0.48)] * 4)

    assert _at(after, 60) == pytest.approx(2.8, rel=0.1)


def test_a_slow_down_that_began_with_more_samples_is_no_cliff_once_fewer_show_it() -> None:
    after = _after(CALM, *[(60, 1.4)] * 2, *[(50, 1.2)] * 3)

    assert after.seen.limits_s is None
    assert _at(after, 50) == pytest.approx(1.2, rel=0.1)


def test_a_time_between_moves_the_cliff() -> None:
    met = _after(CALM, (60, 1.4), (60, 1.4), (50, 0.24))

    passed = _after(met, (55, 0.26), (55, 0.26))
    failed = _after(met, (55, 1.3), (55, 1.3))

    assert passed.seen.limit[:2, 0].tolist() == [55, 60]
    assert failed.seen.limit[:2, 0].tolist() == [50, 55]


def test_each_failed_trial_waits_for_twice_as_long() -> None:
    once = _after(CALM, (60, 1.4), (60, 1.4), *[(50, 0.24)] * 8)
    twice = _after(once, (55, 1.3), (55, 1.3), *[(50, 0.24)] * 8)

    tried, open_to, waited = once.seen.bolder()
    assert (tried.limit[0, 0], open_to.tolist(), waited) == (55, [True], 8)
    assert twice.seen.bolder()[2] == 4


def test_only_the_latest_shares_are_kept() -> None:
    after = _after(Estimate.unknown(1), *[(share, 0.01 * share) for share in range(10, 60)])

    assert sorted(after.seen.share[:, 0].tolist()) == list(range(48, 60))


def test_a_time_on_the_line_between_two_shows_a_bend() -> None:
    seen = _after(CALM, (100, 0.9), (100, 0.9))
    bent = _after(seen, (74, 0.5), (74, 0.5))
    jump = _after(seen, (74, 0.75), (74, 0.75))

    assert seen.seen.limit[:2, 0].tolist() == [50, 100]
    assert bent.model.limits is None
    assert bent.seen.discoveries == seen.seen.discoveries, "it is no other cliff"
    assert jump.seen.limit[:2, 0].tolist() == [50, 74]


def test_only_what_may_be_a_bend_is_tried_halfway_at_once() -> None:
    bend, cliff = _after(CALM, (100, 0.9), (100, 0.9)).seen, _after(CALM, (60, 1.4), (60, 1.4)).seen

    assert bend.halfway_to_bends().limit[0].tolist() == [75]
    assert cliff.halfway_to_bends() is cliff


def test_a_single_slow_step_at_more_samples_is_forgotten_with_the_share() -> None:
    after = _after(CALM, (60, 1.4), (50, 0.24), (60, 1.4))

    assert after.model.limits is None


def test_a_slow_step_that_was_forgotten_hides_no_cliff() -> None:
    once = _after(CALM, (60, 1.4), *[(50, 0.24)] * 3)

    again = _after(once, (64, 1.5), (64, 1.5))

    assert again.seen.cliffs[:2, 0].tolist() == [50, 64]


def test_a_speed_that_changes_elsewhere_leaves_an_older_cliff() -> None:
    met = _after(CALM, (60, 1.4), (60, 1.4), *[(50, 0.24)] * 4, *[(40, 0.2)] * 4)

    slower = _after(met, (50, 0.48), (50, 0.48))

    assert slower.seen.cliffs[:2, 0].tolist() == [50, 60]
    assert _at(slower, 60) == pytest.approx(2.8, rel=0.1)
