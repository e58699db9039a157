"""What is answered at once brings no torch, which takes seconds to import."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

# Runs statements in turn, whatever they print and however they end, and tells after each what the
# process has brought so far: what is not there at last was brought by none.
TELL = """
import json, sys
told = []
for statement in json.loads(sys.argv.pop()):
    try:
        exec(statement, {})
    except SystemExit as end:
        assert not end.code, (statement, end.code)
    told.append(sorted({name.partition(".")[0] for name in sys.modules}))
print("\\n" + json.dumps(told))
"""
CALL = "import sys; sys.argv[1:] = {arguments!r}; from evenstride.cli.main import main; main()"

IMPORTS = [
    "import evenstride; evenstride.ConfigError",
    "import evenstride.testing",
    "import evenstride.core.control.advance, evenstride.trace.decision_replay",
    "import evenstride.lab.comparison.lab_session, evenstride.lab.processes.cpu_limits",
]
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
# In this order, as a later one may bring what an earlier one must not.
ALONE = "import evenstride"
CALLS = [CALL.format(arguments=arguments) for arguments in COMMANDS]


@pytest.fixture(scope="module")
def brought() -> dict[str, set[str]]:
    """What one process has brought after each statement."""
    statements = [ALONE, *CALLS, *IMPORTS]
    done = subprocess.run(
        [sys.executable, "-c", TELL, json.dumps(statements)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    return dict(zip(statements, map(set, told), strict=True))


def test_importing_the_package_alone_brings_none_of_its_dependencies(
    brought: dict[str, set[str]],
) -> None:
    assert "evenstride" in brought[ALONE]
    assert not brought[ALONE] & {"torch", "numpy", "typer", "rich", "sklearn"}


@pytest.mark.parametrize("statement", IMPORTS)
def test_importing_what_needs_no_torch_brings_none(
    brought: dict[str, set[str]], statement: str
) -> None:
    assert "torch" not in brought[statement]


@pytest.mark.parametrize("statement", CALLS, ids=map(" ".join, COMMANDS))
def test_a_command_that_needs_no_torch_brings_none(
    brought: dict[str, set[str]], statement: str
) -> None:
    assert "typer" in brought[statement]
    assert not brought[statement] & {"torch", "jinja2", "matplotlib"}
