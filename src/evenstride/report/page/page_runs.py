"""A run as the report draws it: all processes and generations on one axis, in few buckets.

The axis is the time in which a process ran. It leaves out the time between two processes, which
the page states in a sentence.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from evenstride.core.fleet import FloatArray, IntArray
from evenstride.report.analysis.attribution import (
    Study,
    Totals,
    totals_of,
)
from evenstride.report.analysis.key_findings import key_findings
from evenstride.report.analysis.run_generation import RecordedGeneration, spans_s
from evenstride.report.analysis.run_timeline import RunTimeline
from evenstride.report.page.chart import WIDTH, Scale, Ticks, TimeAxis, step_ticks
from evenstride.report.wording import plain

MOST_LANES = 32
"""Largest number of drawn workers: those that made the others wait longest."""
# Over all runs of a page; a cell is a bucket of one worker.
_MOST_BUCKETS = 2000
_MOST_CELLS = 24_000
_CLOSE = 7.0  # percent of an axis; closer labels would overlap
_FEWEST_BUCKETS = 8  # of one run


@dataclass(frozen=True, slots=True, eq=False)
class Thinned:
    """Buckets of neighbouring points, of equal length except the last."""

    first: IntArray  # index of each bucket's first point, ``(buckets,)``
    last: IntArray  # index of its last point
    least: FloatArray  # smallest value; NaN where no value is known
    mean: FloatArray  # mean value
    most: FloatArray  # largest value

    @property
    def exact(self) -> bool:
        """Whether each bucket is one point."""
        return bool((self.first == self.last).all())


def thinned(values: FloatArray, most: int) -> Thinned:
    """Return values in at most ``most`` buckets. Unknown values are NaN.

    >>> import numpy as np
    >>> few = thinned(np.array([1.0, 9.0, 1.0, 1.0]), 2)
    >>> few.least.tolist(), few.mean.tolist(), few.most.tolist()
    ([1.0, 1.0], [5.0, 1.0], [9.0, 1.0])
    """
    each = max(1, -(-len(values) // most))
    first = np.arange(0, len(values), each, dtype=np.int64)
    last = np.minimum(first + each, len(values)) - 1
    if not len(values):
        return Thinned(first, last, *(np.zeros(0),) * 3)
    known = ~np.isnan(values)
    counts = np.add.reduceat(known.astype(np.int64), first)
    gone = counts == 0
    least = np.minimum.reduceat(np.where(known, values, np.inf), first)
    largest = np.maximum.reduceat(np.where(known, values, -np.inf), first)
    mean = np.add.reduceat(np.where(known, values, 0.0), first) / np.maximum(counts, 1)
    return Thinned(first, last, *(np.where(gone, np.nan, a) for a in (least, mean, largest)))


class Leg(Study):
    """One generation of workers, placed on the axis of its run."""

    def __init__(
        self, generation: RecordedGeneration, offset_s: float, lanes: tuple[int, ...], each: int
    ) -> None:
        super().__init__(generation)
        self.offset_s, self.lanes = offset_s, lanes
        begins_s, ends_s = spans_s(generation)
        self.ends_s = ends_s + offset_s
        self.opens_s = np.append(begins_s[:1] + offset_s, self.ends_s[:-1])
        self.buckets = -(-generation.steps // each)

    @property
    def curtailed(self) -> bool:
        """Whether some step had fewer samples than the global batch, as the last of an epoch."""
        return bool((self.split_rows != np.arange(self.generation.steps)).any())

    def thin(self, values: FloatArray) -> Thinned:
        """Return values of the steps in buckets."""
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
        """Start of each bucket: the end of the step before it."""
        return np.asarray(self.opens_s[self.first])

    @property
    def right_s(self) -> FloatArray:
        """End of each bucket."""
        return np.asarray(self.ends_s[self.last])

    def sums(self, values: FloatArray) -> FloatArray:
        """Return the sum of each bucket. Unknown values count as 0."""
        return np.asarray(np.add.reduceat(np.nan_to_num(values), self.first))

    def rank(self, lane: int) -> int | None:
        """Return the rank of a worker of the run; ``None`` if it is not in this generation."""
        return self.lanes.index(lane) if lane in self.lanes else None

    def drawn(self, lanes: Collection[int]) -> list[int]:
        """Return the ranks of those workers of the run that are in this generation."""
        return [rank for rank, lane in enumerate(self.lanes) if lane in lanes]

    def step_at(self, row: int) -> int:
        """Return the number of a step in its process."""
        return self.generation.first + row


@dataclass(frozen=True, eq=False)
class ReportedRun:
    """One run, read and put on one axis."""

    name: str  # shown on the page
    story: RunTimeline
    legs: tuple[Leg, ...]  # its generations with recorded steps, in order
    lanes: tuple[str, ...]  # names of all workers of the run
    each: int  # largest number of steps in a bucket
    # Where a later process begins on the axis, and the seconds left out before it; NaN if unknown
    pauses: tuple[tuple[float, float], ...]

    @cached_property
    def totals(self) -> Totals:
        return totals_of([leg.generation for leg in self.legs])

    @cached_property
    def findings(self) -> tuple[str, ...]:
        """The most important facts, at most three sentences."""
        unmeasured = [Study(one) for one in self.story.generations[-1:] if one.not_measured]
        study = next(iter((*unmeasured, *reversed(self.legs))), None)
        ranks = self.legs[-1].drawn(self.drawn) if self.legs else ()
        return key_findings(study, self.totals, self.sync, ranks)

    @property
    def length_s(self) -> float:
        return max((float(leg.ends_s[-1]) for leg in self.legs), default=0.0)

    @property
    def lockstep(self) -> bool:
        return all(leg.generation.lockstep for leg in self.legs)

    @property
    def sync(self) -> str:
        """Synchronisation mode in the latest header."""
        header = self.story.lives[-1].header if self.story.lives else {}
        return plain(header.get("sync") or "bsp", 60)

    @property
    def policy(self) -> str:
        """Specification of the policy in the latest header."""
        header = self.story.lives[-1].header if self.story.lives else {}
        return plain(header.get("policy", "?"), 60)

    @cached_property
    def caused_s(self) -> FloatArray:
        """Mean seconds that each other worker waited for each worker, ``(lanes,)``."""
        caused_s = np.zeros(len(self.lanes))
        for leg in self.legs:
            for blame in leg.blames:
                caused_s[leg.lanes[blame.rank]] += blame.each_s
        return caused_s

    @cached_property
    def drawn(self) -> tuple[int, ...]:
        """The drawn workers, in order."""
        worst = np.argsort(-self.caused_s, kind="stable")[:MOST_LANES]
        return tuple(sorted(worst.tolist()))

    def column(self, of: Callable[[Leg], FloatArray]) -> FloatArray:
        """Return a value of each bucket of the run, over all legs."""
        return np.concatenate([of(leg) for leg in self.legs]) if self.legs else np.zeros(0)

    def axis(self, length_s: float) -> TimeAxis:
        """Return the marks of an axis: pauses, and round step numbers at a distance."""
        scale = Scale(0.0, length_s, WIDTH)
        steps: Ticks = []
        before = -np.inf
        for leg in self.legs:
            part = (leg.ends_s[-1] - leg.opens_s[0]) / max(length_s, 1e-9)
            last = leg.step_at(leg.generation.steps - 1)
            for step in step_ticks(leg.step_at(0), last, max(1, round(8 * float(part)))):
                at_s = float(leg.opens_s[step - leg.generation.first])
                if scale.part(at_s) - before >= _CLOSE and scale.part(at_s) < 97.0:
                    steps.append((at_s, f"{step:,}" if steps else f"step {step:,}"))
                    before = scale.part(at_s) + (3.0 if len(steps) == 1 else 0.0)
        return TimeAxis(tuple(at_s for at_s, _ in self.pauses), steps)

    @property
    def edges_s(self) -> tuple[FloatArray, FloatArray]:
        """Start and end of each bucket, over all legs."""
        return self.column(lambda leg: leg.left_s), self.column(lambda leg: leg.right_s)

    def of_lane(self, lane: int, of: Callable[[Leg, int], FloatArray]) -> FloatArray:
        """Return a worker's value in each bucket; NaN where it was not part of the run."""

        def one(leg: Leg) -> FloatArray:
            rank = leg.rank(lane)
            return np.full(leg.buckets, np.nan) if rank is None else of(leg, rank)

        return self.column(one)


