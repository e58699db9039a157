"""Curves from measured points, and what follows from two calibrations."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstride.lab.comparison.comparison_result import (
    TOLERANCE,
    Comparison,
    Curve,
    Oracle,
    PolicyRun,
    achieved_speeds,
    calibrated,
    drift,
    mean_curves,
    true_model,
)

seconds = st.floats(1e-4, 10.0)
sizes = st.lists(st.integers(1, 5000), min_size=2, max_size=4, unique=True)


@given(fixed_s=st.floats(0, 1.0), per_sample_s=st.floats(1e-4, 1.0), sizes=sizes)
def test_an_affine_curve_is_found_again(
    fixed_s: float, per_sample_s: float, sizes: list[int]
) -> None:
    model = true_model([{size: fixed_s + per_sample_s * size for size in sizes}])

    for size in sizes:
        expected_s = fixed_s + per_sample_s * size
        found_s = float(model.fixed_s[0] + model.per_sample_s[0] * size)
        assert found_s == pytest.approx(expected_s, rel=1e-6)


def test_the_fixed_part_and_the_part_per_sample_are_separated() -> None:
    model = true_model([{10: 0.03, 40: 0.06}, {10: 0.02, 20: 0.04}])

    assert model.fixed_s.tolist() == pytest.approx([0.02, 0.0])
    assert model.per_sample_s.tolist() == pytest.approx([0.001, 0.002])


@pytest.mark.parametrize(
    ("curve", "per_sample_s"),
    [({10: 0.02}, 0.002), ({10: 0.01, 20: 0.03}, 0.00125), ({10: 0.04, 20: 0.03}, 0.00275)],
    ids=["one point", "a negative fixed part", "larger is faster"],
)
def test_points_that_no_curve_goes_through_count_as_proportional(
    curve: dict[int, float], per_sample_s: float
) -> None:
    model = true_model([curve])

    assert model.fixed_s.tolist() == [0.0]
    assert model.per_sample_s.tolist() == pytest.approx([per_sample_s])


def test_what_a_large_size_is_off_by_does_not_bend_the_curve_at_small_sizes() -> None:
    curve = {size: 0.02 + 0.001 * size for size in (10, 20, 500, 1000)}

    model = true_model([{**curve, 1000: 0.9 * curve[1000]}])

    # By absolute errors the time at size 10 would come out a third too long.
    found_s = float(model.fixed_s[0] + 10 * model.per_sample_s[0])
    assert found_s == pytest.approx(curve[10], rel=0.02)


def test_speeds_come_out_on_the_scale_they_were_asked_for() -> None:
    curves = [{20: 0.02, 40: 0.04}, {10: 0.02, 20: 0.04}, {5: 0.0225, 10: 0.045}]

    assert achieved_speeds(curves, fastest=0.9) == pytest.approx((0.9, 0.45, 0.2), abs=1e-4)


def test_the_curve_between_two_calibrations_has_the_sizes_of_both() -> None:
    between = mean_curves([{8: 0.1, 16: 0.2}, {4: 0.3}], [{16: 0.4, 32: 0.9}, {4: 0.5}])

    assert between == [{16: pytest.approx(0.3)}, {4: pytest.approx(0.4)}]


def test_drift_is_the_largest_change_of_any_worker() -> None:
    before = [{8: 0.1, 16: 0.2}, {4: 0.4}]

    assert drift(before, [{8: 0.1, 16: 0.2}, {4: 0.36}]) == pytest.approx(0.10)
    assert drift(before, [{8: 0.11, 16: 0.2}, {4: 0.4}]) == pytest.approx(0.01 / 0.3)
    assert drift(before, before) == 0.0


@given(st.lists(st.dictionaries(st.integers(1, 9), seconds, min_size=1), min_size=1, max_size=4))
def test_the_same_calibration_twice_has_not_drifted(curves: list[dict[int, float]]) -> None:
    assert drift(curves, curves) == 0.0
    assert mean_curves(curves, curves) == [pytest.approx(curve) for curve in curves]


# Two workers, the second at a third of the first's speed; four samples each take 4 and 12 ms,
# six and two take 6 ms.
BEFORE: list[Curve] = [{4: 0.004, 8: 0.008}, {4: 0.012, 8: 0.024}]


def _later(factor: float) -> list[Curve]:
    return [BEFORE[0], {size: factor * time_s for size, time_s in BEFORE[1].items()}]


def test_the_bound_compares_the_equal_with_the_best_integer_split() -> None:
    verdict = calibrated(BEFORE, BEFORE, (1.0, 1 / 3), 8)

    assert verdict.bound == pytest.approx(12 / 6)
    assert verdict.linear_bound == pytest.approx((1 + 1 / 3) / 2 / (1 / 3))
    assert verdict.achieved_speeds == pytest.approx((1.0, 1 / 3), abs=1e-4)
    assert not verdict.disturbed
    assert verdict.drift == 0.0


def test_communication_counts_in_the_bound_and_not_in_the_linear_one() -> None:
    verdict = calibrated(BEFORE, BEFORE, (1.0, 1 / 3), 8, communication_s=0.006)

    assert verdict.bound == pytest.approx((12 + 6) / (6 + 6))
    assert verdict.linear_bound == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("factor", "disturbed"), [(1.049, False), (1.051, True), (0.951, False), (0.949, True)]
)
def test_calibrations_with_a_drift_of_more_than_5_percent_differ(
    factor: float, disturbed: bool
) -> None:
    verdict = calibrated(BEFORE, _later(factor), (1.0, 1 / 3), 8)

    assert TOLERANCE == 0.05
    assert verdict.disturbed is disturbed
    assert verdict.drift == pytest.approx(abs(factor - 1), abs=1e-4)


def test_the_bound_rests_on_the_curves_between_the_calibrations() -> None:
    verdict = calibrated(BEFORE, _later(3.0), (1.0, 1 / 3), 8)

    # The second worker takes 6 ms per sample on average; seven and one are best then.
    assert verdict.bound == pytest.approx(24 / 7)


def test_the_json_of_a_comparison_has_the_promised_names() -> None:
    run = PolicyRun("uniform", 0.1, 80.0, 0.5, (4, 4), 0.3, 0.9, 0, 0, 0)
    outcome = Comparison(
        workers=2,
        speeds=(1.0, 0.5),
        achieved_speeds=(1.0, 0.5),
        disturbed=False,
        drift=0.0,
        limits="cgroup v1",
        global_batch=8,
        runs=[run],
        oracle=Oracle((5, 3), 0.05),
        speedup=1.0,
        bound=1.5,
        linear_bound=1.5,
        trace="trace.jsonl",
    ).to_dict()

    promised = (
        "workers speeds achieved_speeds disturbed global_batch runs oracle speedup bound "
        "linear_bound trace speedup_interval bound_interval of_bound of_bound_interval pairs "
        "uncertainty report"
    )
    of_a_run = (
        "policy step_s samples_per_s efficiency shares final_loss test_accuracy samples_lost "
        "samples_repeated changes efficiency_interval"
    )
    assert set(promised.split()) <= outcome.keys()
    assert set(of_a_run.split()) == outcome["runs"][0].keys()
    assert outcome["oracle"] == {"shares": (5, 3), "step_s": 0.05}
