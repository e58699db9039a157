"""How ``demo``, ``lab`` and ``doctor`` tell what they have measured, and with which exit code."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from evenstride.cli.arguments import split_policies
from evenstride.lab.comparison.comparison_result import Comparison, Oracle, PolicyRun
from evenstride.lab.comparison.lab_session import LabPlan, Viewer
from evenstride.lab.demo.demo_schedule import DemoSchedule
from evenstride.lab.processes.speeds import SpeedChange
from tests.messages import check_message
from tests.unit.cli.conftest import Shell

OUTCOME = Comparison(
    workers=3,
    speeds=(1.0, 0.5, 0.2),
    achieved_speeds=(1.0, 0.49, 0.21),
    disturbed=False,
    drift=0.012,
    limits="cgroup v1",
    global_batch=102,
    runs=[
        PolicyRun("uniform", 0.25, 408.0, 0.6, (34, 34, 34), 0.31234, 0.95, 0, 0, 0),
        PolicyRun("adaptive", 0.15, 680.0, 0.97, (60, 30, 12), 0.31235, 0.96, 0, 0, 3),
    ],
    oracle=Oracle((59, 31, 12), 0.1455),
    speedup=1.667,
    bound=1.72,
    linear_bound=2.83,
    trace="somewhere/adaptive.jsonl",
)
DISTURBED = replace(OUTCOME, disturbed=True, drift=0.083, uncertainty=0.14)
CERTAIN = replace(
    OUTCOME,
    runs=[
        replace(OUTCOME.runs[0], efficiency_interval=(0.58, 0.62)),
        replace(OUTCOME.runs[1], efficiency_interval=(0.95, 1.01)),
    ],
    speedup_interval=(1.62, 1.71),
    bound_interval=(1.66, 1.78),
    of_bound=0.969,
    of_bound_interval=(0.94, 1.01),
    pairs=10,
)


@pytest.fixture
def outcome(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The outcome that the commands get under ``is``, and what they asked for under ``asked``."""
    held: dict[str, Any] = {"is": OUTCOME}

    def demo(plan: DemoSchedule, speeds: tuple[float, ...], news: Any, watch: Any) -> Comparison:
        held["asked"] = plan, speeds
        news({"what": "limits", "kind": "signals", "caveat": "They are less even."})
        news({"what": "calibrating"})
        news({"what": "block", "policy": "adaptive", "step_s": 0.1512, "shares": [60, 30, 12]})
        news({"what": "block", "policy": "static:1,2", "step_s": 0.1, "shares": [1, 2]})
        if "news" in held:
            news(held["news"])
        watch()
        result: Comparison = held["is"]
        return result

    def lab(plan: LabPlan, viewer: Viewer) -> Comparison:
        held["asked"] = plan
        viewer.say("calibrating (before) ...")
        result: Comparison = held["is"]
        return result

    monkeypatch.setattr("evenstride.lab.demo.demo_run.run_demo", demo)
    monkeypatch.setattr("evenstride.lab.comparison.lab_session.run_lab", lab)
    return held


COMMANDS = {"demo": ["demo"], "lab": ["lab", "--speeds", "1,0.5,0.2", "--", "train.py"]}


@pytest.mark.parametrize("command", COMMANDS)
def test_json_is_one_object_on_stdout_and_the_rest_is_on_stderr(
    shell: Shell, outcome: dict[str, Any], command: str
) -> None:
    name, *rest = COMMANDS[command]

    answer = shell(name, "--json", *rest)

    assert answer.code == 0
    assert answer.json()["speedup"] == 1.667
    assert answer.json()["runs"][1]["shares"] == [60, 30, 12]
    assert answer.json()["trace"] == "somewhere/adaptive.jsonl"
    assert "calibrating" in answer.err


@pytest.mark.parametrize("command", COMMANDS)
def test_a_disturbed_measurement_has_its_own_exit_code_and_says_so(
    shell: Shell, outcome: dict[str, Any], command: str
) -> None:
    outcome["is"] = DISTURBED
    name, *rest = COMMANDS[command]

    plain, as_json = shell(name, *rest), shell(name, "--json", *rest)

    assert plain.code == as_json.code == 3
    assert as_json.json()["disturbed"] is True
    for answer in (plain, as_json):
        last = answer.err.splitlines()[-1]
        check_message(last, "8%")
    assert "speed-up" in plain.out


@pytest.mark.parametrize("command", COMMANDS)
def test_caveats_are_printed_with_the_figures(
    shell: Shell, outcome: dict[str, Any], command: str
) -> None:
    outcome["is"] = replace(OUTCOME, caveats=("steps are short", "signals are less even"))
    name, *rest = COMMANDS[command]

    plain, as_json = shell(name, *rest), shell(name, "--json", *rest)

    assert (plain.code, as_json.code) == (0, 0)
    assert as_json.json()["caveats"] == ["steps are short", "signals are less even"]
    for answer in (plain, as_json):
        check_message(answer.err.splitlines()[-2:])


