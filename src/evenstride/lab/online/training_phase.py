"""A phase of the training: its processes, what is waited for, and what its trace tells."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from evenstride.core.sync_modes.mode_specs import sync_from_spec
from evenstride.errors import ConfigError, LaunchError
from evenstride.lab.online.phase_measurements import facts_of, mode_of
from evenstride.lab.processes.cpu_limits import Limits, open_limits
from evenstride.lab.processes.speeds import Speeds, pin, place, usable_cpus
from evenstride.planner.online_forecast import Configuration
from evenstride.planner.workload.from_trace import Facts
from evenstride.runtime.checkpoint.handoff import GO, READY, RESTORED, SAVED, STOP
from evenstride.runtime.launching.process_starters import (
    FromScratch,
    FromZygote,
    Starter,
    StartRequest,
    last_words,
)
from evenstride.runtime.launching.rank_environment import STEADY, rank_variables
from evenstride.runtime.store.store_server import serve_store
from evenstride.runtime.timing.progress_file import read_steps

START_S = 600.0
"""For a script to come to its training."""
POLL_S, QUICK_S = 0.05, 0.002
"""How often processes are looked at; and where seconds count."""
LEFT = 143
"""Exit code of a rank that has handed over; that of a rank that leaves."""

_NOT_OURS = ("EVENSTRIDE_CALIBRATE", "EVENSTRIDE_MAX_STEPS")
_GONE_S = 10.0
# The last line of a traceback that ends in one of our own errors.
_REFUSED = re.compile(r"^(?:\[rank\d+\]: )?evenstride\.errors\.\w+: (.+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class ScriptPhase:
    """One launch of the script."""

    workers: int  # how many
    batch: int | None  # global batch; ``None`` for the script's own
    folder: Path  # for its trace and its output; a new one
    epochs: int  # that the script is told the whole training lasts

    @property
    def trace(self) -> Path:
        return self.folder / "trace.jsonl"

    @property
    def progress(self) -> Path:
        return self.folder / "steps"


class Ground:
    """What all phases run on: one way to start processes, and the workers' limits.

    Processes are forked from one that has imported torch, so that the next phase is there at once;
    where that cannot be, they are started from scratch, while the present phase still trains.
    Without limits there are no speeds, and the workers run as they are.
    """

    def __init__(self, starter: Starter, limits: Limits | None, speeds: Speeds) -> None:
        self._starter, self._limits = starter, limits
        self._cores = place(speeds, usable_cpus()) if speeds else None
        if limits is not None:
            for worker, speed in enumerate(speeds):
                limits.set_speed(worker, speed)

    def start(self, order: StartRequest, worker: int) -> int:
        pid = self._starter.start(order)
        if self._limits is not None:
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended
                self._limits.join(worker, pid)
                pin(pid, self._cores[worker] if self._cores else None)
        return pid

    def code(self, pid: int) -> int | None:
        """Return a process's exit code; ``None`` while it runs."""
        return self._starter.ended().get(pid)

    def kill(self, pid: int) -> None:
        """Kill a process and its children; nothing if it has ended."""
        self._starter.signal(pid, signal.SIGKILL)


@contextlib.contextmanager
def ground(speeds: Speeds) -> Iterator[tuple[Ground, str]]:
    """Yield what phases run on, and a sentence on how; no process is left afterwards."""
    with contextlib.ExitStack() as stack:
        environment = {**STEADY, **os.environ}
        starter: Starter
        try:
            starter = FromZygote(environment)
        except LaunchError:
            starter = FromScratch()
        stack.callback(starter.close)
        limits, told = None, "Workers run on this machine as they are."
        if speeds:
            limits, caveat = open_limits(len(speeds))
            stack.callback(limits.close)
            told = f"Workers are slowed down by {limits.kind}." + (f" {caveat}" if caveat else "")
        yield Ground(starter, limits, speeds), told


@dataclass(slots=True)
class PhaseProcesses:
    """The processes of a phase."""

    phase: ScriptPhase  # that they run
    ground: Ground  # that they run on
    pids: list[int] = field(default_factory=list)  # in rank order
    # What to close once they are gone.
    resources: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    @classmethod
    def started(
        cls, phase: ScriptPhase, command: tuple[str, ...], own: Mapping[str, str], on: Ground
    ) -> PhaseProcesses:
        """Start a phase's processes, which wait where the script makes its `Checkpointer`."""
        phase.folder.mkdir(parents=True, exist_ok=False)
        crew = cls(phase, on)
        store = crew.resources.enter_context(serve_store())
        environment = {**STEADY, **os.environ, **own, **_variables_of(phase)}
        for rank in range(phase.workers):
            ranks = rank_variables(rank, phase.workers, store)
            log = phase.folder / f"rank-{rank}.log"
            order = StartRequest(command, {**environment, **ranks}, log)
            crew.pids.append(on.start(order, rank))
        return crew

    def go(self) -> None:
        """Let the processes go on from the newest checkpoint."""
        (self.phase.folder / GO).touch()

    def stop(self) -> None:
        """Ask the processes to save and to end."""
        (self.phase.folder / STOP).touch()

    @property
    def up(self) -> bool:
        """Whether all ranks have come to their `Checkpointer`."""
        folder = self.phase.folder
        return all((folder / f"{READY}-{r}").exists() for r in range(self.phase.workers))

    @property
    def saved(self) -> bool:
        """Whether the phase has saved because it was asked to stop."""
        return (self.phase.folder / SAVED).exists()

    @property
    def restored(self) -> dict[str, Any] | None:
        """Where it went on from a checkpoint; ``None`` if it has not, or not yet."""
        try:
            told = (self.phase.folder / RESTORED).read_text(encoding="utf-8")
        except FileNotFoundError:
            return None
        return dict(json.loads(told))

    @property
    def steps(self) -> int:
        return read_steps(self.phase.progress)

    def ended(self) -> bool:
        """Return whether all processes have ended in order."""
        codes = [self.ground.code(pid) for pid in self.pids]
        for rank, code in enumerate(codes):
            if code and not (code == LEFT and self.saved):
                log = self.phase.folder / f"rank-{rank}.log"
                text = log.read_text(errors="replace") if log.exists() else ""
                if refused := _REFUSED.findall(text):
                    raise ConfigError(f"{refused[-1]} (rank {rank}; all it said is in {log})")
                raise LaunchError(
                    f"rank {rank} of {self.phase.workers} ended with exit code {code}; its last "
                    f"output:\n{last_words(text)}"
                )
        return all(code is not None for code in codes)

    def bury(self) -> None:
        """See to it that a phase that has saved is gone; what does not end by itself is killed."""
        until_s = time.monotonic() + _GONE_S
        while time.monotonic() < until_s:
            if all(self.ground.code(pid) is not None for pid in self.pids):
                break
            time.sleep(0.02)
        self.kill()

    def kill(self) -> None:
        for pid in self.pids:
            self.ground.kill(pid)
        self.resources.close()


