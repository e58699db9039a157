"""A lab session on runs made of numbers: its order, its figures, its refusals."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from evenstride.lab.comparison.lab_session import LabPlan, Viewer
from evenstride.lab.processes.speeds import SpeedChange
from tests.messages import check_message
from tests.unit.lab.fake_runs import BATCH, FakeRuns, outcome_of


def test_figures_come_from_the_runs_and_the_bound_from_the_calibrations(plan: LabPlan) -> None:
    outcome = outcome_of(plan, FakeRuns(split=(7, 5)))

    # Equal: six samples at 20 ms; adaptive: five; the best split: four, and eight at 10 ms.
    uniform, adaptive = outcome.runs
    assert uniform.step_s == pytest.approx(0.12)
    assert adaptive.step_s == pytest.approx(0.10)
    assert outcome.oracle is not None
    assert outcome.oracle.shares == (8, 4)
    assert outcome.oracle.step_s == pytest.approx(0.08)
    assert outcome.speedup == pytest.approx(1.2)
    assert outcome.bound == pytest.approx(1.5)
    assert outcome.linear_bound == pytest.approx(1.5)
    assert uniform.efficiency == pytest.approx(0.08 / 0.12)
    assert adaptive.efficiency == pytest.approx(0.8)
    assert adaptive.samples_per_s == pytest.approx(BATCH / 0.10)
    assert (adaptive.shares, adaptive.changes) == ((7, 5), 1)
    assert (uniform.shares, uniform.changes) == ((6, 6), 0)
    assert outcome.achieved_speeds == pytest.approx((1.0, 0.5), abs=1e-4)
    assert (outcome.global_batch, outcome.workers, outcome.limits) == (BATCH, 2, "numbers")
    assert not outcome.disturbed


def test_ratios_have_intervals_from_pairs_of_blocks(plan: LabPlan) -> None:
    outcome = outcome_of(replace(plan, repeats=3), FakeRuns(split=(7, 5)))

    assert outcome.pairs == 3 * 4, "blocks of 20 of the 80 steps after the cold ones"
    assert outcome.speedup_interval == pytest.approx((1.2, 1.2))
    assert outcome.bound_interval == pytest.approx((1.5, 1.5))
    assert outcome.of_bound == pytest.approx(0.8)
    assert outcome.of_bound_interval == pytest.approx((0.8, 0.8))
    assert outcome.runs[0].efficiency_interval == pytest.approx((2 / 3, 2 / 3))
    assert outcome.uncertainty == pytest.approx(0.0, abs=1e-9)


def test_workers_that_take_longer_in_training_than_apart_from_it_do_not_change_the_bound(
    plan: LabPlan,
) -> None:
    class Loaded(FakeRuns):
        """Loading samples makes the second worker slower in training."""

        def busy_s(self, worker: int, share: int) -> float:
            return share * (0.01, 0.03)[worker]

    outcome = outcome_of(plan, Loaded(split=(9, 3)))

    # By the calibrations it would be 1.5; the balanced split takes 90 ms, the equal one 180 ms.
    assert outcome.bound == pytest.approx(2.0)
    assert outcome.speedup == pytest.approx(2.0)
    assert outcome.of_bound == pytest.approx(1.0)
    assert outcome.achieved_speeds == pytest.approx((1.0, 1 / 3), abs=1e-4)


@pytest.mark.parametrize(("steps", "noted"), [(50, True), (119, False), (120, False)])
def test_a_script_that_ends_before_the_steps_asked_for_is_noted(
    plan: LabPlan, steps: int, noted: bool
) -> None:
    outcome = outcome_of(replace(plan, steps=120), FakeRuns(script_steps=steps))

    early = [one for one in outcome.caveats if "ended after 50 of the 120 requested steps" in one]
    assert len(early) == noted


def test_policies_alternate_between_two_calibrations_and_every_other_round_is_reversed(
    plan: LabPlan,
) -> None:
    runs = FakeRuns(split=(7, 5))

    outcome_of(plan, runs)

    fixed = ["static:8,4", "static:7,5"]
    assert runs.policies() == [
        "calibration",
        *["uniform", "adaptive", *fixed],
        *[*reversed(fixed), "adaptive", "uniform"],
        "calibration",
    ]


def test_calibrations_do_without_fixed_splits(plan: LabPlan) -> None:
    runs = FakeRuns(split=(7, 5))

    outcome = outcome_of(replace(plan, fixed_splits=False), runs)

    in_turn = ["uniform", "adaptive", "adaptive", "uniform"]
    assert runs.policies() == ["calibration", *in_turn, "calibration"]
    assert outcome.oracle is None
    assert outcome.bound == pytest.approx(1.5)


def test_the_oracle_is_the_fastest_fixed_split_that_was_run(plan: LabPlan) -> None:
    class Fooled(FakeRuns):
        """The calibrated curves say (8, 4), but together the second worker is slower."""

        def busy_s(self, worker: int, share: int) -> float:
            return share * (0.01, 0.05)[worker]

    outcome = outcome_of(plan, Fooled(split=(10, 2)))

    assert outcome.oracle is not None
    assert outcome.oracle.shares == (10, 2)
    assert outcome.oracle.step_s == pytest.approx(0.10)


def test_the_cold_block_counts_in_no_figure(plan: LabPlan) -> None:
    outcome = outcome_of(replace(plan, steps=80), FakeRuns())

    adaptive = outcome.runs[1]
    assert adaptive.step_s == pytest.approx(0.08)  # its first 40 steps took 120 ms each


def test_the_bound_counts_the_communication_of_the_runs(plan: LabPlan) -> None:
    outcome = outcome_of(plan, FakeRuns(communication_s=0.04))

    assert outcome.runs[0].step_s == pytest.approx(0.16)
    assert outcome.bound == pytest.approx((0.12 + 0.04) / (0.08 + 0.04))
    assert outcome.linear_bound == pytest.approx(1.5)


def test_what_makes_the_figures_worse_than_they_could_be_goes_with_them(plan: LabPlan) -> None:
    fine = outcome_of(plan, FakeRuns(per_sample_s=(0.02, 0.04)))
    poor = outcome_of(plan, FakeRuns(per_sample_s=(0.002, 0.004), caveat="By numbers only."))

    assert fine.caveats == ()
    assert poor.caveats[0] == "By numbers only."
    check_message(poor.caveats[1], "16 ms", "10")


def test_a_machine_that_slows_down_steadily_leaves_the_ratios_alone(plan: LabPlan) -> None:
    outcome = outcome_of(replace(plan, repeats=4), FakeRuns(tempo=lambda launch: 1.01**launch))

    # 13 launches lie between the two calibrations.
    assert outcome.drift == pytest.approx(1.01**13 - 1, abs=1e-3)
    assert outcome.speedup == pytest.approx(1.5)
    assert outcome.runs[1].efficiency == pytest.approx(1.0)
    assert not outcome.disturbed


@pytest.mark.parametrize(("swing", "disturbed"), [(1.02, False), (1.3, True)])
def test_a_run_is_disturbed_if_its_ratios_are_uncertain(
    plan: LabPlan, swing: float, disturbed: bool
) -> None:
    # The launches after the first calibration: every second run of adaptive is slower.
    runs = FakeRuns(tempo=lambda launch: swing if launch == 3 else 1.0)

    outcome = outcome_of(plan, runs)

    assert outcome.disturbed is disturbed
    assert outcome.uncertainty > 0
    low, high = outcome.speedup_interval or (0.0, 0.0)
    assert low < 1.5 < high


@pytest.mark.parametrize(("drift", "disturbed"), [(1.1, False), (1.3, True)])
def test_a_single_round_allows_for_half_the_drift_between_the_calibrations(
    plan: LabPlan, drift: float, disturbed: bool
) -> None:
    runs = FakeRuns(tempo=lambda launch: drift if launch > 4 else 1.0)

    outcome = outcome_of(replace(plan, repeats=1), runs)

    half = 1 + 0.5 * (drift - 1)
    assert outcome.speedup_interval == pytest.approx((1.5 / half, 1.5 * half))
    assert outcome.disturbed is disturbed
    check_message(outcome.caveats[-1], "--repeats 2")


def test_speeds_that_change_have_no_bound(plan: LabPlan) -> None:
    changing = replace(plan, changes=(SpeedChange((0.5, 1.0), at_step=3),))

    outcome = outcome_of(changing, FakeRuns())

    assert outcome.drift is not None
    assert (outcome.bound, outcome.linear_bound) == (None, None)


def test_without_a_calibration_nothing_is_claimed_that_needs_one(plan: LabPlan) -> None:
    runs = FakeRuns()

    outcome = outcome_of(replace(plan, calibrate=False), runs)

    assert runs.policies() == ["uniform", "adaptive", "adaptive", "uniform"]
    assert outcome.speedup == pytest.approx(1.5)
    assert (outcome.oracle, outcome.bound, outcome.linear_bound) == (None, None, None)
    assert outcome.runs[1].efficiency is None
    assert outcome.achieved_speeds == ()
    assert outcome.disturbed is False


def test_with_speeds_that_change_no_split_is_called_the_best(plan: LabPlan) -> None:
    runs = FakeRuns()
    changes = (SpeedChange((0.5, 1.0), at_step=60),)

    outcome = outcome_of(replace(plan, changes=changes), runs)

    assert outcome.oracle is None
    trained = [launch for launch in runs.launches if not launch.alone]
    assert all(launch.changes == changes for launch in trained)
    assert all(launch.changes == () for launch in runs.launches if launch.alone)


def test_without_the_equal_split_no_speed_up_is_reported(plan: LabPlan) -> None:
    outcome = outcome_of(replace(plan, policies=("adaptive",)), FakeRuns())

    assert outcome.speedup is None
    assert [run.policy for run in outcome.runs] == ["adaptive"]


def test_each_run_leaves_its_trace_where_the_outcome_says(plan: LabPlan) -> None:
    outcome = outcome_of(plan, FakeRuns())

    assert outcome.trace == str(plan.folder / "adaptive-1" / "trace.jsonl")
    for name in ("uniform-1", "uniform-2", "adaptive-1", "adaptive-2", "static-8-4-1"):
        assert (plan.folder / name / "trace.jsonl").is_file()


def test_every_run_gets_policy_steps_and_trace_and_nothing_of_the_callers(plan: LabPlan) -> None:
    runs = FakeRuns()

    outcome_of(plan, runs)

    first, *_, last, _ = (launch for launch in runs.launches if not launch.alone)
    assert first.command == plan.command
    assert first.speeds == plan.speeds
    own = first.environment.pop("EVENSTRIDE_CHECKPOINTS")
    assert Path(own).parent.parent == plan.folder
    assert not Path(own).exists(), "it is deleted in the end"
    assert first.environment == {
        "EVENSTRIDE_RESTORE": "",
        "EVENSTRIDE_CALIBRATE": "",
        "EVENSTRIDE_GLOBAL_BATCH": "low",
        "EVENSTRIDE_POLICY": "uniform",
        "EVENSTRIDE_MAX_STEPS": "120",
        "EVENSTRIDE_TRACE": str(plan.folder / "uniform-1" / "trace.jsonl"),
    }
    assert last.environment["EVENSTRIDE_TRACE"].startswith(str(plan.folder / "adaptive-2"))
    alone = runs.launches[0]
    assert alone.environment["EVENSTRIDE_MAX_STEPS"] == ""
    assert alone.environment["EVENSTRIDE_GLOBAL_BATCH"] == "low", "runs are compared at one batch"
    # Around its share of the best split, and the equal one, as parts of the global batch.
    sizes = [own["EVENSTRIDE_CALIBRATE"] for own in alone.alone]
    assert [[float(p.split(":")[0]) for p in text.split(",")] for text in sizes] == [
        [0.4, 0.5, 0.6667],
        [0.2, 0.3333, 0.5],
    ]


def test_a_batch_that_the_caller_sets_holds_for_every_run(
    plan: LabPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EVENSTRIDE_GLOBAL_BATCH", "48")
    runs = FakeRuns()

    outcome_of(plan, runs)

    assert {one.environment["EVENSTRIDE_GLOBAL_BATCH"] for one in runs.launches} == {"48"}


def test_the_viewer_shows_every_run(plan: LabPlan) -> None:
    said, begun, watched = list[str](), list[str](), list[int]()
    viewer = Viewer(
        said.append, lambda _, title: begun.append(title), lambda s: watched.append(s.step)
    )
    runs = FakeRuns(caveat="By numbers only.")

    outcome_of(replace(plan, repeats=1), runs, viewer)

    check_message(said[0])
    check_message(said, "120.0 ms", "6/6", "80.0 ms", "8/4")
    assert begun == ["uniform", "adaptive", "static:8,4"]
    assert watched == [1, 1, 1]
