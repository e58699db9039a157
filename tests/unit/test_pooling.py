"""Workers of one kind share their evidence; different ones do not."""

from __future__ import annotations

import numpy as np

from evenstride.core.estimation import Estimate
from evenstride.core.fleet import FloatArray
from evenstride.core.observation import Measured
from evenstride.core.pooling import pooled


def _estimate(time_s: FloatArray, steps: int, noise: float, seed: int = 0) -> Estimate:
    """Return what some steps of workers at a share of 64 teach, under noise."""
    rng, workers = np.random.default_rng(seed), len(time_s)
    estimate = Estimate.unknown(workers)
    for step in range(steps):
        busy_s = time_s * np.exp(noise * rng.standard_normal(workers))
        told = np.full(workers, step), np.ones(workers, dtype=np.int64)
        share = np.full(workers, 64)
        estimate = estimate.learn(
            Measured(np.arange(workers), share, *told, busy_s, np.zeros(workers))
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
