"""Phases of a speed: found where they are, and only there."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstride.report.analysis.speed_phases import phases_of
from evenstride.report.page.page_runs import thinned


def noisy(levels: list[tuple[int, float]], noise: float, seed: int) -> np.ndarray:
    speed = np.repeat([level for _, level in levels], [steps for steps, _ in levels])
    return np.asarray(
        speed * np.exp(noise * np.random.default_rng(seed).standard_normal(len(speed)))
    )


@pytest.mark.parametrize("length", [60, 400, 3000, 100_000])
@pytest.mark.parametrize("noise", [0.02, 0.1])
def test_a_change_is_found_at_its_step(length: int, noise: float) -> None:
    first, stop = int(0.3 * length), int(0.6 * length)
    hits = 0
    for seed in range(8):
        levels = [(first, 1.0), (stop - first, 0.5), (length - stop, 1.0)]
        found = phases_of(noisy(levels, noise, seed))
        near = [phase for phase in found if phase.speed < 0.75]
        hits += (
            len(near) == 1
            and abs(near[0].first - first) <= 1 + 0.002 * length
            and abs(near[0].last + 1 - stop) <= 1 + 0.002 * length
        )
        assert near[0].speed == pytest.approx(0.5, rel=0.15)
    assert hits >= 7


@pytest.mark.parametrize("noise", [0.02, 0.1, 0.3])
def test_noise_alone_makes_no_phases(noise: float) -> None:
    counts = [len(phases_of(noisy([(1000, 1.0)], noise, seed))) for seed in range(40)]

    assert counts.count(1) >= 38


def test_single_slow_steps_make_no_phases() -> None:
    speed = noisy([(500, 1.0)], 0.03, 0)
    speed[::29] /= 6.0

    assert len(phases_of(speed)) == 1


def test_a_slow_drift_is_several_phases_of_falling_speed() -> None:
    found = phases_of(np.linspace(1.0, 0.3, 900))
    speeds = [phase.speed for phase in found]

    assert len(found) > 3
    assert speeds == sorted(speeds, reverse=True)


@given(
    st.lists(st.one_of(st.floats(0.01, 100.0), st.just(float("nan")), st.just(0.0)), max_size=120)
)
def test_phases_cover_the_known_steps_in_order(values: list[float]) -> None:
    speed = np.array(values, dtype=np.float64)
    found = phases_of(speed)
    known = np.flatnonzero(np.isfinite(speed) & (speed > 0))

    assert bool(found) == bool(len(known))
    for before, after in pairwise(found):
        assert before.first <= before.last < after.first
    assert all(0.0 < phase.speed <= 1.0 for phase in found)
    if found:
        assert (found[0].first, found[-1].last) == (known[0], known[-1])


@given(
    st.lists(st.one_of(st.floats(-1e6, 1e6), st.just(float("nan"))), max_size=200),
    st.integers(1, 40),
)
def test_thinning_keeps_the_extremes(values: list[float], most: int) -> None:
    array = np.array(values, dtype=np.float64)
    few = thinned(array, most)
    known = array[~np.isnan(array)]

    assert len(few.mean) <= most
    if len(known):
        assert np.nanmin(few.least) == known.min()
        assert np.nanmax(few.most) == known.max()
    if len(array) <= most:
        assert few.exact
        np.testing.assert_array_equal(few.mean, array)
