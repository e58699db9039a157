"""Workers report for duty before they run, so that each starts under its limit.

A worker connects to a Unix socket, says which one it is, and waits. The lab puts the process
under its limit and lets all go at once. The connection stays open: its end is the worker's.
"""

from __future__ import annotations

import json
import os
import select
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from evenstride.errors import LaunchError

MUSTER_VARIABLE = "_EVENSTRIDE_LAB_MUSTER"


@dataclass(frozen=True, slots=True)
class Recruit:
    """A worker that waits to be let loose."""

    worker: int
    pid: int


class StartBarrier:
    """The lab's end of the socket.

    Args:
        folder: where the socket lives; its path must be short (Unix limits it to about 100
            bytes).
        workers: how many must come.
    """

    def __init__(self, folder: Path, workers: int) -> None:
        self.path = folder / "muster"
        self._workers = workers
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(self.path))
        self._listener.listen(workers)
        self._connections: list[socket.socket] = []

    def gather(self, deadline_s: float, failed: Callable[[], str | None]) -> list[Recruit]:
        """Return all workers once they have come, in the order of their numbers.

        Raises:
            LaunchError: it is pointless, or not all came in time.
        """
        recruits: list[Recruit] = []
        end_s = time.monotonic() + deadline_s
        while len(recruits) < self._workers:
            if (why := failed()) is not None:
                raise LaunchError(why)
            if time.monotonic() > end_s:
                raise LaunchError(
                    f"{len(recruits)} of {self._workers} workers came up within {deadline_s:.0f} s"
                )
            if select.select([self._listener], [], [], 0.1)[0]:
                recruits.append(self._admit())
        return sorted(recruits, key=lambda recruit: recruit.worker)

    def release(self) -> None:
        for connection in self._connections:
            connection.sendall(b"go\n")

    def close(self) -> None:
        for connection in (*self._connections, self._listener):
            connection.close()
        self.path.unlink(missing_ok=True)

    def _admit(self) -> Recruit:
        connection, _ = self._listener.accept()
        self._connections.append(connection)
        with connection.makefile("r") as told:
            line = told.readline()
        if not line.endswith("\n"):
            raise LaunchError("a worker ended while it reported for duty")
        plain = json.loads(line)
        return Recruit(plain["worker"], plain["pid"])


def report_for_duty(path: str, worker: int) -> socket.socket:
    """Report to the lab as ``worker`` and wait to be let loose (in the worker's process).

    Returns:
        The connection, to be kept open for as long as the worker lives.

    Raises:
        LaunchError: the lab is gone.
    """
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(path)
        connection.sendall((json.dumps({"worker": worker, "pid": os.getpid()}) + "\n").encode())
        answer = connection.recv(8)
    except OSError as error:
        connection.close()
        raise LaunchError(f"the lab is gone before worker {worker} began: {error}") from None
    if answer != b"go\n":
        connection.close()
        raise LaunchError("the lab ended before the workers were let loose")
    return connection
