"""Speed-up, bound and efficiency from blocks, and curves from busy times."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstride.lab.comparison.block_comparison import busy_curves, compare_blocks, completed
from evenstride.lab.comparison.comparison_result import prospect_of
from evenstride.lab.comparison.paired_ratios import UNCERTAIN

CURVES = [{3: 0.03, 4: 0.04}, {3: 0.06, 2: 0.04}]
PROSPECT = prospect_of(CURVES, 6)


def test_without_the_equal_split_the_bound_follows_from_the_curves_alone() -> None:
    found = compare_blocks({"adaptive": [[0.05], [0.05]]}, "adaptive", (), [PROSPECT] * 2)

    assert found.speedup is None
    assert found.of_bound is None
    assert found.bound is not None
    assert found.bound.value == pytest.approx(1.5)


def test_without_busy_times_a_speed_up_has_no_bound() -> None:
    found = compare_blocks({"uniform": [[0.06]], "adaptive": [[0.05]]}, "adaptive")

    assert found.fields()["speedup"] == pytest.approx(1.2)
    assert found.fields()["bound"] is None
    assert found.fields()["speedup_interval"] is None
    assert (found.efficiency, found.oracle, found.disturbed) == ({}, None, False)


@given(st.lists(st.floats(0.5, 2.0), min_size=2, max_size=8), st.floats(0.04, 0.06))
def test_the_part_of_the_bound_is_the_speed_up_over_the_bound(
    tempo: list[float], balanced_s: float
) -> None:
    blocks = {
        "uniform": [[0.06 * factor] for factor in tempo],
        "adaptive": [[balanced_s * factor] for factor in tempo],
    }
    prospects = [
        prospect_of([{n: t * factor for n, t in one.items()} for one in CURVES], 6)
        for factor in tempo
    ]

    found = compare_blocks(blocks, "adaptive", (), prospects)

    assert found.speedup is not None
    assert found.bound is not None
    assert found.of_bound is not None
    assert found.of_bound.value == pytest.approx(found.speedup.value / found.bound.value)
    assert found.of_bound.value <= 1.0 + 1e-9, "no split is faster than the best one"
    assert found.uncertainty == pytest.approx(0.0, abs=1e-6)


def test_efficiency_is_relative_to_the_fastest_fixed_split() -> None:
    blocks = {"adaptive": [[0.05]], "static:4,2": [[0.04]], "static:5,1": [[0.06]]}

    found = compare_blocks(blocks, "adaptive", ["static:5,1", "static:4,2"])

    assert found.oracle == "static:4,2"
    assert found.efficiency["adaptive"].value == pytest.approx(0.8)
    assert found.efficiency["static:4,2"].value == pytest.approx(1.0)


def test_it_is_disturbed_if_the_efficiency_of_the_balanced_policy_is_uncertain() -> None:
    steady, jumping = [[0.05], [0.05], [0.05]], [[0.04], [0.05], [0.06]]

    found = compare_blocks({"adaptive": steady, "static:4,2": jumping}, "adaptive", ["static:4,2"])

    assert found.uncertainty > UNCERTAIN
    assert found.disturbed


def test_a_curve_has_the_shares_of_enough_steps() -> None:
    many, few = [(4, 0.04)] * 9 + [(3, 0.9)] * 2, [(2, 0.02), (1, 0.01)]

    assert busy_curves([many, few, []]) == [
        {4: pytest.approx(0.04)},
        {2: pytest.approx(0.02), 1: pytest.approx(0.01)},
        {},
    ]


def test_a_worker_of_a_single_share_gets_its_calibrated_curve() -> None:
    own, apart = [{4: 0.04}, {1: 0.1, 2: 0.2}], [{4: 0.05, 8: 0.09}, {9: 9.0}]

    assert completed(own, apart) == [apart[0], own[1]]
