"""What is answered at once brings no torch, which takes seconds to import."""

from __future__ import annotations

import subprocess
import sys

import pytest

# Runs a statement, whatever it prints and however it ends, and then tells what it has brought.
TELL = """
import sys
try:
    {statement}
except SystemExit as end:
    assert not end.code, end.code
print("\\nbrought", *sorted({{name.partition(".")[0] for name in sys.modules}}))
"""
CALL = "import sys; sys.argv[1:] = {arguments!r}; from evenstride.cli.main import main; main()"

COMMANDS = [
    ["--help"],
    ["--version"],
    ["estimate", "1,0.5"],
    ["estimate", "1,0.5", "--json"],
    ["estimate", "--help"],
    ["demo", "--help"],
    ["lab", "--help"],
    ["launch", "--help"],
    ["simulate", "--help"],
    ["compare", "--help"],
    ["doctor", "--help"],
]


def _brought(statement: str) -> set[str]:
    done = subprocess.run(
        [sys.executable, "-c", TELL.format(statement=statement)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found, *names = done.stdout.splitlines()[-1].split()
    assert found == "brought"
    return set(names)


@pytest.mark.parametrize(
    "statement",
    [
        "import evenstride",
        "import evenstride; evenstride.ConfigError",
        "import evenstride.testing",
        "import evenstride.core.control.advance, evenstride.trace.decision_replay",
        "import evenstride.lab.comparison.policy_runs, evenstride.lab.limits.cpu_limits",
    ],
)
def test_importing_what_needs_no_torch_brings_none(statement: str) -> None:
    brought = _brought(statement)

    assert "evenstride" in brought
    assert "torch" not in brought


@pytest.mark.parametrize("arguments", COMMANDS, ids=" ".join)
def test_a_command_that_needs_no_torch_brings_none(arguments: list[str]) -> None:
    brought = _brought(CALL.format(arguments=arguments))

    assert "typer" in brought
    assert not brought & {"torch", "jinja2", "matplotlib"}


def test_importing_the_package_alone_brings_none_of_its_dependencies() -> None:
    assert not _brought("import evenstride") & {"torch", "numpy", "typer", "rich", "sklearn"}
