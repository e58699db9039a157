"""A run's figures from its trace."""

from __future__ import annotations

from pathlib import Path

import pytest

from evenstride.errors import TraceError
from evenstride.lab.comparison.trace_figures import BLOCK_STEPS, measured_curve, run_figures
from tests.messages import raises_message
from tests.unit.lab.traces import write_calibration, write_run


def test_a_run_is_cut_into_blocks_of_which_the_first_is_cold(tmp_path: Path) -> None:
    steps_s = [0.9] * BLOCK_STEPS + [0.1] * BLOCK_STEPS + [0.2] * BLOCK_STEPS
    write_run(tmp_path / "trace.jsonl", "adaptive", steps_s, [(4, 4), (5, 3), (6, 2)], wait_s=0.05)

    figures = run_figures(tmp_path)

    assert figures.policy == "adaptive"
    assert figures.global_batch == 8
    assert figures.blocks_s == pytest.approx((0.9, 0.1, 0.1, 0.2, 0.2))
    assert figures.warm_s == pytest.approx((0.1, 0.1, 0.2, 0.2))
    assert figures.shares == (6, 2)
    assert figures.changes == 2
    assert figures.communication_s == pytest.approx(0.05)  # what the leader waited; others more


def test_a_single_long_step_does_not_move_the_time_of_its_block(tmp_path: Path) -> None:
    steps_s = [0.1] * (BLOCK_STEPS - 1) + [60.0]
    write_run(tmp_path / "trace.jsonl", "uniform", steps_s, [(4, 4)])

    assert run_figures(tmp_path).blocks_s == pytest.approx((0.1,))


@pytest.mark.parametrize(("left_over", "blocks"), [(9, 1), (10, 2), (29, 2), (30, 3)])
def test_a_last_block_counts_when_it_is_at_least_half(
    tmp_path: Path, left_over: int, blocks: int
) -> None:
    steps_s = [0.1] * BLOCK_STEPS + [0.3] * left_over
    write_run(tmp_path / "trace.jsonl", "uniform", steps_s, [(4, 4)])

    assert len(run_figures(tmp_path).blocks_s) == blocks


def test_a_run_shorter_than_a_block_is_judged_on_all_its_steps(tmp_path: Path) -> None:
    write_run(tmp_path / "trace.jsonl", "uniform", [0.1] * 5, [(4, 4)])

    figures = run_figures(tmp_path)

    assert figures.warm_s == figures.blocks_s == pytest.approx((0.1,))
    assert figures.changes == 0


def test_the_busy_times_of_each_worker_are_those_after_the_cold_block(tmp_path: Path) -> None:
    steps_s = [0.5] * (BLOCK_STEPS + 10)
    splits = [(4, 4), (6, 2)]
    write_run(tmp_path / "t", "adaptive", steps_s, splits, busy_s=lambda _, share: share / 20)

    figures = run_figures(tmp_path / "t")

    assert [list(mine) for mine in figures.work] == [[(6, 6 / 20)] * 10, [(2, 2 / 20)] * 10]
    assert figures.communication_s == pytest.approx(0.3), "that of most steps"


def test_of_a_run_shorter_than_two_blocks_the_busy_times_of_the_second_half_count(
    tmp_path: Path,
) -> None:
    write_run(tmp_path / "t", "uniform", [0.1] * 8, [(4, 4)])

    assert [len(mine) for mine in run_figures(tmp_path / "t").work] == [4, 4]


def test_a_run_without_a_measured_step_is_refused(tmp_path: Path) -> None:
    write_run(tmp_path / "trace.jsonl", "uniform", [], [(4, 4)])

    with raises_message(TraceError):
        run_figures(tmp_path)


def test_a_run_that_left_no_trace_is_refused(tmp_path: Path) -> None:
    with raises_message(TraceError):
        run_figures(tmp_path)


def test_a_curve_is_the_mean_at_each_size_without_the_first_steps(tmp_path: Path) -> None:
    times_s = {8: [5.0, 0.1, 0.2, 0.3], 4: [5.0, 0.05, 0.15], 2: [0.04]}
    write_calibration(tmp_path / "trace.jsonl", times_s, unmodelled_s=77.0)

    curve = measured_curve(tmp_path)

    assert curve == {8: pytest.approx(0.2), 4: pytest.approx(0.1), 2: pytest.approx(0.04)}


def test_a_calibration_without_a_measured_step_is_refused(tmp_path: Path) -> None:
    write_calibration(tmp_path / "trace.jsonl", {})

    with raises_message(TraceError):
        measured_curve(tmp_path)
