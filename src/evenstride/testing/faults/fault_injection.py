"""The faults of a plan, met by the worker that they befall, and the files that tell of them.

A script that is to be tried with faults says when it begins, before it saves, and when a step is
committed. Nothing in the library calls this. Supervisor and workers tell each other what they know
in files of one folder: a worker that is killed between two instructions has still written what it
wrote before, since what is handed to the kernel outlives the process.
"""

from __future__ import annotations

import errno
import functools
import json
import os
import signal
import struct
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from evenstride.testing.faults.fault_plan import (
    Fault,
    FaultPlan,
    ScriptedRoster,
    at_restart,
    happening,
)

ORDERS_VARIABLE = "_EVENSTRIDE_FAULTS"
WORKER_VARIABLE = "_EVENSTRIDE_FAULTS_WORKER"

_RECORD = struct.Struct("<qqd?")  # of a `WorkerProgress`
_WRITING = os.O_WRONLY | os.O_RDWR
# Audit events that write, and which of their arguments is the place. Folders are not counted: who
# makes one that several processes need is a matter of chance.
_OPERATIONS = {"os.rename": 1, "os.link": 1, "os.symlink": 1}


@dataclass(frozen=True, slots=True)
class Orders:
    """What the workers of one generation are to know."""

    plan: FaultPlan  # of the run
    number: int  # of the generation
    roster: ScriptedRoster  # of the generation
    fired: tuple[int, ...] = ()  # numbers of the faults that have happened
    reached: int = 0  # steps that were ever committed

    def to_json(self) -> str:
        return TypeAdapter(Orders).dump_json(self).decode()

    @classmethod
    def from_json(cls, text: str) -> Orders:
        return TypeAdapter(Orders).validate_json(text)


@dataclass(frozen=True, slots=True)
class WorkerProgress:
    """How far a worker has come in a generation."""

    first_step: int  # committed steps it began with
    step: int  # committed steps it has come to
    # When it committed its first own step, by the monotonic clock that all processes of a machine
    # share; 0 before.
    committed_s: float = 0.0
    held: bool = False  # whether it waits to be ended, because somebody comes


class FaultJournal:
    """The folder's files; the folder is made if it is not there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def order(self, orders: Orders) -> Path:
        path = self.folder / f"generation-{orders.number}.json"
        path.write_text(orders.to_json())
        return path

    def progress(self, generation: int, worker: str) -> WorkerProgress | None:
        """Return how far a worker has come; ``None`` if it has not begun."""
        try:
            data = self._progress(generation, worker).read_bytes()
        except FileNotFoundError:
            return None
        return WorkerProgress(*_RECORD.unpack(data)) if len(data) == _RECORD.size else None

    def fire(self, fault: int, worker: str) -> None:
        """Note that a fault is about to befall a worker."""
        line = json.dumps({"fault": fault, "worker": worker}) + "\n"
        descriptor = os.open(self._fired, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            os.write(descriptor, line.encode())
        finally:
            os.close(descriptor)

    def fired(self) -> tuple[int, ...]:
        """Return the numbers of the faults that have happened, in the plan's order."""
        try:
            lines = self._fired.read_text().splitlines()
        except FileNotFoundError:
            return ()
        return tuple(sorted({int(json.loads(line)["fault"]) for line in lines}))

    @property
    def _fired(self) -> Path:
        return self.folder / "fired.jsonl"

    def _progress(self, generation: int, worker: str) -> Path:
        return self.folder / f"progress-{generation}-{worker}"


class ProgressFile:
    """A worker's own record of how far it has come in a generation."""

    def __init__(self, journal: FaultJournal, generation: int, worker: str) -> None:
        path = journal._progress(generation, worker)
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
        self._latest: WorkerProgress | None = None

    def note(self, step: int, *, held: bool = False) -> None:
        """Note that ``step`` steps are committed; the first note is what it began with."""
        if self._latest is None:
            self._latest = WorkerProgress(step, step)
        else:
            at_s = self._latest.committed_s or time.monotonic()
            self._latest = WorkerProgress(self._latest.first_step, step, at_s, held)
        os.pwrite(self._descriptor, _RECORD.pack(*astuple(self._latest)), 0)


class ScriptedFault(RuntimeError):
    """What a fault of kind ``raise`` raises."""


