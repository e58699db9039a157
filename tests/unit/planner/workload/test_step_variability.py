"""What steps scatter: the last of several workers, and means that wander."""

from __future__ import annotations

import numpy as np
import pytest

from evenstride.core.allocation.step_forecast import expected_max
from evenstride.core.fleet import FloatArray
from evenstride.planner.workload.from_trace import drift, scatter

MANY = 40_000


def spiky(draw: np.random.Generator, steps: int) -> FloatArray:
    found: FloatArray = np.where(draw.random(steps) < 0.02, 8.0, 1.0)
    return found


@pytest.mark.parametrize("deviation", [0.02, 0.1, 0.3])
def test_the_scatter_of_normal_steps_is_their_deviation(deviation: float) -> None:
    steps = np.random.default_rng(0).normal(1.0, deviation, MANY)

    assert scatter(0.02 * steps) == pytest.approx(deviation, rel=0.03)


def test_the_scatter_of_other_steps_makes_the_last_of_four_as_late() -> None:
    draw = np.random.default_rng(1)
    four = np.stack([spiky(draw, MANY) for _ in range(4)])
    mean = float(four.mean())

    reported = scatter(four[0])

    late = expected_max(np.full(4, mean), np.full(4, reported * mean))
    assert late == pytest.approx(float(four.max(axis=0).mean()), rel=0.02)


def test_what_all_steps_take_longer_for_a_while_is_no_scatter() -> None:
    draw = np.random.default_rng(2)
    slow = np.repeat(np.where(np.arange(40) % 2, 2.0, 1.0), 1_000)

    assert scatter(slow * draw.normal(1.0, 0.05, MANY)) == pytest.approx(0.05, rel=0.1)


@pytest.mark.parametrize(("steps", "reported"), [([1.0], 0.0), ([1.0, 1.0, 1.0], 0.0)])
def test_few_steps_alike_do_not_scatter(steps: list[float], reported: float) -> None:
    assert scatter(steps) == reported


def covered(steps: FloatArray, measured: int) -> float:
    """Return how often the mean of steps to come is within 95 % of that of those before."""
    held, windows = 0, range(0, len(steps) - 11 * measured, measured)
    for first in windows:
        before = steps[first : first + measured]
        after = steps[first + measured : first + 11 * measured]
        half = 1.96 * drift(before, 10.0)
        held += abs(np.log(after.mean() / before.mean())) < half
    return held / len(windows)


def test_means_of_steady_steps_are_known_by_their_number() -> None:
    steps = np.random.default_rng(3).normal(1.0, 0.3, MANY)

    assert covered(steps, 100) > 0.95
    assert drift(steps[:40], 10.0) > 1.5 * drift(steps[:4_000], 10.0)
    assert drift(steps, 10.0) < 0.06


def test_means_of_machines_that_wander_are_not() -> None:
    """Flicker, over three orders of time: a mean's standard error would be 1 %."""
    draw, steps = np.random.default_rng(4), np.zeros(MANY)
    for length in (10, 40, 160, 640, 2_560):
        steps += 0.15 * np.repeat(draw.normal(0.0, 1.0, MANY // length + 1), length)[:MANY]
    steps = np.exp(steps) * draw.normal(1.0, 0.05, MANY)

    assert covered(steps, 200) > 0.8
    half = [1.96 * float(np.std(steps[n : n + 200])) / 200**0.5 for n in range(0, MANY, 200)]
    assert drift(steps[:200], 10.0) > 3 * float(np.mean(half)) / 1.96
