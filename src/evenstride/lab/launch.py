"""Start local workers under limits, watch them, and leave no process behind."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from evenstride.errors import LaunchError
from evenstride.lab.limits import Limits
from evenstride.lab.muster import MUSTER_VARIABLE, Muster, Recruit
from evenstride.lab.placement import pin, place
from evenstride.lab.servers import Servers
from evenstride.lab.speeds import Change, Speeds, usable_cpus
from evenstride.runtime.interfaces import ON_LOOPBACK
from evenstride.runtime.serving import meeting_at, serve_store

_START_S = 180.0
_POLL_S = 0.05
_TAIL_LINES = 30
_TORCHRUN = re.compile(r"(\[rank\d+\]:)?[EWI]\d{4} .*torch/distributed/")

# What makes step times on a CPU mean something: one thread, loopback, and an allocator that
# keeps freed memory. By default glibc hands large blocks back to the kernel at every step, and
# faulting them in again costs a third of the step, unevenly. Any of it can be overridden.
_STEADY = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    **ON_LOOPBACK,
    "MALLOC_MMAP_THRESHOLD_": "1000000000",
    "MALLOC_TRIM_THRESHOLD_": "1000000000",
    # Every connection to a store looks its peer's name up; a lost packet would cost 5 s each.
    "RES_OPTIONS": "timeout:1 attempts:1",
}


@dataclass(frozen=True, slots=True)
class Launch:
    """What to run, and how fast.

    Args:
        command: script and arguments.
        speeds: of the workers, in rank order.
        changes: of speed during the run.
        environment: variables on top of this process's own.
        alone: if not empty, each worker runs by itself, all at the same time, with these
            variables of its own; otherwise they are the ranks of one torchrun job.
        deadline_s: longest time from letting loose to the end.
    """

    command: tuple[str, ...]
    speeds: Speeds
    changes: tuple[Change, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    alone: tuple[dict[str, str], ...] = ()
    deadline_s: float = 3600.0


@dataclass(frozen=True, slots=True)
class Standing:
    """How a launch is doing: steps of the leader, and seconds since the workers were let loose."""

    step: int
    elapsed_s: float


def run(
    launch: Launch,
    limits: Limits,
    folder: Path,
    watch: Callable[[Standing], None] = lambda _: None,
) -> float:
    """Run a launch to its end; return the seconds it took once the workers were let loose.

    Args:
        launch: what to run.
        limits: of at least as many workers.
        folder: for the workers' output, one file each.
        watch: called some 20 times a second.

    Raises:
        LaunchError: a worker failed, or the deadline passed; all others are ended then.
        LimitError: a limit could not be set.
    """
    workers = len(launch.speeds)
    with _scratch() as scratch, contextlib.ExitStack() as stores:
        muster = Muster(scratch, workers)
        progress = scratch / "progress"
        processes: list[subprocess.Popen[bytes]] = []
        try:
            processes += _start(launch, muster, progress, folder, stores)
            recruits = muster.gather(_START_S, lambda: _failure(processes, folder))
            for recruit in recruits:
                limits.join(recruit.worker, recruit.pid)
            pace = _Pace(limits, recruits)
            pace.set(launch.speeds)
            muster.release()
            servers = Servers(limits, [recruit.pid for recruit in recruits])
            return _attend(launch, pace, servers, processes, folder, _Watch(progress, watch))
        finally:
            end_all(processes)
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
class _Watch:
    progress: Path
    tell: Callable[[Standing], None]

    def step(self) -> int:
        """Return the leader's step count, as its `Stride` keeps it in the progress file."""
        try:
            data = self.progress.read_bytes()
        except FileNotFoundError:
            return 0
        return int(struct.unpack("<q", data)[0]) if len(data) == 8 else 0


