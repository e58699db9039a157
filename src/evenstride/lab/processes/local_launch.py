"""Start local workers under CPU limits, watch them, and end them all."""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from evenstride.errors import LaunchError, LimitError
from evenstride.lab.processes.cpu_limits import Limits
from evenstride.lab.processes.lab_worker import MUSTER_VARIABLE
from evenstride.lab.processes.speeds import SpeedChange, Speeds, pin, place, usable_cpus
from evenstride.runtime.launching.process_starters import (
    FromScratch,
    Starter,
    StartRequest,
    end_all,
    newest_words,
)
from evenstride.runtime.launching.rank_environment import STEADY, lone_rank
from evenstride.runtime.timing.progress_file import read_steps

SERVER_MODULE = "evenstride.runtime.parameter_server.server_process"
_LOOK_S = 0.5  # between searches for new servers
_START_S = 180.0
_POLL_S = 0.05
_GRACE_S = 5.0


@dataclass(frozen=True, slots=True)
class Launch:
    """A script to run, and the speeds of its workers."""

    command: tuple[str, ...]  # script and arguments
    speeds: Speeds  # of the workers, in rank order
    changes: tuple[SpeedChange, ...] = ()  # of speed during the run
    # Environment variables, in addition to those of this process.
    environment: dict[str, str] = field(default_factory=dict)
    # If empty, the workers are the ranks of one torchrun job. Otherwise each worker runs in a
    # group of its own, with these variables. All run at the same time.
    alone: tuple[dict[str, str], ...] = ()
    deadline_s: float = 3600.0  # longest time from the start of the workers to the end


@dataclass(frozen=True, slots=True)
class LaunchProgress:
    """Progress of a launch: steps of the leader, and seconds since the start of the workers."""

    step: int
    elapsed_s: float


def run(
    launch: Launch,
    limits: Limits,
    folder: Path,
    watch: Callable[[LaunchProgress], None] = lambda _: None,
) -> float:
    """Run a launch to its end; return the seconds from the start of the workers.

    Raises:
        LaunchError: a worker failed, or the deadline passed. All workers are ended then.
        LimitError: a limit could not be set.
    """
    workers = len(launch.speeds)
    with (
        _scratch() as scratch,
        contextlib.ExitStack() as stores,
        contextlib.closing(FromScratch()) as starter,
    ):
        muster = StartBarrier(scratch, workers)
        running = _Running(launch, starter, scratch / "progress", folder)
        try:
            for request in _requests(launch, muster, running.progress, folder, stores):
                running.pids.append(starter.start(request))
            recruits = muster.gather(_START_S, running.failure)
            for recruit in recruits:
                limits.join(recruit.worker, recruit.pid)
            pace = _Pace(limits, recruits)
            pace.set(launch.speeds)
            muster.release()
            servers = ServerLimits(limits, [recruit.pid for recruit in recruits])
            return running.attend(pace, servers, watch)
        finally:
            end_all(starter, running.pids, _GRACE_S)
            muster.close()
            _Pace(limits, []).set((1.0,) * workers)


@dataclass(frozen=True, slots=True)
class _Pace:
    limits: Limits
    recruits: list[Recruit]

    def set(self, speeds: Speeds) -> None:
        """Give the workers these speeds, and cores with enough capacity."""
        cores = place(speeds, usable_cpus())
        for recruit in self.recruits:
            with contextlib.suppress(FileNotFoundError):  # the process has ended
                pin(recruit.pid, cores[recruit.worker] if cores else None)
        for worker, speed in enumerate(speeds):
            self.limits.set_speed(worker, speed)


@dataclass(frozen=True, slots=True)
class _Running:
    """The processes of a launch, and the file with their progress."""

    launch: Launch
    starter: Starter
    progress: Path
    folder: Path
    pids: list[int] = field(default_factory=list)

    def attend(
        self, pace: _Pace, servers: ServerLimits, watch: Callable[[LaunchProgress], None]
    ) -> float:
        """Change speeds when they are due, until all processes end; return the seconds."""
        launch, waiting = self.launch, list(self.launch.changes)

        def look(elapsed_s: float) -> None:
            standing = LaunchProgress(read_steps(self.progress), elapsed_s)
            for change in [c for c in waiting if c.due(standing.step, standing.elapsed_s)]:
                pace.set(change.speeds)
                waiting.remove(change)
            servers.look(training=standing.step > 0 or bool(launch.alone))
            watch(standing)
            self._check()

        took_s = await_ends(self.starter, self.pids, launch.deadline_s, look, "the workers were")
        self._check()
        return took_s

    def failure(self) -> str | None:
        """Return why a process failed, with its last output; ``None`` if none failed."""
        ends = self.starter.ended()
        code = next((ends[pid] for pid in self.pids if ends.get(pid)), None)
        if code is None:
            return None
        words = newest_words(self.folder)
        return f"the workers ended with exit code {code}; their last output:\n{words}"

    def _check(self) -> None:
        if (why := self.failure()) is not None:
            raise LaunchError(why)