def read_run(path: Path, name: str, among: int = 1) -> ReportedRun:
    """Return a run, read to its end. The ``among`` runs of a page share its room.

    Cost:
        Reading takes about 4 ms for each exchange of four workers.
    """
    story = RunTimeline(path)
    story.read()
    return run_of(story, name, among)


def run_of(story: RunTimeline, name: str, among: int = 1) -> ReportedRun:
    """Return a timeline as a run on one axis. The ``among`` runs of a page share its room."""
    recorded = [one for one in story.generations if one.steps]
    names = dict[tuple[str, int], int]()
    lanes = [_lanes(one.workers, names) for one in recorded]
    steps = sum(one.steps for one in recorded)
    cells = _MOST_CELLS // max(1, min(len(names), MOST_LANES))
    most = max(_FEWEST_BUCKETS, min(_MOST_BUCKETS, cells) // among)
    each = max(1, -(-steps // most))
    legs, pauses, offset_s, life = list[Leg](), list[tuple[float, float]](), 0.0, None
    for generation, mine in zip(recorded, lanes, strict=True):
        if life is not None and generation.life != life:
            offset_s = float(legs[-1].ends_s[-1])
            pauses.append((offset_s, _pause_s(story, life, generation.life, legs[-1])))
        life = generation.life
        legs.append(Leg(generation, offset_s, mine, each))
    each = max((int((leg.last - leg.first).max()) + 1 for leg in legs), default=1)
    shown = tuple(worker if not copy else f"{worker} ({copy + 1})" for worker, copy in names)
    return ReportedRun(plain(name, 80), story, tuple(legs), shown, each, tuple(pauses))


def _lanes(workers: Sequence[str], names: dict[tuple[str, int], int]) -> tuple[int, ...]:
    """Return the number of each worker in the run. Workers of the same name have distinct ones."""
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
