"""``evenstride launch``."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
from datetime import timedelta
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from evenstride.cli.launch import launch
from evenstride.errors import ConfigError

DEADLINE_S = 60.0
SETTINGS = {"ignore_unknown_options": True, "allow_interspersed_args": False}

app = typer.Typer()
app.command(context_settings=SETTINGS)(launch)


@pytest.fixture
def executed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What this process would have become."""
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr(os, "execve", lambda *call: calls.append(call))
    return calls


def call(*arguments: str) -> tuple[str, str]:
    """Return what the command prints, and its notes."""
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout, result.stderr


def test_the_command_is_printed_and_then_run(executed: list[tuple[Any, ...]]) -> None:
    out, err = call("--per-node", "2", "train.py", "--lr", "0.1", "--json")

    ((path, words, environment),) = executed
    assert path == words[0] == sys.executable
    assert words[1:4] == ["-m", "torch.distributed.run", "--standalone"]
    assert words[-4:] == ["train.py", "--lr", "0.1", "--json"]
    assert environment == {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    assert out == f"TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 {' '.join(words)}\n"
    assert err == ""


def test_a_dry_run_only_prints(executed: list[tuple[Any, ...]]) -> None:
    out, err = call("--dry-run", "--nodes", "1:4", "--store", "head", "train.py", "a b")

    assert not executed
    assert "--nnodes=1:4" in out
    assert out.endswith(" train.py 'a b'\n")
    assert err.startswith("note: The machine head hosts the store")


def test_json_is_one_object(executed: list[tuple[Any, ...]]) -> None:
    store = ("--store", "[fd00::1]:1", "--spot", "--id", "mine", "--restarts", "7")
    out, err = call("--json", "--dry-run", "--nodes", "2", *store, "train.py")

    plain = json.loads(out)
    assert {"--rdzv-endpoint=[fd00::1]:1", "--rdzv-id=mine", "--max-restarts=7"} < set(
        plain["command"]
    )
    assert plain["environment"] == {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    assert "--store-only --store [fd00::1]:1" in plain["notes"][0]
    assert err == ""


def test_a_module_is_launched_behind_two_dashes() -> None:
    out, _ = call("--dry-run", "--", "-m", "pkg.train", "--lr", "1")

    assert out.endswith(" -m pkg.train --lr 1\n")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "there is no script to launch; name it"),
        (["--nodes", "1:4", "train.py"], "up to 4 machines cannot find each other"),
        (["--nodes", "4:1", "train.py"], "--nodes '4:1' is not understood"),
        (["--per-node", "0", "train.py"], "--per-node '0' is not understood"),
        (["--store", "a/b", "train.py"], "--store 'a/b' is not understood"),
        (["--store-only"], "a store alone needs an address"),
        (["--store-only", "--store", "127.0.0.1", "train.py"], "but train.py is given"),
        (["--store-only", "--store", "0.0.0.0"], "open to whoever reaches this machine"),
        (["--store-only", "--store", "0:1"], "open to whoever reaches this machine"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_starts(
    executed: list[tuple[Any, ...]], arguments: list[str], said: str
) -> None:
    result = CliRunner().invoke(app, arguments)

    assert isinstance(result.exception, ConfigError)
    assert said in str(result.exception)
    assert result.stdout == ""
    assert not executed


@pytest.mark.parametrize("as_json", [False, True])
def test_a_store_alone_is_announced(as_json: bool) -> None:
    extra = ["--json"] if as_json else []
    out, _ = call("--store-only", "--store", "127.0.0.1:29555", "--dry-run", *extra)

    if as_json:
        assert json.loads(out) == {"store": "127.0.0.1:29555"}
    else:
        assert out.startswith("The store is served at 127.0.0.1:29555; it must run as long as")


def test_a_store_alone_serves_whoever_comes_until_it_is_told_to_end() -> None:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    code = "from tests.unit.cli.test_launch import app; app()"
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


def test_the_help_has_examples_and_needs_no_torch() -> None:
    code = (
        "import sys\nfrom tests.unit.cli.test_launch import app\n"
        "try:\n    app(['--help'])\nexcept SystemExit:\n    print('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=DEADLINE_S, check=True
    )

    _, _, examples = done.stdout.partition("Examples:")
    assert "evenstride launch --store-only --store 10.0.0.5:29400" in examples
    assert done.stdout.splitlines()[-1] == "False"