def await_ends(
    starter: Starter,
    pids: Sequence[int],
    deadline_s: float,
    look: Callable[[float], None],
    who: str = "the script was",
) -> float:
    """Wait until the processes end; return the seconds.

    ``look`` is called about 20 times a second, with the seconds so far.
    """
    started_s = time.monotonic()
    while set(pids) - starter.ended().keys():
        elapsed_s = time.monotonic() - started_s
        look(elapsed_s)
        if elapsed_s > deadline_s:
            raise LaunchError(f"{who} still running after the deadline of {deadline_s:.0f} s")
        time.sleep(_POLL_S)
    return time.monotonic() - started_s


class ServerLimits:
    """Finds parameter servers that workers started, and removes their inherited limits."""

    def __init__(self, limits: Limits, workers: Sequence[int]) -> None:
        self._limits, self._workers = limits, workers
        self._freed: set[int] = set()
        self._looked_s, self._last = 0.0, False

    def look(self, *, training: bool) -> None:
        """Remove the limits of new servers.

        It searches at most twice per second, because a search takes milliseconds. The last search
        is when training has begun, because no server starts after that.
        """
        now_s = time.monotonic()
        if self._last or now_s - self._looked_s < _LOOK_S:
            return
        self._looked_s, self._last = now_s, training
        for pid in self._found():
            with contextlib.suppress(FileNotFoundError, LimitError):  # the process has ended
                self._limits.leave(pid)
                pin(pid, None)
                self._freed.add(pid)

    def _found(self) -> Iterator[int]:
        for worker in self._workers:
            with contextlib.suppress(psutil.Error):
                for child in psutil.Process(worker).children():
                    with contextlib.suppress(psutil.Error):
                        if child.pid not in self._freed and SERVER_MODULE in child.cmdline():
                            yield child.pid


def _requests(
    launch: Launch, muster: StartBarrier, progress: Path, folder: Path, stores: contextlib.ExitStack
) -> Iterator[StartRequest]:
    """Yield the processes to start: the launcher of one job, or each worker alone."""
    base = {
        **STEADY,
        **os.environ,
        **launch.environment,
        MUSTER_VARIABLE: str(muster.path),
        "_EVENSTRIDE_PROGRESS": str(progress),
    }
    script = ("-m", "evenstride.lab.processes.lab_worker", *launch.command)
    if not launch.alone:
        count = f"--nproc-per-node={len(launch.speeds)}"
        torchrun = ("-m", "evenstride.lab.processes.rendezvous", count)
        yield StartRequest((*torchrun, *script), base, folder / "workers.log")
        return
    for worker, own in enumerate(launch.alone):
        alone = {
            **own,
            "_EVENSTRIDE_LAB_WORKER": str(worker),
            "_EVENSTRIDE_PROGRESS": "",
            **stores.enter_context(lone_rank()),
        }
        yield StartRequest(script, {**base, **alone}, folder / f"worker-{worker}.log")


@contextlib.contextmanager
def _scratch() -> Iterator[Path]:
    # The path of a Unix socket must be short, so it is not in the folder of the run.
    folder = Path(tempfile.mkdtemp(prefix="evenstride-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@dataclass(frozen=True, slots=True)
class Recruit:
    """A worker that waits for the start."""

    worker: int
    pid: int


class StartBarrier:
    """The lab's end of the socket to which workers report; see `lab_worker`.

    The path of its folder must be short: Unix limits the path of a socket to about 100 bytes.
    """

    def __init__(self, folder: Path, workers: int) -> None:
        self.path = folder / "muster"
        self._workers = workers
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(self.path))
        self._listener.listen(workers)
        self._connections: list[socket.socket] = []

    def gather(self, deadline_s: float, failed: Callable[[], str | None]) -> list[Recruit]:
        """Return all workers once they have reported, in the order of their numbers."""
        recruits: list[Recruit] = []
        end_s = time.monotonic() + deadline_s
        while len(recruits) < self._workers:
            if (why := failed()) is not None:
                raise LaunchError(why)
            if time.monotonic() > end_s:
                raise LaunchError(
                    f"only {len(recruits)} of {self._workers} workers started within "
                    f"{deadline_s:.0f} s"
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
        with connection.makefile("r") as stream:
            line = stream.readline()
        if not line.endswith("\n"):
            raise LaunchError("a worker ended while it reported to the lab")
        plain = json.loads(line)
        return Recruit(plain["worker"], plain["pid"])
