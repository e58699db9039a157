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
    "grafana",
    "report",
    "trace",
    "doctor",
)


def _reported(*arguments: str) -> str:
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "100", "NO_COLOR": "1"})
    assert result.exit_code == 0, result.output
    return result.stdout


def test_help_lists_every_command_and_the_exit_codes() -> None:
    text = _reported("--help")

    assert [name for name in COMMANDS if f" {name} " in text] == list(COMMANDS)
    check_message(text)
    assert "130 interrupted with Ctrl-C." in " ".join(text.split())
    assert _reported("-h") == text


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_of_every_command_has_an_example_that_can_be_copied(command: str) -> None:
    text = _reported(command, "--help")

    _, found, examples = text.partition("Examples:")
    assert found
    assert f"evenstride {command}" in examples
    assert "--json" in text


def test_every_command_is_known_to_these_tests() -> None:
    assert list(KNOWN) == list(COMMANDS)


def test_without_a_command_the_help_is_shown() -> None:
    result = CliRunner().invoke(app, [])

    assert result.exit_code == 2
    assert "Usage: " in result.output


def test_the_version_is_reported() -> None:
    assert _reported("--version") == f"evenstride {__version__}\n"
