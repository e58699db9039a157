"""Which ports ``evenstride doctor`` lists, and what it says of them."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest

from evenstride.lab.doctor.checkup import (
    Port,
    ports_of,
    ports_of_jobs,
    ports_of_rank,
    tell_ports,
)
from tests.messages import check_message

LISTEN = """
import socket, sys
sockets = [socket.create_server((address, 0)) for address in sys.argv[1].split(",")]
print(*(s.getsockname()[1] for s in sockets), flush=True)
sys.stdin.read()
"""
RANK = {"RANK": "3", "WORLD_SIZE": "4", "MASTER_PORT": "29500"}


@contextlib.contextmanager
def listening(
    addresses: str, environment: dict[str, str], *arguments: str
) -> Iterator[tuple[psutil.Process, list[int]]]:
    """Run a process that listens, and yield it with its ports."""
    process = subprocess.Popen(
        [sys.executable, "-S", "-c", LISTEN, addresses, *arguments],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    with process:
        yield psutil.Process(process.pid), [int(n) for n in process.stdout.readline().split()]
        process.stdin.close()


@pytest.mark.parametrize(
    ("environment", "arguments", "role"),
    [
        (RANK, (), "rank 3"),
        (RANK, ("evenstride.runtime.parameter_server.server_process",), "parameter server"),
        ({}, ("torch.distributed.run",), "agent"),
        ({}, ("evenstride.lab.processes.rendezvous",), "agent"),
        ({}, ("launch", "--store-only"), "store"),
    ],
)
def test_ports_of_a_job_are_listed_with_the_hosts_that_can_reach_them(
    environment: dict[str, str], arguments: tuple[str, ...], role: str
) -> None:
    with listening("127.0.0.1,127.0.0.2", environment, *arguments) as (process, numbers):
        found = ports_of([process])
        assert set(found) <= set(ports_of_jobs())

    assert {(port.address, port.port) for port in found} == {
        ("127.0.0.1", numbers[0]),
        ("127.0.0.2", numbers[1]),
    }
    assert {(port.process, port.pid, port.is_open) for port in found} == {
        (role, process.pid, False)
    }


def test_a_port_on_all_addresses_is_open() -> None:
    with listening("0.0.0.0", RANK) as (process, _):
        (port,) = ports_of([process])

    assert port.is_open


def test_other_processes_are_not_listed() -> None:
    with listening("127.0.0.1", {"RANK": "0"}) as (process, _):
        assert not ports_of([process])
    assert not ports_of([process]), "it has ended"


def test_a_rank_lists_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("evenstride.lab.doctor.checkup.ports_of", lambda processes: [*processes])
    me = psutil.Process()

    assert ports_of_rank() == [me, me.parent()]
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert ports_of_rank() == [me]


def test_open_ports_are_shown_with_the_remedy() -> None:
    closed = Port("127.0.0.1", 29400, "rank 0", 7, is_open=False).to_plain()
    open_ = Port("::", 29401, "agent", 6, is_open=True).to_plain()

    assert tell_ports([]) == ["ports                none"]
    check_message(tell_ports([closed]), "127.0.0.1:29400", "rank 0")
    *lines, warning = tell_ports([closed, open_])
    assert lines[1].split() == [
        "[::]:29401",
        "agent,",
        "pid",
        "6",
        "OPEN",
        "to",
        "other",
        "machines",
    ]
    check_message(warning)
    assert "evenstride launch" in warning
    assert tell_ports([open_, open_])[-1].split()[1:4] == ["2", "ports", "are"]


def test_sockets_that_a_child_inherited_are_listed_once() -> None:
    with socket.create_server(("127.0.0.1", 0)), listening("127.0.0.1", RANK) as (process, _):
        assert len(ports_of([process, process])) == 1
