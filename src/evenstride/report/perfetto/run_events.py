"""Events of a generation on the wall clock: steps, counters and decisions.

The steps of a process follow those of the process before it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from evenstride.core.fleet import FloatArray, IntArray, Shares
from evenstride.report.analysis.attribution import Study, speeds_of
from evenstride.report.analysis.run_generation import RecordedGeneration, spans_s
from evenstride.report.analysis.run_timeline import LeaderProcess
from evenstride.report.perfetto.event_writer import EventFile, LeaderTracks, WorkerTracks
from evenstride.report.wording import duration

BASE_S = 7_889_238
"""torch.profiler counts times from a whole multiple of this period since 1970, a quarter of a
year, so that microseconds keep their nanoseconds as JSON numbers."""
_LATEST_S = 4.0e9
_LEAST_REPORTED_S = 0.001
_AT_ONCE = 4096  # steps
_LEAST_CHANGE = 0.01  # of the best speed; smaller changes are left out
_MOST_BYTES = 1 << 62
_SHOWN_SHARES = 8


class TimeWindow(NamedTuple):
    """Nanoseconds since the base."""

    first: int
    last: int

    def has(self, at_ns: int) -> bool:
        """Return whether a time is in the window."""
        return self.first <= at_ns <= self.last


@dataclass(frozen=True, slots=True, eq=False)
class Placed:
    """A generation whose times are nanoseconds since the base of the trace."""

    study: Study
    began_ns: int  # start of its process's clock.
    after_ns: int  # end of the step before its first one, or start of that clock.
    begins_ns: IntArray  # start of each step, ``(steps,)``.
    # End of each step, when its gradients were averaged: not before its start, and not after the
    # start of the next step
    ends_ns: IntArray
    # First step and epoch of each pass over the data, in order
    passes: tuple[tuple[int, int], ...]

    @property
    def generation(self) -> RecordedGeneration:
        """The workers' generation."""
        return self.study.generation

    def at_ns(self, at_s: float) -> int:
        """Return a time of the process's clock."""
        return self.began_ns + _ns(at_s)

    def epochs(self, first: int, last: int) -> list[int | None]:
        """Return the epochs of rows of steps, counted from 0; ``None`` where unknown."""
        if not self.passes:
            return [None] * (last - first)
        steps = self.generation.first + np.arange(first, last)
        begins, epochs = zip(*self.passes, strict=True)
        at = np.searchsorted(np.array(begins), steps, side="right") - 1
        return [epochs[k] if k >= 0 else None for k in at.tolist()]


def base_of(lives: list[LeaderProcess]) -> int:
    """Return the time from which all times count, in nanoseconds since 1970."""
    starts_s = [_began_s(life) for life in lives]
    first_s = min((s for s in starts_s if s is not None), default=0.0)
    return int(first_s) // BASE_S * BASE_S * 1_000_000_000


def place(lives: list[LeaderProcess], base_ns: int) -> tuple[list[Placed], list[str]]:
    """Return all generations of a run in order, and notes on times that were corrected."""
    found: list[Placed] = []
    notes: list[str] = []
    ended_ns: int | None = None
    for number, life in enumerate(lives, start=1):
        spans = [spans_s(one) for one in life.generations]
        began_ns, note = _began(life, number, spans, base_ns, ended_ns)
        notes += [note] if note else []
        for generation, (begins_s, ends_s) in zip(life.generations, spans, strict=True):
            least = began_ns if ended_ns is None else ended_ns
            begins_ns, ends_ns = began_ns + _all_ns(begins_s), began_ns + _all_ns(ends_s)
            if len(begins_ns) and begins_ns[0] < least:  # by little, within one process
                begins_ns, ends_ns = (at + (least - begins_ns[0]) for at in (begins_ns, ends_ns))
            passes = tuple((one.step, int(one.epochs + 1e-6)) for one in life.passes)
            study = Study(generation)
            found.append(Placed(study, began_ns, least, begins_ns, ends_ns, passes))
            if len(ends_ns):
                ended_ns = int(ends_ns[-1])
    return found, notes


def _began(
    life: LeaderProcess,
    number: int,
    spans: list[tuple[FloatArray, FloatArray]],
    base_ns: int,
    ended_ns: int | None,
) -> tuple[int, str]:
    """Return the start of a process's clock, and a note if it was corrected."""
    first_s = min((float(begins_s[0]) for begins_s, _ in spans if len(begins_s)), default=0.0)
    behind_ns = max((ended_ns or 0) - _ns(first_s), 0)
    began_s = _began_s(life)
    if began_s is None:
        where = "at 1970" if ended_ns is None else "right after the previous one"
        return behind_ns, f"process {number} did not record when it started; it is shown {where}"
    began_ns = round(began_s * 1e6) * 1000 - base_ns
    if ended_ns is None or began_ns >= behind_ns or not spans:
        return began_ns, ""
    early_s = (behind_ns - began_ns) / 1e9
    if early_s < _LEAST_REPORTED_S:
        return behind_ns, ""
    return behind_ns, (
        f"by its clock, process {number} started its steps {duration(early_s)} before the last "
        "step of the previous process ended; it is shown after that step"
    )


