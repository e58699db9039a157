"""One generation of workers: its steps as columns, their splits, the waits, and the clock.

A trace records the length of each step, and at some times the number of committed steps. Between
two such times, steps follow one another. Time outside of steps (evaluation, saving) is placed
before the step that reports it, if known; else before the first step of a pass over the data, and
else before the first step. A small remainder is spread over all steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from evenstride.core.allocation.speedup import SplitReference
from evenstride.core.fleet import FloatArray, IntArray, Shares
from evenstride.core.time_model.estimates import CurveEstimates
from evenstride.core.time_model.observation import Measurements, PeakMemory

_FIRST_ROOM = 256
_MOST_CELLS = 4e8
"""Largest number of recorded times. More would fill the memory, so the step number is wrong."""


class StepTable:
    """Steps of one generation; rows are steps, columns are workers.

    Unknown times are NaN, unknown shares are -1.
    """

    def __init__(self, first: int, workers: int) -> None:
        self.first, self.workers = first, workers
        self._count = 0
        self._times = np.full((_FIRST_ROOM, 4, workers), np.nan)
        self._share = np.full((_FIRST_ROOM, workers), -1, dtype=np.int64)
        self._modelled = np.zeros((_FIRST_ROOM, workers), dtype=np.bool_)
        self._other_s = np.full((2, _FIRST_ROOM), np.nan)

    def __len__(self) -> int:
        return self._count

    @property
    def busy_s(self) -> FloatArray:
        """Busy time: data, compute and the usual time between steps, ``(steps, workers)``."""
        return self._times[: self._count, 0]

    @property
    def wait_s(self) -> FloatArray:
        """The rest of a step: waiting for others, and communication, ``(steps, workers)``."""
        return self._times[: self._count, 1]

    @property
    def data_s(self) -> FloatArray:
        """Part of the busy time spent waiting for data: the mean of its observation."""
        return self._times[: self._count, 2]

    @property
    def apart_s(self) -> FloatArray:
        """Evaluation, saving, waiting for decisions, at the first step of an observation."""
        return self._times[: self._count, 3]

    @property
    def share(self) -> IntArray:
        """Samples, ``(steps, workers)``."""
        return self._share[: self._count]

    @property
    def modelled(self) -> npt.NDArray[np.bool_]:
        """Whether a step is informative about a worker's speed, ``(steps, workers)``."""
        return self._modelled[: self._count]

    @property
    def other_s(self) -> FloatArray:
        """Times of each step with the equal and the best split, ``(2, steps)``."""
        return self._other_s[:, : self._count]

    @property
    def whole(self) -> npt.NDArray[np.bool_]:
        """Whether all workers have reported a step, ``(steps,)``."""
        return np.asarray(~np.isnan(self.busy_s).any(axis=1))

    def add(self, measured: Measurements) -> int:
        """Add measurements; return the number of observations of impossible steps."""
        left_out = 0
        for seen in measured:
            at = seen.first_step - self.first
            sound = 0 <= seen.worker < self.workers and at >= 0
            if not sound or not self._room(at + seen.steps):
                left_out += 1
                continue
            rows = slice(at, at + seen.steps)
            self._times[rows, 0, seen.worker] = seen.busy_s
            self._times[rows, 1, seen.worker] = seen.wait_s
            self._times[rows, 2, seen.worker] = seen.data_s / max(seen.steps, 1)
            self._times[rows, 3, seen.worker] = 0.0
            self._times[at, 3, seen.worker] = seen.outside_s + seen.control_wait_s
            self._share[rows, seen.worker] = seen.share
            self._modelled[rows, seen.worker] = seen.modelled
            self._count = max(self._count, at + seen.steps)
        return left_out

    def judge(self, rows: IntArray, other_s: FloatArray) -> None:
        """Store the times of some steps with the equal and the best split, ``(2, rows)``."""
        self._other_s[:, rows] = other_s

    def _room(self, rows: int) -> bool:
        """Allocate rows; return whether that many steps are possible."""
        have = len(self._share)
        if rows <= have:
            return True
        # Reports come in order, except for the distance between ranks.
        if rows > 2 * self._count + 100_000 or 4.0 * rows * self.workers > _MOST_CELLS:
            return False
        more = max(rows, 2 * have) - have
        self._times = np.concatenate([self._times, np.full((more, 4, self.workers), np.nan)])
        self._share = np.concatenate([self._share, np.full((more, self.workers), -1)])
        fresh = np.zeros((more, self.workers), dtype=np.bool_)
        self._modelled = np.concatenate([self._modelled, fresh])
        self._other_s = np.concatenate([self._other_s, np.full((2, more), np.nan)], axis=1)
        return True


