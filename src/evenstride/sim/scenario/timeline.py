"""The present workers and their speeds at each step: the events of a scenario, evaluated.

`SpeedProfile` is the speed of one event over time. `_Walk` holds a value that changes at few steps.
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
from evenstride.sim.scenario.scenario_events import (
    Bursty,
    Event,
    Join,
    Leave,
    LoadReplay,
    NoticeEvent,
    Periodic,
    Ramp,
    SpeedStep,
    Walk,
    Wave,
    chosen,
)
from evenstride.sim.scenario.scenario_model import Mask, Scenario, there_from_start

_BLOCK = 16  # phases drawn at once; fixed, so that the first ones are always the same


@dataclass(frozen=True, slots=True, eq=False)
class SpeedProfile:
    """The speed of ``n`` workers as a multiple of the usual one; usual before the first step."""

    workers: IntArray  # their numbers, ``(n,)``
    steps: IntArray  # steps at which the speed changes, ascending, all within the run
    # One value for each of the steps, ``(steps,)``, or for each worker, ``(steps, n)``
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


def periodic(event: Periodic, workers: IntArray, run: int, key: Sequence[int]) -> SpeedProfile:
    slow = max(1, round(event.duty * event.period))

    def edges(rng: np.random.Generator | None) -> IntArray:
        passed = 0 if rng is None else int(rng.integers(event.period))
        begins = np.arange(event.at - passed, _end(event, run), event.period)
        # A phase that began before the event shows only its rest, which may be nothing.
        both = np.stack([begins, begins + slow], axis=1).ravel()
        return np.asarray(np.clip(both, event.at, _end(event, run)))

    return _phases(event, workers, run, [edges(rng) for rng in _generators(event, workers, key)])


def bursty(event: Bursty, workers: IntArray, run: int, key: Sequence[int]) -> SpeedProfile:
    """Return slow phases with geometric lengths and gaps."""
    edges = [
        _edges(event, _end(event, run), rng or np.random.default_rng(key))
        for rng in _generators(event, workers, key)
    ]
    return _phases(event, workers, run, edges)


def waving(event: Wave, workers: IntArray, run: int, key: Sequence[int]) -> SpeedProfile:
    steps = np.arange(event.at, _end(event, run))
    points = [
        0 if rng is None else int(rng.integers(event.period))
        for rng in _generators(event, workers, key)
    ]
    turns = (steps[:, None] - event.at + np.array(points)) / event.period
    part = 0.5 - 0.5 * np.cos(2 * np.pi * turns)
    return _returning(event, workers, run, steps, 1.0 + part * (event.speed - 1.0))


def walking(event: Walk, workers: IntArray, run: int, key: Sequence[int]) -> SpeedProfile:
    steps = np.arange(event.at, _end(event, run))
    drawn = [
        (rng or np.random.default_rng(key)).standard_normal(len(steps))
        for rng in _generators(event, workers, key)
    ]
    low, high = np.log(event.least_speed), np.log(event.most_speed)
    logs, now = np.zeros((len(steps), len(drawn))), np.zeros(len(drawn))
    for row, change in enumerate(event.spread * np.stack(drawn, axis=1)):
        logs[row] = now = np.clip(now + change, low, high)
    return _returning(event, workers, run, steps, np.exp(logs))


def _generators(
    event: Periodic | Bursty | Wave | Walk, workers: IntArray, key: Sequence[int]
) -> list[np.random.Generator | None]:
    """Return each worker's random generator, or one ``None`` for all if phases are common.

    With its own generator, a worker's phases do not depend on the length of the run or on the
    other workers of the event.
    """
    if event.phases == "common":
        return [None]
    return [np.random.default_rng([*key, w]) for w in workers.tolist()]


def _phases(
    event: Periodic | Bursty, workers: IntArray, run: int, edges: list[IntArray]
) -> SpeedProfile:
    """Return slow phases between alternating starts and ends, of each worker or of all."""
    steps = np.unique(np.concatenate(edges))
    slow = [np.searchsorted(mine, steps, side="right") % 2 == 1 for mine in edges]
    speeds = np.where(np.stack(slow, axis=1), event.speed, 1.0)
    return SpeedProfile.within(run, workers, steps, _of_each(speeds))


def _of_each(speeds: FloatArray) -> FloatArray:
    """Return the speeds of each worker, ``(steps, n)``, or of all alike, ``(steps,)``."""
    return speeds[:, 0] if speeds.shape[1] == 1 else speeds


def _returning(
    event: Wave | Walk, workers: IntArray, run: int, steps: IntArray, speeds: FloatArray
) -> SpeedProfile:
    """Return a profile that ends with the usual speed."""
    speeds = np.concatenate([speeds, np.ones((1, speeds.shape[1]))])
    return SpeedProfile.within(run, workers, np.append(steps, _end(event, run)), _of_each(speeds))


def _edges(event: Bursty, end: int, rng: np.random.Generator) -> IntArray:
    """Return the alternating starts and ends of slow phases; the last one ends by ``end``."""
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
    """Return the speed that recorded load leaves, for a run of ``run`` steps.

    The recording has load in percent, ``(machines, samples)``, and repeats after its end.
    ``rows`` has a row of it for each worker.
    """
    steps = np.arange(event.at, run, event.steps_per_sample)
    sample = np.arange(len(steps)) % recording.shape[1]
    left = 1.0 - recording[np.asarray(rows)][:, sample].T / 100.0
    return SpeedProfile(workers, steps, np.maximum(left, event.least_speed))


def _end(event: Periodic | Bursty | Wave | Walk, run: int) -> int:
    return run if event.until is None else min(event.until, run)


_Held = TypeVar("_Held", FloatArray, IntArray)


class _Walk(ABC, Generic[_Held]):
    """A value that changes only at some steps, and is recomputed only there.

    Returned values are never changed afterwards.
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
        """Return the value before the first of the steps."""

    @abstractmethod
    def _next(self, step: int, now: _Held) -> _Held:
        """Return the value from one of the steps on."""