class Injector:
    """One worker's part of a plan.

    ``damage`` damages the newest checkpoint, for ``corrupt-newest``.
    """

    def __init__(
        self, orders: Orders, worker: str, journal: FaultJournal, damage: Callable[[], None]
    ) -> None:
        self._orders, self._worker, self._journal = orders, worker, journal
        self._damage = damage
        self._progress = ProgressFile(journal, orders.number, worker)
        self._holds = orders.roster.arrivals(orders.reached)
        self._trap = Trap()

    @classmethod
    def from_environment(
        cls, damage: Callable[[], None], variables: Mapping[str, str] = os.environ
    ) -> Injector:
        """Return the injector of this process, as the supervisor's environment tells it."""
        path = Path(variables[ORDERS_VARIABLE])
        orders = Orders.from_json(path.read_text())
        return cls(orders, variables[WORKER_VARIABLE], FaultJournal(path.parent), damage)

    @property
    def generation(self) -> int:
        return self._orders.number

    @property
    def writes(self) -> int:
        """How many writes this worker's latest save took: places where it may be killed."""
        return self._trap.seen

    def begins(self, first_step: int) -> None:
        """The worker is about to train on from ``first_step`` committed steps."""
        self._progress.note(first_step)
        if self._orders.number:
            orders = self._orders
            self._meet(at_restart(orders.plan, orders.roster, orders.fired, orders.reached))
        self._meet(self._due(first_step))

    def eventful(self, step: int) -> bool:
        """Return whether something befalls anybody when ``step`` steps are committed.

        Then the workers should first wait for each other, with their saves finished: so that
        what the others still get done does not depend on who is faster.
        """
        return bool(self._due(step)) or step in self._holds

    def counts(self, step: int) -> bool:
        """Return whether a save at ``step`` should be waited for, so that `writes` counts it.

        That is what a run without faults is for.
        """
        return not self._orders.plan.faults and step % self._orders.plan.save_every == 0

    def saves(self, step: int, folder: Path) -> None:
        """``step`` steps are committed, and the worker may be about to save in ``folder``.

        A trap is set if that save is to fail.
        """
        self._progress.note(step)
        if step % self._orders.plan.save_every == 0:
            self._trap.count(folder)
        for number, fault in self._mine(self._due(step)):
            if fault.kind == "disk-full":
                self._journal.fire(number, self._worker)
                self._trap.fail(folder)
            elif fault.kind == "crash-in-save":
                assert fault.write is not None, "the plan checks that"
                self._trap.die(folder, fault.write, functools.partial(self._fire, number))

    def committed(self, step: int) -> None:
        """All that comes after the last of ``step`` committed steps is done, saving included."""
        self._trap.open()
        self._progress.note(step)
        self._meet(self._due(step))
        if step in self._holds:
            self._progress.note(step, held=True)
            while True:  # until the supervisor ends this process
                signal.pause()

    def _due(self, step: int) -> tuple[tuple[int, Fault], ...]:
        return happening(self._orders.plan, self._orders.roster, self._orders.fired, step)

    def _mine(self, due: tuple[tuple[int, Fault], ...]) -> list[tuple[int, Fault]]:
        return [(n, f) for n, f in due if self._worker in self._orders.roster.victims(f)]

    def _meet(self, due: tuple[tuple[int, Fault], ...]) -> None:
        for number, fault in self._mine(due):
            if fault.kind in ("disk-full", "crash-in-save"):
                continue
            self._fire(number)
            match fault.kind:
                case "term":
                    os.kill(os.getpid(), signal.SIGTERM)
                case "stop":
                    os.kill(os.getpid(), signal.SIGSTOP)
                case "raise":
                    raise ScriptedFault(f"fault {number} of the plan")
                case "corrupt-newest":
                    self._damage()
                    os.kill(os.getpid(), signal.SIGKILL)
                case _:
                    os.kill(os.getpid(), signal.SIGKILL)

    def _fire(self, number: int) -> None:
        self._journal.fire(number, self._worker)


class Trap:
    """Lets what this process writes below a folder fail, or kills the process at it.

    It hears of opens, renames and links by Python's audit events, whichever thread they
    come from; files that native code opens by name it does not see.
    """

    def __init__(self) -> None:
        self._below: str | None = None
        self._left = 0
        self._last_words: Callable[[], None] | None = None
        self._listens = False
        self.seen = 0

    def fail(self, folder: Path) -> None:
        """Let all writes below ``folder`` fail for want of space."""
        self._set(folder, 0, None)

    def die(self, folder: Path, write: int, last_words: Callable[[], None]) -> None:
        """Kill this process before the ``write``-th write below ``folder``, counted from 1."""
        self._set(folder, write, last_words)

    def count(self, folder: Path) -> None:
        """Only count the writes below ``folder``, in ``seen``."""
        self._set(folder, sys.maxsize, lambda: None)

    def open(self) -> None:
        """Let everything through again."""
        self._below = None

    def _set(self, folder: Path, write: int, last_words: Callable[[], None] | None) -> None:
        self._left, self._last_words, self.seen = write, last_words, 0
        self._below = _absolute(folder)
        if not self._listens:  # a hook can never be taken away again
            self._listens = True
            sys.addaudithook(self._hear)

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self._below is None:
            return
        place = _written(event, arguments)
        if place is None or not _absolute(place).startswith(self._below + os.sep):
            return
        self.seen += 1
        if self._last_words is None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), place)
        self._left -= 1
        if self._left == 0:
            self._below = None
            self._last_words()
            os.kill(os.getpid(), signal.SIGKILL)


def _absolute(place: str | Path) -> str:
    return os.path.abspath(place)  # noqa: PTH100  a hook must not look at the disk


def _written(event: str, arguments: tuple[Any, ...]) -> str | None:
    """Return the path that an audit event is about to write at, if it is about to write."""
    if event == "open":
        place, _, flags = arguments
        writes = isinstance(flags, int) and bool(flags & _WRITING)
        return os.fspath(place) if writes and isinstance(place, (str, os.PathLike)) else None
    if event in _OPERATIONS:
        place = arguments[_OPERATIONS[event]]
        return os.fsdecode(place) if isinstance(place, (str, bytes, os.PathLike)) else None
    return None
