"""A run, folded from the records of its trace: processes, generations of workers, and its course.

Decisions hang on a trace that is planned or compared by, so there one damaged record is an error.
A display is better served with what is there: it counts damaged records, and goes on.

The course is what was found after how many epochs. A training that was continued has several lives
in one trace, and one that went back to a checkpoint has trained some epochs twice. What counts is
the training as it is in the end: what was found beyond the place where it goes on was undone.
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

_SAME = 1e-9  # epochs, by which sums of steps may differ from a position
DAMAGED = (
    EvenstrideError,
    KeyError,
    TypeError,
    ValueError,
    AttributeError,
    OverflowError,
    RecursionError,
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
    """Takes records one after the other, and puts each where its subclass wants it.

    A damaged record raises if the fold is strict, and is counted if it is not.
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
                    f"a record of kind {str(record.get('kind'))[:40]!r} in {self.path} cannot be "
                    f"used ({type(error).__name__}: {str(error)[:80]}); it was changed after it "
                    "was written; take the run's own file"
                ) from None

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
    """All that a run's trace holds, read from beginning to end; any damage is a `TraceError`.

    ``notes_only`` leaves out what the control was told and decided. To decode that takes most
    of the time, and who polls a trace or looks for metrics has no use for it.
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
    """Return a field of a record, which must be of the type or types; a number must be finite, too.

    The lines of a trace are sound JSON, but others may have written or changed them.

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


class MeasuredStep(NamedTuple):
    """A step whose noise was measured.

    Args:
        epochs: trained after it; nan where the trace does not tell, as those of older versions.
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
    """What was found in the course of a training.

    Args:
        metrics: what evaluation found, by name, in order.
        steps: that were measured, in the order in which the leader heard of them.
        batches: global batches that it was trained with, each once; more than one only of a run
            that leaves its batch open.
    """

    metrics: Mapping[str, tuple[Value, ...]]
    steps: tuple[MeasuredStep, ...]
    batches: tuple[int, ...] = ()

    @property
    def losses(self) -> tuple[Value, ...]:
        """The training losses of measured steps, as far as they are known, in order."""
        known = [Value(one.epochs, one.loss) for one in self.steps if one.loss is not None]
        return tuple(sorted((one for one in known if not isnan(one.epochs)), key=_place))


def read_course(run: Path) -> TrainingHistory:
    """Return the course of a training.

    A run of another global batch in the same file is another training, unless its batch was left
    open, and only the latest training counts.

    Raises:
        TraceError: the trace cannot be read, or a record lacks a number.
    """
    return course_of(RunLog(run, notes_only=True))


def course_of(log: RunLog) -> TrainingHistory:
    """Return the course of a training whose trace was read; see `read_course`."""
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
        self._passes: list[DataPass] = []  # of the process in hand

    def of(self, header: dict[str, Any]) -> _Course:
        """Return the same, which begins with another process when that first tells something.

        A process that was refused its state has a header, too, and undoes nothing.
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
        """Begin a pass, and drop what it goes back on."""
        begun = pass_of(record, self._batch, self._run)
        self._batch = begun.batch
        self._passes.append(begun)
        self._back_to(begun.epochs)
        if begun.epochs <= _SAME:
            self.batches.clear()
        if self._batch not in self.batches:
            self.batches.append(self._batch)

    def found(self, record: dict[str, Any]) -> None:
        """Take what an evaluation found."""
        epochs, value = record.get("epochs"), record.get("value")
        if not is_number(epochs):
            raise self._broken("metric", "epochs")
        if not isinstance(record.get("name"), str) or not (value is None or is_number(value)):
            raise self._broken("metric", "name or value")
        number = inf if value is None else float(value)
        self.metrics.setdefault(record["name"], []).append(Value(epochs, number))
        self._furthest = max(self._furthest, epochs)

    def measured(self, record: dict[str, Any]) -> None:
        """Take a step, of which the leader may have heard some passes later."""
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
            batch = batch or round(norms.batch)  # written by hand, say
            self.steps.append(MeasuredStep(epochs, batch, norms, known))
            self._furthest = max(self._furthest, epochs)  # which nan is not

    def _after(self, step: int, of: DataPass | None) -> float:
        """Return the epochs after a step of a pass; nan if that is not known."""
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
            f"a {kind} record in {self._run} lacks one of {names}, or has no finite number there; "
            "it was changed after it was written"
        )


def _place(one: Value) -> float:
    return one.epochs


_At = TypeVar("_At", Value, MeasuredStep)


def _until(found: Iterable[_At], epochs: float) -> list[_At]:
    """Return what was found up to a place, or where is not known."""
    return [one for one in found if not one.epochs > epochs + _SAME]