@dataclass(frozen=True, slots=True, eq=False)
class FleetChange:
    """Some workers join or leave."""

    at: int
    workers: IntArray
    joins: bool


class Presence(_Walk[IntArray]):
    """The numbers of the present workers, ascending."""

    def __init__(self, here: Mask, moves: Sequence[FleetChange]) -> None:
        self._here = here
        self._moves: dict[int, list[FleetChange]] = defaultdict(list)
        for move in moves:
            self._moves[move.at].append(move)
        super().__init__(self._moves)

    def changes(self) -> tuple[int, ...]:
        """Return the steps, except the first, at which the present workers change."""
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
    """Every worker's speed, ``(size,)``: the product of all speed profiles of the worker.

    The factors of all profiles are in one array, grouped by worker, in the order of the profiles.
    When a profile changes, only the products of its own workers are recomputed.
    """

    def __init__(self, size: int, courses: Sequence[SpeedProfile]) -> None:
        self._size, self._courses = size, courses
        self._rows: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for number, course in enumerate(courses):
            for row, step in enumerate(course.steps.tolist()):
                self._rows[step].append((number, row))
        counts = [len(course.workers) for course in courses]
        every = np.concatenate([np.zeros(0, dtype=np.int64), *(c.workers for c in courses)])
        slots = np.empty_like(every)
        slots[np.argsort(every, kind="stable")] = np.arange(len(every))
        self._slots = np.split(slots, np.cumsum(counts)[:-1]) if counts else []
        self._counts = np.bincount(every, minlength=size)
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
        """Return the product of all current speed factors of some workers."""
        counts = self._counts[workers]
        begins = np.cumsum(counts) - counts
        gathered = np.repeat(self._starts[workers] - begins, counts) + np.arange(counts.sum())
        return np.asarray(np.multiply.reduceat(self._factors[gathered], begins))


class Timeline:
    """The speed of every worker at every step, and the workers that take part.

    Events after the last step are left out; they do not affect earlier steps. Steps in ascending
    order are cheap, going back is not. Raises a `ScenarioError` if a recording is missing.
    """

    def __init__(self, scenario: Scenario, seed: int) -> None:
        self.size = scenario.size
        courses: list[SpeedProfile] = []
        replays: list[SpeedProfile] = []
        moves: list[FleetChange] = []
        serving_moves: list[FleetChange] = []
        self._happenings: dict[int, list[tuple[int, MembershipEvent]]] = defaultdict(list)
        for number, event in enumerate(scenario.events):
            if event.at >= scenario.steps:
                continue
            who = np.array(chosen(event.workers, self.size))
            if isinstance(event, Leave | Join):
                moves.append(FleetChange(event.at, who, isinstance(event, Join)))
                serving_moves += moves[-1:]
                self._happen(event, who)
            elif isinstance(event, NoticeEvent):
                serving_moves.append(FleetChange(event.at, who, event.kind == "withdrawn"))
                self._happen(event, who)
            else:
                courses.append(_course(event, who, scenario.steps, [seed, 1, number]))
                replays += courses[-1:] if isinstance(event, LoadReplay) else []
        self._speeds, self._left = Speeds(self.size, courses), Speeds(self.size, replays)
        self._recorded = np.zeros(self.size, dtype=np.bool_)
        for replay in replays:
            self._recorded[replay.workers] = True
        here = there_from_start(scenario)
        self._group, self._presence = Presence(here, moves), Presence(here, serving_moves)
        self.moves = self._presence.changes()
        """Steps at which the workers with samples change, except the start."""
        self.groups = self._group.changes()
        """Steps at which workers join or leave, except the start."""

    @cached_property
    def changes(self) -> tuple[int, ...]:
        """Steps at which the present workers, or the speed of one of them, change.

        The start does not count. Neither does an event without effect: a speed set to its present
        value, or that of an absent worker.
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
        """Return the fraction of each machine's processor that other processes use, ``(size,)``.

        It is known if a recording of it is replayed, and NaN otherwise.
        """
        return np.where(self._recorded, 1.0 - self._left.at(step), np.nan)

    def present(self, step: int) -> IntArray:
        """Return the numbers of the workers that get samples, ascending."""
        serving = self._presence.at(step)
        return serving if len(serving) else self._group.at(step)

    def group(self, step: int) -> IntArray:
        """Return the numbers of all workers that take part, including leaving ones, ascending."""
        return self._group.at(step)

    def happenings(self, step: int) -> list[tuple[int, MembershipEvent]]:
        return self._happenings.get(step, [])

    def _happen(self, event: Leave | Join | NoticeEvent, who: IntArray) -> None:
        """Record what an event does to some workers; a worker that joins is ready at once."""
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
            return periodic(event, who, steps, key)
        case Wave():
            return waving(event, who, steps, key)
        case Walk():
            return walking(event, who, steps, key)
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
