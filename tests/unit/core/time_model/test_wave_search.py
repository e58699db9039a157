"""Waves are found where times are stairs, and nowhere else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from evenstride.core.arrays import FloatArray, IntArray
from evenstride.core.time_model.estimates import Estimate
from evenstride.core.time_model.kalman import learn_times
from evenstride.core.time_model.observation import Measurements

Curve = Callable[[IntArray], FloatArray]


def _learned(
    curve: Curve,
    splits: list[list[int]],
    noise: float = 0.02,
    seed: int = 0,
    sought: bool = True,
    steps: int = 2,
    drift: float = 0.0,
) -> Estimate:
    """Return what some steps at each split of a fleet show; speeds are known to have a drift."""
    rng, workers = np.random.default_rng(seed), len(splits[0])
    estimate = Estimate.unknown(workers, np.full(workers, sought))
    estimate = replace(estimate, drift=np.maximum(estimate.drift, drift))
    for first, split in enumerate(splits):
        shares = np.array(split)
        for step in range(steps):
            busy_s = curve(shares) * np.exp(noise * rng.standard_normal(workers))
            ranks, ones = np.arange(workers), np.ones(workers, np.int64)
            at = np.full(workers, steps * first + step)
            seen = Measurements(ranks, shares, at, ones, busy_s, np.zeros(workers))
            estimate = learn_times(estimate, seen)
    return estimate


def _stairs(quantum: int | list[int], fixed_s: float = 0.0) -> Curve:
    quanta = np.array(quantum)
    return lambda shares: fixed_s + 0.001 * quanta * np.ceil(shares / quanta)


def _spread(unit: int, seed: int, workers: int = 4) -> list[list[int]]:
    """Return random splits around four units each."""
    rng = np.random.default_rng(seed)
    splits: list[list[int]] = rng.integers(2 * unit, 6 * unit, (6, workers)).tolist()
    return splits


@pytest.mark.parametrize("quantum", [8, 16, 24, 32, 48, 64, 128])
@pytest.mark.parametrize("fixed_s", [0.0, 0.02])
def test_waves_of_any_size_are_found(quantum: int, fixed_s: float) -> None:
    estimate = _learned(_stairs(quantum, fixed_s), _spread(quantum, 1))

    assert estimate.seen.quantum.tolist() == [quantum] * 4
    for share in (quantum + 1, 2 * quantum, 3 * quantum - 1):
        shares = np.full(4, share)
        assert estimate.model.at(shares) == pytest.approx(
            _stairs(quantum, fixed_s)(shares), rel=0.12
        )


def test_two_moves_of_a_fleet_are_enough_to_find_them() -> None:
    estimate = _learned(_stairs(32), [[64, 64, 64], [85, 64, 43], [97, 66, 29]])

    assert estimate.seen.quantum.tolist() == [32, 32, 32]


@pytest.mark.parametrize("seed", [0, 2])
def test_small_waves_may_be_speeds_that_drift(seed: int) -> None:
    splits = _spread(8, seed)

    assert _learned(_stairs(8), splits, noise=0.01).seen.quantum.tolist() == [8] * 4
    drifting = _learned(_stairs(8), splits, noise=0.01, drift=0.05)
    assert drifting.seen.quantum.tolist() == [1] * 4


def test_workers_may_have_waves_of_their_own() -> None:
    quanta = [32, 32, 32, 24, 24, 24]

    estimate = _learned(_stairs(quanta), _spread(32, 3, workers=6) + _spread(24, 4, workers=6))

    assert estimate.seen.quantum.tolist() == quanta


def test_a_worker_that_stays_at_one_share_has_the_waves_of_the_others() -> None:
    splits = [[a, b, c, 96] for a, b, c in _spread(32, 5, workers=3)]

    assert _learned(_stairs(32), splits).seen.quantum.tolist() == [32] * 4


def _affine(shares: IntArray) -> FloatArray:
    return np.asarray(0.02 + 0.001 * shares)


def _floor(shares: IntArray) -> FloatArray:
    return np.maximum(0.08, _affine(shares))


def _saturated(shares: IntArray) -> FloatArray:
    return np.asarray(_affine(shares) + 0.0005 * np.maximum(shares - 90, 0))


@pytest.mark.parametrize("curve", [_affine, _floor, _saturated])
@pytest.mark.parametrize("noise", [0.0, 0.02, 0.1, 0.3])
def test_no_waves_are_found_in_other_curves(curve: Curve, noise: float) -> None:
    found = [_learned(curve, _spread(20, seed), noise, seed).seen.quantum for seed in range(20)]

    assert (np.array(found) == 1).all()


def test_speeds_that_change_all_the_time_are_no_waves() -> None:
    for seed in range(20):
        rng = np.random.default_rng(seed)

        def curve(shares: IntArray, rng: np.random.Generator = rng) -> FloatArray:
            return np.asarray(_affine(shares) / rng.choice([0.5, 1.0], len(shares)))

        estimate = _learned(curve, _spread(20, seed), seed=seed)

        assert (estimate.seen.quantum == 1).all()


def test_waves_are_not_sought_if_any_share_is_allowed() -> None:
    estimate = _learned(_stairs(32), _spread(32, 1), sought=False)

    assert (estimate.seen.quantum == 1).all()
    assert not estimate.seen.has_waves


def test_a_change_of_speed_moves_the_whole_staircase() -> None:
    estimate = _learned(_stairs(32), _spread(32, 1))
    shares = estimate.seen.share[0]
    for step in range(3):
        slow_s = 2.0 * _stairs(32)(shares)
        seen = Measurements(
            *(np.arange(4), shares, np.full(4, 50 + step), np.ones(4, np.int64), slow_s),
            np.zeros(4),
        )
        estimate = learn_times(estimate, seen)

    assert estimate.seen.quantum.tolist() == [32] * 4
    assert estimate.model.at(np.full(4, 65)) == pytest.approx(np.full(4, 0.192), rel=0.05)


def test_times_far_apart_leave_finite_numbers() -> None:
    def curve(shares: IntArray) -> FloatArray:
        return np.asarray(10.0 ** (shares % 7 - 3), np.float64)

    huge = _learned(curve, _spread(20, 2), noise=0.5)

    assert np.isfinite(huge.now.rows).all()
    assert (huge.now.per_sample_s > 0).all()
