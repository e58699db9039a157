"""What ``--help`` and ``--version`` tell."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from evenstride import __version__
from evenstride.cli.main import COMMANDS as KNOWN
from evenstride.cli.main import app
from tests.messages import check_message

COMMANDS = (
    "estimate",
    "demo",
    "lab",
    "launch",
    "simulate",
    "compare",
    "profile",
    "plan",
    "top",
    "report",
    "trace",
    "doctor",
)


def _told(*arguments: str) -> str:
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "100", "NO_COLOR": "1"})
    assert result.exit_code == 0, result.output
    return result.stdout


def test_help_lists_every_command_and_the_exit_codes() -> None:
    told = _told("--help")

    assert [name for name in COMMANDS if f" {name} " in told] == list(COMMANDS)
    check_message(told)
    assert "130 interrupted with Ctrl-C." in " ".join(told.split())
    assert _told("-h") == told


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_of_every_command_has_an_example_that_can_be_copied(command: str) -> None:
    told = _told(command, "--help")

    _, found, examples = told.partition("Examples:")
    assert found
    assert f"evenstride {command}" in examples
    assert "--json" in told


def test_every_command_is_known_to_these_tests() -> None:
    assert list(KNOWN) == list(COMMANDS)


def test_without_a_command_the_help_is_shown() -> None:
    result = CliRunner().invoke(app, [])

    assert result.exit_code == 2
    assert "Usage: " in result.output


def test_the_version_is_told() -> None:
    assert _told("--version") == f"evenstride {__version__}\n"
