"""Imports and commands that need no torch do not import it, because that takes seconds."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

# Runs statements one after another in one process and prints the modules that it has imported
# after each. Statements may print text and exit.
IMPORTED_AFTER_EACH = """
import json, sys
imported = []
for statement in json.loads(sys.argv.pop()):
    try:
        exec(statement, {})
    except SystemExit as end:
        assert not end.code, (statement, end.code)
    imported.append(sorted({name.partition(".")[0] for name in sys.modules}))
print("\\n" + json.dumps(imported))
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
# Runs first, because a later statement may import what an earlier one must not.
ALONE = "import evenstride"
CALLS = [CALL.format(arguments=arguments) for arguments in COMMANDS]


@pytest.fixture(scope="module")
def imported() -> dict[str, set[str]]:
    """The packages that one process has imported after each statement."""
    statements = [ALONE, *CALLS, *IMPORTS]
    done = subprocess.run(
        [sys.executable, "-c", IMPORTED_AFTER_EACH, json.dumps(statements)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    packages = json.loads(done.stdout.splitlines()[-1])
    return dict(zip(statements, map(set, packages), strict=True))


def test_importing_the_package_alone_imports_no_dependency(
    imported: dict[str, set[str]],
) -> None:
    assert "evenstride" in imported[ALONE]
    assert not imported[ALONE] & {"torch", "numpy", "typer", "rich", "sklearn"}


@pytest.mark.parametrize("statement", IMPORTS)
def test_importing_a_module_that_needs_no_torch_does_not_import_torch(
    imported: dict[str, set[str]], statement: str
) -> None:
    assert "torch" not in imported[statement]


@pytest.mark.parametrize("statement", CALLS, ids=map(" ".join, COMMANDS))
def test_a_command_that_needs_no_torch_does_not_import_torch(
    imported: dict[str, set[str]], statement: str
) -> None:
    assert "typer" in imported[statement]
    assert not imported[statement] & {"torch", "jinja2", "matplotlib"}
