"""Run a script as workers under a plan of faults, and restart the workers after each fault.

The supervisor serves the store of each generation, so that the store survives the death of any
worker. When a worker dies, the supervisor ends the others too, as torchrun does. `fault_plan`
decides which workers are in the next generation, as in a simulated run of the same plan.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from evenstride.errors import LaunchError
from evenstride.runtime.launching.process_starters import (
    FromScratch,
    FromZygote,
    Starter,
    StartRequest,
    end_all,
    newest_words,
)
from evenstride.runtime.launching.rank_environment import LOCAL, rank_variables
from evenstride.runtime.store.store_server import serve_store
from evenstride.testing.faults.fault_injection import (
    ORDERS_VARIABLE,
    WORKER_VARIABLE,
    FaultJournal,
    Orders,
    WorkerProgress,
)
from evenstride.testing.faults.fault_plan import END, Fault, FaultPlan, Generation, ScriptedRoster

_POLL_S = 0.02
_PRELOAD = ("evenstride.testing.faults.fault_injection",)

Meddle = Callable[[Mapping[str, int], int], str | None]
"""Returns the name of a worker to kill now, or ``None``.

The arguments are the process ids of the running workers and the number of committed steps.
"""


@dataclass(frozen=True, slots=True)
class Job:
    """A script to run under a plan of faults.

    Args:
        command: script and arguments. The script must call `Injector`.
        plan: the workers, the steps and the faults.
        folder: for output and progress of the workers, used by this run only.
        environment: environment variables, in addition to those of this process.
        deadline_s: longest time for the whole run, in seconds.
        hang_s: longest time without progress of any worker before all are restarted, in seconds.
        grace_s: time for a worker to end after it is asked to, in seconds.
        zygote: whether workers are forked from a process that has imported torch.
        meddle: kills that the plan does not contain; called about 50 times a second.
    """

    command: tuple[str, ...]
    plan: FaultPlan
    folder: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    deadline_s: float = 300.0
    hang_s: float = 30.0
    grace_s: float = 0.5
    zygote: bool = True
    meddle: Meddle = lambda *_: None


@dataclass(frozen=True, slots=True)
class Lived:
    """One generation of a real run."""

    generation: Generation  # in the form of a simulated run
    # Exit codes, by worker. Negative codes are signals, including those of the supervisor.
    codes: dict[str, int]
    # Seconds from the end of the previous generation to the first committed step. ``None`` for the
    # first generation, and for one without a committed step.
    recovery_s: float | None
    faults: tuple[int, ...] = ()  # numbers of the faults that ended it


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a run.

    Args:
        lived: its generations.
        seconds: time from the first start to the last end.
    """

    lived: tuple[Lived, ...]
    seconds: float

    @property
    def generations(self) -> list[Generation]:
        """The generations, without exit codes and times."""
        return [lived.generation for lived in self.lived]


def supervise(job: Job, starter: Starter | None = None) -> Outcome:
    """Run a job to its end, and end all its processes in any case.

    Args:
        job: the script, the plan and the limits of the run.
        starter: starts the workers. The caller may use it for several jobs, and closes it. If
            ``None``, a new one is used and closed at the end.

    Raises:
        LaunchError: the deadline passed, the plan allows no more restarts, or the workers do not
            start. The message ends with the last output of a worker.
        ConfigError: no worker is left.
    """
    environment = {**LOCAL, **os.environ, **job.environment}
    with _exit_on_sigterm():
        mine = starter is None
        if starter is None:
            starter = FromZygote(environment, _PRELOAD) if job.zygote else FromScratch()
        try:
            return _Supervisor(job, starter, environment).run()
        finally:
            if mine:
                starter.close()


@contextlib.contextmanager
def _exit_on_sigterm() -> Iterator[None]:
    mine = threading.current_thread() is threading.main_thread()
    former = signal.getsignal(signal.SIGTERM)
    if not mine or former is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, former)


