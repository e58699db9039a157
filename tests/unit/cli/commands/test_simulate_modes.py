"""``evenstride simulate --sync``: modes of synchronisation side by side."""

from __future__ import annotations

from pathlib import Path

import pytest

from evenstride.cli.arguments import read_modes
from evenstride.core.sync_modes.mode_specs import Asynchronous, StaleSynchronous
from evenstride.errors import ConfigError
from tests.messages import check_message, raises_message
from tests.unit.cli.conftest import Shell

SCENARIO = """\
name: small
global_batch: 20
steps: 30
epoch_samples: 200
workers:
  - {name: fast, samples_per_s: 100}
  - {name: slow, samples_per_s: 25}
"""


@pytest.fixture
def file(tmp_path: Path) -> str:
    """A scenario file, in the folder in which the command is called."""
    (tmp_path / "small.yaml").write_text(SCENARIO)
    (tmp_path / "free.yaml").write_text(SCENARIO.replace("small", "free") + "sync: asp\n")
    return "small.yaml"


def test_json_has_a_row_for_every_mode_policy_and_seed(shell: Shell, file: str) -> None:
    answer = shell(
        "simulate", file, "-p", "uniform,adaptive", "--sync", "bsp,ssp(staleness=2,servers=2)",
        *("--seeds", "2", "--json"),
    )  # fmt: skip

    found = answer.json()["rows"]
    keys = [(row["sync"], row["policy"], row["seed"]) for row in found]
    assert keys == [
        (mode, policy, seed)
        for mode in ("bsp", "ssp(staleness=2,servers=2)")
        for policy in ("uniform", "adaptive")
        for seed in (0, 1)
    ]
    equal = found[0]
    assert equal["time_s"] == pytest.approx(30 * 0.4)
    assert (equal["updates"], equal["epochs"], equal["samples"]) == (30, 3, 600)
    assert [worker["name"] for worker in equal["workers"]] == ["fast/0", "slow/0"]


def test_the_table_has_a_line_for_each_mode_and_notes_name_the_drawbacks(
    shell: Shell, file: str
) -> None:
    answer = shell("simulate", file, "-p", "uniform,adaptive", "--sync", "bsp,asp", "--seeds", "2")

    lines = [line.split() for line in answer.out.splitlines()[2:]]
    assert [line[1:3] for line in lines] == [
        ["bsp", "uniform"],
        ["bsp", "adaptive"],
        ["asp", "uniform"],
        ["asp", "adaptive"],
    ]
    assert lines[0][3:] == [
        *("1", "12", "s", "4", "s", "30", "0.00", "0", "37.5%"),
        *["400", "ms"] * 2,
    ]
    check_message(answer.err)
    assert "note: bsp" not in answer.err


def test_a_scenario_s_own_mode_counts_unless_others_are_asked_for(shell: Shell, file: str) -> None:
    own = shell("simulate", file, "free.yaml", "-p", "uniform", "--json").json()["rows"]
    asked = shell("simulate", "free.yaml", "-p", "uniform", "--sync", "bsp", "--json").json()

    assert [(row["scenario"], row["sync"]) for row in own] == [("small", "bsp"), ("free", "asp")]
    assert [row["sync"] for row in asked["rows"]] == ["bsp"]


def test_without_a_mode_all_is_as_it_was(shell: Shell, file: str) -> None:
    rows = shell("simulate", file, "-p", "uniform", "--json").json()["rows"]

    assert rows[0]["efficiency"] == pytest.approx(0.4, abs=0.001)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("small.yaml", "--sync", "sync"), ("'sync'",)),
        (("small.yaml", "--sync", ","), ()),
        (("small.yaml", "--sync", "asp,asp:servers=1"), ()),
        (("small.yaml", "--sync", "asp", "--plot", "a.png"), ("--plot",)),
        (("free.yaml", "--plot", "a.png"), ("--plot",)),
    ],
)
def test_options_without_an_effect_on_modes_are_refused(
    shell: Shell, file: str, arguments: tuple[str, ...], said: tuple[str, ...]
) -> None:
    check_message(shell("simulate", "-p", "uniform", *arguments).refusal(), *said)


def test_compare_is_of_steps_and_so_of_bsp_only(shell: Shell, file: str) -> None:
    said = shell("compare", "free.yaml", "-p", "uniform").refusal()

    check_message(said)
    assert "evenstride simulate" in said


def test_modes_are_read_as_everywhere() -> None:
    assert read_modes(None) == ()
    assert read_modes("asp, ssp:staleness=1,servers=2") == (
        Asynchronous(),
        StaleSynchronous(1, 2),
    )
    with raises_message(ConfigError):
        read_modes("ssp(staleness=3),ssp")
