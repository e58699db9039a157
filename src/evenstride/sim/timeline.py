"""Who is there at each step, and how fast: a scenario's events, worked out."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Protocol

import numpy as np

from evenstride.core.fleet import FloatArray, IntArray
from evenstride.errors import ScenarioError
from evenstride.sim.fitting import there_from_start
from evenstride.sim.scenario import (
    Bursty,
    Event,
    Join,
    Leave,
    Periodic,
    Ramp,
    Replay,
    Scenario,
    SpeedStep,
    chosen,
)


class Course(Protocol):
    """The speed of some workers over time."""

    def at(self, step: int) -> FloatArray | float:
        """Return their speed as a multiple of the usual one."""
        ...

    @property
    def changes(self) -> IntArray:
        """Steps at which the speed changes in a jump, ascending."""
        ...


@dataclass(frozen=True)
class _Jumps:
    """Constant between given steps."""

    steps: IntArray  # ascending, the first one 0
    speeds: FloatArray  # (jumps,) or (jumps, workers)

    def at(self, step: int) -> FloatArray | float:
        index = int(np.searchsorted(self.steps, step, side="right")) - 1
        return np.asarray(self.speeds[index])

    @property
    def changes(self) -> IntArray:
        return self.steps[1:]


@dataclass(frozen=True)
class _Ramp:
    begin: int
    steps: int
    speed: float

    def at(self, step: int) -> float:
        part = min(max((step - self.begin + 1) / self.steps, 0.0), 1.0)
        return 1.0 + part * (self.speed - 1.0)

    @property
    def changes(self) -> IntArray:
        return np.arange(self.begin, self.begin + self.steps)


class Timeline:
    """The speed of every worker at every step, and who takes part.

    Args:
        scenario: whose events to work out.
        seed: of the random ones.

    Raises:
        ScenarioError: a recording that is asked for is not there.
    """

    def __init__(self, scenario: Scenario, seed: int) -> None:
        self.size = scenario.size
        self._courses: list[tuple[list[int], Course]] = []
        self._moves: list[tuple[int, list[int], bool]] = []
        for number, event in enumerate(scenario.events):
            who = chosen(event.workers, self.size)
            if isinstance(event, Leave | Join):
                self._moves.append((event.at, who, isinstance(event, Join)))
            else:
                rng = np.random.default_rng([seed, 1, number])
                self._courses.append((who, _course(event, len(who), scenario.steps, rng)))
        self._moves.sort(key=lambda move: move[0])
        self._from_start = there_from_start(scenario)
        jumps = [at for at, _, _ in self._moves]
        jumps += [int(step) for _, course in self._courses for step in course.changes]
        self.changes = tuple(sorted({step for step in jumps if 0 < step < scenario.steps}))
        """Steps at which anything changes, the start apart."""
        self.moves = tuple(sorted({at for at, _, _ in self._moves if at > 0}))
        """Steps at which workers come or go."""

    def speed(self, step: int) -> FloatArray:
        """Return every worker's speed, shape ``(size,)``."""
        speed = np.ones(self.size)
        for who, course in self._courses:
            speed[who] *= course.at(step)
        return speed

    def present(self, step: int) -> IntArray:
        """Return the numbers of the workers that take part, ascending."""
        here = self._from_start.copy()
        for at, who, joins in self._moves:
            if at <= step:
                here[who] = joins
        return np.flatnonzero(here)


def _course(event: Event, workers: int, steps: int, rng: np.random.Generator) -> Course:
    match event:
        case SpeedStep():
            return _jumps([event.at, event.until], [event.speed, 1.0])
        case Ramp():
            return _Ramp(event.at, event.steps, event.speed)
        case Periodic():
            return _periodic(event, steps)
        case Bursty():
            return _bursty(event, workers, steps, rng)
        case Replay():
            return _replay(event, workers, steps, rng)
    raise AssertionError(f"{type(event).__name__} has no course")


def _jumps(at: list[int | None], speeds: list[float]) -> _Jumps:
    known = [(step, speed) for step, speed in zip(at, speeds, strict=True) if step is not None]
    if known[0][0] > 0:
        known = [(0, 1.0), *known]
    return _Jumps(np.array([s for s, _ in known]), np.array([v for _, v in known]))


def _periodic(event: Periodic, steps: int) -> _Jumps:
    end = steps if event.until is None else event.until
    at: list[int | None] = []
    for begin in range(event.at, end, event.period):
        at += [begin, min(begin + max(1, round(event.duty * event.period)), end)]
    return _jumps(at, [event.speed, 1.0] * (len(at) // 2))


def _bursty(event: Bursty, workers: int, steps: int, rng: np.random.Generator) -> _Jumps:
    """Return phases whose lengths are geometric, each worker's own."""
    end = steps if event.until is None else event.until
    slow = np.zeros((steps, workers), dtype=np.bool_)
    for worker in range(workers):
        at = event.at + int(rng.geometric(1 / max(event.mean_gap, 1)))
        while at < end:
            length = int(rng.geometric(1 / max(event.mean_steps, 1)))
            slow[at : min(at + length, end), worker] = True
            at += length + int(rng.geometric(1 / max(event.mean_gap, 1)))
    return _kept_until_changed(np.where(slow, event.speed, 1.0))


def _replay(event: Replay, workers: int, steps: int, rng: np.random.Generator) -> _Jumps:
    recording = load_recording(event.day)
    rows = event.machines or rng.choice(len(recording), workers, replace=False).tolist()
    unknown = [row for row in rows if not 0 <= row < len(recording)]
    if unknown:
        raise ScenarioError(
            f"the recording of {event.day} has no machine {unknown[0]} "
            f"(allowed: 0 to {len(recording) - 1})"
        )
    sample = (np.arange(steps) - event.at) // event.steps_per_sample % recording.shape[1]
    speeds = np.maximum(1.0 - recording[rows][:, sample].T / 100.0, event.least_speed)
    speeds[: event.at] = 1.0
    return _kept_until_changed(speeds)


def _kept_until_changed(speeds: FloatArray) -> _Jumps:
    changed = np.flatnonzero((speeds[1:] != speeds[:-1]).any(axis=1)) + 1
    at = np.concatenate([[0], changed])
    return _Jumps(at, speeds[at])


_DATA = "../shared/data"


@lru_cache
def load_recording(day: str) -> FloatArray:
    """Return the CPU use of machines in percent, ``(machines, 288)``, every five minutes of a day.

    Source:
        PlanetLab machines, from the CoMon project (Park & Pai 2006), as published with CloudSim
        (Beloglazov & Buyya 2012). Read from the folder that EVENSTRIDE_DATA names, without it
        from ``../shared/data``.

    Raises:
        ScenarioError: it is not there.
    """
    root = os.environ.get("EVENSTRIDE_DATA") or _DATA
    path = Path(root) / "traces" / "planetlab-cpu.npz"
    try:
        with np.load(path) as file:
            return np.asarray(file[f"cpu_{day}"], dtype=np.float64)
    except (OSError, KeyError):
        raise ScenarioError(
            f"the CPU-load recording is not at {path}; set EVENSTRIDE_DATA to the folder that "
            "holds traces/planetlab-cpu.npz, or leave the replay event out"
        ) from None
