"""A run, built from the records of its trace: processes, generations, and training history.

A plan or a comparison depends on its trace, so a damaged record is an error there. A display counts
damaged records and continues.

The history holds results by epochs. A resumed run has several processes in one trace, and one that
went back to a checkpoint has trained some epochs twice. Only the final training counts: results
beyond the point of resumption were undone.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import astuple, dataclass, field
from math import floor, inf, isnan, nan
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from evenstride.core.control.events import (
    Event,
    Exchanged,
    FleetFormed,
    Instruction,
    SetBatch,
    SetShares,
)
from evenstride.core.convergence.batch_laws import Value
from evenstride.core.fleet import Shares
from evenstride.core.gradients.noise_scale import GradientNorms
from evenstride.core.time_model.observation import Observation
from evenstride.errors import EvenstrideError, TraceError
from evenstride.trace.codec import decode
from evenstride.trace.read import DataPass, is_number, norms_of, pass_of, read_records

_SAME = 1e-9  # epochs by which sums of steps may differ from a position
DAMAGED = (
    EvenstrideError,
    KeyError,
    TypeError,
    ValueError,
    AttributeError,
    OverflowError,
    RecursionError,
)
"""Exceptions that a record changed after it was written may raise."""


@dataclass(slots=True, eq=False)
class GenerationLog:
    """One generation of workers, from the formation of its group to that of the next."""

    workers: tuple[str, ...]  # names, in rank order
    global_batch: int  # samples of a step
    splits: list[Shares] = field(default_factory=list)  # in the order in which they were set
    # measurements, in the order of the reports
    exchanges: list[Exchanged] = field(default_factory=list)

    @property
    def observations(self) -> Iterator[Observation]:
        """The measurements, one worker's steps after the other."""
        return (seen for one in self.exchanges for seen in one.observations)


@dataclass(slots=True, eq=False)
class ProcessLog:
    """The records of one process of the leader: from its header to the next one."""

    header: dict[str, Any]  # properties of the process
    generations: list[GenerationLog] = field(default_factory=list)  # of its workers
    # records of all other kinds, as they are in the trace
    notes: list[dict[str, Any]] = field(default_factory=list)

    def of_kind(self, kind: str) -> Iterator[dict[str, Any]]:
        """Yield the notes of one kind, in order."""
        return (note for note in self.notes if note["kind"] == kind)

    @property
    def observations(self) -> Iterator[Observation]:
        """The measurements, in the order of the reports."""
        return (seen for one in self.generations for seen in one.observations)

    @property
    def splits(self) -> Iterator[Shares]:
        """The splits in order, the opening first."""
        return (shares for one in self.generations for shares in one.splits)


