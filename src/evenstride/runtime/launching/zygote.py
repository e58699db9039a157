"""Worker processes at a hundredth of their price: forked from one that has imported everything.

``python -m evenstride.runtime.launching.zygote DESCRIPTOR MODULE ...`` imports torch, evenstride
and the modules once, and then forks a worker for each order that comes over the socket. It starts
no thread, since a fork takes only one along. A worker dies with the zygote, and the zygote with
its parent: the kernel kills both. Why it is not multiprocessing's forkserver:
``docs/explanation/decisions/workers-from-a-zygote.md``.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
from collections.abc import Sequence
from typing import Any

from evenstride.runtime.launching.die_with_parent import die_with_parent, run_script

MOST_BYTES = 1 << 20
"""Of one message."""

# What every training script would import. The second is what making any optimizer imports, and
# takes longer than all the others together.
_WANTED = (
    "torch",
    "torch._dynamo",
    "torch.nn.parallel",
    "torch.utils.data",
    "evenstride.runtime.stride",
    "evenstride.runtime.checkpoint",
)


def main(descriptor: int, also: Sequence[str]) -> None:
    """Fork workers as ordered; return at the end in this process, and run a script in a worker."""
    die_with_parent()
    for name in (*_WANTED, *also):
        importlib.import_module(name)
    channel = socket.socket(fileno=descriptor)
    threads = len(os.listdir("/proc/self/task"))  # noqa: PTH208  nothing but their number
    tell(channel, {"ready": threads == 1, "threads": threads})
    # What was imported is never collected in a worker, so its memory stays shared with the zygote.
    gc.freeze()
    order = _Zygote(channel).serve()
    if order is not None:
        run_script(order["command"])


def tell(channel: socket.socket, message: dict[str, Any]) -> None:
    """Send one message."""
    channel.send(json.dumps(message).encode())


def hear(channel: socket.socket) -> dict[str, Any] | None:
    """Return the next message; ``None`` when there will be no more."""
    try:
        data = channel.recv(MOST_BYTES)
    except ConnectionResetError:
        return None
    message: dict[str, Any] | None = json.loads(data) if data else None
    return message


class _Zygote:
    """The process that forks: its workers, and the socket over which it is told."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._workers: dict[int, int] = {}  # by the descriptor that tells of the end

    def serve(self) -> dict[str, Any] | None:
        """Do as told; return the order in a new worker, and ``None`` at the end."""
        while True:
            told = self._channel.fileno()
            ready, _, _ = select.select([told, *self._workers], [], [])
            for descriptor in ready:
                if descriptor != told:
                    self._bury(descriptor)
            if told not in ready:
                continue
            message = hear(self._channel)
            if message is None:
                self._end_all()
                return None
            if "signal" in message:
                self._signal(message["pid"], message["signal"])
            elif self._fork(message):
                return message

    def _fork(self, order: dict[str, Any]) -> bool:
        """Fork a worker; return true in it."""
        parent = os.getpid()
        pid = os.fork()
        if pid:
            # The worker does the same; whichever is first, signals to its group find it.
            with contextlib.suppress(OSError):
                os.setpgid(pid, pid)
            self._workers[os.pidfd_open(pid)] = pid
            tell(self._channel, {"started": pid})
            return False
        die_with_parent()
        # The zygote may have ended before `die_with_parent` asked which parent that is.
        if os.getppid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)
        with contextlib.suppress(OSError):
            os.setpgid(0, 0)
        # A worker that kept it open would hide the zygote's end from its parent.
        self._channel.close()
        for descriptor in self._workers:
            os.close(descriptor)
        _settle(order)
        return True

    def _signal(self, pid: int, number: int) -> None:
        # Only who is not buried yet: its number cannot be another process's by now.
        if pid in self._workers.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, number)

    def _bury(self, descriptor: int) -> None:
        pid = self._workers.pop(descriptor)
        os.close(descriptor)
        # Before waitpid: until then its group's id cannot be that of another process.
        with contextlib.suppress(ProcessLookupError):  # its own children, if it had any
            os.killpg(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        with contextlib.suppress(OSError):  # nobody listens any more
            tell(self._channel, {"ended": pid, "code": os.waitstatus_to_exitcode(status)})

    def _end_all(self) -> None:
        for pid in self._workers.values():
            self._signal(pid, signal.SIGKILL)
        for descriptor in list(self._workers):
            self._bury(descriptor)


def _settle(order: dict[str, Any]) -> None:
    """Give a new worker its environment, its folder and its output."""
    os.environ.clear()
    os.environ.update(order["environment"])
    os.chdir(order["folder"])
    output = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(source, target)
    os.close(output)
    os.close(nothing)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