def _began_s(life: LeaderProcess) -> float | None:
    began_s = life.began_unix_s
    return began_s if began_s is not None and 0.0 <= began_s <= _LATEST_S else None


def _ns(at_s: float) -> int:
    return round(min(max(at_s, 0.0), _LATEST_S) * 1e9)


def _all_ns(at_s: FloatArray) -> IntArray:
    return np.asarray(np.round(np.clip(at_s, 0.0, _LATEST_S) * 1e9), dtype=np.int64)


@dataclass(frozen=True)
class StepRows:
    """Steps of a generation over all its workers, in nanoseconds."""

    placed: Placed  # the generation
    first: int  # row of the first step
    last: int  # row after the last step

    @cached_property
    def begins_ns(self) -> IntArray:
        return self.placed.begins_ns[self.first : self.last]

    @cached_property
    def ends_ns(self) -> IntArray:
        return self.placed.ends_ns[self.first : self.last]

    @cached_property
    def busy_s(self) -> FloatArray:
        """Busy time of all workers, NaN where unknown, ``(rows, workers)``."""
        return self.placed.generation.table.busy_s[self.first : self.last]

    @cached_property
    def slowest(self) -> IntArray:
        """The slowest rank of each step; -1 where it is unknown or workers do not wait."""
        generation = self.placed.generation
        known = generation.table.whole[self.first : self.last] & generation.lockstep
        if not known.any():
            return np.full(len(known), -1)
        busy_s = np.where(np.isnan(self.busy_s), -1.0, self.busy_s)
        return np.where(known, busy_s.argmax(axis=1), -1)

    @cached_property
    def longest_s(self) -> FloatArray:
        """Busy time of the slowest worker of each step; 0 where unknown."""
        longest_s = np.nan_to_num(self.busy_s).max(axis=1)
        return np.where(self.slowest >= 0, longest_s, 0.0)

    def until_ns(self, seconds: FloatArray) -> IntArray:
        """Return the times ``seconds`` after the starts of the steps, at most their ends."""
        after_ns = np.round(np.nan_to_num(seconds) * 1e9).astype(np.int64)
        return np.minimum(self.begins_ns + np.maximum(after_ns, 0), self.ends_ns)


class _WorkerStep(NamedTuple):
    """One step of one worker; times are nanoseconds since the base."""

    number: int
    known: bool
    apart: int
    begin: int
    fetched: int
    worked: int
    slower: int
    end: int
    slowest: int
    share: int
    epoch: int | None


def write_steps(file: EventFile, tracks: WorkerTracks, rank: int, rows: StepRows) -> None:
    """Write the recorded steps of one worker.

    Each step shows the busy time first, then the wait for slower workers, then communication. The
    trace does not record their true order within a step.
    """
    for step in _steps(rank, rows):
        if step.known:
            _write(file, tracks, step)


def _write(file: EventFile, tracks: WorkerTracks, step: _WorkerStep) -> None:
    args: dict[str, Any] = {"step": step.number, "samples": step.share}
    if step.epoch is not None:
        args["epoch"] = step.epoch
    waiting, begin, end = tracks.waiting, step.begin, step.end
    file.slice(waiting, "evaluation, saving, decisions", begin - step.apart, begin, {})
    file.slice(tracks.step, f"step {step.number}", begin, end, args)
    file.slice(tracks.work, "data", begin, step.fetched, {})
    file.slice(tracks.work, "compute", step.fetched, step.worked, {})
    if step.slowest < 0:
        file.slice(waiting, "waiting", step.worked, end, {})
    else:
        file.slice(waiting, f"for worker {step.slowest}", step.worked, step.slower, {})
        file.slice(waiting, "communication", step.slower, end, {})


def _steps(rank: int, rows: StepRows) -> Iterator[_WorkerStep]:
    generation, part = rows.placed.generation, slice(rows.first, rows.last)
    table, busy_s = generation.table, rows.busy_s[:, rank]
    worked_ns = rows.until_ns(busy_s)
    fetched_ns = rows.until_ns(np.fmin(table.data_s[part, rank], busy_s))
    ends_ns = rows.ends_ns  # common to all workers in lockstep
    if not generation.lockstep:
        ends_ns = rows.until_ns(busy_s + table.wait_s[part, rank])
    columns = (
        np.arange(generation.first + rows.first, generation.first + rows.last),
        ~np.isnan(busy_s),
        _apart_ns(rank, rows),
        rows.begins_ns,
        fetched_ns,
        worked_ns,
        np.maximum(rows.until_ns(rows.longest_s), worked_ns),
        ends_ns,
        rows.slowest,
        table.share[part, rank],
    )
    lists = [column.tolist() for column in columns]
    epochs = rows.placed.epochs(rows.first, rows.last)
    return map(_WorkerStep, *lists, epochs)


