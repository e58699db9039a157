"""A run, folded from the records of its trace: processes, generations of workers, what they told.

Decisions hang on a trace that is planned or compared by, so there one damaged record is an error.
A display is better served with what is there: it counts damaged records, and goes on.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from evenstride.core.control.events import (
    Event,
    Exchanged,
    FleetFormed,
    Instruction,
    SetBatch,
    SetShares,
)
from evenstride.core.fleet import Shares
from evenstride.core.time_model.observation import Observation
from evenstride.errors import EvenstrideError, TraceError
from evenstride.trace.codec import decode
from evenstride.trace.read import is_number, read_records

DAMAGED = (
    *(EvenstrideError, KeyError, TypeError, ValueError, AttributeError),
    *(OverflowError, RecursionError),
)
"""What a record that was changed after it was written may raise while it is taken."""


@dataclass(slots=True, eq=False)
class GenerationLog:
    """One generation of workers, from the forming of its group to the next one's."""

    workers: tuple[str, ...]  # names, in rank order
    global_batch: int  # samples of a step
    splits: list[Shares] = field(default_factory=list)  # that were set, in order
    # what was measured, in the order it was reported
    exchanges: list[Exchanged] = field(default_factory=list)

    @property
    def observations(self) -> Iterator[Observation]:
        """What was measured, one worker's steps after the other."""
        return (seen for one in self.exchanges for seen in one.observations)


@dataclass(slots=True, eq=False)
class ProcessLog:
    """What one process of the leader has written: from its header to the next one."""

    header: dict[str, Any]  # facts about it
    generations: list[GenerationLog] = field(default_factory=list)  # of its workers
    # records of all other kinds, as they are in the trace
    notes: list[dict[str, Any]] = field(default_factory=list)

    def of_kind(self, kind: str) -> Iterator[dict[str, Any]]:
        """Yield the notes of one kind, in order."""
        return (note for note in self.notes if note["kind"] == kind)

    @property
    def observations(self) -> Iterator[Observation]:
        """What was measured, in the order it was reported."""
        return (seen for one in self.generations for seen in one.observations)

    @property
    def splits(self) -> Iterator[Shares]:
        """The splits that were set, the opening first."""
        return (shares for one in self.generations for shares in one.splits)


class TraceFold:
    """Takes records one after the other, and puts each where it belongs.

    What a process or a generation is, subclasses decide.

    Args:
        path: of the trace, for errors.
        strict: whether a damaged record raises; else it is counted.
    """

    def __init__(self, path: Path, *, strict: bool) -> None:
        self.path, self._strict = path, strict
        self.damaged = 0

    def take(self, record: dict[str, Any]) -> None:
        """Take one record.

        Raises:
            TraceError: it is damaged, and the fold is strict.
        """
        try:
            self._take(record)
        except TraceError:
            if self._strict:
                raise
            self.damaged += 1
        except DAMAGED as error:
            if self._strict:
                raise self._unusable(record, error) from None
            self.damaged += 1

    def _unusable(self, record: dict[str, Any], error: BaseException) -> TraceError:
        return TraceError(
            f"a record of kind {str(record.get('kind'))[:40]!r} in {self.path} cannot be used "
            f"({type(error).__name__}: {str(error)[:80]}); it was changed after it was written; "
            "take the run's own file"
        )

    def _take(self, record: dict[str, Any]) -> None:
        match record["kind"]:
            case "header":
                self._begun(record)
            case "event":
                self._happened(decode(field_of(record, "event", dict, self.path)))
            case "instructions":
                for told in field_of(record, "instructions", list, self.path):
                    self._decided(decode(told))
            case _:
                self._noted(record)

    def _begun(self, header: dict[str, Any]) -> None:
        raise NotImplementedError

    def _happened(self, event: Event | Instruction) -> None:
        raise NotImplementedError

    def _decided(self, instruction: Event | Instruction) -> None:
        raise NotImplementedError

    def _noted(self, record: dict[str, Any]) -> None:
        raise NotImplementedError


