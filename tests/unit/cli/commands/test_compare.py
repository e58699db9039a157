"""``evenstride compare``: simulated side by side, and for real."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from evenstride.cli.arguments import every_policy
from evenstride.cli.suite_request import file_name
from evenstride.errors import ConfigError
from evenstride.lab.comparison.comparison_result import Comparison
from evenstride.lab.comparison.lab_session import LabPlan, Viewer
from evenstride.lab.processes.speeds import SpeedChange
from evenstride.sim.scoring.suite import FIELDS
from tests.messages import check_message
from tests.unit.cli.conftest import Answer, Shell
from tests.unit.cli.test_outcome import DISTURBED, OUTCOME
from tests.unit.lab.traces import write_run

SCENARIO = """\
name: {name}
global_batch: 60
steps: 40
workers:
  - {{samples_per_s: 1000, fixed_s: 0.01, noise: 0.05{more}}}
  - {{samples_per_s: 250, fixed_s: 0.01, noise: 0.05{more}}}
"""


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    """Two scenario files, the workers of the second of which declare their cores."""
    (tmp_path / "a.yaml").write_text(SCENARIO.format(name="plain", more=""))
    (tmp_path / "b.yaml").write_text(SCENARIO.format(name="declared", more=", cores: 2"))
    return ["a.yaml", "b.yaml"]


def rows(answer: Answer) -> list[dict[str, Any]]:
    assert answer.code == 0, answer
    found: list[dict[str, Any]] = answer.json()["rows"]
    return found


def test_all_policies_that_fit_are_compared_and_ours_comes_first(
    shell: Shell, files: list[str]
) -> None:
    answer = shell("compare", *files, "--seeds", "1", "--json")

    assert list(answer.json()) == ["rows"]
    policies = [row["policy"] for row in rows(answer) if row["scenario"] == "declared"]
    assert policies == [name for name in every_policy() if name != "static:flops"]
    assert all(tuple(row) == FIELDS for row in rows(answer))


def test_policies_that_cannot_serve_are_left_out_in_one_line_each(
    shell: Shell, files: list[str]
) -> None:
    answer = shell("compare", *files, "--seeds", "1", "--json")

    plain = {row["policy"] for row in rows(answer) if row["scenario"] == "plain"}
    assert not plain & {"static:cores", "static:flops"}
    check_message(answer.err.splitlines()[:2], "flops_per_s")


def test_the_table_has_a_line_for_each_setting_and_marks_the_best(
    shell: Shell, files: list[str]
) -> None:
    options = ["-p", "uniform,static:48,12", "-p", "static:cores", "--seeds", "2", "--lag", "1,3"]

    answer = shell("compare", *files, *options)

    lines = [line.split() for line in answer.out.splitlines()]
    assert lines[1] == ["scenario", "lag", "uniform", "48,12", "cores", "informed"]
    assert [line[:2] for line in lines[2:6]] == [
        *(["plain", "1"], ["plain", "3"], ["declared", "1"], ["declared", "3"]),
    ]
    assert [line[4] for line in lines[2:6]] == ["–", "–", lines[4][2], lines[4][2]]
    assert all(line[3].endswith("*") and "*" not in line[2] for line in lines[2:6])
    check_message(answer.out.splitlines()[-3:], "48,12", "58 ms", "130 ms")


def test_the_last_columns_are_our_lead_with_its_interval(shell: Shell, files: list[str]) -> None:
    options = ["-p", "adaptive,uniform", "--seeds", "3"]

    found = rows(shell("compare", files[0], *options, "--json"))
    line = shell("compare", files[0], *options).out.splitlines()[2]

    interval, wanted = r"\[\+\d+\.\d%, \+\d+\.\d%\]", []
    for figure in ("efficiency_mean", "efficiency"):
        ours, equal = ([r[figure] for r in found if r["policy"] == p] for p in
                       ("adaptive", "uniform"))  # fmt: skip
        ahead = sum(a / b - 1 for a, b in zip(ours, equal, strict=True)) / 3
        wanted.append(rf"\{ahead:+.1%} {interval}")
    assert re.search(rf"{' +'.join(wanted)}$", line)


def test_the_sentence_says_where_ours_is_behind(shell: Shell, files: list[str]) -> None:
    output = shell("compare", *files, "-p", "adaptive,static:48,12", "--seeds", "2", "--lag", "8")

    check_message(output.out.splitlines()[-2], "1%")


def test_a_plot_is_drawn_for_each_scenario_and_lag(
    shell: Shell, files: list[str], tmp_path: Path
) -> None:
    options = ["-p", "uniform,adaptive", "--seeds", "2", "--steps", "10", "--json"]

    one = shell("compare", *files, *options, "--plot", "plots")
    several = shell("compare", files[0], *options, "--lag", "1,3", "--plot", "lags")

    assert sorted(path.name for path in (tmp_path / "plots").iterdir()) == [
        *("declared.png", "plain.png"),
    ]
    assert one.err.splitlines() == [
        *("plot written to plots/plain.png", "plot written to plots/declared.png"),
    ]
    assert sorted(path.name for path in (tmp_path / "lags").iterdir()) == [
        *("plain-lag-1.png", "plain-lag-3.png"),
    ]
    assert len(rows(several)) == 8


def test_only_the_first_seed_is_drawn(
    shell: Shell, files: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[Any] = []
    monkeypatch.setattr("evenstride.cli.suite_request.draw", lambda *args: drawn.append(args))
    options = ["-p", "uniform,adaptive", "--seeds", "4,7", "--steps", "9", "--plot", "out"]

    assert shell("compare", *files, *options).code == 0
    assert [(len(panels), title) for panels, title, _ in drawn] == [
        *((2, "plain, lag 1, seed 4"), (2, "declared, lag 1, seed 4")),
    ]
    assert [panel.title for panel in drawn[0][0]] == ["uniform", "adaptive"]


@pytest.mark.parametrize(
    ("name", "lag", "file"),
    [("h1", None, "h1.png"), ("2 x T4/P4", 3, "2-x-T4-P4-lag-3.png"), ("../..", None, None)],
)
def test_a_plot_stays_in_its_folder(name: str, lag: int | None, file: str | None) -> None:
    assert file_name(name, lag) == (file or "scenario.png")


@pytest.mark.parametrize("name", ["x" * 200, "\U0001d11e" * 200, "é" * 200])
def test_the_name_of_a_plot_is_no_longer_than_file_systems_take(name: str) -> None:
    assert 9 < len(file_name(name, 10_000).encode()) <= 255
    assert file_name(name, 10_000).endswith("-lag-10000.png")


def test_figures_are_printed_before_they_are_drawn(
    shell: Shell, files: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise ConfigError("cannot write it (No space left on device)")

    monkeypatch.setattr("evenstride.cli.suite_request.draw", full)
    options = [*files, "-p", "uniform", "--seeds", "1", "--steps", "9", "--plot", "out"]

    plain, table = shell("compare", *options, "--json"), shell("compare", *options)

    assert (plain.code, table.code) == (2, 2)
    assert len(plain.json()["rows"]) == 2
    check_message(table.out)


REFUSALS = [
    ([], "no scenario given: expected a scenario file, a folder of them, or the name of a"),
    (["refrence"], "similar names are reference,"),
    (["a.yaml", "-p", "magic"], "unknown policy 'magic'; available policies: adaptive,"),
    (["a.yaml", "-p", "static"], "no policy can run: policy static, that is static:flops, nee"),
    (["a.yaml", "--seeds", "few"], "--seeds is 'few': expected a number"),
    (["a.yaml", "--speeds", "1,1"], "--speeds cannot be used with scenarios; add --real"),
    (["a.yaml", "--change", "9:1,1"], "--change cannot be used with scenarios; add --real"),
    (["a.yaml", "--repeats", "2"], "--repeats cannot be used with scenarios; add --real"),
    (["a.yaml", "--plot", "a.yaml"], "a.yaml is not a folder; give a folder for the plots"),
    (["a.yaml", "--plot", "/proc/x"], "cannot write /proc/x/plain.png (No such file or"),
    (["--real", "--plot", "/proc/x"], "cannot write /proc/x/real-1-0.5-0.2.png (No such file"),
    (["--real", "a.yaml"], "--real runs a script, but a.yaml is a scenario; leave --real out to"),
    (["--real", "--speeds", "1,1", "--", "b.YML", "--lr", "1"], "but b.YML is a scenario; leave"),
    (["--real", "--lag", "3"], "--lag cannot be used with --real"),
    (["--real", "--cold-lag", "3"], "--cold-lag cannot be used with --real"),
    (["--real", "--seeds", "3"], "--seeds cannot be used with --real"),
    (["--real", "--every", "3"], "--every cannot be used with --real"),
    (["--real", "--speeds", "1,0"], "invalid speed 0: a speed is a fraction of"),
    (["--real", "--policy", "magic"], "unknown policy 'magic'"),
    (["--real", "--change", "soon"], "invalid change 'soon'"),
]


@pytest.mark.parametrize(("arguments", "text"), REFUSALS, ids=[" ".join(a) for a, _ in REFUSALS])
def test_invalid_options_are_refused_before_any_run(
    shell: Shell,
    files: list[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    text: str,
) -> None:
    def ran(*_: Any) -> None:
        pytest.fail("it was not refused in time")

    monkeypatch.setattr("evenstride.sim.scoring.suite.ScoredScenario.of", ran)
    monkeypatch.setattr("evenstride.lab.comparison.lab_session.run_lab", ran)

    assert text in shell("compare", *arguments).refusal()
    assert text in shell("compare", *arguments, "--json").refusal()


@pytest.fixture
def lab(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    """A lab whose runs take, step after step, 0.3 s cold and then what ``step_s`` says."""
    held: dict[str, Any] = {"step_s": {"adaptive": 0.1, "uniform": 0.25}, "is": OUTCOME}

    def run_lab(plan: LabPlan, viewer: Viewer) -> Comparison:
        held["asked"] = plan
        viewer.say("calibrating (before) ...")
        for policy in plan.policies:
            trace = plan.folder / policy / "trace.jsonl"
            trace.parent.mkdir(parents=True, exist_ok=True)
            viewer.begins(trace, policy)
            warm_s = held["step_s"].get(policy, 0.2)
            write_run(trace, policy, [0.3] * 40 + [warm_s] * 20, [(6, 6)])
        outcome: Comparison = held["is"]
        return outcome

    monkeypatch.setattr("evenstride.lab.comparison.lab_session.run_lab", run_lab)
    return held


def test_for_real_all_policies_run_on_the_packages_own_script(
    shell: Shell, lab: dict[str, Any], tmp_path: Path
) -> None:
    assert shell("compare", "--real", "--json").code == 0

    plan: LabPlan = lab["asked"]
    assert plan.speeds == (1.0, 0.5, 0.2)
    assert sorted(plan.policies) == sorted(every_policy())
    assert (plan.policies[0], plan.policies[-1]) == ("uniform", "adaptive")
    assert (plan.steps, plan.repeats, plan.changes, plan.calibrate) == (120, 1, (), True)
    assert plan.folder.parent == tmp_path / "runs"
    assert plan.folder.name.startswith("compare-")
    (script,) = plan.command
    assert "EVENSTRIDE_MAX_STEPS" in Path(script).read_text()


def test_for_real_it_does_what_its_options_say(shell: Shell, lab: dict[str, Any]) -> None:
    options = ["--speeds", "1,1,0.5", "--steps", "90", "--repeats", "2", "-p", "adaptive,uniform"]
    changes = ["--change", "60:1,0.4,1", "--change", "5s:0.5,1,1"]

    shell("compare", "--real", *options, *changes, "--", "train.py", "--lr", "0.1", "--json")

    plan: LabPlan = lab["asked"]
    assert plan.command == ("train.py", "--lr", "0.1", "--json")
    assert (plan.speeds, plan.steps, plan.repeats) == ((1.0, 1.0, 0.5), 90, 2)
    assert plan.policies == ("uniform", "adaptive")
    assert plan.changes == (
        SpeedChange((1.0, 0.4, 1.0), at_step=60),
        SpeedChange((0.5, 1.0, 1.0), at_s=5.0),
    )


def test_for_real_rows_have_the_same_fields_and_null_where_nothing_is_measured(
    shell: Shell, lab: dict[str, Any]
) -> None:
    answer = shell("compare", "--real", "-p", "uniform,adaptive", "--json")

    equal, ours = rows(answer)
    assert tuple(equal) == tuple(ours) == FIELDS
    assert (ours["scenario"], ours["policy"]) == ("real 1/0.5/0.2", "adaptive")
    assert (ours["efficiency"], equal["efficiency"]) == (0.97, 0.6)
    assert ours["speedup"] == pytest.approx(0.25 / 0.15)
    assert (ours["bound"], ours["linear_bound"]) == (1.72, 2.83)
    nothing = set(FIELDS) - {"scenario", "policy", "efficiency", "speedup", "bound", "linear_bound"}
    assert all(ours[field] is None for field in nothing)
    assert answer.json()["comparison"]["trace"] == OUTCOME.trace
    assert answer.json()["mean_step_s"] == pytest.approx({"uniform": 0.25, "adaptive": 0.1})
    assert "calibrating" in answer.err


def test_for_real_a_script_may_be_given_a_yaml_file(shell: Shell, lab: dict[str, Any]) -> None:
    shell("compare", "--real", "-p", "uniform", "--", "train.py", "settings.yaml")

    assert lab["asked"].command == ("train.py", "settings.yaml")


def test_for_real_a_missing_bound_is_not_shown(shell: Shell, lab: dict[str, Any]) -> None:
    lab["is"] = replace(OUTCOME, bound=None, linear_bound=None)
    options = ["compare", "--real", "-p", "uniform,adaptive", "--change", "9:1,1,1"]

    answer = shell(*options, "--json")

    bounds = [(row["bound"], row["linear_bound"]) for row in rows(answer)]
    assert bounds == [(None, None)] * 2
    assert answer.json()["comparison"]["bound"] is None
    assert answer.json()["comparison"]["linear_bound"] is None
    assert "bound" not in shell(*options).out


def test_for_real_figures_are_printed_before_they_are_drawn(
    shell: Shell, lab: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise ConfigError("cannot write it (No space left on device)")

    monkeypatch.setattr("evenstride.report.suite_figures.draw", full)

    answer = shell("compare", "--real", "-p", "uniform,adaptive", "--json", "--plot", "out")

    assert answer.code == 2
    assert len(answer.json()["rows"]) == 2


def test_for_real_the_table_is_that_of_the_lab_and_a_sentence(
    shell: Shell, lab: dict[str, Any]
) -> None:
    lines = shell("compare", "--real", "-p", "uniform,adaptive").out.splitlines()

    assert "uniform 250.0 ms 408 0.60 0 34/34/34" in [" ".join(line.split()) for line in lines]
    check_message(lines[-1], "100.0 ms", "60.0%", "250.0 ms")


def test_for_real_ours_may_be_behind_or_alone(shell: Shell, lab: dict[str, Any]) -> None:
    lab["step_s"] = {"adaptive": 0.3, "uniform": 0.2, "dbs": 0.25}

    behind = shell("compare", "--real", "-p", "dbs,uniform,adaptive").out.splitlines()[-1]
    alone = shell("compare", "--real", "-p", "adaptive").out.splitlines()[-1]

    check_message(behind, "300.0 ms", "50.0%")
    assert alone == "Mean step 300.0 ms (adaptive)."


def test_for_real_a_disturbed_machine_has_its_own_exit_code(
    shell: Shell, lab: dict[str, Any]
) -> None:
    lab["is"] = replace(DISTURBED, caveats=("steps are short",))

    answer = shell("compare", "--real", "--json")

    assert answer.code == 3
    assert answer.json()["comparison"]["disturbed"] is True
    check_message(answer.err.splitlines()[-1], "8%")
    assert answer.err.splitlines()[-2] == "note: steps are short"


def test_for_real_plots_are_drawn_from_the_traces(
    shell: Shell, lab: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[Any] = []
    monkeypatch.setattr("evenstride.report.suite_figures.draw", lambda *args: drawn.append(args))

    options = ["--speeds", "1,0.5", "-p", "uniform,adaptive", "--steps", "62", "--plot", "out"]

    answer = shell("compare", "--real", *options)

    ((panels, title, path),) = drawn
    assert title == "real workers at speeds 1, 0.5"
    assert path == Path("out/real-1-0.5.png")
    assert "plot written to out/real-1-0.5.png" in answer.err
    assert [panel.title for panel in panels] == ["uniform", "adaptive"]
    np.testing.assert_allclose(panels[1].steps_s["step"], [0.3] * 40 + [0.1] * 20 + [np.nan] * 2)
    for band in panels[1].shares:
        np.testing.assert_array_equal(band.mean, [6] * 60 + [np.nan] * 2)
    assert len(panels[1].shares) == 2
