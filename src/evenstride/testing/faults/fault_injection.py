"""Inject the faults of a plan into a worker, and record them in files.

A script under test calls an `Injector` when it begins, before it saves, and when a step is
committed. The library itself does not call it. Supervisor and workers communicate through files of
one folder. What a worker has written survives when the worker is killed, because the kernel holds
it.
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
# Audit events of writes, and which argument is the path. Folders do not count: when several
# processes need one, chance decides which of them creates it.
_OPERATIONS = {"os.rename": 1, "os.link": 1, "os.symlink": 1}


@dataclass(frozen=True, slots=True)
class Orders:
    """The data that the workers of one generation receive."""

    plan: FaultPlan  # of the run
    number: int  # of the generation
    roster: ScriptedRoster  # of the generation
    fired: tuple[int, ...] = ()  # numbers of the faults that have happened
    reached: int = 0  # most steps that were ever committed

    def to_json(self) -> str:
        return TypeAdapter(Orders).dump_json(self).decode()

    @classmethod
    def from_json(cls, text: str) -> Orders:
        return TypeAdapter(Orders).validate_json(text)


@dataclass(frozen=True, slots=True)
class WorkerProgress:
    """Progress of a worker in a generation."""

    first_step: int  # committed steps at its start
    step: int  # committed steps now
    # Time of its first committed step, by the monotonic clock that all processes of a machine
    # share; 0 before that step.
    committed_s: float = 0.0
    held: bool = False  # whether it waits for its end, because a worker joins


class FaultJournal:
    """The files of a folder, which is created if it does not exist."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def order(self, orders: Orders) -> Path:
        path = self.folder / f"generation-{orders.number}.json"
        path.write_text(orders.to_json())
        return path

    def progress(self, generation: int, worker: str) -> WorkerProgress | None:
        """Return the progress of a worker; ``None`` if it has not begun."""
        try:
            data = self._progress(generation, worker).read_bytes()
        except FileNotFoundError:
            return None
        return WorkerProgress(*_RECORD.unpack(data)) if len(data) == _RECORD.size else None

    def fire(self, fault: int, worker: str) -> None:
        """Record that a fault is about to happen to a worker."""
        line = json.dumps({"fault": fault, "worker": worker}) + "\n"
        descriptor = os.open(self._fired, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            os.write(descriptor, line.encode())
        finally:
            os.close(descriptor)

    def fired(self) -> tuple[int, ...]:
        """Return the numbers of the faults that have happened, in the order of the plan."""
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
    """The file in which a worker records its progress in a generation."""

    def __init__(self, journal: FaultJournal, generation: int, worker: str) -> None:
        path = journal._progress(generation, worker)
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
        self._latest: WorkerProgress | None = None

    def note(self, step: int, *, held: bool = False) -> None:
        """Record that ``step`` steps are committed; the first call gives those at the start."""
        if self._latest is None:
            self._latest = WorkerProgress(step, step)
        else:
            at_s = self._latest.committed_s or time.monotonic()
            self._latest = WorkerProgress(self._latest.first_step, step, at_s, held)
        os.pwrite(self._descriptor, _RECORD.pack(*astuple(self._latest)), 0)


class ScriptedFault(RuntimeError):
    """The exception of a fault of kind ``raise``."""


class Injector:
    """Injects the faults of a plan into one worker.

    ``damage`` damages the newest checkpoint, for faults of kind ``corrupt-newest``.
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
        """Return the injector of this process, from the environment that the supervisor set."""
        path = Path(variables[ORDERS_VARIABLE])
        orders = Orders.from_json(path.read_text())
        return cls(orders, variables[WORKER_VARIABLE], FaultJournal(path.parent), damage)

    @property
    def generation(self) -> int:
        return self._orders.number

    @property
    def writes(self) -> int:
        """Number of writes in this worker's latest save; it may be killed before each of them."""
        return self._trap.seen

    def begins(self, first_step: int) -> None:
        """Call this before the worker continues from ``first_step`` committed steps."""
        self._progress.note(first_step)
        if self._orders.number:
            orders = self._orders
            self._meet(at_restart(orders.plan, orders.roster, orders.fired, orders.reached))
        self._meet(self._due(first_step))

    def eventful(self, step: int) -> bool:
        """Return whether a fault happens to any worker when ``step`` steps are committed.

        Then all workers should first finish their saves and wait for each other, so that the
        outcome does not depend on their speeds.
        """
        return bool(self._due(step)) or step in self._holds

    def counts(self, step: int) -> bool:
        """Return whether to wait for a save at ``step``, so that `writes` counts it.

        It is true in runs without faults, which count the writes.
        """
        return not self._orders.plan.faults and step % self._orders.plan.save_every == 0

    def saves(self, step: int, folder: Path) -> None:
        """Call this when ``step`` steps are committed, before a save in ``folder``.

        It sets a trap if the plan wants that save to fail.
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
        """Call this when all work of ``step`` committed steps is done, including the save."""
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
    """Makes writes of this process below a folder fail, or kills the process before one of them.

    It uses Python's audit events for opens, renames and links in all threads. It does not see files
    that native code opens.
    """

    def __init__(self) -> None:
        self._below: str | None = None
        self._left = 0
        self._last_words: Callable[[], None] | None = None
        self._listens = False
        self.seen = 0

    def fail(self, folder: Path) -> None:
        """Make all writes below ``folder`` fail with "no space left on device"."""
        self._set(folder, 0, None)

    def die(self, folder: Path, write: int, last_words: Callable[[], None]) -> None:
        """Kill this process before the ``write``-th write below ``folder``, counted from 1."""
        self._set(folder, write, last_words)

    def count(self, folder: Path) -> None:
        """Only count the writes below ``folder``, in ``seen``."""
        self._set(folder, sys.maxsize, lambda: None)

    def open(self) -> None:
        """Allow all writes again."""
        self._below = None

    def _set(self, folder: Path, write: int, last_words: Callable[[], None] | None) -> None:
        self._left, self._last_words, self.seen = write, last_words, 0
        self._below = _absolute(folder)
        if not self._listens:  # an audit hook cannot be removed
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
    return os.path.abspath(place)  # noqa: PTH100  a hook must not access the disk


def _written(event: str, arguments: tuple[Any, ...]) -> str | None:
    """Return the path that an audit event is about to write, or ``None``."""
    if event == "open":
        place, _, flags = arguments
        writes = isinstance(flags, int) and bool(flags & _WRITING)
        return os.fspath(place) if writes and isinstance(place, (str, os.PathLike)) else None
    if event in _OPERATIONS:
        place = arguments[_OPERATIONS[event]]
        return os.fsdecode(place) if isinstance(place, (str, bytes, os.PathLike)) else None
    return None