@dataclass(frozen=True, slots=True)
class RecordedDecision:
    """A decision of the leader."""

    step: int  # first step to which it applies
    at_s: float  # in seconds since the start of the process
    shares: Shares | None  # samples of all ranks; ``None`` for a decision that kept them
    reason: str  # one sentence, from the controller


@dataclass(frozen=True, slots=True)
class Incident:
    """An event of the process group, or a note of the run."""

    step: int
    at_s: float  # since the start of the process
    text: str


@dataclass(slots=True, eq=False)
class RecordedGeneration:
    """One generation of workers, filled while its trace is read."""

    life: int  # number of the process in the run, from 0.
    number: int  # of the generation in its process, from 0.
    global_batch: int  # samples of a step.
    workers: tuple[str, ...]  # names, in rank order.
    table: StepTable  # times and shares of their steps.
    lockstep: bool = True  # whether workers take steps together and wait for each other.
    # Whether it began with a new process group; else with another global batch
    met: bool = True
    decisions: list[RecordedDecision] = field(default_factory=list)
    incidents: list[Incident] = field(default_factory=list)
    # Seconds since the start of the process, and the number of steps committed then
    anchors: list[tuple[float, int]] = field(default_factory=list)
    # Latest memory report of each rank
    held: dict[int, PeakMemory] = field(default_factory=dict)
    # All memory reports, with the seconds since the start of the process
    memory: list[tuple[float, PeakMemory]] = field(default_factory=list)
    standing: tuple[str, ...] = ()  # state of each rank at the end.
    not_measured: str = ""  # why its steps could not be measured; empty if they were.
    # Fitted curves of the ``serving`` ranks at the end; ``None`` if not all were measured
    curves: CurveEstimates | None = None
    serving: tuple[int, ...] = ()
    _looked_at: int = 0
    _late: list[int] = field(default_factory=list)

    @property
    def first(self) -> int:
        """Number of its first step in its process."""
        return self.table.first

    @property
    def steps(self) -> int:
        """Number of recorded steps."""
        return len(self.table)

    @property
    def shares(self) -> Shares:
        """The latest shares; empty before the first decision."""
        return next((one.shares for one in reversed(self.decisions) if one.shares), ())

    @property
    def slowest_s(self) -> FloatArray:
        """Busy time of each step's slowest worker; NaN unless all workers reported the step."""
        if not self.steps:
            return np.zeros(0)
        return np.asarray(self.table.busy_s.max(axis=1))

    @property
    def equal_s(self) -> FloatArray:
        """Time of each step with the equal split, without communication, ``(steps,)``.

        NaN where it is unknown.
        """
        return np.asarray(self.table.other_s[0])

    @property
    def best_s(self) -> FloatArray:
        """Time of each step with the best split, likewise."""
        return np.asarray(self.table.other_s[1])

    @property
    def judged(self) -> npt.NDArray[np.bool_]:
        """Whether a step is compared with other splits, ``(steps,)``."""
        return np.asarray(~np.isnan(self.best_s), dtype=np.bool_)

    def leave_unmeasured(self, reason: str) -> None:
        """Record why its steps could not be measured."""
        self.not_measured = reason

    def hold(self, at_s: float, peaks: tuple[PeakMemory, ...]) -> None:
        """Add memory reports of ranks, ``at_s`` seconds since the start of the process."""
        self.memory += [(at_s, one) for one in peaks]
        self.held.update({one.worker: one for one in peaks})

    def remember(
        self, standing: tuple[str, ...], curves: CurveEstimates | None, serving: tuple[int, ...]
    ) -> None:
        """Store the current state of the ranks."""
        self.standing = standing
        if curves is not None:
            self.curves, self.serving = curves, serving

    def judge(self, comparison: SplitReference | None) -> None:
        """Compare newly completed steps with the equal and the best split.

        As in the run, the comparison uses the curves at the time when a step was complete. Without
        curves there is no comparison.
        """
        rows = self._fresh()
        if comparison is None or not len(rows):
            return
        slowest_s = self.table.busy_s[rows].max(axis=1)  # only of these, to avoid quadratic cost
        self.table.judge(rows, comparison.judge(self.table.share[rows], slowest_s))

    def _fresh(self) -> npt.NDArray[np.int64]:
        """Return the rows that were completed since the last call."""
        late = np.array(self._late, dtype=np.int64)
        rows = np.concatenate([late, np.arange(self._looked_at, self.steps)])
        whole = ~np.isnan(self.table.busy_s[rows]).any(axis=1)
        self._looked_at, self._late = self.steps, rows[~whole].tolist()[-4096:]
        return np.asarray(rows[whole])


