"""Noise and signal of gradients from parts of any size: unbiased, nearly best, honestly bounded."""

from __future__ import annotations

from math import inf, isfinite

import numpy as np
import numpy.typing as npt
import pytest

from evenstride.core.gradients.noise_scale import GradientNorms, NoiseEstimate
from tests.messages import raises_message

FloatArray = npt.NDArray[np.float64]

SPLITS = [(8, 16, 40, 64), (4, 8, 100, 400), (5, 5, 5, 5)]
WEIGHTS, TRIALS = 400, 20_000
SPECTRA = {"isotropic": np.ones(WEIGHTS), "power law": 1.0 / np.arange(1, WEIGHTS + 1)}


def _drawn(split: tuple[int, ...], spectrum: FloatArray) -> tuple[FloatArray, FloatArray, float]:
    """Draw gradients on a quadratic: squared norms of the parts and of the mean, and true ``S``.

    The gradient's own squared norm is 1.
    """
    rng = np.random.default_rng(7)
    gradient = rng.normal(size=WEIGHTS)
    gradient /= np.linalg.norm(gradient)
    variance = spectrum * 40.0 / spectrum.sum()
    norms, mean = np.zeros((TRIALS, len(split))), np.zeros(TRIALS)
    for start in range(0, TRIALS, 1000):
        total = np.zeros((1000, WEIGHTS))
        for k, samples in enumerate(split):
            noise = rng.normal(size=(1000, WEIGHTS)) * np.sqrt(variance / samples)
            part = gradient + noise
            norms[start : start + 1000, k] = (part**2).sum(1)
            total += samples / sum(split) * part
        mean[start : start + 1000] = (total**2).sum(1)
    return norms, mean, 40.0


def _estimates(
    split: tuple[int, ...], norms: FloatArray, mean: FloatArray
) -> tuple[FloatArray, FloatArray]:
    reported = [
        GradientNorms.of(split, row.tolist(), float(t)) for row, t in zip(norms, mean, strict=True)
    ]
    return np.array([one.noise for one in reported]), np.array([one.signal for one in reported])


@pytest.mark.parametrize("name", SPECTRA)
@pytest.mark.parametrize("split", SPLITS)
def test_noise_and_signal_are_unbiased_for_any_split(split: tuple[int, ...], name: str) -> None:
    norms, mean, true = _drawn(split, SPECTRA[name])

    noise, signal = _estimates(split, norms, mean)

    assert noise.mean() == pytest.approx(true, rel=0.02)
    errors = signal.std() / np.sqrt(TRIALS)
    assert abs(signal.mean() - 1.0) < max(0.02, 4 * errors)


@pytest.mark.parametrize("split", SPLITS[:2])
def test_plain_means_fail_the_same_test(split: tuple[int, ...]) -> None:
    norms, mean, true = _drawn(split, SPECTRA["isotropic"])
    parts, batch = len(split), sum(split)

    # As AdaptDL has it: parts of one size, whose squared norms count alike.
    noise = batch / (parts - 1) * (norms.mean(1) - mean)

    assert noise.mean() > 2 * true


@pytest.mark.parametrize("name", SPECTRA)
@pytest.mark.parametrize("split", SPLITS)
def test_no_linear_weights_are_much_better(split: tuple[int, ...], name: str) -> None:
    norms, mean, _ = _drawn(split, SPECTRA[name])
    noise, _ = _estimates(split, norms, mean)

    # S as a weighted sum of the parts' squared norms and T: unbiased if the weights add up to 0 and
    # those of the noise to 1; of all such the least varying one, by its own covariance.
    columns = np.column_stack([norms, mean])
    shares = np.array([*(1.0 / b for b in split), 1.0 / sum(split)])
    limits = np.stack([np.ones_like(shares), shares])
    inverse = np.linalg.inv(np.cov(columns.T))
    best = inverse @ limits.T @ np.linalg.solve(limits @ inverse @ limits.T, [0.0, 1.0])

    assert noise.var() <= 1.03 * (columns @ best).var()