def pieces(placed: Placed, first: int, last: int) -> Iterator[StepRows]:
    """Yield rows of a generation in pieces that limit the memory."""
    for begin in range(first, last, _AT_ONCE):
        yield StepRows(placed, begin, min(begin + _AT_ONCE, last))


def write_counters(
    file: EventFile, pid: int, rank: int, placed: Placed, span: tuple[int, int]
) -> None:
    """Write the changes of a worker's share and of its relative speed in a span of rows."""
    counters = (
        ("share (samples)", placed.study.share(rank), 0.5),
        ("speed (part of its best)", _speed(placed.study, rank), _LEAST_CHANGE),
    )
    rows = slice(*span)
    begins_ns = placed.begins_ns[rows].tolist()
    for name, values, least in counters:
        latest = np.inf
        for begin_ns, value in zip(begins_ns, values[rows].tolist(), strict=True):
            if abs(value - latest) >= least:  # False for NaN
                file.counter(pid, name, begin_ns, round(value, 3))
                latest = value


def write_memory(file: EventFile, pids: Sequence[int], placed: Placed, window: TimeWindow) -> None:
    """Write the memory that workers reported in a window of time."""
    for at_s, held in placed.generation.memory:
        at_ns, peak = placed.at_ns(at_s), held.peak_bytes
        if not isinstance(held.worker, int) or not isinstance(peak, int):  # in a changed file
            continue
        if 0 <= held.worker < len(pids) and window.has(at_ns):
            mib = round(min(peak, _MOST_BYTES) / 2**20, 1)
            file.counter(pids[held.worker], "memory, peak (MiB)", at_ns, mib)


def _speed(study: Study, rank: int) -> FloatArray:
    """Return a worker's speed in each step as a fraction of that of its best phase."""
    speed = speeds_of(study.generation, rank)
    best = [phase for phase in study.phases(rank) if phase.speed >= 1.0]
    if not best:
        return np.full(len(speed), np.nan)
    usual = float(np.nanmedian(speed[best[0].first : best[0].last + 1]))
    return np.asarray(speed / usual)


def _apart_ns(rank: int, rows: StepRows) -> IntArray:
    """Return the time outside of steps that precedes each step of a worker.

    All of the time between two passes over the data counts.
    """
    placed = rows.placed
    table, part = placed.generation.table, slice(rows.first, rows.last)
    before_ns = placed.ends_ns[rows.first - 1] if rows.first else placed.after_ns
    room_ns = np.maximum(rows.begins_ns - np.append(before_ns, rows.ends_ns)[:-1], 0)
    apart_s = np.clip(np.nan_to_num(table.apart_s[part, rank]), 0.0, _LATEST_S)
    apart_ns = np.round(apart_s * 1e9).astype(np.int64)
    fresh = ~table.modelled[part, rank]
    if rows.first == 0:
        fresh[:1] = False  # the process has just started
    return np.asarray(np.where(fresh, room_ns, np.minimum(apart_ns, room_ns)), dtype=np.int64)


def write_decisions(
    file: EventFile, tracks: LeaderTracks, placed: Placed, window: TimeWindow
) -> None:
    """Write the decisions and incidents of a generation in a window of time."""
    for one in placed.generation.decisions:
        at_ns = placed.at_ns(one.at_s)
        if window.has(at_ns):
            name = "kept" if one.shares is None else f"shares {_shown(one.shares)}"
            args: dict[str, Any] = {"from step": one.step, "reason": one.reason}
            if one.shares is not None:
                args["shares"] = list(one.shares)
            file.instant(tracks.decisions, name, at_ns, args)
    for incident in placed.generation.incidents:
        at_ns = placed.at_ns(incident.at_s)
        if window.has(at_ns):
            file.instant(tracks.incidents, incident.text, at_ns, {"step": incident.step})


def write_notes(
    file: EventFile, tracks: LeaderTracks, life: LeaderProcess, placed: Placed, window: TimeWindow
) -> None:
    """Write a process's other notes, such as alerts."""
    for note in life.notes:
        at_s = note.get("at_s")
        if not isinstance(at_s, int | float) or not at_s >= 0:
            continue
        at_ns = placed.at_ns(at_s)
        if window.has(at_ns):
            rest = {key: one for key, one in note.items() if key not in ("kind", "at_s")}
            file.instant(tracks.notes, _title(note), at_ns, rest)


def _title(note: dict[str, Any]) -> str:
    """Return the kind of a note and its worker."""
    kind, worker = str(note["kind"]), note.get("worker")
    return f"{kind}: {worker}" if isinstance(worker, str) else kind


def _shown(shares: Shares) -> str:
    text = "/".join(map(str, shares[:_SHOWN_SHARES]))
    return f"{text}/..." if len(shares) > _SHOWN_SHARES else text
