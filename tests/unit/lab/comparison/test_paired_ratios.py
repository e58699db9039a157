"""Ratios from pairs, their intervals, and how often these contain the true ratio."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstride.lab.comparison.paired_ratios import (
    Ratio,
    geometric_mean,
    middle_mean,
    paired_ratio,
)

seconds = st.floats(1e-4, 1e3)
pairs = st.lists(st.tuples(seconds, seconds), min_size=1, max_size=6)
rounds = st.lists(pairs, min_size=1, max_size=5)


def _split(rounds: list[list[tuple[float, float]]]) -> tuple[list[list[float]], list[list[float]]]:
    return [[a for a, _ in some] for some in rounds], [[b for _, b in some] for some in rounds]


@given(rounds)
def test_the_ratio_lies_in_its_interval_and_among_the_ratios_of_the_pairs(
    rounds: list[list[tuple[float, float]]],
) -> None:
    found = paired_ratio(*_split(rounds))

    ratios = [a / b for some in rounds for a, b in some]
    assert min(ratios) * (1 - 1e-9) <= found.value <= max(ratios) * (1 + 1e-9)
    if len(ratios) == 1:
        assert (found.interval, found.half_width) == (None, None)
    else:
        low, high = found.interval or (math.nan, math.nan)
        assert low <= found.value * (1 + 1e-9) <= high * (1 + 1e-9) ** 2


@given(rounds, seconds)
def test_the_inverse_ratio_has_the_inverse_interval(
    rounds: list[list[tuple[float, float]]], factor: float
) -> None:
    above, below = _split(rounds)
    found, other = paired_ratio(above, below), paired_ratio(below, above)

    assert found.value * other.value == pytest.approx(1.0)
    if found.interval is not None and other.interval is not None:
        assert found.interval[0] * other.interval[1] == pytest.approx(1.0)


@given(rounds, st.lists(seconds, min_size=5, max_size=5))
def test_what_slows_down_both_times_of_each_pair_changes_nothing(
    rounds: list[list[tuple[float, float]]], tempo: list[float]
) -> None:
    slower = [
        [(factor * a, factor * b) for a, b in some]
        for factor, some in zip(tempo, rounds, strict=False)
    ]

    found, same = paired_ratio(*_split(rounds)), paired_ratio(*_split(slower))

    assert same.value == pytest.approx(found.value)
    assert (same.interval is None) == (found.interval is None)
    if found.interval is not None:
        assert same.interval == pytest.approx(found.interval)


@given(rounds)
def test_ratios_of_geometric_means_are_the_geometric_means_of_the_ratios(
    rounds: list[list[tuple[float, float]]],
) -> None:
    above, below = _split(rounds)

    expected = geometric_mean(above) / geometric_mean(below)

    assert paired_ratio(above, below).value == pytest.approx(expected)


def test_blocks_without_a_partner_are_left_out() -> None:
    assert paired_ratio([[2.0, 9.0], [2.0]], [[1.0], [1.0, 5.0]]).value == pytest.approx(2.0)


def test_what_differs_between_rounds_counts_once_per_round() -> None:
    """Twenty blocks in two rounds are not twenty independent pairs."""
    above = [[1.0] * 10, [1.1] * 10]

    found = paired_ratio(above, [[1.0] * 10] * 2)

    independent = paired_ratio([[a] for some in above for a in some], [[1.0]] * 20)
    assert found.half_width is not None
    assert independent.half_width is not None
    assert found.half_width > 2 * independent.half_width


def _coverage(pairs: int, noise: float, wander: float) -> float:
    """Return how often the interval contains the true ratio, of 400 machines that drift."""
    rng = np.random.default_rng(pairs)
    inside = 0
    for _ in range(400):
        tempo = np.exp(np.cumsum(rng.normal(0.0, wander, 2 * pairs)))
        times_s = tempo * np.exp(rng.normal(0.0, noise, 2 * pairs))
        order = [(0, 1) if n % 2 == 0 else (1, 0) for n in range(pairs)]
        above = [[2.0 * times_s[2 * n + order[n][0]]] for n in range(pairs)]
        below = [[times_s[2 * n + order[n][1]]] for n in range(pairs)]
        low, high = paired_ratio(above, below).interval or (0.0, 0.0)
        inside += low <= 2.0 <= high
    return inside / 400


@pytest.mark.parametrize("pairs", [3, 8, 20])
@pytest.mark.parametrize("wander", [0.0, 0.03])
def test_the_interval_contains_the_true_ratio_about_95_times_of_100(
    pairs: int, wander: float
) -> None:
    assert 0.92 <= _coverage(pairs, noise=0.03, wander=wander) <= 0.98


@given(st.lists(seconds, min_size=1, max_size=30))
def test_the_middle_mean_lies_among_the_values(values: list[float]) -> None:
    assert min(values) * (1 - 1e-9) <= middle_mean(values) <= max(values) * (1 + 1e-9)


@given(st.lists(st.floats(0.1, 0.2), min_size=4, max_size=30), st.floats(0.2, 1e6))
def test_one_long_step_does_not_count_in_the_middle_mean(steps: list[float], long_s: float) -> None:
    assert middle_mean([*steps, long_s]) <= 0.2 * (1 + 1e-9)


def test_an_interval_can_allow_for_a_drift() -> None:
    assert Ratio(2.0, (1.8, 2.2)).widened(0.1) == Ratio(2.0, (1.8 / 1.1, 2.2 * 1.1))
    assert Ratio(2.0, None).widened(0.1).interval is None
