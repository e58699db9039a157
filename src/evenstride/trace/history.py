"""The course of a training as its trace tells it: what was found, after how many epochs.

A training that was continued has several lives in one trace, and one that went back to a checkpoint
has trained some epochs twice. What counts is the training as it is in the end: whatever was found
beyond the place where it goes on is dropped, since that was undone.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import astuple, dataclass
from math import floor, inf, isnan, nan
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from evenstride.core.convergence.time_to_target import Value
from evenstride.core.gradients.noise_scale import GradientNorms
from evenstride.errors import TraceError
from evenstride.trace.read import DataPass, is_number, norms_of, pass_of
from evenstride.trace.run_log import RunLog

_SAME = 1e-9  # epochs, by which sums of steps may differ from a position


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
    """Return the course of a training whose trace was read; see `read_course`.

    Raises:
        TraceError: a record lacks a number.
    """
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
