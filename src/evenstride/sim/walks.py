"""What holds at one step after another, where little changes from each to the next."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from evenstride.core.fleet import FloatArray, IntArray
from evenstride.sim.courses import Course
from evenstride.sim.fitting import Mask

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
        """Return what holds at a step."""
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
class Move:
    """Some workers come or go."""

    at: int
    workers: IntArray
    joins: bool


class Presence(_Walk[IntArray]):
    """The numbers of those who are there, ascending.

    Args:
        here: who is there before any move.
        moves: in any order; of one step they count in this order.
    """

    def __init__(self, here: Mask, moves: Sequence[Move]) -> None:
        self._here = here
        self._moves: dict[int, list[Move]] = defaultdict(list)
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

    def __init__(self, size: int, courses: Sequence[Course]) -> None:
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
        speed[workers] = self._products(workers)
        return speed

    def _products(self, workers: IntArray) -> FloatArray:
        counts = self._counts[workers]
        begins = np.cumsum(counts) - counts
        gathered = np.repeat(self._starts[workers] - begins, counts) + np.arange(counts.sum())
        return np.asarray(np.multiply.reduceat(self._factors[gathered], begins))