def test_the_demo_tells_its_story(shell: Shell, outcome: dict[str, Any]) -> None:
    answer = shell("demo")

    lines = [" ".join(line.split()) for line in answer.out.splitlines()]
    check_message(lines, "3 workers", "0.5", "1.00")
    assert "samples 34/34/34 60/30/12 59/31/12" in lines
    assert "step 250.0 ms 150.0 ms 145.5 ms" in lines
    assert "efficiency 0.60 0.97 1" in lines
    assert "final loss 0.31234 0.31235" in lines
    assert "test accuracy 95.0% 96.0%" in lines
    assert "lost, repeated 0, 0 0, 0" in lines
    assert "speed-up 1.67, bound 1.72, linear bound 2.83" in lines
    assert "trace somewhere/adaptive.jsonl" in lines
    check_message(lines[-1], "worker 2", "12 samples", "34")


@pytest.mark.parametrize("command", COMMANDS)
def test_ratios_are_shown_with_their_intervals(
    shell: Shell, outcome: dict[str, Any], command: str
) -> None:
    outcome["is"] = CERTAIN
    name, *rest = COMMANDS[command]

    plain, as_json = shell(name, *rest), shell(name, "--json", *rest)

    assert (plain.code, as_json.code) == (0, 0)
    assert "1.67 (1.62 to 1.71), bound 1.72 (1.66 to 1.78), linear bound 2.83" in plain.out
    assert "0.97 (0.95 to 1.01)" in plain.out
    check_message([line for line in plain.out.splitlines() if "interval" in line], "10 pairs")
    assert as_json.json()["speedup_interval"] == [1.62, 1.71]
    assert as_json.json()["runs"][1]["efficiency_interval"] == [0.95, 1.01]


@pytest.mark.parametrize(
    ("interval", "shown", "facts"),
    [
        ((0.94, 1.01), True, ("equals",)),
        ((0.94, 0.99), True, ("97%", "94%", "99%")),
        ((1.01, 1.05), False, ()),
    ],
    ids=["equal", "below", "above"],
)
def test_a_speed_up_is_compared_with_its_bound(
    shell: Shell,
    outcome: dict[str, Any],
    interval: tuple[float, float],
    shown: bool,
    facts: tuple[str, ...],
) -> None:
    outcome["is"] = replace(CERTAIN, of_bound_interval=interval)

    lines = shell(*COMMANDS["lab"]).out.splitlines()

    assert any(", bound 1.72" in line for line in lines) is shown
    check_message(
        next(line for line in lines if line.startswith("The speed-up is") or "equals" in line),
        *facts,
    )


@pytest.mark.parametrize(("third", "noted"), [(0.21, False), (0.29, False), (0.6, True)])
def test_workers_that_miss_their_speeds_are_noted(
    shell: Shell, outcome: dict[str, Any], third: float, noted: bool
) -> None:
    outcome["is"] = replace(OUTCOME, achieved_speeds=(1.0, 0.5, third))

    notes = [line for line in shell(*COMMANDS["lab"]).err.splitlines() if "note: " in line]

    assert len(notes) == noted
    if noted:
        check_message(notes, "1/0.5/0.6", "1/0.5/0.2")


def test_the_demo_says_where_its_report_is(shell: Shell, outcome: dict[str, Any]) -> None:
    outcome["is"] = replace(OUTCOME, report="/far/away/here/report.html")

    answer = shell("demo", "--out", "here")

    check_message(answer.out.splitlines()[-1], "here/report.html")
    assert "/far" not in answer.out


def test_the_demo_shows_its_rounds(shell: Shell, outcome: dict[str, Any]) -> None:
    outcome["news"] = {
        "what": "round",
        "number": 3,
        "of": 10,
        "step_s": [0.4203, 0.1442, 0.1438, 0.1702],
        "shares": [60, 30, 12],
    }

    check_message(shell("demo").err.splitlines()[-1], "3 of 10", "420.3 ms", "144.2", "170.2")


def test_the_demo_says_when_there_was_nothing_to_balance(
    shell: Shell, outcome: dict[str, Any]
) -> None:
    outcome["is"] = replace(OUTCOME, bound=1.02)

    answer = shell("demo")

    check_message(answer.out.splitlines()[-1])


def test_the_demo_claims_nothing_where_other_work_undid_it(
    shell: Shell, outcome: dict[str, Any]
) -> None:
    equal, balanced = OUTCOME.runs
    slower = replace(balanced, step_s=1.4 * equal.step_s)
    outcome["is"] = replace(DISTURBED, runs=[equal, slower])

    answer = shell("demo")

    check_message(answer.out)
    assert "With equal batches" not in answer.out


