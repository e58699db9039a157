"""The scenarios that the package ships: their names, files and summaries."""

from __future__ import annotations

from pathlib import Path

import pytest

from evenstride.errors import ScenarioError
from evenstride.sim.scenario.builtin_scenarios import (
    SCENARIOS,
    scenario_names,
    scenario_path,
    summaries,
)
from tests.messages import raises_message


def test_a_name_is_that_of_a_file_in_the_package() -> None:
    assert scenario_path("reference") == SCENARIOS / "reference.yaml"
    assert len(scenario_names()) == len(list(SCENARIOS.glob("*.yaml"))) > 30


def test_a_path_that_exists_is_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("reference").mkdir()

    assert scenario_path("reference") == Path("reference")
    assert scenario_path(str(tmp_path)) == tmp_path


@pytest.mark.parametrize(
    ("text", "similar"), [("refrence", "reference"), ("a/slow-rampe.yml", "slow-ramp")]
)
def test_a_misspelt_name_is_refused_with_similar_ones(text: str, similar: str) -> None:
    with raises_message(ScenarioError, text, similar, "--list"):
        scenario_path(text)


def test_a_name_unlike_any_is_refused_without_similar_ones() -> None:
    with raises_message(ScenarioError, "zzz") as refused:
        scenario_path("zzz")
    assert "similar" not in str(refused.value)


def test_a_summary_is_one_short_sentence_of_its_own() -> None:
    found = summaries()

    assert tuple(found) == scenario_names()
    assert all(10 < len(text) <= 76 for text in found.values())
    assert len(set(found.values())) == len(found)
