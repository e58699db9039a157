"""``evenstride profile``: what is refused before it measures, and what is doubted after."""

from __future__ import annotations

from pathlib import Path

import pytest

from evenstride.cli.commands.profile import doubts, tell
from evenstride.planner.workload.workload_profile import (
    DeviceProfile,
    Model,
    Point,
    WorkloadProfile,
)
from tests.messages import check_message
from tests.unit.cli.conftest import Shell


def measured(type_: str, computed_on: str) -> WorkloadProfile:
    points = tuple(Point(samples=b, step_s=0.01 + 0.002 * b, steps=50) for b in (32, 128, 512))
    device = {"type": type_, "points": points, "computed_on": computed_on}
    return WorkloadProfile(
        evenstride="0.1.0",
        torch="2.13.0",
        made_on="2026-05-01",
        script="train.py",
        model=Model(parameters=10, gradient_bytes=40.0, digest="abc"),
        samples=640,
        global_batch=512,
        devices=(DeviceProfile.model_validate(device),),
    )


def test_a_missing_script_or_folder_is_refused_at_once(shell: Shell, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")

    check_message(shell("profile", "--", "nowhere.py").refusal(), "nowhere.py")
    answer = shell("profile", "--out", "away/x.json", "--", "train.py")
    check_message(answer.refusal(), "--out")
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]


def test_steps_of_a_processor_under_the_name_of_an_accelerator_are_doubted() -> None:
    (text,) = doubts(measured("g4dn.xlarge", "cpu"))

    check_message(text, "g4dn.xlarge")
    assert doubts(measured("g4dn.xlarge", "cuda")) == []
    assert doubts(measured("this-machine", "cpu")) == []
    assert tell(measured("g4dn.xlarge", "cpu"), Path("a.json")).endswith("refuses this profile")


@pytest.mark.parametrize(
    ("type_", "text"),
    [
        ("g4dn.xlarge", ("a.json", "--epochs")),
        ("this-machine", ("--type",)),
        ("g4dn.xlage", ("g4dn.xlarge",)),
    ],
)
def test_the_printed_next_step_is_possible(type_: str, text: tuple[str, ...]) -> None:
    last = tell(measured(type_, ""), Path("a.json")).splitlines()[-1]

    check_message(last, *text)
    assert ("--catalog F" in last) == (type_ != "g4dn.xlarge")


@pytest.mark.parametrize(("type_", "files"), [("this-machine", 1), ("g4dn.xlarge", 0)])
def test_a_profile_is_stored_unless_its_accelerator_was_idle(
    shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, type_: str, files: int
) -> None:
    monkeypatch.setattr("evenstride.lab.profiling.profile", lambda *_: measured(type_, "cpu"))
    (tmp_path / "train.py").write_text("")

    answer = shell("profile", "--store", "store", "--json", "--", "train.py")

    assert answer.json()["script"] == "train.py"
    kept = list((tmp_path / "store").glob("*.json"))
    assert len(kept) == files
    assert [f"stored store/{one.name}" in answer.err for one in kept] == [True] * files


def test_a_store_that_cannot_be_written_is_a_warning(
    shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("evenstride.lab.profiling.profile", lambda *_: measured("box", "cpu"))
    (tmp_path / "train.py").write_text("")

    answer = shell("profile", "--store", "train.py", "--", "train.py")

    assert not answer.code
    check_message(answer.err, "cannot store")
    assert (tmp_path / "profile.json").exists()