def test_the_demo_tells_what_goes_on_in_lines_on_stderr(
    shell: Shell, outcome: dict[str, Any]
) -> None:
    check_message(shell("demo", "--json").err.splitlines(), "151.2 ms", "60/30/12", "100.0 ms")


def test_the_demo_does_what_its_options_say(
    shell: Shell, outcome: dict[str, Any], tmp_path: Path
) -> None:
    shell("demo", "--speeds", "1,0.3", "--data", "images", "--out", "here")
    given = outcome["asked"]
    shell("demo")
    usual = outcome["asked"]

    assert given == (DemoSchedule(tmp_path / "here", tmp_path / "images"), (1.0, 0.3))
    assert usual[1] == (1.0, 0.5, 0.2)
    assert usual[0].data is None
    assert usual[0].folder.parent == tmp_path / "runs"
    assert usual[0].folder.name.startswith("demo-")


def test_the_lab_does_what_its_options_say(
    shell: Shell, outcome: dict[str, Any], tmp_path: Path
) -> None:
    options = ["--policies", "uniform,static:20,100,adaptive", "--steps", "90", "--repeats", "3"]
    changes = ["--change", "60:1,0.4", "--change", "5s:0.5,1", "--no-calibrate", "--out", "here"]
    script = ["--", "train.py", "--lr", "0.1", "--json"]

    shell("lab", "--speeds", "1,1", *options, *changes, *script)

    assert outcome["asked"] == LabPlan(
        command=("train.py", "--lr", "0.1", "--json"),
        speeds=(1.0, 1.0),
        policies=("uniform", "static:20,100", "adaptive"),
        steps=90,
        repeats=3,
        changes=(SpeedChange((1.0, 0.4), at_step=60), SpeedChange((0.5, 1.0), at_s=5.0)),
        folder=tmp_path / "here",
        calibrate=False,
    )


def test_the_lab_tells_a_line_for_each_policy(shell: Shell, outcome: dict[str, Any]) -> None:
    lines = [" ".join(line.split()) for line in shell(*COMMANDS["lab"]).out.splitlines()]

    check_message(lines, "3 workers", "0.5", "0.49", "1.67")
    assert "uniform 250.0 ms 408 0.60 0 34/34/34" in lines
    assert "adaptive 150.0 ms 680 0.97 3 60/30/12" in lines
    assert "best fixed split 145.5 ms 59/31/12" in lines
    assert "trace somewhere/adaptive.jsonl" in lines


def test_the_lab_leaves_out_what_was_not_measured(shell: Shell, outcome: dict[str, Any]) -> None:
    run = replace(OUTCOME.runs[1], efficiency=None)
    outcome["is"] = replace(
        OUTCOME, runs=[run], achieved_speeds=(), oracle=None, speedup=None, bound=None
    )

    output = shell(*COMMANDS["lab"]).out

    assert "adaptive" in output
    assert not any(word in output for word in ("measured", "best fixed", "speed-up", "None"))


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("adaptive", ("adaptive",)),
        ("static:1,2,3,uniform", ("static:1,2,3", "uniform")),
        ("static:1,2,static:2,1", ("static:1,2", "static:2,1")),
        ("uniform,,adaptive,", ("uniform", "adaptive")),
    ],
)
def test_policies_are_distinguished_from_the_shares_of_a_fixed_one(
    text: str, names: tuple[str, ...]
) -> None:
    assert split_policies(text) == names


def test_the_doctor_tells_about_this_machine(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    findings = {"cores": 2.0, "backends": ["gloo"]}
    monkeypatch.setattr("evenstride.lab.doctor.checkup.examine_machine", lambda: dict(findings))
    # Other tests' jobs listen on this machine too.
    monkeypatch.setattr("psutil.process_iter", lambda: [psutil.Process()])

    output, as_json = shell("doctor"), shell("doctor", "--json")

    assert output.out.startswith("cores                2.0\nbackends             gloo\nports   ")
    assert as_json.json() == {**findings, "ports": []}
    assert (output.code, as_json.code) == (0, 0)


def test_the_doctor_in_a_group_speaks_on_one_rank_only(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr("evenstride.lab.doctor.checkup.examine_machine", lambda: {"cores": 2.0})
    monkeypatch.setattr("evenstride.lab.doctor.checkup.examine_group", lambda: {"exact": True})
    first = shell("doctor", "--json")
    monkeypatch.setattr("evenstride.lab.doctor.checkup.examine_group", lambda: None)
    other = shell("doctor", "--json")

    assert first.json() == {"cores": 2.0, "group": {"exact": True}}
    assert (other.code, other.out) == (0, "")
