"""What a simulated run in one mode of synchronisation came to, and a record of its events."""

from __future__ import annotations

from collections.abc import Iterable, Sized
from dataclasses import dataclass, field
from typing import Any

from evenstride.core.sync_modes.async_schedule import Piece, Staleness


@dataclass(frozen=True, slots=True)
class Begun:
    """A worker was allowed to begin an update; its weights may still be on their way."""

    worker: int
    at_s: float


@dataclass(frozen=True, slots=True)
class Applied:
    """What a worker did became part of the model."""

    worker: int
    at_s: float  # when it was applied; who takes part in all updates hears of it later
    epoch: int  # counted from 0
    positions: Piece  # of the epoch that it trained
    staleness: int  # of the update


@dataclass(frozen=True, slots=True)
class Gone:
    """A worker is not there any more; what it had in hand is given out again."""

    worker: int
    at_s: float


Entry = Begun | Applied | Gone


@dataclass(frozen=True, slots=True)
class WorkerOutcome:
    """What one worker did."""

    name: str
    updates: int  # that it made, or in lockstep its steps; what was lost does not count
    samples: int  # that it trained in them
    busy_s: float  # seconds at its own work, as the controller was told
    wait_s: float  # seconds for which it was there besides
    staleness: Staleness  # of its updates; in lockstep of all

    @property
    def period_s(self) -> float:
        """Mean seconds from one of its updates to the next; 0 if it made none."""
        return (self.busy_s + self.wait_s) / self.updates if self.updates else 0.0


@dataclass(frozen=True, slots=True)
class ModeResult:
    """What a run came to."""

    sync: str
    time_s: float  # simulated seconds until all samples are trained and all have the weights
    updates: int  # of the model
    epochs: int  # that were trained
    samples: int  # trained, each once per epoch
    staleness: Staleness  # of the updates
    moves: int  # changes of the split
    workers: tuple[WorkerOutcome, ...]  # all there ever were

    @property
    def waiting(self) -> float:
        """The part of the workers' time in which they waited, from 0 to 1."""
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
    """What one worker has done so far."""

    since_s: float | None = None  # when it came; ``None`` while it is not there
    there_s: float = 0.0  # seconds for which it was there before
    busy_s: float = 0.0  # seconds at its own work
    updates: int = 0  # that it made
    samples: int = 0  # that it trained
    staleness: Staleness = field(default_factory=Staleness)  # of its updates

    def comes(self, at_s: float) -> None:
        self.since_s = at_s

    def goes(self, at_s: float) -> None:
        """Stop counting the time for which it is there; nothing if it is not."""
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
    """What a run has come to so far; ``record`` takes what happens, in order, if it is there."""

    def __init__(self, workers: int, record: list[Entry] | None) -> None:
        self.accounts = [Account() for _ in range(workers)]
        self.samples = 0
        self._moves = 0
        self._updates, self._staleness, self._record = 0, Staleness(), record

    def keep(self, entry: Entry) -> None:
        if self._record is not None:
            self._record.append(entry)

    def moved(self, before: Sized) -> None:
        """Count a change of the shares; the first ones of a fleet are none."""
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
