"""A run as its report draws it: all processes and generations one after another, in few buckets.

The axis is the time in which a process was up. What lay between two processes is left out of it,
and told beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from evenstride.core.fleet import FloatArray, IntArray
from evenstride.report.analysis.attribution import Blame, Study, Waits
from evenstride.report.analysis.run_generation import RecordedGeneration
from evenstride.report.analysis.run_timeline import RunTimeline
from evenstride.report.analysis.slowdowns import Slowdown, slowed_of
from evenstride.report.analysis.speed_phases import SpeedPhase
from evenstride.report.analysis.step_clock import spans_s
from evenstride.report.analysis.thinning import Thinned, thinned
from evenstride.report.analysis.totals import Totals, totals_of
from evenstride.report.wording import plain

MOST_LANES = 32
"""Workers that are drawn; of more, those who kept the others waiting longest."""
# Of all runs of a page together; a cell is a bucket of one worker.
_MOST_BUCKETS = 2000
_MOST_CELLS = 24_000
_FEWEST_BUCKETS = 8  # of one run, however many there are


class Leg:
    """One generation of workers on the axis of its run."""

    def __init__(
        self, generation: RecordedGeneration, offset_s: float, lanes: tuple[int, ...], each: int
    ) -> None:
        self.generation, self.offset_s, self.lanes = generation, offset_s, lanes
        begins_s, ends_s = spans_s(generation)
        self.ends_s = ends_s + offset_s
        self.opens_s = np.append(begins_s[:1] + offset_s, self.ends_s[:-1])
        self.buckets = -(-generation.steps // each)
        self._study = Study(generation)

    @property
    def waits(self) -> Waits:
        """Who waited for whom, step by step."""
        return self._study.waits

    @property
    def blames(self) -> tuple[Blame, ...]:
        """What each worker cost the others."""
        return self._study.blames

    @property
    def durations_s(self) -> FloatArray:
        """How long each step took."""
        return self._study.durations_s

    @property
    def curtailed(self) -> bool:
        """Whether some step had fewer samples than the global batch, as an epoch's last one."""
        return bool((self._study.split_rows != np.arange(self.generation.steps)).any())

    def share(self, rank: int) -> FloatArray:
        """Return a worker's samples in the split of each step."""
        return self._study.share(rank)

    def phases(self, rank: int) -> tuple[SpeedPhase, ...]:
        """Return the phases of a worker's speed."""
        return self._study.phases(rank)

    def slowed(self, ranks: Sequence[int]) -> tuple[Slowdown, ...]:
        """Return who of some workers was slower than at its best, though nobody waited for it."""
        return slowed_of(self._study, ranks)

    def thin(self, values: FloatArray) -> Thinned:
        """Return values of its steps in its buckets."""
        return thinned(np.asarray(values, dtype=np.float64), self.buckets)

    @cached_property
    def first(self) -> IntArray:
        """Row of each bucket's first step."""
        return self.thin(self.ends_s).first

    @cached_property
    def last(self) -> IntArray:
        """Row of each bucket's last step."""
        return self.thin(self.ends_s).last

    @property
    def left_s(self) -> FloatArray:
        """Where each bucket begins: at the end of the step before it."""
        return np.asarray(self.opens_s[self.first])

    @property
    def right_s(self) -> FloatArray:
        """Where each bucket ends."""
        return np.asarray(self.ends_s[self.last])

    def sums(self, values: FloatArray) -> FloatArray:
        """Return the sum of each bucket; what is not known counts nothing."""
        return np.asarray(np.add.reduceat(np.nan_to_num(values), self.first))

    def rank(self, lane: int) -> int | None:
        """Return the rank of a worker of the run; ``None`` if it is not among them."""
        return self.lanes.index(lane) if lane in self.lanes else None

    def step_at(self, row: int) -> int:
        """Return a step's number in its process."""
        return self.generation.first + row


