"""Start worker processes, forked from a zygote or from scratch, and end them.

All code here that starts processes of ranks uses a `Starter`, which alone decides how they end and
ensures that none is left. There are two exceptions. The processes of `evenstride.testing.RankPool`
outlive a run, and parameter servers outlive the rank that starts them.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import psutil

from evenstride.errors import LaunchError
from evenstride.runtime.launching.zygote import MOST_BYTES, hear, tell

_RUNNER = "evenstride.runtime.launching.die_with_parent"
_READY_S = 120.0
_GONE_S = 10.0
_KILLED_S = 10.0
_POLL_S = 0.02
_TAIL_LINES = 30
_TORCHRUN = re.compile(r"(\[rank\d+\]:)?[EWI]\d{4} .*torch/distributed/")


@dataclass(frozen=True, slots=True)
class StartRequest:
    """A process to start."""

    # script and arguments; with `FromScratch` also ``-m``, module and arguments
    command: tuple[str, ...]
    environment: Mapping[str, str]  # its complete environment
    log: Path  # file to which its output is appended


class Starter(Protocol):
    """Starts processes, each the leader of a process group, and keeps their exit codes.

    `close` kills all remaining processes; use ``contextlib.closing``, for example.
    """

    def start(self, order: StartRequest) -> int:
        """Start a process; return its id."""
        ...

    def signal(self, pid: int, number: int) -> None:
        """Send a signal to a process and its children; nothing if it has ended."""
        ...

    def ended(self, timeout_s: float = 0.0) -> Mapping[int, int]:
        """Return the exit codes of all ended processes by id; negative codes are signals.

        If no process ended since the last call, wait for one for up to ``timeout_s``.
        """
        ...

    def close(self) -> None:
        """Kill all remaining processes."""
        ...


class FromZygote:
    """Forks workers from a process that has imported torch, evenstride and the modules to preload.

    That process, the zygote, dies with the thread that makes it, because the kernel ties it to that
    thread. Native libraries read ``environment`` when the zygote loads them.

    Raises:
        LaunchError: the zygote does not start, or it has threads, which a fork would lose.
    """

    def __init__(self, environment: Mapping[str, str], preload: Sequence[str] = ()) -> None:
        # SOCK_SEQPACKET keeps message boundaries: one `recv` returns one message.
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            self._channel.setsockopt(socket.SOL_SOCKET, option, MOST_BYTES)
        zygote = ["-m", "evenstride.runtime.launching.zygote", str(theirs.fileno())]
        self._process = subprocess.Popen(
            [sys.executable, *zygote, *preload],
            env=dict(environment),
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        # With this copy open, the channel would not show the end of the zygote.
        theirs.close()
        self._ends: dict[int, int] = {}
        self._unread = False  # whether an end arrived while `start` waited for its answer
        try:
            self._await_ready()
        except BaseException:
            self.close()
            raise

    def start(self, order: StartRequest) -> int:
        """Fork a process; return its id."""
        message = {
            "command": order.command,
            "environment": dict(order.environment),
            "folder": str(Path.cwd()),
            "log": str(order.log.resolve()),
        }
        tell(self._channel, message)
        # Ends of other workers may arrive before the answer.
        while "started" not in (answer := self._hear(_READY_S)):
            self._note(answer)
        pid = int(answer["started"])
        self._ends.pop(pid, None)  # the kernel uses the ids of ended processes again
        return pid

    def signal(self, pid: int, number: int) -> None:
        """Send a signal to a process and its children; nothing if it has ended."""
        tell(self._channel, {"signal": number, "pid": pid})

    def ended(self, timeout_s: float = 0.0) -> Mapping[int, int]:
        """Return the exit codes of all processes that have ended; wait for one if none is new."""
        left_s = 0.0 if self._unread else timeout_s
        while select.select([self._channel], [], [], left_s)[0]:
            self._note(self._hear(0.0))
            left_s = 0.0
        self._unread = False
        return self._ends

    def workers(self) -> list[int]:
        """Return the running processes of the workers, with their child processes."""
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
                f"the process from which workers are forked runs {answer.get('threads')} threads, "
                "which a fork would lose; an imported module starts them; use plain processes "
                "instead (zygote=False)"
            )

    def _note(self, message: dict[str, Any]) -> None:
        self._ends[int(message["ended"])] = int(message["code"])
        self._unread = True

    def _hear(self, timeout_s: float) -> dict[str, Any]:
        ready = select.select([self._channel], [], [], timeout_s)[0]
        message = hear(self._channel) if ready else None
        if message is None:
            raise LaunchError(
                "the process from which workers are forked "
                + ("has ended" if ready else f"did not answer within {timeout_s:.0f} s")
            )
        return message


class FromScratch:
    """Starts each worker as a new process, which imports everything itself."""

    def __init__(self) -> None:
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._ends: dict[int, int] = {}

    def start(self, order: StartRequest) -> int:
        """Start a process; return its id."""
        command = [sys.executable, "-m", _RUNNER, *order.command]
        order.log.parent.mkdir(parents=True, exist_ok=True)
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
        self._ends.pop(process.pid, None)  # the kernel uses the ids of ended processes again
        return process.pid

    def signal(self, pid: int, number: int) -> None:
        """Send a signal to a process and its children; nothing if it has ended."""
        if pid in self._processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, number)

    def ended(self, timeout_s: float = 0.0) -> Mapping[int, int]:
        """Return the exit codes of all processes that have ended; wait for one if none is new."""
        until_s = time.monotonic() + timeout_s
        while True:
            ends = {pid: self._bury(pid) for pid in list(self._processes) if _is_over(pid)}
            self._ends |= ends
            left_s = until_s - time.monotonic()
            if ends or left_s <= 0:
                return self._ends
            time.sleep(min(left_s, 0.01))

    def close(self) -> None:
        """Kill all remaining processes."""
        for pid in list(self._processes):
            self.signal(pid, signal.SIGKILL)
            self._bury(pid)

    def _bury(self, pid: int) -> int:
        # Before the wait reaps it: until then the kernel cannot reuse the id of its group.
        with contextlib.suppress(ProcessLookupError):  # kills its children, if it has any
            os.killpg(pid, signal.SIGKILL)
        return self._processes.pop(pid).wait()


def end_all(starter: Starter, pids: Iterable[int], grace_s: float) -> None:
    """End processes and their children: send SIGTERM, and after ``grace_s`` SIGKILL.

    Raises:
        LaunchError: a process could not be killed.
    """
    left = set(pids) - starter.ended().keys()
    for number, within_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, _KILLED_S)):
        for pid in left:
            starter.signal(pid, number)
            starter.signal(pid, signal.SIGCONT)  # a stopped process does not handle SIGTERM
        until_s = time.monotonic() + within_s
        while left and time.monotonic() < until_s:
            left -= starter.ended(_POLL_S).keys()
    if left:
        raise LaunchError(f"processes {sorted(left)} could not be killed")


def last_words(text: str) -> str:
    """Return the last lines of the workers' own output, without torchrun's report."""
    lines = []
    for line in text.splitlines():
        if _TORCHRUN.match(line):
            if "failed (exitcode" in line:
                break
        else:
            lines.append(line)
    return "\n".join(lines[-_TAIL_LINES:])


def newest_words(folder: Path) -> str:
    """Return the last lines of the most recently written log in a folder."""
    logs = sorted(folder.glob("*.log"), key=lambda log: log.stat().st_mtime)
    return last_words(logs[-1].read_text(errors="replace")) if logs else ""


def _is_over(pid: int) -> bool:
    """Return whether a child has ended, without reaping it, so that its group id stays reserved."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
