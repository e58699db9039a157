"""Virtual workers: their true curves, and the noise that every policy sees alike."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstride.core.fleet import FloatArray
from evenstride.sim.engine.virtual_workers import Cluster, TrueTimes
from evenstride.sim.scenario.scenario_model import Scenario
from tests.unit.sim.clusters import FAST, SLOW, scenario, scenarios

MOST = 60


def times_of(made: Scenario, speed: float = 1.0) -> TrueTimes:
    usual = Cluster(made, 0).usual
    return usual.at_speed(np.full(made.size, speed))


@given(scenarios(), st.floats(0.2, 5), st.floats(0, 3))
def test_the_capacity_is_the_largest_share_that_ends_in_time(
    made: Scenario, speed: float, deadline_s: float
) -> None:
    times = times_of(made, speed)

    capacity = times.capacity(deadline_s)

    assert (times.at(capacity)[capacity > 0] <= deadline_s).all()
    assert (times.at(capacity + 1) > deadline_s).all()


@given(scenarios(), st.floats(0.2, 5))
def test_the_share_that_ends_at_its_own_time_is_at_least_itself(
    made: Scenario, speed: float
) -> None:
    times = times_of(made, speed)

    for share in range(1, MOST):
        shares = np.full(made.size, share)
        for worker, end_s in enumerate(times.at(shares)):
            assert times.capacity(float(end_s))[worker] >= share


@given(scenarios())
def test_a_larger_share_never_ends_sooner(made: Scenario) -> None:
    times = times_of(made)

    steps = [times.at(np.full(made.size, share)) for share in range(MOST)]

    assert (np.diff(steps, axis=0) >= 0).all()


def test_a_curve_has_a_floor_a_knee_and_a_speed() -> None:
    made = scenario(
        workers=[{**FAST, "floor_s": 0.02, "saturates_at": 30, "beyond": 3.0}, SLOW],
    )
    times = times_of(made, speed=0.5)

    fast = [float(times.at(np.array([share, 1]))[0]) for share in (1, 10, 30, 31, 40)]

    assert fast == pytest.approx([0.04, 0.04, 0.08, 0.086, 0.14])


def test_a_curve_has_waves_and_a_cliff() -> None:
    made = scenario(workers=[{**FAST, "wave": 16, "cliff_at": 40, "cliff_factor": 3.0}, SLOW])
    times = times_of(made)

    fast = [float(times.at(np.array([share, 1]))[0]) for share in (1, 16, 17, 40, 41)]

    assert fast == pytest.approx([0.026, 0.026, 0.042, 0.058, 0.174])
    assert [int(times.capacity(s)[0]) for s in (0.025, 0.027, 0.043, 0.1, 0.175)] == [
        *(0, 16, 32, 40, 48)
    ]


def test_workers_are_numbered_and_keep_what_they_declare() -> None:
    made = scenario(workers=[{**FAST, "count": 2, "cores": 4, "max_share": 40, "quantum": 8}, SLOW])

    workers = Cluster(made, 0).workers

    assert [worker.quantum for worker in workers] == [8, 8, None]
    assert [worker.name for worker in workers] == ["fast/0", "fast/1", "slow/0"]
    assert [worker.cores for worker in workers] == [4, 4, None]
    assert [worker.max_share for worker in workers] == [40, 40, None]


def test_noise_lengthens_by_what_its_group_says() -> None:
    quiet = {**FAST, "count": 1000}
    loud = {**SLOW, "count": 1000, "noise": 0.1}
    spiky = {**SLOW, "count": 1000, "spike_rate": 0.25, "spike_factor": 4.0}
    noise = Cluster(scenario(global_batch=9000, workers=[quiet, loud, spiky]), 5).next_noise()

    assert (noise[:1000] == 1.0).all()
    assert np.log(noise[1000:2000]).std() == pytest.approx(0.1, rel=0.1)
    assert sorted(set(noise[2000:])) == [1.0, 4.0]
    assert (noise[2000:] == 4.0).mean() == pytest.approx(0.25, abs=0.05)


def logs_of(steps: int, *kinds: dict[str, object]) -> FloatArray:
    """Return the logarithms of the noise of some kinds, ``(steps, W)``."""
    cluster = Cluster(scenario(global_batch=9000, workers=list(kinds)), 7)
    return np.log([cluster.next_noise() for _ in range(steps)])


def test_correlated_noise_keeps_its_size_and_remembers_the_last_step() -> None:
    kind = {**SLOW, "count": 50, "noise": 0.1}
    logs = logs_of(1000, {**kind, "noise_correlation": 0.9}, kind)

    slow, plain = logs[:, :50], logs[:, 50:]

    assert slow.std() == pytest.approx(0.1, rel=0.1)
    assert np.mean(slow[1:] * slow[:-1]) == pytest.approx(0.009, rel=0.15)
    assert np.mean(plain[1:] * plain[:-1]) == pytest.approx(0.0, abs=0.001)


def test_a_heavy_tail_keeps_the_size_of_the_noise() -> None:
    kind = {**SLOW, "count": 50, "noise": 0.1}
    logs = logs_of(1000, {**kind, "noise_tail": 5.0}, kind)

    heavy, plain = logs[:, :50], logs[:, 50:]

    assert heavy.std() == pytest.approx(0.1, rel=0.1)
    assert (np.abs(heavy) > 0.5).mean() > 1e-3 > (np.abs(plain) > 0.5).mean()


def test_no_tail_is_longer_than_the_longest_spike() -> None:
    logs = logs_of(300, {**SLOW, "count": 100, "noise": 2.0, "noise_tail": 2.1})

    assert np.abs(logs).max() == pytest.approx(np.log(1000.0))


@pytest.mark.parametrize("tail", [None, 4.0])
def test_common_noise_is_that_of_all_workers(tail: float | None) -> None:
    kind = {**SLOW, "count": 20, "noise": 0.1, "noise_tail": tail}
    half, whole = (
        logs_of(2000, {**kind, "noise_common": 0.5}),
        logs_of(100, {**kind, "noise_common": 1.0}),
    )

    assert half.std() == pytest.approx(0.1, rel=0.1)
    assert half.mean(axis=1).var() == pytest.approx(0.5 * 0.1**2, rel=0.25)
    assert np.ptp(whole, axis=1).max() < 1e-12 < whole.std()


def test_noise_of_a_kind_does_not_depend_on_what_others_add() -> None:
    plain = {**SLOW, "count": 3, "noise": 0.1}
    special = plain | {"noise_common": 0.5, "noise_tail": 3.0, "noise_correlation": 0.5}

    usual, others = logs_of(20, plain, plain), logs_of(20, plain, special)

    np.testing.assert_array_equal(usual[:, :3], others[:, :3])
    assert not np.isclose(usual[:, 3:], others[:, 3:]).any()


@given(scenarios(), st.integers(0, 9))
def test_one_seed_is_one_noise_and_another_is_another(made: Scenario, seed: int) -> None:
    one, same, other = Cluster(made, seed), Cluster(made, seed), Cluster(made, seed + 1)

    first, again, different = ([c.next_noise() for _ in range(5)] for c in (one, same, other))

    np.testing.assert_array_equal(first, again)
    if all(group.noise > 1e-6 for group in made.workers):
        assert not np.array_equal(first, different)