class TraceFold:
    """Takes records one after the other, and passes each to a method of its subclass.

    A damaged record raises if the fold is strict, and is counted otherwise.
    """

    def __init__(self, path: Path, *, strict: bool) -> None:
        self.path, self._strict = path, strict
        self.damaged = 0

    def take(self, record: dict[str, Any]) -> None:
        """Take one record; a damaged one raises `TraceError` if the fold is strict."""
        try:
            self._take(record)
        except DAMAGED as error:
            if not self._strict:
                self.damaged += 1
            elif isinstance(error, TraceError):
                raise
            else:
                raise TraceError(
                    f"invalid record of kind {str(record.get('kind'))[:40]!r} in {self.path} "
                    f"({type(error).__name__}: {str(error)[:80]}); it was changed after it "
                    "was written; use the run's original file"
                ) from None

    def _take(self, record: dict[str, Any]) -> None:
        match record["kind"]:
            case "header":
                self._begun(record)
            case "event":
                self._happened(decode(field_of(record, "event", dict, self.path)))
            case "instructions":
                for plain in field_of(record, "instructions", list, self.path):
                    self._decided(decode(plain))
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
    """All records of a run's trace, read from beginning to end; any damage is a `TraceError`.

    ``notes_only`` leaves out events and decisions. Decoding them takes most of the time, and
    readers that poll a trace or look for metrics do not need them.
    """

    def __init__(self, run: Path, *, notes_only: bool = False) -> None:
        super().__init__(run, strict=True)
        self.processes: list[ProcessLog] = []
        for record in read_records(run):
            if not notes_only or record["kind"] not in ("event", "instructions"):
                self.take(record)

    @property
    def observations(self) -> Iterator[Observation]:
        """The measurements of all processes, in the order of the reports."""
        return (seen for one in self.processes for seen in one.observations)

    @property
    def splits(self) -> tuple[Shares, ...]:
        """The splits of all processes, the opening first."""
        return tuple(shares for one in self.processes for shares in one.splits)

    @property
    def header(self) -> dict[str, Any]:
        """Properties of the latest process; empty before the first."""
        return self.processes[-1].header if self.processes else {}

    @property
    def summary(self) -> dict[str, Any]:
        """The summary of the latest process that ended normally; otherwise empty."""
        ended = (note.get("summary", {}) for one in self.processes for note in one.of_kind("ended"))
        return next(reversed(list(ended)), {})

    @property
    def opening_batch(self) -> int:
        """Samples of the first step of the latest process; 0 before the first process."""
        begun = [log.generations[0] for log in self.processes if log.generations]
        return begun[-1].global_batch if begun else 0

    @property
    def _now(self) -> GenerationLog:
        """The latest generation of the latest process.

        The generations of earlier processes had other workers.
        """
        if not self.processes or not self.processes[-1].generations:
            raise ValueError("an event precedes the formation of its workers")
        return self.processes[-1].generations[-1]

    def _begun(self, header: dict[str, Any]) -> None:
        self.processes.append(ProcessLog(header))

    def _happened(self, event: Event | Instruction) -> None:
        match event:
            case FleetFormed(global_batch=batch, workers=workers):
                names = tuple(worker.name for worker in workers)
                self._form(names, batch)
            case Exchanged(observations=reports):
                self._check_workers(reports)
                self._now.exchanges.append(event)

    def _check_workers(self, reports: Iterable[Observation]) -> None:
        workers = self._now.workers
        for seen in reports:
            if not 0 <= seen.worker < len(workers):
                raise TraceError(
                    f"{self.path} has times of worker {seen.worker}, but only {len(workers)} "
                    "workers; it was changed after it was written; use the run's original file"
                )

    def _decided(self, instruction: Event | Instruction) -> None:
        match instruction:
            case SetShares(shares=shares):
                self._now.splits.append(shares)
            case SetBatch(global_batch=batch):
                self._form(self._now.workers, batch)

    def _form(self, workers: tuple[str, ...], batch: int) -> None:
        # The codec accepts any JSON value, but speeds are divided by this one.
        if not isinstance(batch, int) or batch < 1:
            raise ValueError(f"invalid global batch {batch!r}")
        self.processes[-1].generations.append(GenerationLog(workers, batch))

    def _noted(self, record: dict[str, Any]) -> None:
        self.processes[-1].notes.append(record)


def field_of(record: dict[str, Any], name: str, kind: Any, trace: Path) -> Any:
    """Return a field of a record, which must have the given type; a number must also be finite.

    The lines of a trace are valid JSON, but other programs may have written or changed them.

    Raises:
        TraceError: the field is missing or invalid.
    """
    found = record.get(name)
    usable = isinstance(found, kind) and (is_number(found) or not isinstance(found, int | float))
    if not usable:
        raise TraceError(
            f"a record of kind {record.get('kind')!r} in {trace} has no valid {name} "
            f"({str(found)[:40]}); it was changed after it was written; use the run's original file"
        )
    return found


class MeasuredStep(NamedTuple):
    """A step whose noise was measured.

    Args:
        epochs: trained after it; NaN if the trace does not contain it, as in older versions.
        samples: global batch of the process that trained it.
        norms: of its gradient.
        loss: of its global batch; ``None`` if it is not known.
    """

    epochs: float
    samples: int
    norms: GradientNorms
    loss: float | None


@dataclass(frozen=True, slots=True)
class TrainingHistory:
    """The results of a training run over time.

    Args:
        metrics: results of evaluations, by name, in order.
        steps: measured steps, in the order in which the leader received them.
        batches: the distinct global batches of the run; more than one only if the batch is open.
    """

    metrics: Mapping[str, tuple[Value, ...]]
    steps: tuple[MeasuredStep, ...]
    batches: tuple[int, ...] = ()

    @property
    def losses(self) -> tuple[Value, ...]:
        """The known training losses of measured steps, in order."""
        known = [Value(one.epochs, one.loss) for one in self.steps if one.loss is not None]
        return tuple(sorted((one for one in known if not isnan(one.epochs)), key=_place))


def read_course(run: Path) -> TrainingHistory:
    """Return the history of a training run.

    A run with another global batch in the same file is another training run, unless its batch is
    open. Only the latest training run counts.

    Raises:
        TraceError: the trace cannot be read, or a record lacks a number.
    """
    return course_of(RunLog(run, notes_only=True))


