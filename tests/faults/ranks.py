"""Running a script as the ranks of one group, on this machine and without a launcher."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from evenstride.runtime.launching.process_starters import FromZygote, StartRequest
from evenstride.runtime.launching.rank_environment import LOCAL
from evenstride.testing.ranks import loopback_store

# Ranks import what the tests import, also where another tree is installed.
PYTHON_PATH = os.pathsep.join(sys.path)
# What each rank would otherwise import itself, which takes as long as training ten steps.
PRELOAD = ("evenstride.testing.faults.fault_injection", "numpy.ma", "pydantic.dataclasses")
_KILLED_S = 10.0


@functools.cache
def zygote() -> FromZygote:
    """Return what all ranks are forked from, as importing torch takes longer than most runs."""
    return FromZygote({**os.environ, **LOCAL, "PYTHONPATH": PYTHON_PATH}, PRELOAD)


def end_zygote() -> None:
    """End it, if there is one."""
    if zygote.cache_info().currsize:
        zygote().close()
        zygote.cache_clear()


class Rank:
    """A process of a run.

    Args:
        order: what it runs.
        ends: exit codes of those of its run that have ended, by process id.
    """

    def __init__(self, order: StartRequest, ends: dict[int, int]) -> None:
        self._ends = ends
        self.pid = zygote().start(order)

    def wait(self, timeout_s: float) -> int:
        """Return its exit code, once it has ended.

        Raises:
            subprocess.TimeoutExpired: it has not.
        """
        end_s = time.monotonic() + timeout_s
        while self.pid not in self._ends:
            if (left_s := end_s - time.monotonic()) < 0:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout_s)
            self._ends.update(zygote().ended(left_s))
        return self._ends[self.pid]

    def kill(self) -> None:
        """Kill it if it runs."""
        zygote().signal(self.pid, signal.SIGKILL)


@contextlib.contextmanager
def started(
    script: Path, world_size: int, folder: Path, arguments: list[str], **variables: str
) -> Iterator[list[Rank]]:
    """Start a script as ranks of a group whose store outlives them; leave none behind.

    Each rank's output is added to ``rank-RANK.log`` in the folder.
    """
    with loopback_store() as port:
        processes, ends = list[Rank](), dict[int, int]()
        try:
            for rank in range(world_size):
                environment = {
                    **os.environ,
                    **LOCAL,
                    "RANK": str(rank),
                    "WORLD_SIZE": str(world_size),
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(port),
                    "TORCHELASTIC_USE_AGENT_STORE": "True",  # so that rank 0 hosts no store
                    "TORCHELASTIC_RESTART_COUNT": "0",
                    **variables,
                }
                order = StartRequest(
                    (str(script), *arguments), environment, folder / f"rank-{rank}.log"
                )
                processes.append(Rank(order, ends))
            yield processes
        finally:
            for process in processes:
                process.kill()
            for process in processes:
                process.wait(_KILLED_S)
