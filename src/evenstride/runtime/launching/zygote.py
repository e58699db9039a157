"""Fork worker processes from one that has imported everything, at a hundredth of the cost.

``python -m evenstride.runtime.launching.zygote DESCRIPTOR MODULE ...`` imports torch, evenstride
and the modules once. It then forks a worker for each request from the socket. It starts no thread,
because a fork copies only one. The kernel kills a worker when the zygote ends, and the zygote when
its parent ends. For the reasons not to use multiprocessing's forkserver, see
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
"""Largest size of one message."""

# Modules that every training script imports. Creating any optimizer imports the second one, which
# takes longer than all others together.
_WANTED = (
    "torch",
    "torch._dynamo",
    "torch.nn.parallel",
    "torch.utils.data",
    "evenstride.runtime.stride",
    "evenstride.runtime.checkpoint",
)


def main(descriptor: int, also: Sequence[str]) -> None:
    """Fork workers on request; in a worker, run its script."""
    die_with_parent()
    for name in (*_WANTED, *also):
        importlib.import_module(name)
    channel = socket.socket(fileno=descriptor)
    threads = len(os.listdir("/proc/self/task"))  # noqa: PTH208  only their number matters
    tell(channel, {"ready": threads == 1, "threads": threads})
    # A worker never collects imported objects, so their memory stays shared with the zygote.
    gc.freeze()
    order = _Zygote(channel).serve()
    if order is not None:
        run_script(order["command"])


def tell(channel: socket.socket, message: dict[str, Any]) -> None:
    """Send one message."""
    channel.send(json.dumps(message).encode())


def hear(channel: socket.socket) -> dict[str, Any] | None:
    """Return the next message; ``None`` once the channel is closed."""
    try:
        data = channel.recv(MOST_BYTES)
    except ConnectionResetError:
        return None
    message: dict[str, Any] | None = json.loads(data) if data else None
    return message


class _Zygote:
    """The forking process: its workers, and the socket with its requests."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._workers: dict[
            int, int
        ] = {}  # process ids by the descriptor that becomes readable at the end

    def serve(self) -> dict[str, Any] | None:
        """Handle requests; return the request in a new worker, and ``None`` at the end."""
        while True:
            requests = self._channel.fileno()
            ready, _, _ = select.select([requests, *self._workers], [], [])
            for descriptor in ready:
                if descriptor != requests:
                    self._bury(descriptor)
            if requests not in ready:
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
        """Fork a worker; return true in the worker."""
        parent = os.getpid()
        pid = os.fork()
        if pid:
            # The worker does the same, so signals to its group reach it in either order.
            with contextlib.suppress(OSError):
                os.setpgid(pid, pid)
            self._workers[os.pidfd_open(pid)] = pid
            tell(self._channel, {"started": pid})
            return False
        die_with_parent()
        # The zygote may have ended before `die_with_parent` read the parent's id.
        if os.getppid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)
        with contextlib.suppress(OSError):
            os.setpgid(0, 0)
        # If a worker kept it open, the zygote's parent would not see the zygote's end.
        self._channel.close()
        for descriptor in self._workers:
            os.close(descriptor)
        _settle(order)
        return True

    def _signal(self, pid: int, number: int) -> None:
        # Only a worker that is not reaped yet: the kernel may reuse the id afterwards.
        if pid in self._workers.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, number)

    def _bury(self, descriptor: int) -> None:
        pid = self._workers.pop(descriptor)
        os.close(descriptor)
        # Before waitpid reaps it: until then the kernel cannot reuse the id of its group.
        with contextlib.suppress(ProcessLookupError):  # kills its children, if it has any
            os.killpg(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        with contextlib.suppress(OSError):  # the other end is closed
            tell(self._channel, {"ended": pid, "code": os.waitstatus_to_exitcode(status)})

    def _end_all(self) -> None:
        for pid in self._workers.values():
            self._signal(pid, signal.SIGKILL)
        for descriptor in list(self._workers):
            self._bury(descriptor)


def _settle(order: dict[str, Any]) -> None:
    """Set the environment, the working directory and the output of a new worker."""
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