def test_a_part_without_samples_does_not_count() -> None:
    with_it = GradientNorms.of((8, 0, 24), (3.0, 99.0, 5.0), 2.0)

    assert with_it == GradientNorms.of((8, 24), (3.0, 5.0), 2.0)
    assert (with_it.parts, with_it.batch, with_it.local) == (2, 32, 4.5)
    assert with_it.noise == pytest.approx(32 * 2.5)
    assert with_it.signal == pytest.approx(2 * 2.0 - 4.5)
    assert with_it.gain == pytest.approx(2.25)


def test_no_samples_at_all_are_refused() -> None:
    with raises_message(ValueError):
        GradientNorms.of((0, 0), (1.0, 1.0), 1.0)


def test_one_part_tells_nothing() -> None:
    before = NoiseEstimate().after(GradientNorms(2, 32, 4.5, 2.0))

    assert before.after(GradientNorms.of((32,), (2.0,), 2.0)) == before
    assert NoiseEstimate().scale() == NoiseEstimate().scale()
    assert NoiseEstimate().scale().high == inf


def _steps(count: int, seed: int, noise: float, signal: float) -> NoiseEstimate:
    """Return the estimate after some steps of four parts in a hundred dimensions."""
    rng, split, estimate = np.random.default_rng(seed), (8, 16, 40, 64), NoiseEstimate()
    gradient = np.full(100, np.sqrt(signal / 100))
    for _ in range(count):
        parts = [
            gradient + rng.normal(size=100) * np.sqrt(noise / 100 / samples) for samples in split
        ]
        mean = sum(s / 128 * part for s, part in zip(split, parts, strict=True))
        norms = [float((part**2).sum()) for part in parts]
        estimate = estimate.after(
            GradientNorms.of(split, norms, float((mean**2).sum())), memory=1e9
        )
    return estimate


def test_the_interval_of_the_scale_holds_as_often_as_it_says() -> None:
    true, held = 500.0, 0
    for seed in range(300):
        interval = _steps(40, seed, noise=500.0, signal=1.0).scale()
        held += interval.low <= true <= interval.high

    assert 0.91 <= held / 300 <= 0.985


def test_with_hardly_any_signal_the_scale_has_no_upper_end() -> None:
    interval = _steps(20, 3, noise=500.0, signal=0.01).scale()

    assert interval.high == inf
    assert interval.low >= 0.0


def test_a_scale_without_bound_has_a_lower_end_that_holds() -> None:
    """Of a signal so small that half of the estimates of it are below 0."""
    ends = [_steps(20, seed, noise=50.0, signal=0.002).scale() for seed in range(300)]
    unbound = [end for end in ends if end.value == inf]

    assert len(unbound) > 60
    assert all(end.high == inf for end in unbound)
    assert sum(end.low > 0 for end in unbound) > 0.8 * len(unbound)
    assert sum(end.low <= 50.0 / 0.002 for end in ends) >= 0.95 * len(ends)


def test_more_steps_make_the_interval_narrower() -> None:
    few, many = (_steps(count, 1, noise=100.0, signal=1.0).scale() for count in (30, 480))

    assert isfinite(few.high)
    assert many.high - many.low < 0.4 * (few.high - few.low)


def test_old_steps_are_forgotten() -> None:
    old, new = GradientNorms(4, 64, 9.0, 3.0), GradientNorms(4, 64, 3.0, 1.5)
    estimate = NoiseEstimate()
    for norms in [old] * 100 + [new] * 100:
        estimate = estimate.after(norms, memory=10.0)

    assert estimate.noise == pytest.approx(new.noise, rel=1e-3)
    assert estimate.signal == pytest.approx(new.signal, rel=1e-2)
    assert estimate.gain == pytest.approx(2.0, rel=1e-3)
    assert estimate.steps == pytest.approx(21.0, rel=0.01)


def test_with_an_infinite_memory_all_steps_count_alike() -> None:
    """Noise that grows tenfold over a run is its mean, and of late it is the latest."""
    steps = [GradientNorms(2, 8, 1.0 + 2 * s / 8, 1.0 + s / 8) for s in range(1, 401)]
    whole = late = NoiseEstimate()
    for one in steps:
        whole, late = whole.after(one, memory=inf), late.after(one, memory=5.0)

    assert (whole.steps, whole.noise, whole.signal) == pytest.approx((400, 200.5, 1.0))
    assert late.noise > 390