def _variables_of(phase: ScriptPhase) -> dict[str, str]:
    return {
        **dict.fromkeys(_NOT_OURS, ""),
        # Where none is chosen here, an open one stays as it is: phases are compared at one batch.
        "EVENSTRIDE_GLOBAL_BATCH": "low" if phase.batch is None else str(phase.batch),
        "EVENSTRIDE_EPOCHS": str(phase.epochs),
        "EVENSTRIDE_TRACE": str(phase.trace),
        "_EVENSTRIDE_PROGRESS": str(phase.progress),
        "_EVENSTRIDE_HAND_OVER": str(phase.folder),
    }


@dataclass(slots=True)
class OnlineTraining:
    """A crew that trains, and where it began."""

    script: str  # that it runs, for messages
    crew: PhaseProcesses  # its processes
    choice: Configuration  # its configuration; a batch of 0 until that is known
    first_s: float = 0.0  # when its first step was committed
    began: float = 0.0  # samples trained before it
    length: int = 0  # samples of an epoch; 0 until it is known

    @property
    def samples(self) -> float:
        return float(self.crew.steps * self.choice.batch)

    def await_first_step(self, every_s: float = POLL_S) -> bool:
        """Wait for the first step and note the time; return whether it was made before the end."""
        made = self.until(lambda: self.crew.steps > 0, START_S, "took no step", every_s=every_s)
        self.first_s = time.monotonic()
        return made

    def settle(self, known: Facts) -> None:
        """Take over batch and length of an epoch from the trace, and where training went on."""
        self.choice = Configuration(self.choice.workers, known.global_batch)
        self.length = known.samples
        if (began := self.restored_at(known.samples)) is not None:
            self.began = began

    def restored_at(self, epoch_samples: int) -> float | None:
        """Return how many samples the restored checkpoint had trained; ``None`` without one."""
        restored = self.crew.restored
        if restored is None:
            return None
        return float(restored["epoch"] * epoch_samples + restored["position"])

    def until(
        self,
        done: Callable[[], bool],
        within_s: float,
        failing: str = "was not there",
        *,
        every_s: float = POLL_S,
        beside: PhaseProcesses | None = None,
    ) -> bool:
        """Wait until something is done; return whether it is, and training has not just ended."""
        until_s = time.monotonic() + within_s
        while not done():
            if beside is not None and beside.ended():
                raise LaunchError(
                    f"{self.script} ended before it made its Checkpointer, when it was started "
                    f"with {beside.phase.workers} workers; see {beside.phase.folder}"
                )
            if self.crew.ended():
                return done()
            if time.monotonic() > until_s:
                raise LaunchError(f"{self.script} {failing} within {within_s:.0f} s")
            time.sleep(every_s)
        return True

    def facts(self) -> Facts:
        """Return what its trace says of the workload, as soon as it does."""
        found: list[Facts] = []

        def told() -> bool:
            known = facts_of(self.crew.phase.trace)
            found.extend([] if known is None else [known])
            return bool(found)

        if not self.until(told, START_S, "told of no training in its trace"):
            raise ConfigError(
                f"{self.script} ended before it trained a step, or it gave no model to watch(), or "
                "it writes its trace elsewhere; there is nothing to choose for"
            )
        return found[0]

    def check(self, known: Facts, *, open_batch: bool) -> None:
        """Refuse a script that cannot take part."""
        if not self.crew.up:
            raise ConfigError(
                f"{self.script} trains without an evenstride.Checkpointer, so what it trains would "
                "be lost at every change; make one, and call its restore() before the loop and its "
                "step() after every optimizer step"
            )
        if open_batch and known.global_batch != self.choice.batch:
            raise ConfigError(
                f"{self.script} has a global batch of its own, {known.global_batch}; leave it "
                'open, with Stride(global_batch="auto", bounds=...), or leave out --batches'
            )
        if not sync_from_spec(mode := mode_of(self.crew.phase.trace)).lockstep:
            raise ConfigError(
                f"{self.script} trains with sync={mode}, in which workers do not keep step, so "
                "that nothing can be saved in mid-epoch; use a mode such as bsp"
            )
