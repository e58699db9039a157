"""A phase of the training: its processes, its progress, and the facts in its trace."""

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
"""Longest time for a script to reach its training."""
POLL_S, QUICK_S = 0.05, 0.002
"""Polling intervals for processes, and for moments in which seconds count."""
LEFT = 143
"""Exit code of a rank that leaves; a rank that hands over has the same."""

_NOT_OURS = ("EVENSTRIDE_CALIBRATE", "EVENSTRIDE_MAX_STEPS")
_GONE_S = 10.0
# The last line of a traceback of an evenstride error.
_REFUSED = re.compile(r"^(?:\[rank\d+\]: )?evenstride\.errors\.\w+: (.+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class ScriptPhase:
    """One launch of the script."""

    workers: int  # their number
    batch: int | None  # global batch; ``None`` for the script's own
    folder: Path  # a new folder for trace and output
    epochs: int  # of the whole training, as given to the script

    @property
    def trace(self) -> Path:
        return self.folder / "trace.jsonl"

    @property
    def progress(self) -> Path:
        return self.folder / "steps"


class Ground:
    """Starts the processes of all phases, and limits the workers.

    Processes are forked from one that has imported torch, so that the next phase starts at once. If
    that fails, they start from scratch while the present phase still trains. Without ``limits``,
    workers run at full speed.
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
        """Return the exit code of a process; ``None`` while it runs."""
        return self._starter.ended().get(pid)

    def kill(self, pid: int) -> None:
        """Kill a process and its children, if it still runs."""
        self._starter.signal(pid, signal.SIGKILL)


@contextlib.contextmanager
def ground(speeds: Speeds) -> Iterator[tuple[Ground, str]]:
    """Yield the ground of all phases and a sentence on the limits; end all processes afterwards."""
    with contextlib.ExitStack() as stack:
        environment = {**STEADY, **os.environ}
        starter: Starter
        try:
            starter = FromZygote(environment)
        except LaunchError:
            starter = FromScratch()
        stack.callback(starter.close)
        limits, how = None, "Workers run without CPU limits."
        if speeds:
            limits, caveat = open_limits(len(speeds))
            stack.callback(limits.close)
            how = f"CPU limits: {limits.kind}." + (f" {caveat}" if caveat else "")
        yield Ground(starter, limits, speeds), how


@dataclass(slots=True)
class PhaseProcesses:
    """The processes of a phase."""

    phase: ScriptPhase
    ground: Ground  # starts them
    pids: list[int] = field(default_factory=list)  # in rank order
    # Closed after the end of the processes.
    resources: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    @classmethod
    def started(
        cls, phase: ScriptPhase, command: tuple[str, ...], own: Mapping[str, str], on: Ground
    ) -> PhaseProcesses:
        """Start the processes, which wait where the script creates its `Checkpointer`."""
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
        """Let the processes continue from the newest checkpoint."""
        (self.phase.folder / GO).touch()

    def stop(self) -> None:
        """Ask the processes to save and end."""
        (self.phase.folder / STOP).touch()

    @property
    def up(self) -> bool:
        """Whether all ranks have created their `Checkpointer`."""
        folder = self.phase.folder
        return all((folder / f"{READY}-{r}").exists() for r in range(self.phase.workers))

    @property
    def saved(self) -> bool:
        """Whether the phase has saved because it was asked to stop."""
        return (self.phase.folder / SAVED).exists()

    @property
    def restored(self) -> dict[str, Any] | None:
        """Position of the restored checkpoint; ``None`` if none was restored, or not yet."""
        try:
            text = (self.phase.folder / RESTORED).read_text(encoding="utf-8")
        except FileNotFoundError:
            return None
        return dict(json.loads(text))

    @property
    def steps(self) -> int:
        return read_steps(self.phase.progress)

    def ended(self) -> bool:
        """Return whether all processes have ended successfully."""
        codes = [self.ground.code(pid) for pid in self.pids]
        for rank, code in enumerate(codes):
            if code and not (code == LEFT and self.saved):
                log = self.phase.folder / f"rank-{rank}.log"
                text = log.read_text(errors="replace") if log.exists() else ""
                if refused := _REFUSED.findall(text):
                    raise ConfigError(f"{refused[-1]} (rank {rank}; its output is in {log})")
                raise LaunchError(
                    f"rank {rank} of {self.phase.workers} ended with exit code {code}; its last "
                    f"output:\n{last_words(text)}"
                )
        return all(code is not None for code in codes)

    def bury(self) -> None:
        """Wait for the end of a phase that has saved; kill processes that do not end."""
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
        # Phases are compared at one batch, so an open batch does not change.
        "EVENSTRIDE_GLOBAL_BATCH": "low" if phase.batch is None else str(phase.batch),
        "EVENSTRIDE_EPOCHS": str(phase.epochs),
        "EVENSTRIDE_TRACE": str(phase.trace),
        "_EVENSTRIDE_PROGRESS": str(phase.progress),
        "_EVENSTRIDE_HAND_OVER": str(phase.folder),
    }


@dataclass(slots=True)
class OnlineTraining:
    """The training of one phase, and the point at which it began."""

    script: str  # path, for messages
    crew: PhaseProcesses
    choice: Configuration  # its batch is 0 until it is known
    first_s: float = 0.0  # time of the first committed step
    began: float = 0.0  # samples trained before the phase
    length: int = 0  # samples of an epoch; 0 until known

    @property
    def samples(self) -> float:
        return float(self.crew.steps * self.choice.batch)

    def await_first_step(self, every_s: float = POLL_S) -> bool:
        """Wait for the first step and record its time; return whether it came before the end."""
        made = self.until(lambda: self.crew.steps > 0, START_S, "took no step", every_s=every_s)
        self.first_s = time.monotonic()
        return made

    def settle(self, known: Facts) -> None:
        """Set the batch and the epoch length from the trace, and the point at which it began."""
        self.choice = Configuration(self.choice.workers, known.global_batch)
        self.length = known.samples
        if (began := self.restored_at(known.samples)) is not None:
            self.began = began

    def restored_at(self, epoch_samples: int) -> float | None:
        """Return the trained samples of the restored checkpoint; ``None`` without one."""
        restored = self.crew.restored
        if restored is None:
            return None
        return float(restored["epoch"] * epoch_samples + restored["position"])

    def until(
        self,
        done: Callable[[], bool],
        within_s: float,
        failing: str = "did not start",
        *,
        every_s: float = POLL_S,
        successor: PhaseProcesses | None = None,
    ) -> bool:
        """Wait until ``done`` returns true; return false if the training ends before."""
        until_s = time.monotonic() + within_s
        while not done():
            if successor is not None and successor.ended():
                raise LaunchError(
                    f"{self.script} with {successor.phase.workers} workers ended before it created "
                    f"its Checkpointer; see its output in {successor.phase.folder}"
                )
            if self.crew.ended():
                return done()
            if time.monotonic() > until_s:
                raise LaunchError(f"{self.script} {failing} within {within_s:.0f} s")
            time.sleep(every_s)
        return True

    def facts(self) -> Facts:
        """Wait for the facts about the workload in the trace, and return them."""
        found: list[Facts] = []

        def known() -> bool:
            facts = facts_of(self.crew.phase.trace)
            found.extend([] if facts is None else [facts])
            return bool(found)

        if not self.until(known, START_S, "wrote no training step to its trace"):
            raise ConfigError(
                f"{self.script} ended without a training step in its trace; the script must train, "
                "pass its model to watch(), and leave the trace to EVENSTRIDE_TRACE"
            )
        return found[0]

    def check(self, known: Facts, *, open_batch: bool) -> None:
        """Refuse a script that cannot take part."""
        if not self.crew.up:
            raise ConfigError(
                f"{self.script} trains without an evenstride.Checkpointer, so every change would "
                "lose its work; create one, and call its restore() before the loop and its step() "
                "after every optimizer step"
            )
        if open_batch and known.global_batch != self.choice.batch:
            raise ConfigError(
                f"{self.script} sets its own global batch, {known.global_batch}; leave it open "
                'with Stride(global_batch="auto", bounds=...), or remove --batches'
            )
        if not sync_from_spec(mode := mode_of(self.crew.phase.trace)).lockstep:
            raise ConfigError(
                f"{self.script} trains with sync={mode}, in which workers do not step together, so "
                "it cannot save in the middle of an epoch; use a mode such as bsp"
            )
