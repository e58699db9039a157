"""The benchmark of the integrations compares blocks of the same round."""

from __future__ import annotations

from typing import Any

import pytest
from benchmarks.integrations import results
from benchmarks.integrations_ranks import POLICIES, BlockPlan

FRAMEWORKS = ("bare", "lightning")


def blocks(*speedups: tuple[float, float]) -> list[dict[str, Any]]:
    """Return the blocks of rounds in which both frameworks have these speed-ups.

    The machine is twice as slow in each round as in the one before.
    """
    return [
        {
            "round": number,
            "framework": framework,
            "policy": policy,
            "steps_s": [2.0**number * (speedup if policy == "uniform" else 1.0)] * 3,
            "shares": [number, 1],
        }
        for number, of_round in enumerate(speedups)
        for framework, speedup in zip(FRAMEWORKS, of_round, strict=True)
        for policy in POLICIES
    ][::-1]


def test_a_speedup_is_compared_with_that_of_the_bare_loop_in_the_same_round() -> None:
    bare, other = results(blocks((2.0, 1.8), (2.4, 2.16), (2.2, 1.98)), FRAMEWORKS)

    assert bare.to_bare.interval == pytest.approx((1.0, 1.0))
    assert other.to_bare.interval == pytest.approx((0.9, 0.9))
    assert other.speedup.value == pytest.approx((1.8 * 2.16 * 1.98) ** (1 / 3))
    assert other.shares == (2, 1)
    assert other.equal_overhead.value == pytest.approx(0.9)


def test_an_interval_that_is_wide_does_not_tell_and_one_below_does() -> None:
    _, below = results(blocks((2.0, 1.8), (2.0, 1.82), (2.0, 1.81)), FRAMEWORKS)
    _, wide = results(blocks((2.0, 1.8), (2.0, 2.2), (2.0, 2.0)), FRAMEWORKS)
    _, within = results(blocks((2.0, 2.0), (2.0, 1.99), (2.0, 2.01)), FRAMEWORKS)
    _, single = results(blocks((2.0, 2.0)), FRAMEWORKS)

    assert (below.outside, wide.outside, within.outside) == (True, False, False)
    assert (within.uncertain, wide.uncertain, single.uncertain) == (False, True, True)


def test_each_arm_is_as_often_early_in_a_round_as_late() -> None:
    steps = dict.fromkeys(POLICIES, 1)
    order = list(BlockPlan(FRAMEWORKS, 4, steps, steps, 0.1).order())

    places: dict[tuple[str, str], int] = {}
    for place, (number, *arm) in enumerate(order):
        places[tuple(arm)] = places.get(tuple(arm), 0) + place - 4 * number  # type: ignore[index,arg-type]
    assert len(order) == 16
    assert set(places.values()) == {6}
