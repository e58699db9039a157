"""What the ranks of islands have measured, folded into what each island did.

An island is as slow as its slowest member: its busy time is the largest of theirs. That is a lower
bound, as members may be the slowest in turn, in one layer and another.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import inf, nan
from typing import NamedTuple

from evenstride.core.observation import Observation
from evenstride.runtime.islands import Islands
from evenstride.runtime.recorder import observation, stretches
from evenstride.runtime.timing import StepRecord

# Steps that some member has not told of yet. Ranks are a few steps apart, an exchange at most 512.
_MOST_PENDING = 4096


class Fold:
    """Makes of what ranks have measured what their islands did, one exchange after the other.

    A step of an island is known once all its members have told of it. Steps that some member has
    not told of are kept for the next exchange; those that it never will are dropped.

    Args:
        islands: the ranks are on.
    """

    def __init__(self, islands: Islands) -> None:
        self._islands = islands
        self._pending: list[dict[int, dict[int, _Step]]] = [{} for _ in islands.members]
        self._latest = [-1] * islands.size
        self._pace = [1.0] * islands.size

    def take(self, told: Sequence[Sequence[Observation]]) -> tuple[Observation, ...]:
        """Return the islands' observations, each step of an island once.

        Args:
            told: by each rank since the last call, in rank order; steps ascending.

        Raises:
            ValueError: an observation has not both times of each step.

        Cost:
            ``O(ranks * steps)``, some 2 us for each step of each rank.
        """
        seen: list[Observation] = []
        for island, (members, pending) in enumerate(
            zip(self._islands.members, self._pending, strict=True)
        ):
            for rank in members:
                for step in _steps(told[rank]):
                    number = step.record.step
                    pending.setdefault(number, {})[rank] = step
                    self._latest[rank] = max(self._latest[rank], number)
            whole = sorted(step for step, by in pending.items() if len(by) == len(members))
            rows = [pending.pop(step) for step in whole]
            self._forget(pending, members)
            self._pace_of(members, rows)
            seen += _observations(island, [_folded([row[r] for r in members]) for row in rows])
        return tuple(seen)

    def expected(self, expected_s: Sequence[float]) -> tuple[float, ...]:
        """Return every rank's expected busy time, given the islands'; of no values none.

        A member is busy for its usual part of its island's time. Else one that is faster than the
        slowest would be outside its band at all times, and ask for one exchange after the other.
        """
        pairs = zip(self._islands.each(expected_s), self._pace, strict=bool(expected_s))
        return tuple(round(one_s * pace, 7) for one_s, pace in pairs)

    def _pace_of(self, members: Sequence[int], rows: list[dict[int, _Step]]) -> None:
        """Learn which part of the island's time each member is busy."""
        good = [row for row in rows if all(_usual(step.record) for step in row.values())]
        whole_s = sum(max(step.record.busy_s for step in row.values()) for row in good)
        for rank in members if good else ():
            self._pace[rank] = sum(row[rank].record.busy_s for row in good) / whole_s

    def _forget(self, pending: dict[int, dict[int, _Step]], members: Sequence[int]) -> None:
        """Drop the steps that are never told of by all: a rank tells of its steps in order."""
        told_by_all = min(self._latest[rank] for rank in members)
        for step in [step for step in pending if step <= told_by_all]:
            del pending[step]
        for step in sorted(pending)[:-_MOST_PENDING]:
            del pending[step]


class _Step(NamedTuple):
    """One step of a rank or an island; ``begins`` where it must not be put to the one before."""

    record: StepRecord
    loads: tuple[float, float]
    begins: bool


def _steps(observations: Sequence[Observation]) -> Iterator[_Step]:
    """Yield the steps of one rank's observations.

    Sums are taken to be the same part in each step. All observations but the first begin where the
    rank saw a change; the first begins where the exchange before happened to be.
    """
    for number, seen in enumerate(observations):
        steps = max(seen.steps, 1)
        sums_s = seen.data_s / steps, seen.outside_s / steps, seen.control_wait_s / steps
        loads = seen.cpu_load, seen.memory_load
        for offset, (busy_s, wait_s) in enumerate(zip(seen.busy_s, seen.wait_s, strict=True)):
            step = seen.first_step + offset
            record = StepRecord(step, seen.share, busy_s, wait_s, *sums_s, seen.modelled)
            yield _Step(record, loads, begins=number > 0 and offset == 0)


def _usual(record: StepRecord) -> bool:
    return record.modelled and 0 < record.busy_s < inf


def _folded(told: Sequence[_Step]) -> _Step:
    """Return a step of an island, given that of all its members.

    The slowest member has the busy time. The wait is the least: what others wait beyond it they
    wait for members of their own island, which is no wait for other islands nor communication.
    """
    slowest = max(told, key=lambda step: step.record.busy_s)
    records = [step.record for step in told]
    sound = all(each.busy_s > 0 and each.wait_s >= 0 for each in records)  # not with a nan
    folded = slowest.record._replace(
        share=sum(each.share for each in records),
        busy_s=slowest.record.busy_s if sound else nan,
        wait_s=min(each.wait_s for each in records),
        modelled=all(each.modelled for each in records),
    )
    return _Step(folded, slowest.loads, any(step.begins for step in told))


def _observations(island: int, steps: Sequence[_Step]) -> Iterator[Observation]:
    """Yield what an island has measured: of each stretch, with the loads at its end."""
    records = [step.record for step in steps]
    breaks = {index for index, step in enumerate(steps) if step.begins}
    for run in stretches(records, breaks):
        yield observation(island, records[run], steps[run][-1].loads)