def split_rows(generation: RecordedGeneration) -> IntArray:
    """Return for each step the row of a step with the same split and all samples, ``(steps,)``.

    This is its own row, unless it had fewer samples than the global batch. Then it is the latest
    row before it with all samples, or the first such row. Without any, each step has its own.
    """
    share = generation.table.share
    rows = np.arange(generation.steps)
    if not generation.lockstep:  # workers take separate steps
        return rows
    short = (share >= 0).all(axis=1) & (share.sum(axis=1) < generation.global_batch)
    if short.all():
        return rows
    before = np.maximum.accumulate(np.where(short, -1, rows))
    return np.where(before < 0, np.argmin(short), before)


def split_share(generation: RecordedGeneration, rank: int, rows: IntArray) -> FloatArray:
    """Return a worker's samples in the split of each step, ``(steps,)``, given the `split_rows`.

    NaN where they are unknown.
    """
    share = generation.table.share[rows, rank].astype(np.float64)
    return np.where(share < 0, np.nan, share)


_NO_PAUSE = 0.05
"""Fraction of the steps' time; a smaller remainder is the error of the measured times."""


def durations_s(generation: RecordedGeneration) -> FloatArray:
    """Return the length of each step, ``(steps,)``: the mean over the workers that reported it.

    Workers start and end a step together, except for small offsets that the next step cancels. So
    the mean sums to the wall-clock time, and the longest time would sum to more. Without lockstep
    it is the time of the worker that took longest. An unreported step gets the median.
    """
    table = generation.table
    if not generation.steps:
        return np.zeros(0)
    spent_s = table.busy_s + table.wait_s
    reported = ~np.isnan(spent_s)
    counts, spent_s = np.count_nonzero(reported, axis=1), np.where(reported, spent_s, 0.0)
    if generation.lockstep:
        lasting_s = spent_s.sum(axis=1) / np.maximum(counts, 1)
    else:
        lasting_s = spent_s.max(axis=1)
    known = counts > 0
    return np.where(known, lasting_s, np.median(lasting_s[known]) if known.any() else 0.0)


def spans_s(generation: RecordedGeneration) -> tuple[FloatArray, FloatArray]:
    """Return the starts and ends of steps, ``(steps,)`` each, in seconds of the process's clock.

    Steps are in order, do not overlap, and lie within the recorded time. Without lockstep, the
    times are those of the worker that took longest in each step.
    """
    lasting_s = durations_s(generation)
    apart_s = np.nan_to_num(generation.table.apart_s, nan=0.0).max(axis=1, initial=0.0)
    if not len(lasting_s):
        return np.zeros(0), np.zeros(0)
    ends_s = _ends(generation, lasting_s, apart_s)
    begins_s = np.maximum(ends_s - lasting_s, np.append(generation.anchors[0][0], ends_s[:-1]))
    return begins_s, ends_s