def _attend(
    launch: Launch,
    pace: _Pace,
    servers: Servers,
    processes: list[subprocess.Popen[bytes]],
    folder: Path,
    watch: _Watch,
) -> float:
    started_s = time.monotonic()
    waiting = list(launch.changes)
    while any(process.poll() is None for process in processes):
        standing = Standing(watch.step(), time.monotonic() - started_s)
        for change in [c for c in waiting if c.due(standing.step, standing.elapsed_s)]:
            pace.set(change.speeds)
            waiting.remove(change)
        servers.look(training=standing.step > 0 or bool(launch.alone))
        watch.tell(standing)
        if standing.elapsed_s > launch.deadline_s:
            raise LaunchError(f"the workers were still running after {launch.deadline_s:.0f} s")
        if (why := _failure(processes, folder)) is not None:
            raise LaunchError(why)
        time.sleep(_POLL_S)
    if (why := _failure(processes, folder)) is not None:
        raise LaunchError(why)
    return time.monotonic() - started_s


def _start(
    launch: Launch, muster: Muster, progress: Path, folder: Path, stores: contextlib.ExitStack
) -> Iterator[subprocess.Popen[bytes]]:
    base = {
        **_STEADY,
        **os.environ,
        **launch.environment,
        MUSTER_VARIABLE: str(muster.path),
        "EVENSTRIDE_PROGRESS": str(progress),
    }
    script = ["-m", "evenstride.lab.worker", *launch.command]
    if not launch.alone:
        count = f"--nproc-per-node={len(launch.speeds)}"
        torchrun = [
            "-m",
            "evenstride.lab.guarded",
            "evenstride.lab.rendezvous",
            count,
        ]
        yield started([*torchrun, *script], base, folder / "workers.log")
        return
    for worker, own in enumerate(launch.alone):
        alone = {
            **own,
            "EVENSTRIDE_LAB_WORKER": str(worker),
            "EVENSTRIDE_PROGRESS": "",
            **stores.enter_context(meeting_alone()),
        }
        yield started(script, {**base, **alone}, folder / f"worker-{worker}.log")


def started(
    arguments: list[str], environment: dict[str, str], log: Path
) -> subprocess.Popen[bytes]:
    """Start a Python process in a session of its own, which writes to a file."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output:
        return subprocess.Popen(
            [sys.executable, *arguments],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


@contextlib.contextmanager
def meeting_alone() -> Iterator[dict[str, str]]:
    """Serve a store for a process group of one rank, and yield the rank's environment."""
    with serve_store() as (host, port):
        yield {
            "RANK": "0",
            "LOCAL_RANK": "0",
            "WORLD_SIZE": "1",
            "LOCAL_WORLD_SIZE": "1",
            **meeting_at(host, port),
        }


def _failure(processes: list[subprocess.Popen[bytes]], folder: Path) -> str | None:
    """Return what went wrong with a process that has ended badly, with its last output."""
    for process in processes:
        code = process.poll()
        if code not in (None, 0):
            logs = sorted(folder.glob("*.log"), key=lambda log: log.stat().st_mtime)
            text = logs[-1].read_text(errors="replace") if logs else ""
            return (
                f"the workers ended with exit code {code}; their last output:\n{last_words(text)}"
            )
    return None


def last_words(text: str) -> str:
    """Return the last lines that the workers themselves wrote, without torchrun's report."""
    told = []
    for line in text.splitlines():
        if _TORCHRUN.match(line):
            if "failed (exitcode" in line:
                break
        else:
            told.append(line)
    return "\n".join(told[-_TAIL_LINES:])


def end_all(processes: list[subprocess.Popen[bytes]]) -> None:
    """End what still runs, workers that torchrun started included."""
    for process in processes:
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
    for process in processes:
        try:
            process.wait(5.0)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@contextlib.contextmanager
def _scratch() -> Iterator[Path]:
    # A Unix socket's path must be short, so not below the run's own folder.
    folder = Path(tempfile.mkdtemp(prefix="evenstride-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
