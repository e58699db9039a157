"""Two ways to start worker processes: forked from a zygote, or each from scratch."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import psutil

from evenstride.errors import LaunchError
from evenstride.lab.elastic.zygote import MOST_BYTES, hear, tell

_READY_S = 120.0
_GONE_S = 10.0


@dataclass(frozen=True, slots=True)
class Order:
    """A process to start.

    Args:
        command: script and arguments.
        environment: all of its variables.
        log: file that its output is appended to.
    """

    command: tuple[str, ...]
    environment: Mapping[str, str]
    log: Path


class Starter(Protocol):
    """Starts processes, each the head of a process group, and hears of their ends."""

    def start(self, order: Order) -> int:
        """Start a process; return its id."""
        ...

    def signal(self, pid: int, number: int) -> None:
        """Send a signal to a process and its children; nothing if it has ended."""
        ...

    def ended(self, timeout_s: float) -> dict[int, int]:
        """Return who has ended since the last call, with exit codes; wait a while if nobody has."""
        ...

    def close(self) -> None:
        """Kill all that is left."""
        ...


class FromZygote:
    """Forks workers from a process that has imported torch and evenstride.

    It dies with the thread that makes it, as the kernel counts parents.

    Args:
        environment: of the zygote itself; what native libraries read as they are loaded.

    Raises:
        LaunchError: the zygote did not come up, or has threads, which a fork would lose.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            self._channel.setsockopt(socket.SOL_SOCKET, option, MOST_BYTES)
        command = [sys.executable, "-m", "evenstride.lab.elastic.zygote", str(theirs.fileno())]
        self._process = subprocess.Popen(
            command,
            env=dict(environment),
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        theirs.close()
        self._ends: dict[int, int] = {}
        try:
            self._await_ready()
        except BaseException:
            self.close()
            raise

    def start(self, order: Order) -> int:
        """Fork a process; return its id."""
        message = {
            "command": order.command,
            "environment": dict(order.environment),
            "folder": str(Path.cwd()),
            "log": str(order.log.resolve()),
        }
        tell(self._channel, message)
        while "started" not in (answer := self._hear(_READY_S)):
            self._note(answer)
        return int(answer["started"])

    def signal(self, pid: int, number: int) -> None:
        """Send a signal to a process and its children; nothing if it has ended."""
        tell(self._channel, {"signal": number, "pid": pid})

    def ended(self, timeout_s: float) -> dict[int, int]:
        """Return who has ended since the last call, with exit codes; wait a while if nobody has."""
        while select.select([self._channel], [], [], 0.0 if self._ends else timeout_s)[0]:
            self._note(self._hear(0.0))
        ends, self._ends = self._ends, {}
        return ends

    def workers(self) -> list[int]:
        """Return the workers' processes and theirs, as far as they have not ended."""
        return [child.pid for child in psutil.Process(self._process.pid).children(recursive=True)]

    def close(self) -> None:
        """Kill all workers and the zygote."""
        self._channel.close()
        try:
            self._process.wait(_GONE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()  # its workers die with it
            self._process.wait()

    def _await_ready(self) -> None:
        answer = self._hear(_READY_S)
        if not answer.get("ready"):
            raise LaunchError(
                f"the process that workers are forked from runs {answer.get('threads')} threads, "
                "which a fork would lose; some module starts them as it is imported; start plain "
                "processes instead (zygote=False)"
            )

    def _note(self, message: dict[str, Any]) -> None:
        self._ends[int(message["ended"])] = int(message["code"])

    def _hear(self, timeout_s: float) -> dict[str, Any]:
        ready = select.select([self._channel], [], [], timeout_s)[0]
        message = hear(self._channel) if ready else None
        if message is None:
            raise LaunchError(
                "the process that workers are forked from "
                + ("has ended" if ready else f"did not answer within {timeout_s:.0f} s")
            )
        return message


class FromScratch:
    """Starts each worker as a process of its own, imports and all."""

    def __init__(self) -> None:
        self._processes: dict[int, subprocess.Popen[bytes]] = {}

    def start(self, order: Order) -> int:
        """Start a process; return its id."""
        command = [sys.executable, "-m", "evenstride.lab.elastic.plain", *order.command]
        with order.log.open("ab") as log:
            process = subprocess.Popen(
                command,
                env=dict(order.environment),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._processes[process.pid] = process
        return process.pid

    def signal(self, pid: int, number: int) -> None:
        """Send a signal to a process and its children; nothing if it has ended."""
        if pid in self._processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, number)

    def ended(self, timeout_s: float) -> dict[int, int]:
        """Return who has ended since the last call, with exit codes; wait a while if nobody has."""
        until_s = time.monotonic() + timeout_s
        while True:
            ends = {pid: self._bury(pid) for pid in list(self._processes) if _is_over(pid)}
            left_s = until_s - time.monotonic()
            if ends or left_s <= 0:
                return ends
            time.sleep(min(left_s, 0.01))

    def close(self) -> None:
        """Kill all that is left."""
        for pid in list(self._processes):
            self.signal(pid, signal.SIGKILL)
            self._bury(pid)

    def _bury(self, pid: int) -> int:
        with contextlib.suppress(ProcessLookupError):  # its own children, if it had any
            os.killpg(pid, signal.SIGKILL)
        return self._processes.pop(pid).wait()


def _is_over(pid: int) -> bool:
    """Return whether a child has ended, without burying it: its group is still its own."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