def _ends(generation: RecordedGeneration, lasting_s: FloatArray, apart_s: FloatArray) -> FloatArray:
    """Return the ends of steps, scaled to the time between two known commits."""
    at = [(0, generation.anchors[0][0])]
    for when_s, step in generation.anchors[1:]:
        row = min(step - generation.first, len(lasting_s))
        if row > at[-1][0] and when_s > at[-1][1]:
            at.append((row, when_s))
    ends_s = np.zeros(len(lasting_s))
    fresh = np.asarray(~generation.table.modelled.any(axis=1), dtype=np.bool_)
    for (first, from_s), (last, until_s) in pairwise(at):
        rows = slice(first, last)
        room_s = until_s - from_s
        ends_s[rows] = from_s + _placed(lasting_s[rows], apart_s[rows], fresh[rows], room_s)
    first, from_s = at[-1]
    if first < len(lasting_s):  # steps after the last known commit
        ends_s[first:] = from_s + np.cumsum(lasting_s[first:] + apart_s[first:])
    return ends_s


def _placed(
    lasting_s: FloatArray, apart_s: FloatArray, fresh: npt.NDArray[np.bool_], room_s: float
) -> FloatArray:
    """Return the ends of steps within the time that they have together.

    ``apart_s`` is the reported time outside of steps before each one. ``fresh`` steps may be the
    first of a pass.
    """
    work_s = float(lasting_s.sum())
    left_s = room_s - work_s
    if left_s <= 0.0:
        return np.asarray(np.cumsum(lasting_s) * (room_s / work_s if work_s else 0.0))
    known_s = float(apart_s.sum())
    gaps_s = apart_s * min(left_s / known_s, 1.0) if known_s else np.zeros(len(lasting_s))
    rest_s = max(left_s - float(gaps_s.sum()), 0.0)
    if not fresh.any() and rest_s < _NO_PAUSE * work_s:
        return np.asarray(np.cumsum(gaps_s + lasting_s * (1.0 + rest_s / work_s)))
    before = np.flatnonzero(fresh) if fresh.any() else np.zeros(1, dtype=np.int64)
    gaps_s[before] += rest_s / len(before)
    return np.asarray(np.cumsum(gaps_s + lasting_s))


@dataclass(frozen=True, slots=True, eq=False)
class Waits:
    """The waiting times of a generation and their causes."""

    caused_s: FloatArray  # by each worker in each step, ``(steps, workers)``
    waited_s: FloatArray  # by each worker for the slowest one, ``(steps, workers)``
    communication_s: FloatArray  # the shortest wait of each step, ``(steps,)``


def waits_of(generation: RecordedGeneration) -> Waits:
    """Return the waits of each step; 0 in steps that not all workers reported."""
    table, whole = generation.table, generation.table.whole
    busy_s = table.busy_s[whole]
    shape = (generation.steps, len(generation.workers))
    caused_s, waited_s = np.zeros(shape), np.zeros(shape)
    communication_s = np.zeros(generation.steps)
    if len(busy_s) and generation.lockstep:
        slowest = busy_s.argmax(axis=1)
        gaps_s = busy_s.max(axis=1)[:, np.newaxis] - busy_s
        waited_s[whole] = gaps_s
        caused_s[np.flatnonzero(whole), slowest] = gaps_s.sum(axis=1)
        communication_s[whole] = table.wait_s[whole].min(axis=1)
    return Waits(caused_s, waited_s, communication_s)


def median_s(values_s: FloatArray) -> float | None:
    """Return the median of the known times; ``None`` without any."""
    known = values_s[~np.isnan(values_s)]
    return float(np.median(known)) if len(known) else None


def since_met(generations: Sequence[RecordedGeneration]) -> Sequence[RecordedGeneration]:
    """Return the parts of the latest process group: one for each of its global batches."""
    return generations[max((n for n, one in enumerate(generations) if one.met), default=0) :]
