"""What is printed besides the table: what could not take effect, interruptions, the policies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from evenstride.cli.arguments import POLICIES_HELP
from evenstride.cli.suite_request import notes
from evenstride.core.policies import POLICY_NAMES, policy_from_spec
from evenstride.sim.scenario.scenario_model import Scenario
from evenstride.sim.scoring.suite import ScoredScenario, Suite
from tests.messages import check_message
from tests.unit.cli.conftest import Shell


def made(name: str = "small", steps: int = 20, **exchange: Any) -> Scenario:
    workers = [{"samples_per_s": 1000, "cores": 4}, {"samples_per_s": 250, "cores": 1}]
    values = {"global_batch": 60, "steps": steps, "workers": workers}
    return Scenario.model_validate({"name": name, "exchange": exchange, **values})


def text(*scenarios: Scenario, policies: tuple[str, ...] = ("adaptive",)) -> list[str]:
    return notes(Suite(tuple((scenario, policies) for scenario in scenarios), (0,)))


@pytest.mark.parametrize(
    ("exchange", "first"),
    [
        ({"lag": 20}, 20),
        ({"every": 20}, 20),
        ({"every": 18, "lag": 3}, 20),
        ({"every": "leader", "lag": 50}, 50),
        ({"lag": 50, "cold_lag": 30}, 30),
    ],
)
def test_it_is_reported_where_no_decision_could_take_effect(
    exchange: dict[str, Any], first: int
) -> None:
    scenario = made(**exchange)

    (note,) = text(scenario, policies=("adaptive", "dbs"))

    check_message(note, scenario.exchange.lag, first, "20")
    assert ScoredScenario.of(scenario, 0).run("dynamic-batching")[1].decisions == []


@pytest.mark.parametrize(
    "exchange", [{"lag": 19}, {"every": 19}, {"every": "leader"}, {"lag": 50, "cold_lag": 9}]
)
def test_nothing_is_reported_where_a_decision_can_take_effect(exchange: dict[str, Any]) -> None:
    assert text(made(**exchange)) == []
    assert ScoredScenario.of(made(**exchange), 0).run("lb-bsp-cpu:predictor=last")[1].decisions


@pytest.mark.parametrize("policy", ["dbs", "omnilearn"])
def test_a_policy_that_waits_for_an_epoch_longer_than_the_run_is_reported(policy: str) -> None:
    scenarios = [made(f"s{number}", steps=100) for number in range(8)]

    (note,) = text(*scenarios, policies=(policy, "uniform", "adaptive"))

    check_message(note, policy, "100 steps", "step 100")
    assert ScoredScenario.of(scenarios[0], 0).run(policy)[1].decisions == []


@pytest.mark.parametrize(
    ("exchange", "steps", "first"),
    [
        ({"every": 90}, 180, 180),
        ({"every": 90, "lag": 3}, 182, 182),
        ({"every": 90, "lag": 3, "cold_lag": 30}, 182, 182),
    ],
)
def test_a_policy_that_decides_by_epoch_waits_for_the_next_exchange(
    exchange: dict[str, Any], steps: int, first: int
) -> None:
    (note,) = text(made(steps=steps, **exchange), policies=("dbs",))
    longer = made(steps=steps + 1, **exchange)

    check_message(note, first)
    assert ScoredScenario.of(made(steps=steps, **exchange), 0).run("dbs")[1].decisions == []
    assert text(longer, policies=("dbs",)) == []
    assert ScoredScenario.of(longer, 0).run("dbs")[1].decisions


def test_the_first_decision_waits_for_the_cold_lag_however_long() -> None:
    late: dict[str, Any] = {"lag": 3, "cold_lag": 19, "every": 2}

    check_message(text(made(**late))[0], "20 steps")
    assert ScoredScenario.of(made(**late), 0).run("lb-bsp-cpu:predictor=last")[1].decisions == []
    assert text(made(steps=21, **late)) == []
    assert (
        ScoredScenario.of(made(steps=21, **late), 0).run("lb-bsp-cpu:predictor=last")[1].decisions
    )


def test_an_epoch_that_ends_in_time_is_not_reported() -> None:
    scenario = made(steps=101)

    assert text(scenario, policies=("dbs", "dbs:epoch_steps=20")) == []
    in_short_epochs = made(steps=21).model_copy(update={"epoch_samples": 1200})
    assert text(in_short_epochs, policies=("dbs",)) == []
    assert (
        "after each epoch of 20 steps"
        in text(in_short_epochs.model_copy(update={"steps": 20}), policies=("dbs",))[0]
    )
    assert ScoredScenario.of(in_short_epochs, 0).run("dbs")[1].decisions
    assert ScoredScenario.of(scenario, 0).run("dbs")[1].decisions


FILE = """\
name: small
global_batch: 60
steps: 30
workers:
  - {name: fast, samples_per_s: 1000}
  - {name: slow, samples_per_s: 250}