@dataclass(frozen=True, eq=False)
class ReportedRun:
    """One run, read and put on one axis.

    Args:
        name: that it is shown under.
        story: of it.
        legs: its generations that have told of steps, in order.
        lanes: names of all workers there ever were.
        each: steps that are one bucket, at most.
        pauses: where on the axis a later process begins, and the seconds before that are left out
            (not a number where nobody knows).
    """

    name: str
    story: RunTimeline
    legs: tuple[Leg, ...]
    lanes: tuple[str, ...]
    each: int
    pauses: tuple[tuple[float, float], ...]

    @cached_property
    def totals(self) -> Totals:
        """Sums over all of it."""
        return totals_of([leg.generation for leg in self.legs])

    @property
    def length_s(self) -> float:
        """Of the axis."""
        return max((float(leg.ends_s[-1]) for leg in self.legs), default=0.0)

    @property
    def lockstep(self) -> bool:
        """Whether workers wait for one another."""
        return all(leg.generation.lockstep for leg in self.legs)

    @property
    def sync(self) -> str:
        """Mode of synchronisation, as the latest header has it."""
        header = self.story.lives[-1].header if self.story.lives else {}
        return plain(header.get("sync") or "bsp", 60)

    @property
    def policy(self) -> str:
        """Specification of the policy, as the latest header has it."""
        header = self.story.lives[-1].header if self.story.lives else {}
        return plain(header.get("policy", "?"), 60)

    @cached_property
    def caused_s(self) -> FloatArray:
        """Seconds that each of the others waited for each worker, on average, ``(lanes,)``."""
        caused_s = np.zeros(len(self.lanes))
        for leg in self.legs:
            for blame in leg.blames:
                caused_s[leg.lanes[blame.rank]] += blame.each_s
        return caused_s

    @cached_property
    def drawn(self) -> tuple[int, ...]:
        """The workers that are drawn, in the order of their ranks."""
        worst = np.argsort(-self.caused_s, kind="stable")[:MOST_LANES]
        return tuple(sorted(worst.tolist()))

    def column(self, of: Callable[[Leg], FloatArray]) -> FloatArray:
        """Return a value of each bucket of the run, of all legs together."""
        return np.concatenate([of(leg) for leg in self.legs]) if self.legs else np.zeros(0)

    @property
    def edges_s(self) -> tuple[FloatArray, FloatArray]:
        """Where each bucket begins and ends, of all legs together."""
        return self.column(lambda leg: leg.left_s), self.column(lambda leg: leg.right_s)

    def of_lane(self, lane: int, of: Callable[[Leg, int], FloatArray]) -> FloatArray:
        """Return a worker's value in each bucket; not a number where it was not there."""

        def one(leg: Leg) -> FloatArray:
            rank = leg.rank(lane)
            return np.full(leg.buckets, np.nan) if rank is None else of(leg, rank)

        return self.column(one)


def read_run(path: Path, name: str, among: int = 1) -> ReportedRun:
    """Return a run, read to its end.

    Args:
        path: a run's folder or its trace file.
        name: to show it under.
        among: how many runs its page has in all, which share the room.

    Raises:
        TraceError: there is no such file.

    Cost:
        that of reading: about 4 ms for each exchange of four workers.
    """
    story = RunTimeline(path)
    story.read()
    return run_of(story, name, among)


def run_of(story: RunTimeline, name: str, among: int = 1) -> ReportedRun:
    """Return a story that was read as a run on one axis, among so many runs of its page."""
    told = [one for one in story.generations if one.steps]
    names = dict[tuple[str, int], int]()
    lanes = [_lanes(one.workers, names) for one in told]
    steps = sum(one.steps for one in told)
    cells = _MOST_CELLS // max(1, min(len(names), MOST_LANES))
    most = max(_FEWEST_BUCKETS, min(_MOST_BUCKETS, cells) // among)
    each = max(1, -(-steps // most))
    legs, pauses, offset_s, life = list[Leg](), list[tuple[float, float]](), 0.0, None
    for generation, mine in zip(told, lanes, strict=True):
        if life is not None and generation.life != life:
            offset_s = float(legs[-1].ends_s[-1])
            pauses.append((offset_s, _pause_s(story, life, generation.life, legs[-1])))
        life = generation.life
        legs.append(Leg(generation, offset_s, mine, each))
    each = max((int((leg.last - leg.first).max()) + 1 for leg in legs), default=1)
    shown = tuple(worker if not copy else f"{worker} ({copy + 1})" for worker, copy in names)
    return ReportedRun(plain(name, 80), story, tuple(legs), shown, each, tuple(pauses))


def _lanes(workers: Sequence[str], names: dict[tuple[str, int], int]) -> tuple[int, ...]:
    """Return the number of each worker in the run; those of the same name are told apart."""
    seen, found = dict[str, int](), []
    for worker in (plain(worker, 80) for worker in workers):
        copy = seen[worker] = seen.get(worker, -1) + 1
        found.append(names.setdefault((worker, copy), len(names)))
    return tuple(found)


def _pause_s(story: RunTimeline, before: int, after: int, leg: Leg) -> float:
    began_s = story.lives[before].began_unix_s, story.lives[after].began_unix_s
    if began_s[0] is None or began_s[1] is None:
        return float("nan")
    return max(0.0, began_s[1] - began_s[0] - (float(leg.ends_s[-1]) - leg.offset_s))
