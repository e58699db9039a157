"""Start local workers under limits, watch them, and leave no process behind."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from evenstride.errors import LaunchError, LimitError
from evenstride.lab.limits.core_pinning import pin, place
from evenstride.lab.limits.cpu_limits import Limits
from evenstride.lab.limits.speeds import SpeedChange, Speeds, usable_cpus
from evenstride.lab.processes.start_barrier import MUSTER_VARIABLE, Recruit, StartBarrier
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
_LOOK_S = 0.5  # between looks for new servers
_START_S = 180.0
_POLL_S = 0.05
_GRACE_S = 5.0


@dataclass(frozen=True, slots=True)
class Launch:
    """What to run, and how fast."""

    command: tuple[str, ...]  # script and arguments
    speeds: Speeds  # of the workers, in rank order
    changes: tuple[SpeedChange, ...] = ()  # of speed during the run
    # Variables on top of this process's own.
    environment: dict[str, str] = field(default_factory=dict)
    # If not empty, each worker runs by itself, all at the same time, with these variables of its
    # own; otherwise they are the ranks of one torchrun job.
    alone: tuple[dict[str, str], ...] = ()
    deadline_s: float = 3600.0  # longest time from letting loose to the end


@dataclass(frozen=True, slots=True)
class LaunchProgress:
    """How a launch is doing: steps of the leader, and seconds since the workers were let loose."""

    step: int
    elapsed_s: float


def run(
    launch: Launch,
    limits: Limits,
    folder: Path,
    watch: Callable[[LaunchProgress], None] = lambda _: None,
) -> float:
    """Run a launch to its end; return the seconds it took once the workers were let loose.

    Raises:
        LaunchError: a worker failed, or the deadline passed; all others are ended then.
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
            running.start(_requests(launch, muster, running.progress, folder, stores))
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
        """Give the workers these speeds, and cores that have room for them."""
        cores = place(speeds, usable_cpus())
        for recruit in self.recruits:
            with contextlib.suppress(FileNotFoundError):  # it has ended meanwhile
                pin(recruit.pid, cores[recruit.worker] if cores else None)
        for worker, speed in enumerate(speeds):
            self.limits.set_speed(worker, speed)


@dataclass(frozen=True, slots=True)
class _Running:
    """The processes of a launch, and where they tell how they are doing."""

    launch: Launch
    starter: Starter
    progress: Path
    folder: Path
    pids: list[int] = field(default_factory=list)

    def start(self, requests: Iterable[StartRequest]) -> None:
        self.pids.extend(self.starter.start(request) for request in requests)

    def attend(
        self, pace: _Pace, servers: ServerLimits, watch: Callable[[LaunchProgress], None]
    ) -> float:
        """Change speeds as they are due, until all have ended; return the seconds it took."""
        launch, started_s = self.launch, time.monotonic()
        waiting = list(launch.changes)
        while set(self.pids) - self.starter.ended().keys():
            standing = LaunchProgress(read_steps(self.progress), time.monotonic() - started_s)
            for change in [c for c in waiting if c.due(standing.step, standing.elapsed_s)]:
                pace.set(change.speeds)
                waiting.remove(change)
            servers.look(training=standing.step > 0 or bool(launch.alone))
            watch(standing)
            if standing.elapsed_s > launch.deadline_s:
                raise LaunchError(f"the workers were still running after {launch.deadline_s:.0f} s")
            self._check()
            time.sleep(_POLL_S)
        self._check()
        return time.monotonic() - started_s

    def failure(self) -> str | None:
        """Return what went wrong with a process that has ended badly, with its last output."""
        ends = self.starter.ended()
        code = next((ends[pid] for pid in self.pids if ends.get(pid)), None)
        if code is None:
            return None
        words = newest_words(self.folder)
        return f"the workers ended with exit code {code}; their last output:\n{words}"

    def _check(self) -> None:
        if (why := self.failure()) is not None:
            raise LaunchError(why)


class ServerLimits:
    """Finds the servers that workers have started, and lifts the limits they inherited.

    Args:
        limits: of the workers.
        workers: their processes.
    """

    def __init__(self, limits: Limits, workers: Sequence[int]) -> None:
        self._limits, self._workers = limits, workers
        self._freed: set[int] = set()
        self._looked_s, self._last = 0.0, False

    def look(self, *, training: bool) -> None:
        """Free those that are new.

        At most twice per second, as a look costs milliseconds, and once more when training has
        begun: there are no new ones then.
        """
        now_s = time.monotonic()
        if self._last or now_s - self._looked_s < _LOOK_S:
            return
        self._looked_s, self._last = now_s, training
        for pid in self._found():
            with contextlib.suppress(FileNotFoundError, LimitError):  # it has ended meanwhile
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
    """Yield what to start: the launcher of one job, or each worker by itself."""
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
    # A Unix socket's path must be short, so not below the run's own folder.
    folder = Path(tempfile.mkdtemp(prefix="evenstride-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