"""


@pytest.fixture
def file(tmp_path: Path) -> str:
    """A scenario file, in the folder in which the command is called."""
    (tmp_path / "small.yaml").write_text(FILE)
    return "small.yaml"


@pytest.mark.parametrize("command", ["simulate", "compare"])
def test_notes_go_to_stderr_whatever_is_printed(shell: Shell, file: str, command: str) -> None:
    for more in ([], ["--json"]):
        answer = shell(command, file, "-p", "adaptive,dbs", *more)

        assert answer.code == 0
        check_message(answer.err)
        assert answer.err.count("\n") == 1


@pytest.fixture
def interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in the third run."""
    run, begun = ScoredScenario.run, list[str]()

    def once_more(stage: ScoredScenario, spec: str) -> Any:
        begun.append(spec)
        if len(begun) % 3 == 0:
            raise KeyboardInterrupt
        return run(stage, spec)

    monkeypatch.setattr(ScoredScenario, "run", once_more)


@pytest.mark.usefixtures("interrupted")
@pytest.mark.parametrize("command", ["simulate", "compare"])
def test_ctrl_c_prints_the_finished_runs(shell: Shell, file: str, command: str) -> None:
    options = ["-p", "uniform,adaptive", "--seeds", "3", "--plot", "a"]
    options[-1] += ".svg" if command == "simulate" else ""

    table = shell(command, file, *options)
    plain = shell(command, file, *options, "--json")

    assert (table.code, plain.code) == (130, 130)
    assert table.err == plain.err == "interrupted after 2 of 6 runs\n"
    check_message(table.out.splitlines()[-1], "48 ms", "120 ms")
    assert [row["policy"] for row in plain.json()["rows"]] == ["uniform", "adaptive"]
    assert plain.json()["interrupted"] == "2 of 6 runs"


def test_ctrl_c_before_anything_is_finished_leaves_a_line(
    shell: Shell, file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def at_once(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(ScoredScenario, "of", at_once)

    answer = shell("simulate", file, "-p", "uniform")

    assert (answer.code, answer.out, answer.err) == (130, "", "interrupted after 0 of 1 runs\n")


@pytest.mark.parametrize("command", ["simulate", "compare"])
def test_the_help_names_every_policy_and_a_setting(
    shell: Shell, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")

    text = " ".join(shell(command, "-h").out.replace("│", " ").split())

    assert POLICIES_HELP in text
    assert ("Default: adaptive." in text) == (command == "simulate")


def test_the_help_lists_all_policies() -> None:
    listed, _, setting = POLICIES_HELP.removeprefix("Policies: ").partition(". my_module.")
    plain = listed.replace("(static:cores, static:flops, static:20,100)", "")

    assert tuple(name.strip() for name in plain.split(",")) == POLICY_NAMES
    policy_from_spec(setting.partition(": ")[2].removesuffix("."))


def test_the_times_are_those_of_the_seeds_together(shell: Shell, file: str, tmp_path: Path) -> None:
    (tmp_path / "other.yaml").write_text(FILE.replace("small", "other").replace("1000", "250"))

    lines = shell("simulate", file, "other.yaml", "-p", "uniform", "--seeds", "2").out.splitlines()

    check_message(lines[-1], "48 ms", "120 ms")
