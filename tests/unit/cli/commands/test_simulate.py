"""``evenstride simulate``: what it prints, what it refuses, what it brings."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from evenstride.cli.arguments import every_policy, split_lags, split_policies, split_seeds
from evenstride.core.policies import POLICY_NAMES
from evenstride.errors import ConfigError
from evenstride.sim.scenario.builtin_scenarios import scenario_names
from evenstride.sim.scenario.scenario_model import Scenario
from evenstride.sim.scoring.suite import FIELDS
from tests.messages import check_message, raises_message
from tests.unit.cli.conftest import Answer, Shell

SCENARIO = """\
name: small
global_batch: 60
steps: 60
workers:
  - {name: fast, samples_per_s: 1000, fixed_s: 0.01, noise: 0.05}
  - {name: slow, samples_per_s: 250, fixed_s: 0.01, noise: 0.05}
events:
  - {kind: step, at: 30, workers: 0, speed: 0.5}
"""


@pytest.fixture
def file(tmp_path: Path) -> str:
    """A scenario file, in the folder in which the command is called."""
    (tmp_path / "small.yaml").write_text(SCENARIO)
    return "small.yaml"


def cells(line: str) -> list[str]:
    return line.split()


def rows(answer: Answer) -> list[dict[str, Any]]:
    """Return the rows of a JSON answer, of which nothing else may be on stdout."""
    assert answer.code == 0, answer
    plain = answer.json()
    assert list(plain) == ["rows"]
    found: list[dict[str, Any]] = plain["rows"]
    return found


def test_json_is_one_object_of_rows_with_the_promised_fields(shell: Shell, file: str) -> None:
    found = rows(shell("simulate", file, "--policy", "adaptive,uniform", "--json"))

    assert [tuple(row) for row in found] == [FIELDS, FIELDS]
    ours, equal = found
    assert (ours["scenario"], ours["policy"], ours["lag"], ours["seed"]) == (
        *("small", "adaptive", 1, 0),
    )
    assert 0.9 < ours["efficiency_mean"] <= ours["informed"] <= 1
    assert equal["efficiency_mean"] == pytest.approx(0.6)
    assert equal["steps_to_95_cold"] is None
    assert isinstance(ours["steps_to_95_cold"], int)
    assert isinstance(ours["needless_changes"], int)
    assert ours["bound"] == equal["bound"] > 1.5
    assert ours["linear_bound"] == pytest.approx((60 / 500) / (30 / 1250 + 30 / 750))
    assert ours["decide_s"] > 0


def test_every_scenario_lag_policy_and_seed_has_a_row(
    shell: Shell, file: str, tmp_path: Path
) -> None:
    (tmp_path / "other.yaml").write_text(SCENARIO.replace("small", "other"))
    options = ["-p", "uniform", "-p", "static:40,20", "--lag", "1,4", "--seeds", "3"]

    found = rows(shell("simulate", file, "other.yaml", *options, "--json"))

    keys = [(row["scenario"], row["lag"], row["policy"], row["seed"]) for row in found]
    assert keys == [
        (scenario, lag, policy, seed)
        for scenario in ("small", "other")
        for lag in (1, 4)
        for policy in ("uniform", "static:40,20")
        for seed in (0, 1, 2)
    ]


def test_seeds_may_be_named(shell: Shell, file: str) -> None:
    found = rows(shell("simulate", file, "-p", "uniform", "--seeds", "4,2", "--json"))

    assert [row["seed"] for row in found] == [4, 2]


def test_the_same_call_gives_the_same_rows(shell: Shell, file: str) -> None:
    once, again = (rows(shell("simulate", file, "-p", "adaptive", "--json")) for _ in range(2))

    for row in (*once, *again):
        del row["decide_s"]
    assert once == again


def test_options_count_instead_of_what_the_file_says(shell: Shell, file: str) -> None:
    def ours(*options: str) -> dict[str, Any]:
        return rows(shell("simulate", file, "-p", "adaptive", "--json", *options))[0]

    slow = ours("--lag", "9")

    assert slow["lag"] == 9
    assert slow["informed"] < ours()["informed"]
    assert ours("--lag", "9", "--cold-lag", "1")["informed"] > slow["informed"]
    assert ours("--steps", "20")["steps_to_95_after_change"] is None
    rare = ours("--every", "20")
    assert rare["informed"] == ours()["informed"] > rare["efficiency_mean"]
    assert ours("--every", "leader")["efficiency_mean"] > 0.8


def test_the_table_has_a_line_for_each_policy_over_all_seeds(shell: Shell, file: str) -> None:
    answer = shell("simulate", file, "-p", "uniform,static:40,20", "--seeds", "3")

    assert answer.code == 0
    lines = answer.out.splitlines()
    assert "median / 90 %" in lines[1]
    assert cells(lines[1])[:8] == [
        *("scenario", "policy", "lag", "efficiency", "noise-free", "informed", "real", "time"),
    ]
    assert cells(lines[2])[:3] == ["small", "uniform", "1"]
    assert cells(lines[2])[8:14] == ["never", "/", "never", "never", "/", "never"]
    assert cells(lines[3])[:3] == ["small", "static:40,20", "1"]
    assert cells(lines[1])[-4:] == ["decision", "speed-up", "bound", "bound"]
    assert cells(lines[2])[-3] == "1.00"
    assert lines[4] == ""
    check_message(lines[5])
    check_message(lines[6], "40,20")
    check_message(lines[7], "78 ms", "130 ms")
    assert len(lines) == 8


def test_without_changes_the_table_has_no_time_after_a_change(shell: Shell, tmp_path: Path) -> None:
    (tmp_path / "calm.yaml").write_text(SCENARIO.partition("events")[0])

    line = cells(shell("simulate", "calm.yaml", "-p", "uniform").out.splitlines()[2])

    assert line[8:12] == ["never", "/", "never", "–"]


@pytest.mark.parametrize(
    ("event", "output"),
    [
        ("at: 39, workers: 0, speed: 0.5", ["never", "/", "never"]),
        ("at: 40, workers: 0, speed: 0.5", ["–"]),
        ("at: 30, workers: 0, speed: 1.0", ["–"]),
    ],
)
def test_the_table_tells_never_found_from_nothing_to_find(
    shell: Shell, tmp_path: Path, event: str, output: list[str]
) -> None:
    before, _, _ = SCENARIO.partition("  - {kind")
    (tmp_path / "one.yaml").write_text(f"{before}  - {{kind: step, {event}}}\n")

    line = cells(shell("simulate", "one.yaml", "-p", "uniform").out.splitlines()[2])

    assert line[11 : 11 + len(output)] == output


def test_the_sentence_says_how_much_longer_than_necessary_it_takes(shell: Shell, file: str) -> None:
    row = rows(shell("simulate", file, "-p", "static:40,20", "--json"))[0]

    sentence = shell("simulate", file, "-p", "static:40,20").out.splitlines()[-2]

    assert sentence == (
        f"In small at lag 1, static:40,20 has {row['efficiency_mean']:.3f}: its steps take "
        f"{1 / row['efficiency_mean'] - 1:.1%} longer than with the best split at every moment. "
        "The informed controller takes "
        f"{1 / row['informed'] - 1:.1%} longer than with the best split, the equal split "
        f"{row['bound'] - 1:.1%} longer than with the best split."
    )


@pytest.mark.parametrize(
    "options",
    [
        ["-p", "static:40,20,uniform", "--lag", "1,2"],
        ["-p", "uniform", "--lag", "1,2"],
    ],
)
def test_the_sentence_of_many_settings_sums_them_up(
    shell: Shell, file: str, options: list[str]
) -> None:
    check_message(shell("simulate", file, *options).out.splitlines()[-2])


def test_the_schema_needs_no_file_and_is_that_of_scenarios(shell: Shell) -> None:
    answer = shell("simulate", "--schema")

    assert (answer.code, answer.err) == (0, "")
    assert json.loads(answer.out) == TypeAdapter(Scenario).json_schema()


def test_a_built_in_scenario_is_simulated_by_name_and_without_a_policy(shell: Shell) -> None:
    found = rows(shell("simulate", "reference", "--steps", "12", "--json"))

    assert [(row["scenario"], row["policy"]) for row in found] == [("reference", "adaptive")]


def test_a_file_takes_precedence_over_a_built_in_scenario(shell: Shell, tmp_path: Path) -> None:
    (tmp_path / "reference").write_text(SCENARIO)

    found = rows(shell("simulate", "reference", "--steps", "12", "--json"))

    assert [row["scenario"] for row in found] == ["small"]


def test_the_list_has_a_line_for_each_built_in_scenario(shell: Shell) -> None:
    lines = shell("simulate", "--list").out.splitlines()

    assert [line.split()[0] for line in lines] == list(scenario_names())
    assert all(len(line) <= 100 and len(line.split()) > 4 for line in lines)
    assert list(shell("simulate", "--list", "--json").json()["scenarios"]) == list(scenario_names())
    assert {"reference", "h10", "membership", "equal-8"} <= set(scenario_names())


def test_a_folder_stands_for_the_files_in_it(shell: Shell, file: str) -> None:
    found = rows(shell("simulate", ".", "-p", "uniform", "--json"))

    assert [row["scenario"] for row in found] == ["small"]


def test_plots_are_written_for_the_first_seed(shell: Shell, file: str, tmp_path: Path) -> None:
    options = ["-p", "uniform,adaptive", "--seeds", "2", "--steps", "12", "--json"]

    answer = shell("simulate", file, *options, "--plot", "new/runs.svg")

    assert len(rows(answer)) == 4
    assert answer.err == "plot written to new/runs.svg\n"
    text = (tmp_path / "new" / "runs.svg").read_text()
    assert text.startswith("<?xml")
    again = shell("simulate", file, *options, "--plot", "again.svg")
    assert again.code == 0
    assert (tmp_path / "again.svg").read_text() == text
    shell("simulate", file, *options, "--plot", "runs.PNG")
    assert (tmp_path / "runs.PNG").read_bytes().startswith(b"\x89PNG")


REFUSALS = [
    (["-p", "uniform"], "no scenario given: expected a scenario file, a folder of them, or the"),
    (["small.yaml", "-p", ","], "no policy given: expected a list, such as --policy uniform,ada"),
    (["small.yaml", "-p", "magic"], "unknown policy 'magic'; available policies: adaptive,"),
    (["small.yaml", "-p", "uniform,magic"], "unknown policy 'magic'"),
    (["small.yaml", "-p", "static"], "small: policy static, that is static:flops, needs the fl"),
    (["small.yaml", "-p", "static:1,2"], "small: policy static has shares that sum to 3"),
    (["small.yaml", "-p", "uniform", "-p", "uniform"], "policy uniform is given twice"),
    (["small.yaml", "-p", "uniform", "--seeds", "few"], "--seeds is 'few': expected a number of"),
    (["small.yaml", "-p", "uniform", "--seeds", "0"], "--seeds is '0', which is no seed: expected"),
    (["small.yaml", "-p", "uniform", "--seeds", "1,1"], "--seeds 1,1 has a number twice"),
    (["small.yaml", "-p", "uniform", "--seeds", "-1"], "--seeds is '-1': expected a number of"),
    (["small.yaml", "-p", "uniform", "--lag", "0"], "--lag has 0: expected steps from 1 to"),
    (["small.yaml", "-p", "uniform", "--lag", "1,x"], "--lag is '1,x': expected steps from 1"),
    (["small.yaml", "-p", "uniform", "--every", "0"], "--every is '0': expected steps from 1"),
    (["small.yaml", "-p", "uniform", "--every", "often"], "--every is 'often': expected steps"),
    (["gone.yaml", "-p", "uniform"], "no scenario 'gone.yaml': expected a scenario file"),
    (["h11"], "no scenario 'h11': expected a scenario file"),
    (["h11"], "similar names are h1, h10;"),
    (["benchmarks/scenarios/reference.yaml"], "similar names are reference,"),
    (["bad.yaml", "-p", "uniform"], "bad.yaml:2: global_batch: -60 (Input should be greater"),
    (["small.yaml", "bad.yaml", "-p", "uniform"], "bad.yaml:2: global_batch: -60 (Input should"),
    (
        ["small.yaml", "-p", "uniform", "--plot", "a.gif"],
        "cannot write a plot to a.gif: expected a",
    ),
    (["small.yaml", "-p", "uniform", "--plot", "/proc/x/a.png"], "cannot write /proc/x/a.png (No "),
    (["small.yaml", "-p", "uniform", "--plot", "/proc/a.png"], "cannot write /proc/a.png ("),
    (["small.yaml", "small.yaml", "-p", "uniform"], "both have the name small, so their results"),
]


@pytest.mark.parametrize(("arguments", "text"), REFUSALS, ids=[" ".join(a) for a, _ in REFUSALS])
def test_invalid_options_are_refused_before_any_simulation(
    shell: Shell,
    file: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    text: str,
) -> None:
    def simulated(*_: Any) -> None:
        pytest.fail("it was not refused in time")

    monkeypatch.setattr("evenstride.sim.scoring.suite.ScoredScenario.of", simulated)
    (tmp_path / "bad.yaml").write_text(SCENARIO.replace("60", "-60", 1))

    assert text in shell("simulate", *arguments).refusal()
    assert text in shell("simulate", *arguments, "--json").refusal()


@pytest.mark.parametrize(
    "options", [["--steps", "0"], ["--cold-lag", "0"], ["--steps", "many"], ["--what"]]
)
def test_arguments_that_do_not_fit_the_command_end_with_code_2(
    shell: Shell, file: str, options: list[str]
) -> None:
    answer = shell("simulate", file, "-p", "uniform", *options)

    assert (answer.code, answer.out) == (2, "")
    assert "Usage: evenstride simulate" in answer.err


def test_too_many_runs_for_one_plot_are_refused(shell: Shell, file: str) -> None:
    lags = ",".join(str(lag) for lag in range(1, 30))

    answer = shell("simulate", file, "-p", "uniform", "--lag", lags, "--plot", "a.png")

    check_message(answer.refusal(), "29", "24")


def test_without_matplotlib_a_plot_is_refused_with_the_way_to_get_it(
    shell: Shell, file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("evenstride.report.suite_figures.find_spec", lambda _: None)

    answer = shell("simulate", file, "-p", "uniform", "--plot", "a.png")

    check_message(answer.refusal(), "'evenstride[report]'")


def test_figures_are_printed_even_if_drawing_them_fails(
    shell: Shell, file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise ConfigError("cannot write a.png (No space left on device)")

    monkeypatch.setattr("evenstride.cli.suite_request.draw", full)
    options = [file, "-p", "uniform", "--steps", "9", "--plot", "a.png"]

    plain, table = shell("simulate", *options, "--json"), shell("simulate", *options)

    assert (plain.code, table.code) == (2, 2)
    assert len(plain.json()["rows"]) == 1
    check_message(table.out.splitlines()[-2])
    check_message(plain.err)


@pytest.mark.parametrize(
    ("texts", "names"),
    [
        (["adaptive"], ("adaptive",)),
        (["adaptive,uniform", "dbs"], ("adaptive", "uniform", "dbs")),
        (["static:20,100"], ("static:20,100",)),
        (["static:20,100,uniform,static:1,2"], ("static:20,100", "uniform", "static:1,2")),
        (
            ["dynamic-batching:window=5,dead_band=0.1,adaptive"],
            ("dynamic-batching:window=5,dead_band=0.1", "adaptive"),
        ),
        (["dbs, uniform ,,"], ("dbs", "uniform")),
        (["uniform,5"], ("uniform", "5")),
        (["static:flops,static:cores"], ("static:flops", "static:cores")),
    ],
)
def test_a_comma_parts_policies_only_where_one_begins(
    texts: list[str], names: tuple[str, ...]
) -> None:
    assert split_policies(texts) == names


def test_all_policies_are_simulated_and_ours_comes_first() -> None:
    names = every_policy()

    assert names[0] == "adaptive"
    assert {name.partition(":")[0] for name in names} == set(POLICY_NAMES)
    assert {"static:cores", "static:flops", "dynamic-batching:window=10"} <= set(names)
    assert len(names) == len(POLICY_NAMES) + 2


@pytest.mark.parametrize(
    ("text", "seeds"), [("1", (0,)), ("3", (0, 1, 2)), ("7,", (7,)), ("0, 1 ,2", (0, 1, 2))]
)
def test_seeds_are_a_number_or_a_list(text: str, seeds: tuple[int, ...]) -> None:
    assert split_seeds(text) == seeds


@pytest.mark.parametrize("text", ["", ",", "1,,2", "²", "1.5", "9" * 30])
def test_an_invalid_list_of_numbers_is_refused(text: str) -> None:
    with raises_message(ConfigError):
        split_seeds(text)
    with raises_message(ConfigError):
        split_lags(text)


def test_the_help_brings_neither_torch_nor_what_simulating_needs() -> None:
    tell = (
        "import sys; sys.argv[1:] = ['simulate', '--help']\n"
        "from evenstride.cli.main import main\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "print('brought', *sys.modules)"
    )

    done = subprocess.run(
        [sys.executable, "-c", tell], capture_output=True, text=True, timeout=60, check=True
    )

    brought = set(done.stdout.splitlines()[-1].split())
    assert "evenstride.cli.commands.simulate" in brought
    assert not brought & {"torch", "numpy", "yaml", "matplotlib", "evenstride.sim"}


def test_simulating_brings_no_torch(file: str, tmp_path: Path) -> None:
    tell = (
        "import sys; sys.argv[1:] = ['simulate', 'small.yaml', '-p', 'uniform']\n"
        "from evenstride.cli.main import main\nmain()"
    )

    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", tell],
        capture_output=True, text=True, timeout=60, check=False, cwd=tmp_path,
    )  # fmt: skip

    assert "efficiency" in done.stdout
    assert "numpy" in done.stderr
    assert "torch" not in done.stderr