class RunLog(TraceFold):
    """All that a run's trace holds, read once, from beginning to end.

    Args:
        run: a run's folder or its trace file.
        notes_only: leave out what the control was told and what it decided. To decode that takes
            most of the time, and who polls a trace or looks for metrics has no use for it.

    Raises:
        TraceError: there is none, or a record of it is damaged.

    Cost:
        memory for all steps' times.
    """

    def __init__(self, run: Path, *, notes_only: bool = False) -> None:
        super().__init__(run, strict=True)
        self.processes: list[ProcessLog] = []
        for record in read_records(run):
            if not notes_only or record["kind"] not in ("event", "instructions"):
                self.take(record)

    @property
    def observations(self) -> Iterator[Observation]:
        """What was measured in all processes, in the order it was reported."""
        return (seen for one in self.processes for seen in one.observations)

    @property
    def splits(self) -> tuple[Shares, ...]:
        """The splits that were set in all processes, the opening first."""
        return tuple(shares for one in self.processes for shares in one.splits)

    @property
    def header(self) -> dict[str, Any]:
        """Facts about the latest process; empty before the first."""
        return self.processes[-1].header if self.processes else {}

    @property
    def summary(self) -> dict[str, Any]:
        """What the latest process that ended in order ended with; else empty."""
        ended = (note.get("summary", {}) for one in self.processes for note in one.of_kind("ended"))
        return next(reversed(list(ended)), {})

    @property
    def opening_batch(self) -> int:
        """Samples of a step with which the latest process began; 0 before the first."""
        begun = [log.generations[0] for log in self.processes if log.generations]
        return begun[-1].global_batch if begun else 0

    @property
    def _now(self) -> GenerationLog:
        """The latest generation of the latest process.

        What an earlier process knew says nothing of this one's workers.
        """
        if not self.processes or not self.processes[-1].generations:
            raise ValueError("something happened to workers that have not met")
        return self.processes[-1].generations[-1]

    def _begun(self, header: dict[str, Any]) -> None:
        self.processes.append(ProcessLog(header))

    def _happened(self, event: Event | Instruction) -> None:
        match event:
            case FleetFormed(global_batch=batch, workers=workers):
                names = tuple(worker.name for worker in workers)
                self._form(names, batch)
            case Exchanged(observations=told):
                self._check_workers(told)
                self._now.exchanges.append(event)

    def _check_workers(self, told: Iterable[Observation]) -> None:
        workers = self._now.workers
        for seen in told:
            if not 0 <= seen.worker < len(workers):
                raise TraceError(
                    f"{self.path} has times of worker {seen.worker}, but {len(workers)} workers; "
                    "it was changed after it was written; take the run's own file"
                )

    def _decided(self, instruction: Event | Instruction) -> None:
        match instruction:
            case SetShares(shares=shares):
                self._now.splits.append(shares)
            case SetBatch(global_batch=batch):
                self._form(self._now.workers, batch)

    def _form(self, workers: tuple[str, ...], batch: int) -> None:
        # The codec takes any JSON value, and rates are divided by this one.
        if not isinstance(batch, int) or batch < 1:
            raise ValueError(f"a global batch of {batch!r}")
        self.processes[-1].generations.append(GenerationLog(workers, batch))

    def _noted(self, record: dict[str, Any]) -> None:
        self.processes[-1].notes.append(record)


def field_of(record: dict[str, Any], name: str, kind: Any, trace: Path) -> Any:
    """Return a field of a record.

    The lines of a trace are sound JSON, but others may have written or changed them.

    Args:
        record: of the trace.
        name: of the field.
        kind: type or types that it has to have; a number must be finite, too.
        trace: for the error.

    Raises:
        TraceError: it is not there, or is something else.
    """
    found = record.get(name)
    usable = isinstance(found, kind) and (is_number(found) or not isinstance(found, int | float))
    if not usable:
        raise TraceError(
            f"a record of kind {record.get('kind')!r} in {trace} has no {name} that can be used "
            f"({str(found)[:40]}); it was changed after it was written; take the run's own file"
        )
    return found
