"""``evenstride lab --sync``: what it asks the lab for, and how it tells what came of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from evenstride.core.sync_modes.mode_specs import Asynchronous, LocalSgd, SyncMode
from evenstride.lab.comparison.comparison_result import Cost, ModesComparison
from evenstride.lab.comparison.lab_session import LabPlan, Viewer
from evenstride.lab.comparison.trace_figures import Rates, WorkerRates
from tests.messages import check_message
from tests.unit.cli.conftest import Shell


def _run(sync: str, policy: str, per_s: float, **more: Any) -> Rates:
    workers = (WorkerRates(40.0, 0.2, 0.0), WorkerRates(20.0, 0.4, 0.5))
    text = {"waiting": 0.25, "workers": workers, "staleness": None, "shares": (8, 4), "changes": 1}
    more = {"steps": 90.0, **more}
    return Rates(sync, policy, 12, per_s, **{**text, **more})


STALE = {"staleness": (1.25, 4)}
OUTCOME = ModesComparison(
    workers=2,
    speeds=(1.0, 0.5),
    achieved_speeds=(1.0, 0.49),
    costs=(Cost(0.01, 0.001), Cost(0.02, 0.002)),
    disturbed=False,
    drift=0.01,
    limits="cgroup v1",
    global_batch=12,
    runs=(
        _run("bsp", "uniform", 100.0, shares=(6, 6), changes=0),
        _run("bsp", "adaptive", 150.0),
        _run("bsp", "uniform", 120.0, shares=(6, 6), changes=0),
        _run("bsp", "adaptive", 180.0),
        _run("asp", "adaptive", 170.0, **STALE),
        _run("asp", "adaptive", 190.0, staleness=(1.75, 6)),
        _run("local-sgd", "uniform", 90.0, workers=(WorkerRates(0.0, 0.0, 1.0),)),
    ),
    folder="somewhere",
)
LAB = ("lab", "--speeds", "1,0.5")


@pytest.fixture
def outcome(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The outcome that the command gets under ``is``, and the plan it made under ``asked``."""
    held: dict[str, Any] = {"is": OUTCOME}

    def lab(plan: LabPlan, viewer: Viewer) -> ModesComparison:
        held["asked"] = plan
        viewer.say("calibrating (before) ...")
        result: ModesComparison = held["is"]
        return result

    monkeypatch.setattr("evenstride.lab.comparison.lab_session.run_modes", lab)
    return held


def test_the_modes_are_part_of_the_plan(shell: Shell, outcome: dict[str, Any]) -> None:
    answer = shell(
        *LAB, "--sync", "asp,local-sgd(every=4)", "--policies", "uniform,dbs", "--", "t.py", "--x"
    )

    modes: tuple[SyncMode, ...] = (Asynchronous(), LocalSgd(every=4))
    assert answer.code == 0
    assert outcome["asked"].modes == modes
    assert outcome["asked"].policies == ("uniform", "dbs")
    assert outcome["asked"].command == ("t.py", "--x")


def test_a_line_for_each_mode_and_policy_has_the_means_of_its_runs(
    shell: Shell, outcome: dict[str, Any]
) -> None:
    answer = shell(*LAB, "--sync", "bsp,asp", "--", "train.py")

    text = answer.out.splitlines()
    check_message(text, "2 workers", "0.5", "0.49")
    table = [line.split() for line in text if line.startswith(("bsp", "asp", "local"))]
    assert table == [
        ["bsp", "uniform", "110", "1.00", "25.0%", "–", "–", "200", "ms", "400", "ms", "6/6"],
        ["bsp", "adaptive", "165", "1.50", "25.0%", "–", "–", "200", "ms", "400", "ms", "8/4"],
        ["asp", "adaptive", "180", "–", "25.0%", "1.50", "6", "200", "ms", "400", "ms", "8/4"],
        ["local-sgd", "uniform", "90", "1.00", "25.0%", "–", "–", "–", "–", "8/4"],
    ]
    assert text[-1] == "traces somewhere"


def test_what_a_mode_forgoes_is_reported_on_stderr(shell: Shell, outcome: dict[str, Any]) -> None:
    answer = shell(*LAB, "--sync", "bsp,asp", "--", "train.py")

    notes = [line for line in answer.err.splitlines() if line.startswith("note: ")]
    assert notes == [f"note: asp: {sentence}" for sentence in Asynchronous().forgoes]


def test_json_holds_every_run_and_nothing_else_is_on_stdout(
    shell: Shell, outcome: dict[str, Any]
) -> None:
    found = shell(*LAB, "--sync", "bsp,asp", "--json", "--", "train.py").json()

    assert [run["samples_per_s"] for run in found["runs"]] == [
        *(100.0, 150.0, 120.0, 180.0, 170.0, 190.0, 90.0),
    ]
    assert found["runs"][4]["staleness"] == [1.25, 4]
    assert found["costs"][1] == {"fixed_s": 0.02, "per_sample_s": 0.002}


def test_a_disturbed_comparison_has_its_own_exit_code(
    shell: Shell, outcome: dict[str, Any]
) -> None:
    outcome["is"] = replace(OUTCOME, disturbed=True, drift=0.09, caveats=("steps are short",))

    answer = shell(*LAB, "--sync", "bsp", "--", "train.py")

    assert answer.code == 3
    assert "note: steps are short\n" in answer.err
    check_message(answer.err.splitlines()[-1], "9%")


@pytest.mark.parametrize(
    ("sync", "text"),
    [
        ("", ("--sync",)),
        ("asp,asp", ()),
        ("ssp(staleness=-1)", ("-1",)),
        ("local-sgd(every=0)", ()),
        ("aps", ()),
    ],
)
def test_modes_that_cannot_be_are_refused_before_anything_runs(
    shell: Shell, outcome: dict[str, Any], sync: str, text: tuple[str, ...]
) -> None:
    check_message(shell(*LAB, "--sync", sync, "--", "train.py").refusal(), *text)
    assert "asked" not in outcome
