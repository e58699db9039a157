"""``demo`` and ``lab`` refuse what cannot be before they start anything."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from evenstride.errors import LaunchError
from tests.messages import check_message
from tests.unit.cli.conftest import Shell


@pytest.fixture(autouse=True)
def nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with two cores, on which any launch and any limit is a failure of the test."""

    def started(*_: Any) -> None:
        pytest.fail("it was not refused in time")

    for module in ("evenstride.lab.comparison.lab_session", "evenstride.lab.demo.demo_run"):
        monkeypatch.setattr(f"{module}.run", started)
        monkeypatch.setattr(f"{module}.open_limits", started)
        monkeypatch.setattr(f"{module}.usable_cpus", lambda: 2)


@pytest.fixture
def script(tmp_path: Path) -> str:
    """A training script that is there."""
    path = tmp_path / "train.py"
    path.write_text("")
    return str(path)


SPEEDS = [
    ("1,0", "invalid speed 0:"),
    ("1,1.5", "invalid speed 1.5:"),
    ("1,-0.5", "invalid speed -0.5:"),
    ("1,1,0.5", "sum to 2.5 cores, but this machine has 2"),
    ("half", "invalid speeds 'half'"),
    ("", "invalid speeds ''"),
]


@pytest.mark.parametrize(("speeds", "text"), SPEEDS)
def test_the_demo_refuses_speeds_that_cannot_be(
    shell: Shell, tmp_path: Path, speeds: str, text: str
) -> None:
    assert text in shell("demo", "--speeds", speeds, "--json").refusal()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("speeds", "text"), SPEEDS)
def test_the_lab_refuses_speeds_that_cannot_be(
    shell: Shell, tmp_path: Path, script: str, speeds: str, text: str
) -> None:
    assert text in shell("lab", "--speeds", speeds, "--", script).refusal()
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            ["--policies", "uniform,magic"],
            ("'magic'",),
        ),
        (["--policies", ","], ("--policies",)),
        (["--policies", "static:a"], ("'static:a'",)),
        (
            ["--policies", "uniform:3"],
            ("'uniform:3'", "'3'"),
        ),
        (["--change", "soon:1,1"], ("'soon:1,1'",)),
        (["--change", "10:1,0.5,1"], ()),
        (["--change", "10:1,0"], ()),
    ],
)
def test_the_lab_refuses_policies_and_changes_that_cannot_be(
    shell: Shell, tmp_path: Path, script: str, options: list[str], text: tuple[str, ...]
) -> None:
    answer = shell("lab", "--speeds", "1,0.5", *options, "--", script)

    check_message(answer.refusal(), *text)
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]


def test_the_lab_refuses_given_shares_for_another_number_of_workers(
    shell: Shell, script: str
) -> None:
    answer = shell("lab", "--speeds", "1,0.5", "--policies", "static:1,2,3", "--", script)

    check_message(answer.refusal(), "2 workers")


def test_the_lab_refuses_a_missing_script(shell: Shell, tmp_path: Path) -> None:
    answer = shell("lab", "--speeds", "1,0.5", "--", "gone.py", "--lr", "0.1")

    check_message(answer.refusal(), "gone.py")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("options", [["--steps", "0"], ["--repeats", "0"], ["--steps", "few"]])
def test_the_lab_refuses_numbers_out_of_range(
    shell: Shell, script: str, options: list[str]
) -> None:
    answer = shell("lab", "--speeds", "1", *options, "--", script)

    assert (answer.code, answer.out) == (2, "")
    assert options[0] in answer.err


@pytest.mark.parametrize("arguments", [["--speeds", "1"], ["--", "train.py"]])
def test_the_lab_needs_speeds_and_a_script(shell: Shell, arguments: list[str]) -> None:
    answer = shell("lab", *arguments)

    assert (answer.code, answer.out) == (2, "")
    assert "Missing" in answer.err


def test_the_demo_refuses_a_missing_data_folder(shell: Shell, tmp_path: Path) -> None:
    answer = shell("demo", "--speeds", "1", "--data", str(tmp_path / "nowhere"))

    assert "nowhere" in answer.refusal()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", ["demo", "lab"])
def test_a_folder_that_cannot_be_made_is_refused(shell: Shell, script: str, command: str) -> None:
    rest = ["--", script] if command == "lab" else []

    answer = shell(command, "--speeds", "1", "--out", "/proc/nowhere/out", *rest)

    check_message(answer.refusal())


def test_a_launch_that_fails_is_reported_without_a_traceback(
    shell: Shell, script: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> None:
        raise LaunchError("worker 1 fell over")

    monkeypatch.setattr("evenstride.lab.comparison.lab_session.run_lab", fails)

    answer = shell("lab", "--speeds", "1", "--json", "--", script)

    assert answer.refusal() == "evenstride: worker 1 fell over\n"


@pytest.mark.parametrize("error", [ZeroDivisionError(), OSError(errno.EIO, "Input/output error")])
def test_errors_of_other_code_keep_their_traceback(
    shell: Shell, script: str, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def broken(*_: Any) -> None:
        raise error

    monkeypatch.setattr("evenstride.lab.comparison.lab_session.run_lab", broken)

    with pytest.raises(type(error)):
        shell("lab", "--speeds", "1", "--", script)


def test_the_doctor_takes_no_arguments(shell: Shell) -> None:
    answer = shell("doctor", "me")

    assert (answer.code, answer.out) == (2, "")
    assert "Usage: evenstride doctor" in answer.err


def test_the_doctor_refuses_a_world_size_that_is_no_number(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("evenstride.lab.doctor.checkup.examine_machine", dict)
    monkeypatch.setenv("WORLD_SIZE", "two")

    assert "WORLD_SIZE is 'two'" in shell("doctor").refusal()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("more", [[], ["--json"]], ids=str)
def test_output_that_cannot_be_written_is_one_line_and_no_traceback(more: list[str]) -> None:
    # As it is as a rule: what could not be written stays in the buffer until the end.
    environment = {**os.environ, "PYTHONUNBUFFERED": ""}

    with Path("/dev/full").open("w") as full:
        ended = subprocess.run(
            [sys.executable, "-m", "evenstride", "estimate", "1,0.5", *more],
            env=environment,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=120,
            check=False,
        )

    assert ended.returncode == 2
    check_message(ended.stderr)
