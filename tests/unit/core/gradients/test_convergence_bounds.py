"""The theorems of docs/explanation/convergence-rates.md, on problems whose constants are known.

All random numbers are seeded. Each bound is on an expectation. It is compared with a mean over many
independent trainings and steps, well clear of the bound on either side.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest

from evenstride.core.arrays import FloatArray, IntArray
from evenstride.core.gradients.weighting import loss_factor
from evenstride.core.sampling.partition import EpochParts, cut
from evenstride.core.sampling.permutation import Permutation

SHARES = (2, 62)
WORKERS, BATCH = len(SHARES), sum(SHARES)
LENGTH, STEPS, RUNS = 512, 160, 48
EXACT = np.array([loss_factor(WORKERS, share, BATCH) / WORKERS for share in SHARES])
NAIVE = np.full(WORKERS, 1 / WORKERS)

Samples = Iterator[list[IntArray]]
"""Each step's samples of each worker, one row per run."""


class LeastSquares:
    """Sample ``i`` has the loss ``|A w - y_i|^2 / 2``, and the data set is sorted by its targets.

    With ``H = A'A``, the smoothness ``L`` and strong convexity ``mu`` are the extreme eigenvalues
    of ``H``. A gradient's noise is ``A'(mean y - y_i)`` at all weights, so its variance is exact.
    """

    smoothness, convexity, step_size = 4.0, 1.0, 0.125
    curvature = np.array([smoothness, convexity])  # in the basis of the eigenvectors
    start = np.array([0.5, -0.5])

    def __init__(self) -> None:
        noise = np.random.default_rng(1).normal(size=(LENGTH, 2))
        noise = noise[np.argsort(noise[:, 1])]
        self.noise = noise - noise.mean(axis=0)  # so that the best weights are 0
        self.variance = float((self.noise**2).sum(axis=1).mean())

    def gradient(self, at: FloatArray, samples: IntArray) -> FloatArray:
        return np.asarray(at * self.curvature + self.noise[samples].mean(axis=1))

    def bound(self) -> float:
        """Return theorem 1's bound on the mean squared distance in the second half."""
        steps = np.arange(STEPS // 2, STEPS) + 1
        begin = (1 - self.step_size * self.convexity) ** steps * float(self.start @ self.start)
        noise = self.step_size * self.variance / (self.convexity * BATCH)
        return float((begin + noise).mean())

    def error(self, source: Samples, weights: FloatArray) -> float:
        """Return the mean squared distance in the second half of the trainings."""
        at, errors = np.tile(self.start, (RUNS, 1)), list[float]()
        for _, samples in zip(range(STEPS), source, strict=False):
            of_workers = [self.gradient(at, mine) for mine in samples]
            at = at - self.step_size * np.tensordot(weights, np.array(of_workers), 1)
            errors.append(float((at**2).sum(axis=1).mean()))
        return float(np.mean(errors[STEPS // 2 :]))


PROBLEM = LeastSquares()
WINDOWS = [range(start, start + BATCH) for start in range(0, LENGTH, BATCH)]
# Each worker's positions in an epoch, step after step.
PLACES = [
    np.concatenate([np.array(cut(window, SHARES)[k].positions) for window in WINDOWS])
    for k in range(WORKERS)
]


def independent() -> Samples:
    random = np.random.default_rng(2)
    while True:
        yield np.split(random.integers(0, LENGTH, (RUNS, BATCH)), [SHARES[0]], axis=1)


def windows() -> Samples:
    """Yield windows of one permutation per epoch, as the loader's default."""
    for epoch in range(STEPS):
        orders = [Permutation(LENGTH, run, epoch) for run in range(RUNS)]
        yield from _steps([[order.at(at) for order in orders] for at in PLACES])


def parts() -> Samples:
    """Yield samples of parts that are cut from one permutation, as with `dbs`."""
    for epoch in range(STEPS):
        runs = [EpochParts(LENGTH, BATCH, SHARES, run, epoch) for run in range(RUNS)]
        yield from _steps([[run.indices(k, at) for run in runs] for k, at in enumerate(PLACES)])


def _steps(of_workers: list[list[IntArray]]) -> Samples:
    """Yield the steps of an epoch, from each worker's samples of all steps by run."""
    split = [np.split(np.array(runs), LENGTH // BATCH, axis=1) for runs in of_workers]
    yield from map(list, zip(*split, strict=True))


@pytest.mark.parametrize("source", [independent, windows, parts])
def test_weighted_gradients_obey_the_bound_and_a_mean_of_means_does_not(
    source: Callable[[], Samples],
) -> None:
    exact, naive = (PROBLEM.error(source(), weights) for weights in (EXACT, NAIVE))

    assert exact < 0.7 * PROBLEM.bound()
    assert naive > 1.5 * PROBLEM.bound()


def test_the_bound_is_no_looser_than_its_proof() -> None:
    """Independent samples: the error is known exactly, and a third of the bound."""
    h, eta = PROBLEM.curvature, PROBLEM.step_size
    known = eta * (PROBLEM.noise**2).mean(axis=0) / (BATCH * h * (2 - eta * h))

    assert PROBLEM.error(independent(), EXACT) == pytest.approx(float(known.sum()), rel=0.2)


def test_parts_in_the_order_of_the_data_would_differ_by_class() -> None:
    """Why parts are cut from a permutation: the first worker would have one end of the targets."""

    def offset(shuffle: bool) -> float:
        part = EpochParts(LENGTH, BATCH, SHARES, 0, 0, shuffle)
        steps = BATCH * np.arange(part.full_steps)[:, np.newaxis] + np.arange(SHARES[0])
        mine = PROBLEM.noise[part.indices(0, steps.ravel()), 1]
        return abs(float(np.mean(mine))) * float(np.sqrt(len(mine)))

    assert offset(shuffle=True) < 3
    assert offset(shuffle=False) > 6


def rounds(
    every: int, weights: FloatArray, slope: Callable[[FloatArray], FloatArray], eta: float
) -> Iterator[FloatArray]:
    """Yield the mean weights ``(RUNS,)`` after each step of local SGD with unit noise."""
    random = np.random.default_rng(3)
    scale = 1 / np.sqrt(np.array(SHARES))[:, np.newaxis]
    at, step = np.ones((WORKERS, RUNS)), 0
    while True:
        at = at - eta * (slope(at) + scale * random.normal(size=at.shape))
        step += 1
        mean = weights @ at
        if step % every == 0:
            at = np.tile(mean, (WORKERS, 1))
        yield mean


def test_local_sgd_with_weights_obeys_its_bound_and_a_plain_mean_does_not() -> None:
    """``L w^2 / 2 - (L - mu) log cosh w``: its curvature goes from ``mu`` at the optimum to L."""
    smoothness, convexity, eta, every, steps = 4.0, 1.0, 1 / 80, 8, 2400
    shared = eta / (convexity * BATCH)
    drift = 2 * smoothness * (every - 1) * (WORKERS - 1) * eta**2 / (convexity * BATCH)
    begin = (1 - eta * convexity) ** (steps // 2)

    def error(weights: FloatArray) -> float:
        found = rounds(
            every, weights, lambda w: smoothness * w - (smoothness - convexity) * np.tanh(w), eta
        )
        means = [next(found) for _ in range(steps)]
        return float(np.mean(np.square(means[steps // 2 :])))

    assert error(EXACT) < 0.7 * (begin + shared + drift)
    assert error(NAIVE) > 1.5 * (begin + shared + drift)


def test_on_least_squares_local_sgd_with_weights_is_mini_batch_sgd() -> None:
    local, union = (rounds(every, EXACT, lambda w: 3 * w, 0.1) for every in (8, 1))

    for _ in range(80):
        assert np.abs(next(local) - next(union)).max() < 1e-12
