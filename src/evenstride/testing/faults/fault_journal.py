"""What supervisor and workers tell each other, in files of one folder.

A worker that is killed between two instructions has still written what it wrote before, since
what is handed to the kernel outlives the process.
"""

from __future__ import annotations

import json
import os
import struct
import time
from dataclasses import astuple, dataclass
from pathlib import Path

from evenstride.testing.faults.fault_plan import FaultPlan, ScriptedRoster

ORDERS_VARIABLE = "_EVENSTRIDE_FAULTS"
WORKER_VARIABLE = "_EVENSTRIDE_FAULTS_WORKER"

_RECORD = struct.Struct("<qqd?")


@dataclass(frozen=True, slots=True)
class Orders:
    """What the workers of one generation are to know."""

    plan: FaultPlan  # of the run
    number: int  # of the generation
    roster: ScriptedRoster  # of the generation
    fired: tuple[int, ...] = ()  # numbers of the faults that have happened
    reached: int = 0  # steps that were ever committed

    def to_json(self) -> str:
        plain = {
            "plan": self.plan.model_dump(),
            "number": self.number,
            "members": self.roster.members,
            "absent": self.roster.absent,
            "fired": self.fired,
            "reached": self.reached,
        }
        return json.dumps(plain)

    @classmethod
    def from_json(cls, text: str) -> Orders:
        plain = json.loads(text)
        absent = tuple((str(name), int(step)) for name, step in plain["absent"])
        return cls(
            FaultPlan.model_validate(plain["plan"]),
            plain["number"],
            ScriptedRoster(tuple(plain["members"]), absent),
            tuple(plain["fired"]),
            plain["reached"],
        )


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
    """The folder's files.

    Args:
        folder: is made if it is not there.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def order(self, orders: Orders) -> Path:
        """Write a generation's orders; return their file."""
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
    """A worker's own record of how far it has come.

    Args:
        journal: of the run.
        generation: in which it takes part.
        worker: its name.
    """

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
