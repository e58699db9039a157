"""A lab session over modes of synchronisation, on runs made of numbers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from evenstride.core.sync_modes.mode_specs import AllReduce, Asynchronous, StaleSynchronous
from evenstride.errors import ConfigError
from evenstride.lab.comparison.comparison_result import ModesComparison
from evenstride.lab.comparison.lab_session import LabPlan, Viewer, run_modes
from evenstride.lab.processes.speeds import SpeedChange
from tests.messages import check_message, raises_message
from tests.unit.lab.fake_runs import BATCH, FakeRuns

MODES = (AllReduce(), StaleSynchronous(staleness=2))


@pytest.fixture
def modes(plan: LabPlan) -> LabPlan:
    """Two modes under two policies, two runs each."""
    return replace(plan, modes=MODES)


def _outcome(plan: LabPlan, runs: FakeRuns, viewer: Viewer | None = None) -> ModesComparison:
    with pytest.MonkeyPatch.context() as patch:
        runs.install(patch)
        return run_modes(plan, viewer or Viewer())


def test_all_arms_alternate_between_two_calibrations(modes: LabPlan) -> None:
    runs = FakeRuns()

    outcome = _outcome(modes, runs)

    arms = [
        (sync, policy) for sync in ("bsp", "ssp(staleness=2)") for policy in ("uniform", "adaptive")
    ]
    asked = [launch.environment for launch in runs.launches if not launch.alone]
    in_turn = [(one["EVENSTRIDE_SYNC"], one["EVENSTRIDE_POLICY"]) for one in asked]
    assert in_turn == [*arms, *reversed(arms)]
    assert runs.launches[0].alone and runs.launches[-1].alone
    assert list(outcome.by_arm()) == arms
    assert [len(some) for some in outcome.by_arm().values()] == [2] * 4


def test_figures_come_from_the_runs_and_costs_from_the_calibrations(modes: LabPlan) -> None:
    outcome = _outcome(modes, FakeRuns())

    equal, balanced = (outcome.by_arm()["bsp", policy][0] for policy in modes.policies)
    assert equal.samples_per_s == pytest.approx(BATCH / 0.12)
    assert balanced.samples_per_s == pytest.approx(BATCH / 0.08)
    assert [cost.per_sample_s for cost in outcome.costs] == pytest.approx([0.01, 0.02])
    assert [cost.fixed_s for cost in outcome.costs] == pytest.approx([0.0, 0.0], abs=1e-9)
    assert outcome.achieved_speeds == pytest.approx((1.0, 0.5), abs=1e-4)
    assert (outcome.workers, outcome.global_batch, outcome.limits) == (2, BATCH, "numbers")
    assert not outcome.disturbed
    assert outcome.to_dict()["runs"][0]["sync"] == "bsp"


@pytest.mark.parametrize(("swing", "disturbed"), [(1.02, False), (1.4, True)])
def test_modes_are_disturbed_if_their_ratios_are_uncertain(
    modes: LabPlan, swing: float, disturbed: bool
) -> None:
    outcome = _outcome(modes, FakeRuns(tempo=lambda launch: swing if launch == 3 else 1.0))

    assert outcome.disturbed is disturbed
    assert outcome.uncertainty > 0


def test_a_drift_between_the_calibrations_alone_does_not_disturb(modes: LabPlan) -> None:
    outcome = _outcome(modes, FakeRuns(tempo=lambda launch: 1.2 if launch > 1 else 1.0))

    assert not outcome.disturbed
    assert outcome.drift == pytest.approx(0.2, abs=1e-3)


def test_without_calibrations_there_are_no_costs(modes: LabPlan) -> None:
    runs = FakeRuns()

    outcome = _outcome(replace(modes, calibrate=False), runs)

    assert all(not launch.alone for launch in runs.launches)
    assert (outcome.costs, outcome.achieved_speeds, outcome.disturbed) == ((), (), False)


def test_each_run_leaves_a_trace_in_a_folder_that_names_its_arm(modes: LabPlan) -> None:
    titles = list[tuple[Path, str]]()
    viewer = Viewer(begins=lambda trace, title: titles.append((trace, title)))

    outcome = _outcome(replace(modes, repeats=1), FakeRuns(), viewer)

    names = ["bsp-uniform-1", "bsp-adaptive-1"]
    names += ["ssp-staleness=2-uniform-1", "ssp-staleness=2-adaptive-1"]
    assert [trace.parent.name for trace, _ in titles] == names
    assert [title for _, title in titles][2] == "ssp(staleness=2) uniform"
    assert all((Path(outcome.folder) / name / "trace.jsonl").is_file() for name in names)


def test_steps_that_are_too_short_are_noted(modes: LabPlan) -> None:
    outcome = _outcome(modes, FakeRuns(per_sample_s=(0.002, 0.004)))

    check_message(outcome.caveats[0], "10")


def test_a_script_that_sets_its_own_mode_cannot_be_compared(modes: LabPlan) -> None:
    plan = replace(modes, modes=(Asynchronous(),))

    with raises_message(ConfigError):
        _outcome(plan, FakeRuns(sync="bsp"))


def test_a_script_that_sets_its_own_policy_cannot_be_compared(modes: LabPlan) -> None:
    with raises_message(ConfigError):
        _outcome(modes, FakeRuns(policy="dbs"))


def test_changes_at_steps_are_refused_where_workers_have_no_step_in_common(modes: LabPlan) -> None:
    runs, later = FakeRuns(), (0.5, 1.0)
    by_step = replace(modes, changes=(SpeedChange(later, at_step=3),))

    with raises_message(ConfigError):
        _outcome(by_step, runs)

    assert runs.launches == []
    assert _outcome(replace(modes, changes=(SpeedChange(later, at_s=3.0),)), runs).runs
    assert _outcome(replace(by_step, modes=(AllReduce(),)), runs).runs
