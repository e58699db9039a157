"""The speed of some workers over the steps of a run, as one event has it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from evenstride.core.fleet import FloatArray, IntArray
from evenstride.sim.scenario.scenario_events import Bursty, LoadReplay, Periodic, Ramp, SpeedStep

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
        """Return the part of a course that a run of so many steps sees."""
        seen = steps < run
        return cls(workers, steps[seen], speeds[seen])


def stepped(event: SpeedStep, workers: IntArray, run: int) -> SpeedProfile:
    """Return another speed from one step on, up to another one."""
    steps = [event.at] if event.until is None else [event.at, event.until]
    return SpeedProfile.within(
        run, workers, np.array(steps), np.array([event.speed, 1.0][: len(steps)])
    )


def ramped(event: Ramp, workers: IntArray, run: int) -> SpeedProfile:
    """Return an even change."""
    steps = np.arange(event.at, min(event.at + event.steps, run))
    part = (steps - event.at + 1) / event.steps
    return SpeedProfile(workers, steps, 1.0 + part * (event.speed - 1.0))


def periodic(event: Periodic, workers: IntArray, run: int) -> SpeedProfile:
    """Return slow phases that begin again and again."""
    end = _end(event, run)
    begins = np.arange(event.at, end, event.period)
    ends = np.minimum(begins + max(1, round(event.duty * event.period)), end)
    steps = np.stack([begins, ends], axis=1).ravel()
    return SpeedProfile.within(run, workers, steps, np.tile([event.speed, 1.0], len(begins)))


def bursty(event: Bursty, workers: IntArray, run: int, key: Sequence[int]) -> SpeedProfile:
    """Return slow phases whose lengths and gaps are geometric.

    Each worker draws from a generator of its own, so that nobody's phases hang on how long the
    run is, or on who else is in the event.
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
    """Return what recorded load leaves.

    Args:
        event: asks for it.
        workers: their numbers.
        run: steps of the run.
        recording: load in percent, ``(machines, samples)``; it begins again after its end.
        rows: of the recording, one for each worker.
    """
    steps = np.arange(event.at, run, event.steps_per_sample)
    sample = np.arange(len(steps)) % recording.shape[1]
    left = 1.0 - recording[np.asarray(rows)][:, sample].T / 100.0
    return SpeedProfile(workers, steps, np.maximum(left, event.least_speed))


def _end(event: Periodic | Bursty, run: int) -> int:
    return run if event.until is None else min(event.until, run)
