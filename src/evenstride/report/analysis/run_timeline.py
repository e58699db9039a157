"""A run, assembled from the records of its trace.

The trace does not contain the workers' curves, which the times of other splits depend on. The
controller learns them again from the events. It makes no decisions: those of the run are recorded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import ceil
from pathlib import Path
from typing import Any

from evenstride.core.allocation.speedup import SplitReference, equal_split
from evenstride.core.control.advance import advance, learn
from evenstride.core.control.events import (
    EpochEnded,
    Event,
    Exchanged,
    FleetFormed,
    Instruction,
    KeepShares,
    LetGo,
    MembersChanged,
    NotMeasured,
    Recalled,
    SaveAfter,
    SetBatch,
    SetShares,
)
from evenstride.core.control.state import Control, rebatched
from evenstride.core.fleet import Shares
from evenstride.core.policies import policy_from_spec
from evenstride.errors import TraceError
from evenstride.report.analysis.record_validation import (
    MOST_STEPS,
    batch_of,
    check_exchanged,
    check_formed,
    check_shares,
    gaps,
    lockstep_of,
    number_of,
    possible,
    seconds_of,
    shallow,
    unlike_summary,
    unrecorded,
    whole_of,
)
from evenstride.report.analysis.run_generation import (
    Incident,
    RecordedDecision,
    RecordedGeneration,
    StepTable,
)
from evenstride.report.wording import plain
from evenstride.trace.read import DataPass, TraceTail, pass_of
from evenstride.trace.run_log import DAMAGED, TraceFold

_LONGEST_NAME = 120
_FURTHEST = 100_000  # steps that may be committed before a rank reports them
_FURTHEST_STEP = (1 << 63) - 1
_SAME = 1e-9  # epochs; largest difference between a sum of steps and a position
_MOST = 1e15  # steps of a training


@dataclass(slots=True)
class LeaderProcess:
    """The records of one process of the leader."""

    header: dict[str, Any]
    generations: list[RecordedGeneration] = field(default_factory=list)
    summary: dict[str, Any] | None = None  # ``None`` before its end
    # Results of evaluations by name: step, epochs, value
    metrics: dict[str, list[tuple[int, float, float]]] = field(default_factory=dict)
    # Step and loss of the measured steps
    losses: list[tuple[int, float]] = field(default_factory=list)
    notes: list[dict[str, Any]] = field(default_factory=list)  # of other kinds, such as alerts

    @property
    def began_unix_s(self) -> float | None:
        """Start of its clock, in seconds since 1970; ``None`` if it is not recorded."""
        started_s = number_of(self.header.get("started_unix_s"))
        at_s = seconds_of(self.header.get("at_s")) or 0.0
        return None if started_s is None else started_s - at_s

    @property
    def passes(self) -> list[DataPass]:
        """The starts of passes over the data in order of steps, without impossible ones."""
        found = []
        for note in self.notes:
            if note["kind"] != "pass":
                continue
            try:
                one = pass_of(note, self.header.get("global_batch"), Path())
            except TraceError:
                continue
            sound = one.batch > 0 and one.samples > 0 and one.epochs >= 0
            if sound and 0 <= one.step < _MOST and one.epochs * one.samples / one.batch < _MOST:
                found.append(one)
        return sorted(found, key=lambda one: one.step)

    def take(self, record: dict[str, Any]) -> None:
        """Add a record that is neither a header nor an event of the controller."""
        match record["kind"]:
            case "ended":
                summary = shallow(record["summary"])
                self.summary = summary if isinstance(summary, dict) else {}
            case "metric":
                value = number_of(record.get("value"))
                if value is not None:
                    found = _step_of(record), float(record["epochs"]), value
                    name = plain(record["name"], _LONGEST_NAME)
                    self.metrics.setdefault(name, []).append(found)
            case "noise":
                loss = number_of(record.get("loss"))
                if loss is not None:
                    self.losses.append((_step_of(record), loss))
            case _:
                self.notes.append(shallow(record))


class RunTimeline(TraceFold):
    """A run up to the last record read; `read` continues.

    Cost:
        About 0.1 ms for each exchange, and 40 bytes for each worker and step.
    """

    def __init__(self, run: Path) -> None:
        self._tail = TraceTail(run)
        super().__init__(self._tail.path, strict=False)
        self._begin()

    def _begin(self) -> None:
        self.lives: list[LeaderProcess] = []
        self._control: Control | None = None
        self._equal: Shares = ()
        self._at_s, self._step = 0.0, 0
        self._committed_s: float | None = None
        self.damaged, self._unsound, self._not_replayed = 0, 0, ""
        self._restarts = self._tail.restarts

    @property
    def generations(self) -> list[RecordedGeneration]:
        """Generations of all processes, in order."""
        return [one for life in self.lives for one in life.generations]

    @property
    def now(self) -> RecordedGeneration | None:
        """The latest generation; ``None`` before the first one."""
        return next(reversed(self.generations), None)

    @property
    def _here(self) -> RecordedGeneration | None:
        """The latest generation of the latest process; ``None`` before its first one."""
        of_this = self.lives[-1].generations if self.lives else []
        return of_this[-1] if of_this else None

    @property
    def ended(self) -> bool:
        """Whether the latest process recorded its end."""
        return bool(self.lives) and self.lives[-1].summary is not None

    @property
    def unread(self) -> tuple[str, ...]:
        """What could not be read or understood, one sentence each."""
        found = [*self._tail.unread, *gaps(self.damaged, self._unsound, self._not_replayed)]
        found.append(unrecorded(self._here, self.lives[-1].summary if self.lives else None))
        found += [
            unlike_summary(life.generations, life.summary)
            for life in self.lives
            if life.summary and life.generations
        ]
        return tuple(map(plain, filter(None, found)))

    def read(self) -> bool:
        """Read to the current end of the trace; return whether there were new records.

        Raises:
            TraceError: The file cannot be read. Earlier records stay.
        """
        any_new = False
        while records := self._records():
            if self._restarts != self._tail.restarts:
                self._begin()
            for record in records:
                self.take(record)
            any_new = True
        if self._restarts != self._tail.restarts:  # replaced by an empty file
            self._begin()
        return any_new

    def _records(self) -> list[dict[str, Any]]:
        try:
            return self._tail.records()
        except OSError as error:
            raise TraceError(
                f"{self.path} cannot be read ({error.strerror}); check whether it was moved or "
                "removed, and its permissions"
            ) from None

    def _take(self, record: dict[str, Any]) -> None:
        if not self.lives and record["kind"] != "header":
            raise ValueError("a record before any header")
        if record["kind"] == "event":
            self._at_s = seconds_of(record.get("at_s")) or 0.0
            self._committed_s = seconds_of(record.get("committed_at_s"))
        super()._take(record)

    def _begun(self, header: dict[str, Any]) -> None:
        self.lives.append(LeaderProcess(shallow(header)))
        header = self.lives[-1].header
        try:
            policy = policy_from_spec(header["policy"], imported=False)
            self._control = Control(policy, memory_fraction=header.get("memory_fraction"))
        except DAMAGED as error:
            self._lose_control(error)

    def _noted(self, record: dict[str, Any]) -> None:
        self.lives[-1].take(record)

    def _lose_control(self, error: BaseException) -> None:
        self._control = None
        self._not_replayed = f"{type(error).__name__}: {plain(error, 80)}"

    def _happened(self, event: Event | Instruction) -> None:
        whole_of(getattr(event, "step", 0), _FURTHEST_STEP)
        match event:
            case FleetFormed():
                self._formed(event)
            case Exchanged():
                check_exchanged(event)
        now = self._here
        if now is None:  # an earlier process's generations are of other workers
            raise ValueError("an event before the first process group")
        self._replay(event)
        match event:
            case FleetFormed():
                self._set_equal()
            case NotMeasured(reason=reason):
                now.leave_unmeasured(plain(reason))
            case Exchanged():
                self._measured(now, event)
            case MembersChanged(happenings=happenings):
                for one in happenings:
                    why = f" ({one.why})" if one.why else ""
                    text = f"{one.worker}: {one.change.value}{why}"
                    now.incidents.append(self._incident(event.step, text))
        if isinstance(event, Exchanged | MembersChanged | Recalled | EpochEnded):
            self._step = event.step
            self._remember_control(now)

    def _incident(self, step: int, text: str) -> Incident:
        return Incident(step, self._at_s, plain(text))

    def _formed(self, event: FleetFormed) -> None:
        check_formed(event)
        life = self.lives[-1]
        formed = RecordedGeneration(
            life=len(self.lives) - 1,
            number=event.generation,
            global_batch=event.global_batch,
            workers=tuple(plain(worker.name, _LONGEST_NAME) for worker in event.workers),
            table=StepTable(event.step, len(event.workers)),
            lockstep=lockstep_of(life.header),
            not_measured=life.generations[-1].not_measured if life.generations else "",
        )
        for one in event.happenings:
            text = f"{one.worker}: {one.change.value}"
            formed.incidents.append(self._incident(event.step, text))
        formed.anchors.append((self._at_s, event.step))
        formed.standing = ("serving",) * len(formed.workers)
        life.generations.append(formed)
        self._step = event.step

    def _replay(self, event: Event | Instruction) -> None:
        if self._control is None or isinstance(event, EpochEnded):  # its decision is recorded
            return
        try:
            if isinstance(event, Exchanged):  # its decision is recorded
                self._control = learn(self._control, event)
            else:
                self._control, _ = advance(self._control, event)  # type: ignore[arg-type]
        except Exception as error:  # a changed trace may cause any error
            self._lose_control(error)

    def _measured(self, now: RecordedGeneration, event: Exchanged) -> None:
        committed_s = self._at_s if self._committed_s is None else self._committed_s
        believed = possible(event.observations, now.global_batch)
        self._unsound += int((~believed).sum())
        self.damaged += now.table.add(event.observations.only(believed))
        if now.first <= event.step <= now.first + 2 * now.steps + _FURTHEST:
            now.anchors.append((committed_s, event.step))
        now.hold(self._at_s, event.memory)
        if now.lockstep:
            now.judge(self._comparison())

    def _set_equal(self) -> None:
        """Store the equal split. As in the run, later memory reports do not change it."""
        fleet = None if self._control is None else self._control.fleet
        self._equal = () if fleet is None else equal_split(fleet)

    def _comparison(self) -> SplitReference | None:
        control = self._control
        if control is None or control.fleet is None or control.estimate is None:
            return None
        if not control.estimate.known or not control.roster.all_serve:
            return None
        model = control.estimate.model
        return SplitReference.of(model, control.fleet, self._equal)

    def _remember_control(self, now: RecordedGeneration) -> None:
        control = self._control
        if control is None or control.estimate is None:
            return
        curves = control.estimate.now if control.estimate.known else None
        standing = tuple(member.standing.value for member in control.membership.members)
        now.remember(standing, curves, control.roster.serving)

    def _follow(self, shares: Shares) -> None:
        control = self._control
        if control is not None and len(shares) == len(control.roster.workers):
            of_serving = tuple(shares[rank] for rank in control.roster.serving)
            self._control = replace(control, shares=of_serving)

    def _take_batch(self, now: RecordedGeneration, effective: int, batch: int, reason: str) -> None:
        """Start a generation of the same workers with another global batch."""
        whole_of(effective, MOST_STEPS, now.first)
        after = RecordedGeneration(
            life=now.life,
            number=now.number,
            global_batch=batch_of(batch),
            workers=now.workers,
            table=StepTable(effective, len(now.workers)),
            lockstep=now.lockstep,
            met=False,
            anchors=[(self._at_s, effective)],
            held=dict(now.held),
            not_measured=now.not_measured,
            standing=now.standing,
        )
        after.incidents.append(self._incident(effective, reason))
        self.lives[-1].generations.append(after)
        if self._control is not None:
            try:
                self._control, _ = rebatched(self._control, batch, effective)
            except Exception as error:  # a changed trace may cause any error
                self._lose_control(error)
        self._set_equal()
        self._remember_control(after)

    def _decided(self, instruction: Event | Instruction) -> None:
        now = self._here
        if now is None:
            raise ValueError("a decision before the first process group")
        match instruction:
            case SetShares(effective, shares, reason):
                check_shares(instruction, now.global_batch)
                self._follow(shares)
                now.decisions.append(
                    RecordedDecision(effective, self._at_s, tuple(shares), plain(reason))
                )
            case SetBatch(effective, batch, reason):
                self._take_batch(now, effective, batch, reason)
            case KeepShares(reason):
                now.decisions.append(RecordedDecision(self._step, self._at_s, None, plain(reason)))
            case SaveAfter(steps, reason):
                text = f"checkpoint after {steps} steps: {reason}"
                now.incidents.append(self._incident(self._step, text))
            case LetGo(_, ranks, reason):
                text = f"ranks {', '.join(map(str, ranks))} leave: {reason}"
                now.incidents.append(self._incident(self._step, text))


def _step_of(record: dict[str, Any]) -> int:
    return whole_of(int(record["step"]), MOST_STEPS, -MOST_STEPS)


def nothing_to_show(story: RunTimeline) -> TraceError:
    """Return the error of a trace without a generation, with the reason."""
    why = "; ".join(map(plain, story.unread))
    if not why:
        why = "it has a header, but its workers have not started yet; try again when they train"
    return TraceError(f"{plain(story.path)} contains no run: {why}")


def kept_before(lives: Sequence[LeaderProcess]) -> tuple[int, ...]:
    """Return the number of kept steps of the training before each process.

    A process counts its steps from its own start. The record of its first pass has its position in
    the training, in epochs. Later steps of previous processes were discarded. A process without
    such a record continues at the last recorded step of the previous one.
    """
    kept: list[int] = []
    course: list[DataPass] = []  # of the training as it is, with the steps of all of it
    end = 0
    for life in lives:
        passes = life.passes
        start = end
        if passes and course:
            course = [one for one in course if one.epochs <= passes[0].epochs + _SAME]
            start = _steps_until(passes[0].epochs, course[-1]) if course else 0
            start -= passes[0].step
        course += [one._replace(step=start + one.step) for one in passes]
        end = start + max((one.first + one.steps for one in life.generations), default=0)
        kept.append(start)
    return tuple(kept)


def _steps_until(epochs: float, last: DataPass) -> int:
    """Return the steps of a training up to a position within its last pass."""
    # The last step of an epoch may have fewer samples and counts as one.
    each = last.batch / last.samples
    return last.step + ceil(round((epochs - last.epochs) / each, 6))
