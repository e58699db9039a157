"""``evenstride launch``."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from evenstride.cli.commands.launch import launch
from evenstride.errors import ConfigError
from tests.free_ports import free_ports
from tests.messages import check_message

DEADLINE_S = 60.0
SETTINGS = {"ignore_unknown_options": True, "allow_interspersed_args": False}

app = typer.Typer()
app.command(context_settings=SETTINGS)(launch)


@pytest.fixture
def executed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What this process would have become."""
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr(os, "execv", lambda *call: calls.append(call))
    return calls


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """``train.py`` in the folder that the command is run in."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "train.py"
    path.touch()
    return path


def call(*arguments: str) -> tuple[str, str]:
    """Return what the command prints, and its notes."""
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout, result.stderr


@pytest.mark.usefixtures("script")
def test_the_command_is_printed_and_then_run(executed: list[tuple[Any, ...]]) -> None:
    out, err = call("--per-node", "2", "train.py", "--lr", "0.1", "--debug")

    ((path, words),) = executed
    assert path == words[0] == sys.executable
    assert words[1:4] == ["-m", "evenstride.lab.processes.rendezvous", "--nnodes=1"]
    assert words[-4:] == ["train.py", "--lr", "0.1", "--debug"]
    assert out == f"{' '.join(words)}\n"
    assert err == ""


def test_a_dry_run_only_prints(executed: list[tuple[Any, ...]]) -> None:
    out, err = call("--dry-run", "--nodes", "1:4", "--store", "head", "train.py", "a b")

    assert not executed
    assert "--nnodes=1:4" in out
    assert out.endswith(" train.py 'a b'\n")
    check_message(err)


def test_json_is_one_object(executed: list[tuple[Any, ...]]) -> None:
    store = ("--store", "[fd00::1]:1", "--spot", "--id", "mine", "--restarts", "7")
    out, err = call("--json", "--nodes", "2", *store, "train.py")

    plain = json.loads(out)
    assert {"--rdzv-endpoint=[fd00::1]:1", "--rdzv-id=mine", "--max-restarts=7"} < set(
        plain["command"]
    )
    assert "--store-only --store [fd00::1]:1" in plain["notes"][0]
    assert err == ""
    assert not executed, "the object would be mixed with what the training prints"


def test_options_of_launch_behind_the_script_go_to_it_and_that_is_said(
    executed: list[tuple[Any, ...]],
) -> None:
    stray = ("--nodes=2", "--spot", "--lr", "--id", "a", "--id", "b", "--help", "--", "--store")
    out, err = call("--dry-run", "--", "train.py", *stray)

    assert out.endswith(f" train.py {' '.join(stray)}\n")
    assert len(err.splitlines()) == 3
    check_message(err, "--nodes", "--spot", "--id")


@pytest.mark.parametrize("name", ["nosuch.py", "folder"])
def test_a_missing_script_is_refused_once_and_not_at_each_restart(
    executed: list[tuple[Any, ...]], script: Path, name: str
) -> None:
    script.with_name("folder").mkdir()
    result = CliRunner().invoke(app, ["--spot", name])

    printed = str(result.exception)
    assert isinstance(result.exception, ConfigError)
    check_message(printed, name)
    assert "-- -m pkg.module; correct the name" in printed
    assert ("a folder" if name == "folder" else str(script.parent)) in printed
    assert result.stdout == ""
    assert not executed

    call("--dry-run", name)


@pytest.mark.parametrize("started", ["train.py", "package", "-m nosuch", "--no-python nosuch"])
def test_what_python_or_torchrun_can_start_is_not_refused(
    executed: list[tuple[Any, ...]], script: Path, started: str
) -> None:
    package = script.with_name("package")
    package.mkdir()
    (package / "__main__.py").touch()

    call("--", *started.split())

    assert len(executed) == 1


def test_a_module_is_launched_behind_two_dashes() -> None:
    out, _ = call("--dry-run", "--", "-m", "pkg.train", "--lr", "1")

    assert out.endswith(" -m pkg.train --lr 1\n")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], ()),
        (["--nodes", "1:4", "train.py"], ()),
        (["--nodes", "4:1", "train.py"], ("--nodes", "'4:1'")),
        (["--per-node", "0", "train.py"], ("--per-node", "'0'")),
        (["--store", "a/b", "train.py"], ("--store", "'a/b'")),
        (["--store-only"], ()),
        (["--store-only", "--store", "127.0.0.1", "train.py"], ("train.py",)),
        (["--store-only", "--store", "0.0.0.0"], ()),
        (["--store-only", "--store", "0:1"], ()),
        (["--store", "0.0.0.0", "train.py"], ("--store 0.0.0.0",)),
    ],
)
def test_invalid_options_are_refused_before_anything_starts(
    executed: list[tuple[Any, ...]], arguments: list[str], said: tuple[str, ...]
) -> None:
    result = CliRunner().invoke(app, arguments)

    assert isinstance(result.exception, ConfigError)
    check_message(str(result.exception), *said)
    assert result.stdout == ""
    assert not executed


@pytest.mark.parametrize("as_json", [False, True])
def test_a_store_alone_is_announced(as_json: bool) -> None:
    extra = ["--json"] if as_json else []
    out, _ = call("--store-only", "--store", "127.0.0.1:29555", "--dry-run", *extra)

    if as_json:
        assert json.loads(out) == {"store": "127.0.0.1:29555"}
    else:
        check_message(out, "127.0.0.1:29555")


def test_a_store_alone_serves_until_a_signal_ends_it() -> None:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    (port,) = free_ports(1)
    code = "from tests.unit.cli.commands.test_launch import app; app()"
    arguments = ["--json", "--store-only", "--store", f"127.0.0.1:{port}"]
    server = subprocess.Popen(
        [sys.executable, "-c", code, *arguments], stdout=subprocess.PIPE, text=True
    )
    try:
        assert server.stdout is not None
        assert select.select([server.stdout], [], [], DEADLINE_S)[0]
        assert json.loads(server.stdout.readline()) == {"store": f"127.0.0.1:{port}"}
        for visit in (1, 2):  # one after the other: it does not end with its first client
            store = TCPStore("127.0.0.1", port, None, False, timedelta(seconds=10))
            assert store.add("visitors", 1) == visit
            del store
        server.send_signal(signal.SIGTERM)
        assert server.wait(DEADLINE_S) == -signal.SIGTERM
    finally:
        server.kill()
        server.wait()
        if server.stdout is not None:
            server.stdout.close()


def test_no_line_of_the_help_is_broken_at_80_columns() -> None:
    lines = (launch.__doc__ or "").expandtabs().splitlines()

    assert all(len(line.removeprefix("    ")) <= 78 for line in lines)


def test_the_help_has_examples_and_needs_no_torch() -> None:
    code = (
        "import sys\nfrom tests.unit.cli.commands.test_launch import app\n"
        "try:\n    app(['--help'])\nexcept SystemExit:\n    print('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=DEADLINE_S, check=True
    )

    _, _, examples = done.stdout.partition("Examples:")
    assert "evenstride launch --store-only --store 10.0.0.5:29400" in examples
    assert "-- -m pkg.module" in examples
    assert "auto:" in examples
    assert done.stdout.splitlines()[-1] == "False"
