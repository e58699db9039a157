"""Policies in scenarios under seeds: what is simulated, what is refused, what is left out."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from evenstride.errors import ConfigError, ScenarioError, UnknownPolicy
from evenstride.sim.scenario.recordings import load_recording
from evenstride.sim.scenario.scenario_file import changed, load_scenario
from evenstride.sim.scenario.timeline import Timeline
from evenstride.sim.scoring.suite import (
    EVERY,
    Overrides,
    ScoredScenario,
    Suite,
    in_order,
    load_all,
    plan,
    simulate,
)
from tests.messages import check_message, raises_message
from tests.unit.sim.clusters import FAST, SLOW, scenario

EVENTS: list[dict[str, Any]] = [
    {"kind": "step", "at": 20, "workers": 0, "speed": 0.5},
    {"kind": "step", "at": 10, "workers": 1, "speed": 0.5},
]
TEXT = """\
name: {name}
global_batch: 50
workers: [{{samples_per_s: 100}}, {{samples_per_s: 50}}]
"""


def planned(
    policies: list[str],
    *,
    leave_out: bool = False,
    overrides: Overrides | None = None,
    **values: Any,
) -> Suite:
    return plan(
        [scenario(**values)], policies, [0, 1], overrides or Overrides(), leave_out=leave_out
    )


def test_every_case_is_simulated_under_every_seed() -> None:
    suite = plan(
        [scenario(name="a"), scenario(name="b")],
        ["uniform", "adaptive"],
        [3, 5],
        Overrides(lags=(1, 2)),
        leave_out=False,
    )

    rows = in_order(suite, [ran.row for ran in simulate(suite)])

    assert suite.runs == len(rows) == 16
    assert [(row.scenario, row.lag, row.policy, row.seed) for row in rows[:5]] == [
        ("a", 1, "uniform", 3),
        ("a", 1, "uniform", 5),
        ("a", 1, "adaptive", 3),
        ("a", 1, "adaptive", 5),
        ("a", 2, "uniform", 3),
    ]
    assert len({(row.scenario, row.lag, row.policy, row.seed) for row in rows}) == 16


def test_a_row_is_that_of_its_stage_whatever_ran_before() -> None:
    noisy = scenario(workers=[{**FAST, "noise": 0.1}, {**SLOW, "noise": 0.1}])
    suite = plan([noisy], ["uniform", "adaptive"], [0, 4], Overrides(), leave_out=False)

    *_, ran = simulate(suite)

    alone, _ = ScoredScenario.of(noisy, 4).run("adaptive")
    assert replace(ran.row, decide_s=0.0) == replace(alone, decide_s=0.0)
    assert ran.stage.seed == 4


def test_overrides_count_instead_of_what_the_scenario_says() -> None:
    made = scenario(events=EVENTS, exchange={"lag": 4, "cold_lag": 2, "every": 3})
    given = Overrides(lags=(1, 8), cold_lag=3, steps=15, every="leader")

    one, other = given.of(made)
    (same,) = Overrides().of(made)

    assert (one.exchange.lag, other.exchange.lag) == (1, 8)
    assert (one.exchange.cold_lag, one.exchange.every, one.steps) == (3, "leader", 15)
    assert same == made


def test_events_that_fewer_steps_leave_no_room_for_do_not_happen() -> None:
    made = scenario(events=EVENTS)

    assert Timeline(changed(made, {"steps": 20}), 0).changes == (10,)
    assert Timeline(changed(made, {"steps": 21}), 0).changes == (10, 20)
    assert Timeline(changed(made, {"steps": 5}), 0).changes == ()


def test_a_worker_that_joins_after_the_last_step_is_absent_before() -> None:
    late = scenario(events=[{"kind": "join", "at": 30, "workers": 1}])

    short = changed(changed(late, {"steps": 30}), {"exchange.lag": 2})

    assert Timeline(short, 0).present(29).tolist() == [0]
    with raises_message(ValidationError, "30"):
        scenario(steps=30, events=[{"kind": "join", "at": 30, "workers": 1}])


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        ("exchange.lag", 0, ("exchange.lag",)),
        ("exchange.cold_lag", -1, ("exchange.cold_lag", "-1")),
        ("steps", 0, ()),
        ("steps", "many", ("'many'",)),
        ("exchange.every", 0, ("exchange.every", "1e+07")),
    ],
)
def test_an_override_out_of_range_is_refused(key: str, value: Any, text: tuple[str, ...]) -> None:
    with pytest.raises(ScenarioError) as caught:
        changed(scenario(), {key: value})

    check_message(str(caught.value), *text)


def test_changes_of_a_file_are_read_as_overrides(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(TEXT.format(name="a"))

    made = load_scenario(path, {"exchange.lag": 6, "steps": 9, "global_batch": 20})

    assert (made.exchange.lag, made.steps, made.global_batch) == (6, 9, 20)


@pytest.mark.parametrize(
    ("policy", "reason"),
    [
        ("static", ()),
        ("static:cores", ()),
        ("static:20,20", ("40", "50")),
        ("static:20,20,10", ("2 workers",)),
    ],
)
def test_policies_that_cannot_serve_are_refused_or_left_out(
    policy: str, reason: tuple[str, ...]
) -> None:
    with raises_message(ConfigError, *reason):
        planned(["uniform", policy])

    suite = planned(["uniform", policy], leave_out=True)

    assert suite.cases[0][1] == ("uniform",)
    assert suite.runs == 2
    (left_out,) = suite.left_out
    assert (left_out.policy, left_out.scenario) == (policy, "made")
    check_message(left_out.reason, *reason)


def test_a_policy_is_asked_about_every_fleet_there_will_be() -> None:
    away = [{"kind": "leave", "at": 9, "workers": 2}]

    suite = planned(
        ["static:20,20,10", "uniform"], leave_out=True, workers=[FAST, FAST, SLOW], events=away
    )

    assert suite.cases[0][1] == ("uniform",)
    check_message(suite.left_out[0].reason, "step 9", "2 workers")


def test_static_serves_workers_that_declare_their_resource() -> None:
    declared = [{**FAST, "cores": 4}, {**SLOW, "cores": 1}]

    suite = planned(["static:cores", "static"], leave_out=True, workers=declared)

    assert suite.cases[0][1] == ("static:cores",)
    assert [ran.row.policy for ran in simulate(suite)] == ["static:cores"] * 2


def test_a_left_out_policy_is_reported_once_for_all_lags() -> None:
    suite = planned(["uniform", "static"], leave_out=True, overrides=Overrides(lags=(1, 3)))

    assert len(suite.left_out) == 1


def test_nothing_left_to_simulate_is_an_error() -> None:
    with raises_message(ConfigError):
        planned(["static"], leave_out=True)


@pytest.mark.parametrize("leave_out", [True, False])
def test_an_unknown_policy_is_never_left_out(leave_out: bool) -> None:
    with pytest.raises(UnknownPolicy):
        planned(["uniform", "magic"], leave_out=leave_out)


def test_a_folder_stands_for_the_scenarios_in_it(tmp_path: Path) -> None:
    for name in ("b.yaml", "a.yml", "c.txt"):
        (tmp_path / name).write_text(TEXT.format(name=name))

    assert [made.scenario.name for made in load_all([tmp_path])] == ["a.yml", "b.yaml"]
    assert [made.scenario.name for made in load_all([tmp_path / "c.txt"])] == ["c.txt"]


def test_a_folder_without_scenarios_is_refused(tmp_path: Path) -> None:
    with raises_message(ScenarioError):
        load_all([tmp_path])


def test_scenarios_of_one_name_are_refused(tmp_path: Path) -> None:
    for name in ("a.yaml", "b.yaml"):
        (tmp_path / name).write_text(TEXT.format(name="twin"))

    with raises_message(ScenarioError, "a.yaml", "b.yaml"):
        load_all([tmp_path])


REPLAYED = "events: [{kind: replay, at: 0, workers: all}]\n"


@pytest.fixture
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No recording is there."""
    monkeypatch.setenv("EVENSTRIDE_DATA", str(tmp_path))
    load_recording.cache_clear()


