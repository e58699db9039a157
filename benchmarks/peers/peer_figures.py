"""Figures of compared systems, from the records of their workers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

DISTURBED = 0.1
"""Largest change of the sum of the workers' speeds during an undisturbed block."""


@dataclass(frozen=True, slots=True)
class Note:
    """A step that a worker has ended.

    Args:
        at_s: When, on the clock of the machine.
        samples: Samples in it.
        loss: Their mean loss.
        updates: Updates of the weights so far.
        ids: Numbers of the samples, in a block that keeps them.
    """

    at_s: float
    samples: int
    loss: float
    updates: int
    ids: tuple[int, ...] = ()

    @classmethod
    def of(cls, plain: dict[str, Any]) -> Note:
        """Return the note in a line of a file."""
        ids = tuple(plain.get("ids", ()))
        return cls(plain["t"], plain["n"], plain["loss"], plain["u"], ids)


Notes = list[list[Note]]
"""Notes of each worker, in order of time."""


def first_s(notes: Notes) -> float:
    """Return when the first step of any worker ended; infinite without steps."""
    return min((own[0].at_s for own in notes if own), default=math.inf)


def samples_per_s(notes: Notes, begin_s: float, end_s: float) -> float:
    """Return the samples per second of all workers between two times."""
    return sum(worker_rate(own, begin_s, end_s) for own in notes)


def worker_rate(own: Sequence[Note], begin_s: float, end_s: float) -> float:
    """Return a worker's samples per second, over whole steps that end in the window.

    A worker that ended no step there has a rate of 0.
    """
    inside = [note for note in own if begin_s < note.at_s <= end_s]
    if not inside:
        return 0.0
    # The step before the first one began where the last one before the window ended.
    before = [note.at_s for note in own if note.at_s <= begin_s]
    begun_s = before[-1] if before else begin_s
    # A worker that hangs has not worked until the end of the window.
    paused = end_s - inside[-1].at_s > 2.0 * longest_step_s(inside, begun_s)
    ended_s = end_s if paused else inside[-1].at_s
    return sum(note.samples for note in inside) / (ended_s - begun_s)


def longest_step_s(inside: Sequence[Note], begun_s: float) -> float:
    """Return the longest time between two steps."""
    times_s = [begun_s, *(note.at_s for note in inside)]
    return max(after - before for before, after in pairwise(times_s))


def lost_s(rate_before: float, rate_after: float, seconds: float) -> float:
    """Return the seconds of work lost after a change that left the sum of speeds as it was."""
    return seconds * (1.0 - rate_after / rate_before)


def to_loss_s(notes: Notes, goal: float, span: int) -> float | None:
    """Return the time from the first step to a training loss; ``None`` if it was not reached.

    Args:
        notes: All notes.
        goal: The mean loss to reach.
        span: Samples over which to take the mean: those of an epoch.
    """
    merged = sorted((note for own in notes for note in own), key=lambda note: note.at_s)
    held, total, first = 0, 0.0, 0
    for note in merged:
        held, total = held + note.samples, total + note.samples * note.loss
        while held - merged[first].samples >= span:
            held, total = (
                held - merged[first].samples,
                total - merged[first].samples * merged[first].loss,
            )
            first += 1
        if held >= span and total <= goal * held:
            return note.at_s - merged[0].at_s
    return None


def pause_s(notes: Notes, killed_s: float) -> float:
    """Return the longest time without an update after a loss, less the usual time of one."""
    times_s = sorted(update_times_s(notes))
    usual = [after - before for before, after in pairwise(times_s) if after < killed_s]
    later = [after - before for before, after in pairwise(times_s) if after >= killed_s]
    if not later or not usual:
        return math.inf
    return max(later) - median(usual)


def update_times_s(notes: Notes) -> Iterator[float]:
    """Yield when each worker's weights were updated."""
    for own in notes:
        for before, after in pairwise([Note(0.0, 0, 0.0, 0), *own]):
            if after.updates > before.updates:
                yield after.at_s


def samples_of_updates(own: Sequence[Note]) -> dict[int, list[int]]:
    """Return the ids of the samples that a worker contributed to each update."""
    found, before = dict[int, list[int]](), 0
    for note in own:
        # A step that led to no update is part of the next one.
        update = note.updates if note.updates > before else note.updates + 1
        found.setdefault(update, []).extend(note.ids)
        before = note.updates
    return found


def tail(notes: Notes, rows: int) -> tuple[int, list[int], int] | None:
    """Return the last update of the first epoch.

    Returns:
        Its number, the samples that were due in it, and how many samples the epoch repeated.
        ``None`` if the samples of no number of updates make an epoch.
    """
    updates, seen, taken = [samples_of_updates(own) for own in notes], set[int](), 0
    for number in range(1, max(map(len, updates), default=0) + 1):
        here = [each for own in updates for each in own.get(number, [])]
        due = sorted(set(here) - seen)
        seen, taken = seen.union(here), taken + len(here)
        if len(seen) == rows:
            return number, due, taken - rows
    return None


def disturbed(before: float, after: float) -> bool:
    """Return whether the sum of the workers' speeds changed too much for a comparison."""
    return 0.0 in (before, after) or abs(after - before) > DISTURBED * 0.5 * (after + before)