class _Supervisor:
    def __init__(self, job: Job, starter: Starter, environment: Mapping[str, str]) -> None:
        self._job, self._starter, self._environment = job, starter, environment
        self._journal = FaultJournal(job.folder / "journal")
        self._started_s = time.monotonic()
        self._roster, self._reached = ScriptedRoster.opening(job.plan), 0
        self._lived: list[Lived] = []
        self._lost_s: float | None = None

    def run(self) -> Outcome:
        while not self._lived or self._lived[-1].generation.ended_by != END:
            if len(self._lived) > self._job.plan.restarts:
                raise LaunchError(
                    f"the run has not ended after {self._job.plan.restarts} restarts, the most "
                    f"that the plan allows; raise restarts; {self._last_words()}"
                )
            self._lived.append(self._live(len(self._lived)))
        return Outcome(tuple(self._lived), time.monotonic() - self._started_s)

    def _live(self, number: int) -> Lived:
        orders = Orders(self._job.plan, number, self._roster, self._journal.fired(), self._reached)
        with serve_store() as store:
            group = _ProcessGroup(self._starter, orders, self._journal)
            try:
                group.start(self._job, self._environment, self._journal.order(orders), store)
                lost_s = self._watch(group)
            except BaseException:
                group.end(0.0)
                raise
            group.end(self._job.grace_s)
        lived = self._book(group, self._lost_s)
        self._lost_s = lost_s
        return lived

    def _watch(self, group: _ProcessGroup) -> float:
        """Wait until the generation ends or must be ended; return the time."""
        seen: tuple[int, float] = (-1, time.monotonic())
        while True:
            group.hear(_POLL_S)
            now_s = time.monotonic()
            if group.is_over or group.holds():
                return now_s
            if group.step != seen[0]:
                seen = (group.step, now_s)
            if now_s > seen[1] + self._job.hang_s:
                return now_s
            if now_s > self._started_s + self._job.deadline_s:
                raise LaunchError(
                    f"the run had not ended after {self._job.deadline_s:.0f} s, at step "
                    f"{group.step} of {self._job.plan.steps}; {self._last_words()}"
                )
            victim = self._job.meddle(group.running, group.step)
            if victim in group.running:
                self._starter.signal(group.running[victim], signal.SIGKILL)

    def _book(self, group: _ProcessGroup, lost_s: float | None) -> Lived:
        noted = group.progress()
        begun = self._lived[-1].generation.last_step if self._lived else 0
        first = min((one.first_step for one in noted), default=begun)
        last = max((one.step for one in noted), default=begun)
        self._reached = max(self._reached, last)
        own = [one.committed_s for one in noted if one.committed_s]
        recovery_s = min(own) - lost_s if own and lost_s is not None else None
        fired = tuple(n for n in self._journal.fired() if n not in group.orders.fired)
        faults = [self._job.plan.faults[n] for n in fired]
        faults = [f for f in faults if f.kind != "disk-full"]
        if group.went_well and (last >= self._job.plan.steps or not (faults or group.held)):
            why = END
        else:
            if not faults and not group.held:
                faults = group.unplanned(last)
            why = self._roster.ended_by(faults, self._reached) or "hang"
            self._roster = self._roster.after(faults, self._reached)
        members = group.orders.roster.members
        generation = Generation(group.orders.number, first, last, members, why)
        return Lived(generation, dict(group.codes), recovery_s, fired)

    def _last_words(self) -> str:
        return f"a worker's last output:\n{newest_words(self._job.folder)}"


class _ProcessGroup:
    """The processes of one generation."""

    def __init__(self, starter: Starter, orders: Orders, journal: FaultJournal) -> None:
        self.orders = orders
        self.codes: dict[str, int] = {}
        self.held = False
        self.running: dict[str, int] = {}
        self._starter, self._journal = starter, journal
        self._own: set[str] = set()  # workers that ended before the supervisor ended any
        self._stopped: tuple[str, ...] = ()

    def start(
        self, job: Job, base: Mapping[str, str], orders: Path, store: tuple[str, int]
    ) -> None:
        size = len(self.orders.roster.members)
        for rank, name in enumerate(self.orders.roster.members):
            environment = {
                **base,
                **rank_variables(rank, size, store),
                # torchrun sets these too; they tell the ranks that the launcher restarts.
                "GROUP_RANK": "0",
                "TORCHELASTIC_RESTART_COUNT": str(self.orders.number),
                "TORCHELASTIC_RUN_ID": "elastic-lab",
                ORDERS_VARIABLE: str(orders.resolve()),
                WORKER_VARIABLE: name,
            }
            log = job.folder / f"{name}.log"
            self.running[name] = self._starter.start(StartRequest(job.command, environment, log))

    def hear(self, timeout_s: float) -> None:
        ends = self._starter.ended(timeout_s)
        for name, pid in list(self.running.items()):
            if pid in ends:
                self.codes[name] = ends[pid]
                del self.running[name]

    @property
    def is_over(self) -> bool:
        return not self.running or any(self.codes.values())

    @property
    def went_well(self) -> bool:
        return not self.running and not any(self.codes.values())

    @property
    def step(self) -> int:
        """Largest number of committed steps of any worker; -1 before the first has begun."""
        return max((one.step for one in self.progress()), default=-1)

    def progress(self) -> list[WorkerProgress]:
        """Return the progress of the members that have begun."""
        number = self.orders.number
        noted = [self._journal.progress(number, n) for n in self.orders.roster.members]
        return [one for one in noted if one is not None]

    def holds(self) -> bool:
        """Return whether all members wait for a worker that joins."""
        noted = self.progress()
        complete = len(noted) == len(self.orders.roster.members)
        self.held = complete and all(one.held for one in noted)
        return self.held

    def end(self, grace_s: float) -> None:
        self._own = set(self.codes)
        self._stopped = tuple(name for name, pid in self.running.items() if _is_stopped(pid))
        end_all(self._starter, self.running.values(), grace_s)
        self.hear(0.0)

    def unplanned(self, step: int) -> list[Fault]:
        """Return the fault that must have happened, if the plan does not contain it."""
        killed = [n for n in self.orders.roster.members if n in self._own and self.codes[n] < 0]
        failed = [n for n in self.orders.roster.members if n in self._own and self.codes[n] > 0]
        if killed:
            return [Fault(at=step, workers=killed, kind="kill")]
        if self._stopped:
            return [Fault(at=step, workers=list(self._stopped), kind="stop")]
        return [Fault(at=step, workers=failed, kind="raise")] if failed else []


def _is_stopped(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
    except psutil.NoSuchProcess:
        return False
