"""Parameter servers are found among what workers have started, and are not slowed down."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from evenstride.errors import LimitError
from evenstride.lab.processes.local_launch import SERVER_MODULE, ServerLimits
from tests.unit.lab.fake_runs import SpyLimits


@pytest.fixture
def child() -> Iterator[int]:
    """A child of this process that looks like a server, next to one that does not."""
    code = "import sys; print(flush=True); sys.stdin.read()"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    made = [
        subprocess.Popen([sys.executable, "-c", code, name], **pipes)  # type: ignore[call-overload]
        for name in (SERVER_MODULE, "other")
    ]
    for process in made:
        process.stdout.read(1)
    yield made[0].pid
    for process in made:
        process.communicate()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, and the processes that were pinned."""
    now = [100.0]
    monkeypatch.setattr("evenstride.lab.processes.local_launch.time.monotonic", lambda: now[0])
    return now


@pytest.fixture
def pinned(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int | None]]:
    """Processes, and the cores they were pinned to."""
    found: list[tuple[int, int | None]] = []
    monkeypatch.setattr(
        "evenstride.lab.processes.local_launch.pin", lambda *which: found.append(which)
    )
    return found


def test_a_server_is_freed_once_and_nothing_else_is(
    child: int, clock: list[float], pinned: list[tuple[int, int | None]]
) -> None:
    limits = SpyLimits()
    servers = ServerLimits(limits, [os.getpid()])

    for _ in range(3):
        clock[0] += 1.0
        servers.look(training=False)

    assert (limits.left, pinned) == ([child], [(child, None)])


class Refusing(SpyLimits):
    """Limits that let nothing go, so that each look finds it again."""

    def leave(self, pid: int) -> None:
        super().leave(pid)
        raise LimitError(f"process {pid} could not be limited")


def test_looks_are_some_time_apart(
    child: int, clock: list[float], pinned: list[tuple[int, int | None]]
) -> None:
    limits = Refusing()
    servers = ServerLimits(limits, [os.getpid()])
    servers.look(training=False)
    assert limits.left == [child]

    clock[0] += 0.4
    servers.look(training=False)
    assert limits.left == [child]
    clock[0] += 0.2
    servers.look(training=False)
    assert limits.left == [child] * 2


def test_after_training_has_begun_one_more_check_follows(
    child: int, clock: list[float], pinned: list[tuple[int, int | None]]
) -> None:
    limits = Refusing()
    servers = ServerLimits(limits, [os.getpid()])

    for _ in range(2):
        clock[0] += 1.0
        servers.look(training=True)
        assert limits.left == [child]


def test_a_server_that_is_gone_by_then_is_looked_for_again(
    child: int, clock: list[float], pinned: list[tuple[int, int | None]]
) -> None:
    class Late(SpyLimits):
        def leave(self, pid: int) -> None:
            super().leave(pid)
            if len(self.left) == 1:
                raise LimitError(f"process {pid} could not be limited")

    limits = Late()
    servers = ServerLimits(limits, [os.getpid()])
    servers.look(training=False)
    clock[0] += 1.0
    servers.look(training=False)

    assert (limits.left, pinned) == ([child, child], [(child, None)])


def test_workers_that_have_ended_have_no_servers(clock: list[float]) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()

    ServerLimits(SpyLimits(), [gone.pid]).look(training=False)