@pytest.mark.usefixtures("nowhere")
def test_scenarios_that_lack_their_recording_are_left_out_or_refused(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(TEXT.format(name="load") + REPLAYED)
    (tmp_path / "b.yaml").write_text(TEXT.format(name="calm"))
    files = load_all([tmp_path])

    suite = plan(files, ["uniform", "dbs"], [0], Overrides(lags=(1, 3)), leave_out=True)

    assert [scenario.name for scenario, _ in suite.cases] == ["calm", "calm"]
    (left_out,) = suite.left_out
    assert (left_out.policy, left_out.scenario) == (EVERY, "load")
    reported = left_out.reason.partition(";")[0]
    check_message(reported, "a.yaml", "events[0].kind", "EVENSTRIDE_DATA", "cpu.npz")
    with pytest.raises(ScenarioError) as caught:
        plan(files, ["uniform"], [0], Overrides(), leave_out=False)
    assert str(caught.value) == left_out.reason


@pytest.mark.usefixtures("nowhere")
def test_nothing_but_scenarios_that_lack_their_recording_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(TEXT.format(name="load") + REPLAYED)

    with raises_message(ConfigError, "a.yaml"):
        plan(load_all([file]), ["uniform"], [0], Overrides(), leave_out=True)


@pytest.mark.parametrize("leave_out", [True, False])
def test_events_are_checked_against_the_steps_that_count(tmp_path: Path, leave_out: bool) -> None:
    file = tmp_path / "late.yaml"
    late = "events: [{kind: step, at: 60, workers: 0, speed: 0.5}]\n"
    file.write_text(TEXT.format(name="late") + "steps: 40\n" + late)
    files = load_all([file])

    longer = plan(files, ["uniform"], [0], Overrides(steps=100), leave_out=leave_out)
    still = plan(files, ["uniform"], [0], Overrides(steps=50), leave_out=leave_out)

    assert Timeline(longer.cases[0][0], 0).changes == (60,)
    assert Timeline(still.cases[0][0], 0).changes == ()
    assert load_scenario(file, {"steps": 100}) == longer.cases[0][0]
    for refused in (
        lambda: plan(files, ["uniform"], [0], Overrides(), leave_out=leave_out),
        lambda: load_scenario(file, {"exchange.lag": 2}),
    ):
        with raises_message(ScenarioError, "late.yaml", "60"):
            refused()
