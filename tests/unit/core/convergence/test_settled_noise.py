"""Noise has settled once its steps prove that it no longer changes."""

from __future__ import annotations

from math import inf

import numpy as np
import pytest

from evenstride.core.convergence.settled_noise import MOST_CHANGE, settling


def gains(*levels: float, each: int = 20, scatter: float = 0.08, seed: int = 0) -> list[float]:
    """Return the gains of some steps at each level of noise, scattered by a fraction."""
    chance = np.random.default_rng(seed)
    noise = np.repeat(levels, each) * np.exp(scatter * chance.normal(size=each * len(levels)))
    return [1.0 + float(one) for one in noise]


def test_steady_noise_has_settled_from_the_start() -> None:
    found = settling(gains(0.6, 0.6))

    assert found.settled
    assert found.left_out == 0
    assert abs(found.change.value) < 0.1


def test_the_rise_at_the_beginning_is_left_out() -> None:
    found = settling(gains(0.05, 0.3, 0.6, 0.6, 0.6, 0.6))

    assert found.settled
    assert 30 <= found.left_out <= 45, "of the 40 steps that differ"


def test_noise_that_still_rises_has_not_settled() -> None:
    found = settling(gains(*np.linspace(0.01, 0.1, 12)))

    assert not found.settled
    assert found.left_out == 120, "half of them, at most"
    assert 0.25 < found.change.low < found.change.value < found.change.high < 0.5


@pytest.mark.parametrize("count", [0, 1, 7])
def test_too_few_steps_prove_nothing(count: int) -> None:
    found = settling([1.5] * count)

    assert not found.settled
    assert found.change.high == inf


def test_scattered_steps_prove_nothing_until_there_are_many() -> None:
    few, many = gains(0.5, each=16, scatter=0.4), gains(0.5, each=800, scatter=0.4)

    assert not settling(few).settled
    assert settling(many).settled
    assert not settling([*few, inf]).settled, "and a step without a mean gradient does not count"


def test_the_confidence_is_as_stated() -> None:
    """Of series whose noise changes by just too much, at most 2.5 % count as settled per look."""
    lucky = [
        settling(gains(1.0, 1.0 + MOST_CHANGE, each=40, seed=seed)).left_out
        for seed in range(400)
        if settling(gains(1.0, 1.0 + MOST_CHANGE, each=40, seed=seed)).settled
    ]

    assert lucky.count(0) <= 0.04 * 400
