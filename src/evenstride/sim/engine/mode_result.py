"""The result of a simulated run in one synchronisation mode, and a record of its events."""

from __future__ import annotations

from collections.abc import Iterable, Sized
from dataclasses import dataclass, field
from typing import Any

from evenstride.core.sync_modes.async_schedule import Piece, Staleness


@dataclass(frozen=True, slots=True)
class Begun:
    """A worker was allowed to begin an update; its weights may not have arrived yet."""

    worker: int
    at_s: float


@dataclass(frozen=True, slots=True)
class Applied:
    """A worker's work became part of the model."""

    worker: int
    at_s: float  # time at which it was applied; the workers learn of it later
    epoch: int  # counted from 0
    positions: Piece  # trained positions of the epoch
    staleness: int  # of the update


@dataclass(frozen=True, slots=True)
class Gone:
    """A worker left or was lost; its unfinished samples are assigned again."""

    worker: int
    at_s: float


Entry = Begun | Applied | Gone


@dataclass(frozen=True, slots=True)
class WorkerOutcome:
    """The work of one worker."""

    name: str
    updates: int  # number of its updates, or of its steps in lockstep; lost ones do not count.
    samples: int  # number of samples trained in them.
    busy_s: float  # busy time in seconds, as reported to the controller.
    wait_s: float  # the rest of the time during which it took part.
    staleness: Staleness  # of its updates; in lockstep of all.

    @property
    def period_s(self) -> float:
        """Mean seconds from one of its updates to the next; 0 without updates."""
        return (self.busy_s + self.wait_s) / self.updates if self.updates else 0.0


@dataclass(frozen=True, slots=True)
class ModeResult:
    """The result of a run."""

    sync: str
    time_s: float  # simulated seconds until all samples are trained and all have the weights
    updates: int  # of the model
    epochs: int  # number of trained epochs
    samples: int  # trained, each once per epoch
    staleness: Staleness  # of the updates
    moves: int  # number of changes of the split
    workers: tuple[WorkerOutcome, ...]  # all workers of the scenario

    @property
    def waiting(self) -> float:
        """The fraction of the workers' time in which they waited, from 0 to 1."""
        wait_s = sum(worker.wait_s for worker in self.workers)
        there_s = wait_s + sum(worker.busy_s for worker in self.workers)
        return wait_s / there_s if there_s else 0.0

    def to_dict(self) -> dict[str, Any]:
        return {
            "sync": self.sync,
            "time_s": self.time_s,
            "updates": self.updates,
            "epochs": self.epochs,
            "samples": self.samples,
            "staleness": self.staleness.to_dict(),
            "waiting": self.waiting,
            "moves": self.moves,
            "workers": [
                {
                    "name": worker.name,
                    "updates": worker.updates,
                    "samples": worker.samples,
                    "period_s": worker.period_s,
                    "busy_s": worker.busy_s,
                    "wait_s": worker.wait_s,
                    "staleness": worker.staleness.to_dict(),
                }
                for worker in self.workers
            ],
        }


@dataclass(slots=True)
class Account:
    """The totals of one worker so far."""

    since_s: float | None = None  # time at which it joined; ``None`` while it is absent
    there_s: float = 0.0  # seconds of its earlier presence
    busy_s: float = 0.0  # busy time in seconds
    updates: int = 0  # number of its updates
    samples: int = 0  # number of its trained samples
    staleness: Staleness = field(default_factory=Staleness)  # of its updates

    def comes(self, at_s: float) -> None:
        self.since_s = at_s

    def goes(self, at_s: float) -> None:
        """Stop counting its presence; does nothing if it is absent."""
        if self.since_s is not None:
            self.there_s += at_s - self.since_s
            self.since_s = None

    def works(self, busy_s: float) -> None:
        self.busy_s += busy_s

    def applied(self, samples: int, staleness: int) -> None:
        self.samples += samples
        self.updates += 1
        self.staleness = self.staleness.counted(staleness)

    def outcome(self, name: str) -> WorkerOutcome:
        wait_s = max(self.there_s - self.busy_s, 0.0)
        return WorkerOutcome(name, self.updates, self.samples, self.busy_s, wait_s, self.staleness)


class RunTotals:
    """The totals of a run so far; ``record``, if given, receives the events in order."""

    def __init__(self, workers: int, record: list[Entry] | None) -> None:
        self.accounts = [Account() for _ in range(workers)]
        self.samples = 0
        self._moves = 0
        self._updates, self._staleness, self._record = 0, Staleness(), record

    def keep(self, entry: Entry) -> None:
        if self._record is not None:
            self._record.append(entry)

    def moved(self, before: Sized) -> None:
        """Count a change of the shares; a fleet's first shares do not count."""
        self._moves += len(before) > 0

    def update(self, staleness: int) -> None:
        self._updates += 1
        self._staleness = self._staleness.counted(staleness)

    def applied(self, entry: Applied) -> None:
        samples = sum(map(len, entry.positions))
        self.samples += samples
        self.accounts[entry.worker].applied(samples, entry.staleness)
        self.keep(entry)

    def outcome(self, sync: str, end_s: float, epochs: int, names: Iterable[str]) -> ModeResult:
        for account in self.accounts:
            account.goes(end_s)
        return ModeResult(
            sync=sync,
            time_s=end_s,
            updates=self._updates,
            epochs=epochs,
            samples=self.samples,
            staleness=self._staleness,
            moves=self._moves,
            workers=tuple(map(Account.outcome, self.accounts, names)),
        )