def course_of(log: RunLog) -> TrainingHistory:
    """Return the history of a training run whose trace was read; see `read_course`."""
    course = _Course(log.path)
    for process in log.processes:
        for record in process.notes:
            match record["kind"]:
                case "pass":
                    course.of(process.header).go_on(record)
                case "metric":
                    course.of(process.header).found(record)
                case "noise":
                    course.of(process.header).measured(record)
    # A process may evaluate before it has restored its checkpoint.
    metrics = {name: tuple(sorted(values, key=_place)) for name, values in course.metrics.items()}
    return TrainingHistory(metrics, tuple(course.steps), tuple(course.batches))


class _Course:
    def __init__(self, run: Path) -> None:
        self.metrics: dict[str, list[Value]] = {}
        self.steps: list[MeasuredStep] = []
        self.batches: list[int] = []
        self._header: dict[str, Any] = {}
        self._run, self._batch, self._furthest = run, 0, 0.0
        self._passes: list[DataPass] = []  # of the current process

    def of(self, header: dict[str, Any]) -> _Course:
        """Return the same object, after a change of process at that process's first record.

        A process whose state was rejected has a header, too, and undoes nothing.
        """
        if header is not self._header:
            self._header, batch = header, header.get("global_batch", 0)
            if not is_number(batch):
                raise self._broken("header", "global_batch")
            if batch != self._batch and header.get("bounds") is None:
                self.metrics, self.steps, self.batches = {}, [], []
            self._batch, self._passes = int(batch), []
        return self

    def go_on(self, record: dict[str, Any]) -> None:
        """Begin a pass, and drop the results that it undoes."""
        begun = pass_of(record, self._batch, self._run)
        self._batch = begun.batch
        self._passes.append(begun)
        self._back_to(begun.epochs)
        if begun.epochs <= _SAME:
            self.batches.clear()
        if self._batch not in self.batches:
            self.batches.append(self._batch)

    def found(self, record: dict[str, Any]) -> None:
        """Add the result of an evaluation."""
        epochs, value = record.get("epochs"), record.get("value")
        if not is_number(epochs):
            raise self._broken("metric", "epochs")
        if not isinstance(record.get("name"), str) or not (value is None or is_number(value)):
            raise self._broken("metric", "name or value")
        number = inf if value is None else float(value)
        self.metrics.setdefault(record["name"], []).append(Value(epochs, number))
        self._furthest = max(self._furthest, epochs)

    def measured(self, record: dict[str, Any]) -> None:
        """Add a step, which the leader may have received some passes later."""
        step, norms = norms_of(record, self._run)
        if not all(map(is_number, (step, *astuple(norms)))) or norms.batch <= 0:
            raise self._broken("noise", "step, parts, batch, local, mean")
        begun = bisect_right(self._passes, step, key=lambda one: one.step)
        loss = record.get("loss")
        of = self._passes[begun - 1] if begun else None
        epochs = self._after(step, of)
        if not any(epochs > later.epochs + _SAME for later in self._passes[begun:]):
            known = float(loss) if is_number(loss) else None
            batch = of.batch if of is not None else self._batch
            batch = batch or round(norms.batch)  # for example, written by hand
            self.steps.append(MeasuredStep(epochs, batch, norms, known))
            self._furthest = max(self._furthest, epochs)  # NaN is ignored

    def _after(self, step: int, of: DataPass | None) -> float:
        """Return the epochs after a step of a pass; NaN if not known."""
        if of is None:
            return nan
        part = (step + 1 - of.step) * of.batch / max(of.samples, 1)
        # An epoch's last step may have fewer samples.
        return min(of.epochs + part, floor(of.epochs + _SAME) + 1.0)

    def _back_to(self, epochs: float) -> None:
        if self._furthest <= epochs + _SAME:
            return
        self._furthest = epochs
        for name, values in self.metrics.items():
            self.metrics[name] = _until(values, epochs)
        self.steps = _until(self.steps, epochs)

    def _broken(self, kind: str, names: str) -> TraceError:
        return TraceError(
            f"a {kind} record in {self._run} lacks one of {names}, or has a non-finite number "
            "there; it was changed after it was written"
        )


def _place(one: Value) -> float:
    return one.epochs


_At = TypeVar("_At", Value, MeasuredStep)


def _until(found: Iterable[_At], epochs: float) -> list[_At]:
    """Return the results up to a position, or with an unknown position."""
    return [one for one in found if not one.epochs > epochs + _SAME]
