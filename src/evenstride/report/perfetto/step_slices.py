"""The steps of one worker as slices and counters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from evenstride.core.fleet import FloatArray, IntArray
from evenstride.report.analysis.attribution import speeds_of
from evenstride.report.analysis.speed_phases import phases_of
from evenstride.report.perfetto.event_writer import EventFile
from evenstride.report.perfetto.track_groups import WorkerTracks
from evenstride.report.perfetto.world_clock import Placed

_AT_ONCE = 4096
_TOLD_CHANGE = 0.01  # of the best speed; smaller changes are left out
_LONGEST_S = 4.0e9
_MOST_BYTES = 1 << 62


@dataclass(frozen=True)
class StepRows:
    """Steps of a generation, all its workers together, as nanoseconds.

    Args:
        placed: the generation.
        first: row of the first step.
        last: row behind the last.
    """

    placed: Placed
    first: int
    last: int

    @cached_property
    def begins_ns(self) -> IntArray:
        """When each step began."""
        return self.placed.begins_ns[self.first : self.last]

    @cached_property
    def ends_ns(self) -> IntArray:
        """When it ended."""
        return self.placed.ends_ns[self.first : self.last]

    @cached_property
    def busy_s(self) -> FloatArray:
        """Own work of all workers, not a number where nobody told, ``(rows, workers)``."""
        return self.placed.generation.table.busy_s[self.first : self.last]

    @cached_property
    def slowest(self) -> IntArray:
        """Whom the others waited for in each step; -1 where that is not known or nobody."""
        generation = self.placed.generation
        known = generation.table.whole[self.first : self.last] & generation.lockstep
        if not known.any():
            return np.full(len(known), -1)
        worked_s = np.where(np.isnan(self.busy_s), -1.0, self.busy_s)
        return np.where(known, worked_s.argmax(axis=1), -1)

    @cached_property
    def longest_s(self) -> FloatArray:
        """Own work of the slowest worker of each step; 0 where that is not known."""
        worked_s = np.nan_to_num(self.busy_s).max(axis=1)
        return np.where(self.slowest >= 0, worked_s, 0.0)

    def until_ns(self, seconds: FloatArray) -> IntArray:
        """Return the moments so many seconds into the steps, within them."""
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
    """Write the steps of one worker, as far as it told of them.

    In each it worked first, then waited for slower workers, then for communication. In which order
    work and waiting took turns within a step is in no trace.

    Args:
        file: to write to.
        tracks: of the worker.
        rank: of it.
        rows: few enough to be in memory; see `pieces`.
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
    ends_ns = rows.ends_ns  # of all, where they keep step
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
    """Yield rows of a generation, few at a time.

    Args:
        placed: the generation.
        first: row of the first step.
        last: row behind the last.
    """
    for begin in range(first, last, _AT_ONCE):
        yield StepRows(placed, begin, min(begin + _AT_ONCE, last))


def write_counters(
    file: EventFile, pid: int, rank: int, placed: Placed, span: tuple[int, int]
) -> None:
    """Write a worker's share, and its speed against its best, each where it changes.

    Args:
        file: to write to.
        pid: number of the worker's group.
        rank: of it.
        placed: its generation.
        span: row of the first step, and behind the last.
    """
    share = placed.share(rank)
    _write_changes(file, pid, "share (samples)", placed, share, span, 0.5)
    speed, name = _speed(placed, rank), "speed (part of its best)"
    _write_changes(file, pid, name, placed, speed, span, _TOLD_CHANGE)


def write_memory(
    file: EventFile, pids: Sequence[int], placed: Placed, window: tuple[int, int]
) -> None:
    """Write the memory that workers told of in a window of time.

    Args:
        file: to write to.
        pids: numbers of the workers' groups, in rank order.
        placed: their generation.
        window: nanoseconds since the base, first and last.
    """
    for at_s, held in placed.generation.memory:
        at_ns, peak = placed.at_ns(at_s), held.peak_bytes
        if not isinstance(held.worker, int) or not isinstance(peak, int):  # a file may be changed
            continue
        if 0 <= held.worker < len(pids) and window[0] <= at_ns <= window[1]:
            mib = round(min(peak, _MOST_BYTES) / 2**20, 1)
            file.counter(pids[held.worker], "memory, peak (MiB)", at_ns, mib)


def _write_changes(
    file: EventFile,
    pid: int,
    name: str,
    placed: Placed,
    values: FloatArray,
    span: tuple[int, int],
    least: float,
) -> None:
    """Write the values that differ from what was last written, at the beginning of their step."""
    latest = np.inf
    first, last = span
    for begin_ns, value in zip(
        placed.begins_ns[first:last].tolist(), values[first:last].tolist(), strict=True
    ):
        if abs(value - latest) >= least:  # never, where it is not a number
            file.counter(pid, name, begin_ns, round(value, 3))
            latest = value


def _speed(placed: Placed, rank: int) -> FloatArray:
    """Return a worker's speed in each step as a part of that of its best phase."""
    speed = speeds_of(placed.generation, rank)
    best = [phase for phase in phases_of(speed) if phase.speed >= 1.0]
    if not best:
        return np.full(len(speed), np.nan)
    usual = float(np.nanmedian(speed[best[0].first : best[0].last + 1]))
    return np.asarray(speed / usual)


def _apart_ns(rank: int, rows: StepRows) -> IntArray:
    """Return how long before each step a worker was at something else, behind the step before.

    What it does between two passes over the data is in no step's times; all of that time counts.
    """
    placed = rows.placed
    table, part = placed.generation.table, slice(rows.first, rows.last)
    before_ns = placed.ends_ns[rows.first - 1] if rows.first else placed.after_ns
    room_ns = np.maximum(rows.begins_ns - np.append(before_ns, rows.ends_ns)[:-1], 0)
    told_s = np.clip(np.nan_to_num(table.apart_s[part, rank]), 0.0, _LONGEST_S)
    told_ns = np.round(told_s * 1e9).astype(np.int64)
    fresh = ~table.modelled[part, rank]
    if rows.first == 0:
        fresh[:1] = False  # the process has just begun
    return np.asarray(np.where(fresh, room_ns, np.minimum(told_ns, room_ns)), dtype=np.int64)
