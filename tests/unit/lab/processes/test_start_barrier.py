"""Workers report, wait, and start together."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from socket import AF_UNIX, socket

import pytest

from evenstride.errors import LaunchError
from evenstride.lab.processes.lab_worker import report_for_duty
from evenstride.lab.processes.local_launch import Recruit, StartBarrier
from evenstride.testing import FakeClock
from tests.messages import raises_message

Open = Callable[[int], StartBarrier]


@pytest.fixture
def workers() -> Iterator[ThreadPoolExecutor]:
    """Threads that play the workers' processes."""
    with ThreadPoolExecutor(4) as pool:
        yield pool


@pytest.fixture
def folder(workers: ThreadPoolExecutor) -> Iterator[Path]:
    """A folder with a short path, as a Unix socket needs."""
    path = Path(tempfile.mkdtemp())
    yield path
    shutil.rmtree(path)


@pytest.fixture
def open_muster(folder: Path) -> Iterator[Open]:
    """Make musters that are closed before the workers are waited for, whatever happens."""
    with contextlib.ExitStack() as closing:

        def make(workers: int) -> StartBarrier:
            return closing.enter_context(contextlib.closing(StartBarrier(folder, workers)))

        yield make


def _nothing() -> None:
    return None


def _close(waiting: list[Future[socket]]) -> None:
    for future in waiting:
        future.result(30.0).close()


def test_workers_are_gathered_in_the_order_of_their_numbers(
    open_muster: Open, workers: ThreadPoolExecutor
) -> None:
    muster = open_muster(3)
    waiting = [workers.submit(report_for_duty, str(muster.path), worker) for worker in (2, 0, 1)]

    recruits = muster.gather(30.0, _nothing)

    assert recruits == [Recruit(worker, os.getpid()) for worker in range(3)]
    muster.release()
    _close(waiting)


def test_no_worker_continues_before_all_are_started(open_muster: Open) -> None:
    muster = open_muster(2)
    with socket(AF_UNIX) as first, socket(AF_UNIX) as second:
        for worker, connection in enumerate((first, second)):
            connection.connect(str(muster.path))
            connection.sendall(f'{{"worker": {worker}, "pid": 4711}}\n'.encode())

        muster.gather(30.0, _nothing)

        assert select.select([first, second], [], [], 0.0)[0] == []
        muster.release()
        assert [connection.recv(8) for connection in (first, second)] == [b"go\n"] * 2


def test_a_failure_elsewhere_ends_the_wait(open_muster: Open) -> None:
    with raises_message(LaunchError):
        open_muster(1).gather(5.0, lambda: "it fell over")


def test_workers_that_do_not_come_in_time_are_counted(
    open_muster: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    muster, clock = open_muster(2), FakeClock()
    monkeypatch.setattr("evenstride.lab.processes.local_launch.time.monotonic", clock)
    with socket(AF_UNIX) as only:
        only.connect(str(muster.path))
        only.sendall(b'{"worker": 0, "pid": 4711}\n')

        with raises_message(LaunchError, "2 workers", "60 s"):
            muster.gather(60.0, lambda: clock.spend(40.0))


def test_a_worker_whose_lab_ends_fails(open_muster: Open, workers: ThreadPoolExecutor) -> None:
    muster = open_muster(1)
    waiting = workers.submit(report_for_duty, str(muster.path), 0)
    muster.gather(30.0, _nothing)

    muster.close()

    with raises_message(LaunchError):
        waiting.result(30.0)


def test_a_worker_without_a_lab_fails(folder: Path) -> None:
    with raises_message(LaunchError, "worker 0"):
        report_for_duty(str(folder / "muster"), 0)


def test_a_worker_that_dies_while_it_reports_is_a_failed_launch(open_muster: Open) -> None:
    muster = open_muster(1)
    with socket(AF_UNIX) as connection:
        connection.connect(str(muster.path))

    with raises_message(LaunchError):
        muster.gather(30.0, _nothing)


def test_nothing_is_left_of_a_muster(open_muster: Open, folder: Path) -> None:
    open_muster(1).close()

    assert list(folder.iterdir()) == []
