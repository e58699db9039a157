"""Lab sessions that are refused or fail: their messages and their traces."""

from __future__ import annotations

from dataclasses import replace

import pytest

from evenstride.errors import ConfigError, LaunchError, TraceError
from evenstride.lab.comparison.lab_session import LabPlan
from evenstride.lab.processes.speeds import SpeedChange
from tests.messages import raises_message
from tests.unit.lab.fake_runs import FakeRuns, outcome_of


def test_limits_are_taken_away_after_a_good_end_and_after_a_bad_one(plan: LabPlan) -> None:
    good, bad = FakeRuns(), FakeRuns()

    def broken(launch: int) -> float:
        raise LaunchError("worker 1 is gone")

    bad.tempo = broken
    outcome_of(plan, good)
    with raises_message(LaunchError, "worker 1"):
        outcome_of(plan, bad)

    assert (good.limits.closed, bad.limits.closed) == (1, 1)


def test_a_script_that_sets_its_own_policy_is_refused(plan: LabPlan) -> None:
    runs = FakeRuns(policy="uniform")

    with raises_message(ConfigError):
        outcome_of(plan, runs)

    assert runs.limits.closed == 1


def test_a_script_without_a_stride_is_refused(plan: LabPlan) -> None:
    with raises_message(TraceError, "train.py", "ddp.py"):
        outcome_of(plan, FakeRuns(traced=False))


def test_a_missing_script_is_refused_before_anything_is_done(plan: LabPlan) -> None:
    runs = FakeRuns()

    with raises_message(ConfigError, "gone.py"):
        outcome_of(replace(plan, command=("gone.py",)), runs)

    assert not plan.folder.exists()
    assert runs.launches == []


def test_speeds_above_the_cores_are_refused_before_anything_is_done(plan: LabPlan) -> None:
    runs = FakeRuns()

    with raises_message(ConfigError, "2.5"):
        outcome_of(replace(plan, speeds=(1.0, 1.0, 0.5)), runs)

    assert not plan.folder.exists()
    assert runs.launches == []


def test_a_change_to_speeds_above_the_cores_is_refused_too(plan: LabPlan) -> None:
    plan = replace(plan, speeds=(0.5, 0.5), changes=(SpeedChange((1.0, 0.5), at_step=5),))

    with raises_message(ConfigError, "1.5"):
        outcome_of(plan, FakeRuns(cores=1))


def test_runs_into_a_folder_that_was_used_before_count_alone(plan: LabPlan) -> None:
    first = outcome_of(replace(plan, steps=200), FakeRuns(per_sample_s=(0.1, 0.2)))

    again = outcome_of(plan, FakeRuns())

    assert first.runs[0].step_s == pytest.approx(1.2)
    assert again.runs[0].step_s == pytest.approx(0.12)
    assert again.runs[1].changes == 1


def test_a_script_whose_workers_have_no_step_in_common_cannot_be_compared_by_steps(
    plan: LabPlan,
) -> None:
    with raises_message(ConfigError, "'asp'", "--sync"):
        outcome_of(plan, FakeRuns(sync="asp"))

    assert outcome_of(plan, FakeRuns(sync="local-sgd(every=8)")).runs
