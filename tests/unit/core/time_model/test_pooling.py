"""Workers of one kind share their evidence; different ones do not."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from evenstride.core.fleet import FloatArray
from evenstride.core.time_model.estimates import CurveEstimates, Estimate
from evenstride.core.time_model.kalman import learn_times
from evenstride.core.time_model.observation import Measurements
from evenstride.core.time_model.pooling import KindMembers, Kinds, pooled


def _estimate(time_s: FloatArray, steps: int, noise: float | FloatArray, seed: int = 0) -> Estimate:
    """Return what some steps of workers at a share of 64 teach, under noise."""
    rng, workers = np.random.default_rng(seed), len(time_s)
    estimate = Estimate.unknown(workers)
    for step in range(steps):
        busy_s = time_s * np.exp(noise * rng.standard_normal(workers))
        reported = np.full(workers, step), np.ones(workers, dtype=np.int64)
        share = np.full(workers, 64)
        estimate = learn_times(
            estimate, Measurements(np.arange(workers), share, *reported, busy_s, np.zeros(workers))
        )
    return estimate


def _times(estimate: Estimate, workers: int) -> FloatArray:
    return estimate.model.at(np.full(workers, 64))


def test_equal_workers_come_out_equal() -> None:
    estimate = _estimate(np.full(8, 0.05), 5, 0.05)
    alone, together = _times(estimate, 8), _times(pooled(estimate, np.full(8, 64)), 8)

    assert np.ptp(alone) / 0.05 > 0.03
    assert np.ptp(together) / 0.05 < 2e-3
    assert abs(together.mean() / 0.05 - 1) < 0.02


def test_a_noisy_worker_of_a_kind_is_not_left_out_for_its_doubt() -> None:
    """Its own times are off by 3 % as a rule. Where that lets it fit its kind, it is put right."""
    noise, off = np.array([0.01, 0.01, 0.01, 0.2]), []
    for seed in range(12):
        estimate = _estimate(np.full(4, 0.05), 60, noise, seed)
        both = estimate, pooled(estimate, np.full(4, 64))
        off.append([abs(_times(one, 4)[3] / 0.05 - 1) for one in both])
    alone, together = np.array(off).T

    assert (together <= alone + 0.002).all()
    assert np.count_nonzero(together < 0.25 * alone) >= 4


def test_two_kinds_are_kept_apart() -> None:
    truth = np.repeat([0.05, 0.08], 4)
    together = _times(pooled(_estimate(truth, 10, 0.03), np.full(8, 64)), 8)

    assert np.ptp(together[:4]) < 1e-4 < np.ptp(together)
    assert np.allclose(together, truth, rtol=0.03)


def test_neighbours_that_differ_truly_keep_their_own_times() -> None:
    truth = np.linspace(0.05, 0.06, 8)
    estimate = _estimate(truth, 400, 0.01)

    alone, together = _times(estimate, 8), _times(pooled(estimate, np.full(8, 64)), 8)

    assert np.allclose(together, truth, rtol=0.005)
    assert np.allclose(together, alone, rtol=0.005)


def test_drawing_together_leaves_less_doubt() -> None:
    estimate, shares = _estimate(np.full(8, 0.05), 3, 0.05), np.full(8, 64)

    assert (pooled(estimate, shares).relative_std(shares) < estimate.relative_std(shares)).all()


def test_a_lone_worker_is_left_alone() -> None:
    estimate = _estimate(np.array([0.05]), 3, 0.05)

    assert (pooled(estimate, np.array([64])).now.rows == estimate.now.rows).all()


def test_a_worker_whose_speed_has_just_changed_is_left_alone() -> None:
    """Its shape is in doubt then, so elsewhere it would fit any kind."""
    shares, rng = np.array([120, 40, 40]), np.random.default_rng(0)
    fixed_s, per_sample_s = np.full(3, 0.02), np.array([1 / 3000, 1 / 1000, 1 / 1000])
    estimate = Estimate.unknown(3)
    for step in range(60):
        time_s = (fixed_s + shares * per_sample_s) * np.exp(0.03 * rng.standard_normal(3))
        time_s[0] *= 2.5 if step >= 57 else 1.0
        reported = np.full(3, step), np.ones(3, dtype=np.int64), time_s, np.zeros(3)
        estimate = learn_times(estimate, Measurements(np.arange(3), shares, *reported))

    # The split that follows is already decided, long before anybody has worked under it.
    decided = np.array([50, 75, 75])
    alone, together = estimate.model.at(decided), pooled(estimate, decided).model.at(decided)

    assert together[0] == alone[0]
    assert np.ptp(together[1:]) < np.ptp(alone[1:])


def test_more_kinds_than_are_looked_for_keep_their_own_times() -> None:
    truth = np.geomspace(0.02, 0.2, 400)
    estimate = _estimate(truth, 60, 0.01)

    together = _times(pooled(estimate, np.full(400, 64)), 400)

    assert np.allclose(together, truth, rtol=0.015)


def test_two_kinds_among_very_many_workers_are_distinguished_in_any_order() -> None:
    for truth in (np.tile([0.05, 0.06], 2500), np.repeat([0.05, 0.06], 2500)):
        together = _times(pooled(_estimate(truth, 5, 0.05), np.full(5000, 64)), 5000)

        assert np.count_nonzero(np.abs(together / truth - 1) > 0.01) < 25


def test_a_worker_that_outweighs_all_others_stays_unchanged() -> None:
    """Of what the others tell, rounding alone is left: of some times, more than an exp can hold."""
    known, shares = Estimate.unknown(3), np.full(3, 64)
    for sure_s in np.linspace(0.01, 0.2, 200):
        time_s = sure_s * np.array([1.0, 1.2, 0.8])
        doubt_s = np.array([0.0, 0.7, 0.7]) * time_s
        none = np.zeros(3)
        slope, slope_doubt = 0.8 * time_s / 64, (doubt_s / 64) ** 2
        rows = np.stack([0.2 * time_s, slope, doubt_s**2, none, slope_doubt])
        together = pooled(replace(known, now=CurveEstimates(rows)), shares)

        assert np.isfinite(together.now.rows).all()
        assert np.allclose(together.now.rows[:, 0], rows[:, 0], rtol=1e-12, atol=0.0)
        assert np.allclose(_times(together, 3), time_s, rtol=1e-6)


def _levels(*time_s: float) -> Estimate:
    """Return well-known workers with these times at a share of 64."""
    level, every = np.array(time_s), np.ones(len(time_s), dtype=np.int64)
    curves = CurveEstimates.certain(0.3 * level, 0.7 * level / 64)
    curves = curves.times(1.0, np.full(len(time_s), 1e-6))
    unknown = Estimate.unknown(len(time_s))
    return replace(unknown, now=curves, steps=1000 * every)


def test_kinds_are_used_again_ever_longer_while_they_stay_the_same() -> None:
    known, shares = _levels(0.05, 0.05, 0.08, 0.08), np.full(4, 64)
    kinds: Kinds | None = None
    searched = []
    for decision in range(40):
        before, kinds = kinds, Kinds.of(known, shares, kinds)
        if before is None or kinds.each is not before.each:
            searched.append(decision)

    assert kinds is not None and kinds.each.tolist() == [0, 0, 1, 1]
    assert searched == [0, 1, 3, 7, 15, 23, 31, 39]


def test_a_kind_that_fails_its_test_is_found_again_at_once() -> None:
    shares, kinds = np.full(4, 64), None
    for _ in range(10):
        kinds = Kinds.of(_levels(0.05, 0.05, 0.05, 0.05), shares, kinds)
    assert kinds is not None and kinds.left > 2

    kinds = Kinds.of(_levels(0.05, 0.05, 0.05, 0.09), shares, kinds)

    assert kinds.each.tolist() == [0, 0, 0, 1]
    assert kinds.period == 1, "they may be others after the next time"


def test_workers_that_become_equal_are_one_kind_after_a_while() -> None:
    shares, kinds = np.full(4, 64), None
    for _ in range(20):
        kinds = Kinds.of(_levels(0.05, 0.05, 0.05, 0.09), shares, kinds)
    for _ in range(8):
        kinds = Kinds.of(_levels(0.05, 0.05, 0.05, 0.05), shares, kinds)

    assert kinds is not None and kinds.count == 1


def test_a_kind_with_tiny_weights_after_one_with_large_weights_is_divided() -> None:
    level = np.array([-1.0, 1.0, -1.0, -1.0, 2.0])
    weight = np.array([1e20, 1e20, 1.0, 1.0, 1.0])
    parts = KindMembers.of(np.array([0, 0, 1, 1, 1]))

    last, gain = parts.best_cuts(level, weight)

    assert last.tolist() == [0, 3]
    assert gain == pytest.approx([2e20, 6.0])
