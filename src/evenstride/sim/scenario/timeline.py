"""Who is there at each step, and how fast: a scenario's events, worked out.

`SpeedProfile` is the course of one event. `_Walk` holds what is true at one step after another,
where little changes from each to the next.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Generic, Self, TypeVar

import numpy as np

from evenstride.core.fleet import FloatArray, IntArray
from evenstride.core.membership.member_table import MembershipEvent
from evenstride.errors import ScenarioError
from evenstride.sim.scenario.recordings import load_recording
from evenstride.sim.scenario.scenario_model import (
    Bursty,
    Event,
    Join,
    Leave,
    LoadReplay,
    Mask,
    NoticeEvent,
    Periodic,
    Ramp,
    Scenario,
    SpeedStep,
    chosen,
    there_from_start,
)

_BLOCK = 16  # phases that are drawn at once; fixed, so that the first ones are always the same


@dataclass(frozen=True, slots=True, eq=False)
class SpeedProfile:
    """The speed of ``n`` workers as a multiple of the usual one; usual before the first step."""

    workers: IntArray  # their numbers, ``(n,)``
    steps: IntArray  # from which another speed holds, ascending, all within the run
    # One for each of the steps, ``(steps,)``, or for each worker, ``(steps, n)``
    speeds: FloatArray

    @classmethod
    def within(cls, run: int, workers: IntArray, steps: IntArray, speeds: FloatArray) -> Self:
        seen = steps < run
        return cls(workers, steps[seen], speeds[seen])


def stepped(event: SpeedStep, workers: IntArray, run: int) -> SpeedProfile:
    steps = [event.at] if event.until is None else [event.at, event.until]
    return SpeedProfile.within(
        run, workers, np.array(steps), np.array([event.speed, 1.0][: len(steps)])
    )


def ramped(event: Ramp, workers: IntArray, run: int) -> SpeedProfile:
    steps = np.arange(event.at, min(event.at + event.steps, run))
    part = (steps - event.at + 1) / event.steps
    return SpeedProfile(workers, steps, 1.0 + part * (event.speed - 1.0))


def periodic(event: Periodic, workers: IntArray, run: int) -> SpeedProfile:
    end = _end(event, run)
    begins = np.arange(event.at, end, event.period)
    ends = np.minimum(begins + max(1, round(event.duty * event.period)), end)
    steps = np.stack([begins, ends], axis=1).ravel()
    return SpeedProfile.within(run, workers, steps, np.tile([event.speed, 1.0], len(begins)))


def bursty(event: Bursty, workers: IntArray, run: int, key: Sequence[int]) -> SpeedProfile:
    """Return slow phases whose lengths and gaps are geometric.

    Each worker draws from a generator of its own, so that nobody's phases hang on how long the run
    is, or on who else is in the event.
    """
    end = _end(event, run)
    edges = [_edges(event, end, np.random.default_rng([*key, w])) for w in workers.tolist()]
    steps = np.unique(np.concatenate(edges))
    slow = [np.searchsorted(mine, steps, side="right") % 2 == 1 for mine in edges]
    speeds = np.where(np.stack(slow, axis=1), event.speed, 1.0)
    return SpeedProfile.within(run, workers, steps, speeds)


def _edges(event: Bursty, end: int, rng: np.random.Generator) -> IntArray:
    """Return where slow phases begin and end by turns, the last one at the latest at ``end``."""
    chances = 1 / event.mean_gap, 1 / event.mean_steps
    known, at = [np.zeros(0, dtype=np.int64)], event.at
    while at < end:
        edges = at + np.cumsum(rng.geometric(chances, (_BLOCK, 2)))
        known.append(edges)
        at = int(edges[-1])
    edges = np.concatenate(known)
    edges = edges[edges < end]
    return np.append(edges, end) if len(edges) % 2 else edges


def replayed(
    event: LoadReplay, workers: IntArray, run: int, recording: FloatArray, rows: Sequence[int]
) -> SpeedProfile:
    """Return what recorded load leaves, of a run of so many steps.

    The recording has load in percent, ``(machines, samples)``, and begins again after its end;
    there is a row of it for each worker.
    """
    steps = np.arange(event.at, run, event.steps_per_sample)
    sample = np.arange(len(steps)) % recording.shape[1]
    left = 1.0 - recording[np.asarray(rows)][:, sample].T / 100.0
    return SpeedProfile(workers, steps, np.maximum(left, event.least_speed))


def _end(event: Periodic | Bursty, run: int) -> int:
    return run if event.until is None else min(event.until, run)


_Held = TypeVar("_Held", FloatArray, IntArray)


class _Walk(ABC, Generic[_Held]):
    """Something that changes at some steps only, and is worked out anew at no other.

    What it returns is never changed afterwards.
    """

    def __init__(self, steps: Iterable[int]) -> None:
        self.steps = sorted(set(steps))
        self._passed = 0
        self._now: _Held = self._first()

    def at(self, step: int) -> _Held:
        if self._passed and step < self.steps[self._passed - 1]:
            self._passed, self._now = 0, self._first()
        while self._passed < len(self.steps) and self.steps[self._passed] <= step:
            self._now = self._next(self.steps[self._passed], self._now)
            self._passed += 1
        return self._now

    @abstractmethod
    def _first(self) -> _Held:
        """Return what holds before the first of the steps."""

    @abstractmethod
    def _next(self, step: int, now: _Held) -> _Held:
        """Return what holds from one of the steps on."""


@dataclass(frozen=True, slots=True, eq=False)
class FleetChange:
    """Some workers come or go."""

    at: int
    workers: IntArray
    joins: bool


class Presence(_Walk[IntArray]):
    """The numbers of those who are there, ascending."""

    def __init__(self, here: Mask, moves: Sequence[FleetChange]) -> None:
        self._here = here
        self._moves: dict[int, list[FleetChange]] = defaultdict(list)
        for move in moves:
            self._moves[move.at].append(move)
        super().__init__(self._moves)

    def changes(self) -> tuple[int, ...]:
        """Return the steps, the first apart, at which others are there than before."""
        steps = [step for step in self.steps if step]
        return tuple(step for step in steps if not np.array_equal(self.at(step - 1), self.at(step)))

    def _first(self) -> IntArray:
        return np.flatnonzero(self._here)

    def _next(self, step: int, now: IntArray) -> IntArray:
        here = np.zeros_like(self._here)
        here[now] = True
        for move in self._moves[step]:
            here[move.workers] = move.joins
        return np.flatnonzero(here)


class Speeds(_Walk[FloatArray]):
    """Every worker's speed, ``(size,)``: the product of all courses that the worker is in.

    The factors of all courses stand in one array, those of a worker side by side and in the order
    of the courses. So when a course changes, only its own workers' products are formed anew,
    however many other courses there are.
    """

    def __init__(self, size: int, courses: Sequence[SpeedProfile]) -> None:
        self._size, self._courses = size, courses
        self._rows: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for number, course in enumerate(courses):
            for row, step in enumerate(course.steps.tolist()):
                self._rows[step].append((number, row))
        counts = [len(course.workers) for course in courses]
        everyone = np.concatenate([np.zeros(0, dtype=np.int64), *(c.workers for c in courses)])
        slots = np.empty_like(everyone)
        slots[np.argsort(everyone, kind="stable")] = np.arange(len(everyone))
        self._slots = np.split(slots, np.cumsum(counts)[:-1]) if counts else []
        self._counts = np.bincount(everyone, minlength=size)
        self._starts = np.cumsum(self._counts) - self._counts
        super().__init__(self._rows)

    def _first(self) -> FloatArray:
        self._factors = np.ones(int(self._counts.sum()))
        return np.ones(self._size)

    def _next(self, step: int, now: FloatArray) -> FloatArray:
        touched = np.zeros(self._size, dtype=np.bool_)
        for number, row in self._rows[step]:
            course = self._courses[number]
            self._factors[self._slots[number]] = course.speeds[row]
            touched[course.workers] = True
        workers, speed = np.flatnonzero(touched), now.copy()
        speed[workers] = self.products(workers)
        return speed

    def products(self, workers: IntArray) -> FloatArray:
        """Return the product of all speeds in force of some workers."""
        counts = self._counts[workers]
        begins = np.cumsum(counts) - counts
        gathered = np.repeat(self._starts[workers] - begins, counts) + np.arange(counts.sum())
        return np.asarray(np.multiply.reduceat(self._factors[gathered], begins))


class Timeline:
    """The speed of every worker at every step, and who takes part.

    What happens after the last step is left out; it has no part in what happens before. To ask for
    one step after another is cheap, to go back is not. Raises a `ScenarioError` if a recording is
    not there.
    """

    def __init__(self, scenario: Scenario, seed: int) -> None:
        self.size = scenario.size
        courses: list[SpeedProfile] = []
        replays: list[SpeedProfile] = []
        moves: list[FleetChange] = []
        told: list[FleetChange] = []
        self._happenings: dict[int, list[tuple[int, MembershipEvent]]] = defaultdict(list)
        for number, event in enumerate(scenario.events):
            if event.at >= scenario.steps:
                continue
            who = np.array(chosen(event.workers, self.size))
            if isinstance(event, Leave | Join):
                moves.append(FleetChange(event.at, who, isinstance(event, Join)))
                told += moves[-1:]
                self._happen(event, who)
            elif isinstance(event, NoticeEvent):
                told.append(FleetChange(event.at, who, event.kind == "withdrawn"))
                self._happen(event, who)
            else:
                courses.append(_course(event, who, scenario.steps, [seed, 1, number]))
                replays += courses[-1:] if isinstance(event, LoadReplay) else []
        self._speeds, self._left = Speeds(self.size, courses), Speeds(self.size, replays)
        self._recorded = np.zeros(self.size, dtype=np.bool_)
        for replay in replays:
            self._recorded[replay.workers] = True
        here = there_from_start(scenario)
        self._group, self._presence = Presence(here, moves), Presence(here, told)
        self.moves = self._presence.changes()
        """Steps at which others get samples than before, the start apart."""
        self.groups = self._group.changes()
        """Steps at which workers come or go, the start apart."""

    @cached_property
    def changes(self) -> tuple[int, ...]:
        """Steps at which those who are there, or the speed of one of them, are others than before.

        The start is none. What changes nothing is none either: a speed that is set again to what it
        is, or that of a worker who is away.
        """
        moves, changes, before = frozenset(self.moves), set(self.moves), self.speed(0)
        for step in self._speeds.steps:
            here, now = self.present(step), self.speed(step)
            if step and step not in moves and (now[here] != before[here]).any():
                changes.add(step)
            before = now
        return tuple(sorted(changes))

    def speed(self, step: int) -> FloatArray:
        """Return every worker's speed, shape ``(size,)``."""
        return self._speeds.at(step)

    def load(self, step: int) -> FloatArray:
        """Return the part of each machine's processor that others take, ``(size,)``.

        It is known where a recording of it is replayed, and not a number elsewhere.
        """
        return np.where(self._recorded, 1.0 - self._left.at(step), np.nan)

    def present(self, step: int) -> IntArray:
        """Return the numbers of the workers that get samples, ascending."""
        serving = self._presence.at(step)
        return serving if len(serving) else self._group.at(step)

    def group(self, step: int) -> IntArray:
        """Return the numbers of all who take part, those about to leave included, ascending."""
        return self._group.at(step)

    def happenings(self, step: int) -> list[tuple[int, MembershipEvent]]:
        return self._happenings.get(step, [])

    def _happen(self, event: Leave | Join | NoticeEvent, who: IntArray) -> None:
        """Note what an event does to some workers; who comes in is ready at once."""
        changes = [MembershipEvent(event.kind)]
        if isinstance(event, Join):
            changes.append(MembershipEvent.READY)
        self._happenings[event.at] += [(k, change) for k in who.tolist() for change in changes]


def _course(event: Event, who: IntArray, steps: int, key: list[int]) -> SpeedProfile:
    match event:
        case SpeedStep():
            return stepped(event, who, steps)
        case Ramp():
            return ramped(event, who, steps)
        case Periodic():
            return periodic(event, who, steps)
        case Bursty():
            return bursty(event, who, steps, key)
        case LoadReplay():
            return _replay(event, who, steps, key)
    raise AssertionError(f"{type(event).__name__} has no course")


def _replay(event: LoadReplay, who: IntArray, steps: int, key: list[int]) -> SpeedProfile:
    recording, rng = load_recording(event.day), np.random.default_rng(key)
    rows = event.machines or rng.choice(len(recording), len(who), replace=False).tolist()
    unknown = [row for row in rows if not 0 <= row < len(recording)]
    if unknown:
        raise ScenarioError(
            f"the recording of {event.day} has no machine {unknown[0]} "
            f"(allowed: 0 to {len(recording) - 1})"
        )
    return replayed(event, who, steps, recording, rows)
