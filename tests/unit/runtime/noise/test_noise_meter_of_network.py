"""Noise and signal of a real network's gradient, compared with those of all single samples.

Batches are drawn with replacement, so the covariance of a sample's gradient is exactly that over
the data set. The estimates from parts of batches must be unbiased.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, vmap

from evenstride.core.gradients.noise_scale import GradientNorms

FloatArray = npt.NDArray[np.float64]

SPLITS = [(8, 16, 40, 64), (4, 8, 100, 400), (5, 5, 5, 5)]
SAMPLES, DRAWS = 1500, 3_000_000


def _trained() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """Return a small, briefly trained classifier and its data."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(SAMPLES, 6, generator=generator, dtype=torch.float64)
    classes = (x[:, 0] + x[:, 1] * x[:, 2] > 0).long() + 2 * (x[:, 3] > 0.3).long()
    state = torch.get_rng_state()
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).double()
    torch.set_rng_state(state)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(5):
        nn.functional.cross_entropy(model(x), classes).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    return model, x, classes


@cache
def _each() -> FloatArray:
    """Return the gradient of every sample by itself, ``(samples, weights)``."""
    model, x, classes = _trained()
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def loss(values: dict[str, torch.Tensor], one: torch.Tensor, label: torch.Tensor) -> object:
        return nn.functional.cross_entropy(functional_call(model, values, one), label)

    rows = vmap(grad(loss), in_dims=(None, 0, 0))(parameters, x, classes)
    flat: FloatArray = torch.cat([rows[name].flatten(1) for name in parameters], 1).numpy()
    return flat


@cache
def _estimates(split: tuple[int, ...]) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Return ``S`` and ``|G|^2`` of many random batches, and ``S`` by plain means."""
    rng, each = np.random.default_rng(5), _each()
    found = []
    for _ in range(DRAWS // sum(split)):
        parts = [each[rng.integers(SAMPLES, size=samples)].mean(0) for samples in split]
        mean = sum(s / sum(split) * part for s, part in zip(split, parts, strict=True))
        squared = [float(part @ part) for part in parts]
        norms = GradientNorms.of(split, squared, float(mean @ mean))
        plain = norms.batch * (np.mean(squared) - norms.mean) / (norms.parts - 1)
        found.append((norms.noise, norms.signal, plain))
    noise, signal, plain = np.array(found).T
    return noise, signal, plain


def _truth() -> tuple[float, float]:
    """Return ``S`` and ``|G|^2`` over the whole data set."""
    each = _each()
    return float(each.var(0).sum()), float((each.mean(0) ** 2).sum())


def _bias(estimates: FloatArray, true: float) -> float:
    """Return the relative error of the mean; also check that the batches suffice for it."""
    error = float(estimates.std() / np.sqrt(len(estimates)) / true)
    assert error < 0.006, "more batches are needed to tell a bias of 2 %"
    return float(estimates.mean() / true - 1)


def test_the_rows_are_the_gradients_of_the_network() -> None:
    model, x, classes = _trained()
    some = [3, 3, 77, 1204]

    nn.functional.cross_entropy(model(x[some]), classes[some]).backward()  # type: ignore[no-untyped-call]

    flat = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    assert flat.numpy() == pytest.approx(_each()[some].mean(0), rel=1e-12, abs=1e-15)


@pytest.mark.parametrize("split", SPLITS)
def test_noise_and_signal_are_correct_within_2_percent(split: tuple[int, ...]) -> None:
    noise, signal, _ = _estimates(split)
    true_noise, true_signal = _truth()

    assert abs(_bias(noise, true_noise)) <= 0.02
    assert abs(_bias(signal, true_signal)) <= 0.02


@pytest.mark.parametrize(("split", "factor"), [(SPLITS[0], 2.1), (SPLITS[1], 16.0)])
def test_plain_means_fail_the_same_test(split: tuple[int, ...], factor: float) -> None:
    _, _, plain = _estimates(split)

    bias = _bias(plain / factor, _truth()[0])

    assert (1 + bias) * factor == pytest.approx(factor, rel=0.05), "as was worked out for AdaptDL"
    assert (1 + bias) * factor - 1 > 0.02


def test_plain_means_are_right_only_for_equal_parts() -> None:
    _, _, plain = _estimates(SPLITS[2])

    assert abs(_bias(plain, _truth()[0])) <= 0.02
