"""What a run's trace tells of its speed: by steps, in any mode by time, and alone by size.

By steps, the first block is cold and counted apart. Each function raises `TraceError` if the trace
cannot be read, or holds too few measured steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from evenstride.core.arrays import FloatArray, Shares
from evenstride.core.time_model.observation import (
    Measurements,
    Observation,
    communication_s,
    median,
)
from evenstride.errors import TraceError
from evenstride.trace.run_log import RunLog

BLOCK_STEPS = 40


@dataclass(frozen=True, slots=True)
class RunFigures:
    """What one trace tells."""

    policy: str  # as the run's header names it
    global_batch: int  # samples per step, at first if they changed
    blocks_s: tuple[float, ...]  # median step of each block, the first one cold
    shares: Shares  # in force at the end
    changes: int  # of the split after the opening
    communication_s: float  # of a step, what was left of it for the worker that waited least
    sync: str  # mode of synchronisation; empty if the run did not end in order
    steps: int  # measured steps of the run

    @property
    def warm_s(self) -> tuple[float, ...]:
        """Blocks after the cold one; that one if there is no other."""
        return self.blocks_s[1:] or self.blocks_s


def run_figures(trace: Path) -> RunFigures:
    """Return the figures of a run; a step's wall time is the leader's work and waiting in it."""
    log = RunLog(trace)
    steps_s = dict(leader_steps(log))
    if not steps_s:
        raise TraceError(f"{trace} holds no measured step; let the run take more steps")
    times_s = [steps_s[step] for step in sorted(steps_s)]
    blocks = [times_s[i : i + BLOCK_STEPS] for i in range(0, len(times_s), BLOCK_STEPS)]
    whole = [block for block in blocks if len(block) >= BLOCK_STEPS // 2] or blocks[:1]
    return RunFigures(
        policy=log.header["policy"],
        global_batch=log.opening_batch,
        blocks_s=tuple(median(tuple(block)) for block in whole),
        shares=log.splits[-1],
        changes=len(log.splits) - 1,
        communication_s=communication_s(Measurements.of(log.observations), log.splits[-1]) or 0.0,
        sync=log.summary.get("sync", ""),
        steps=len(steps_s),
    )


def ended_early(steps: Iterable[float], asked: int) -> str:
    """Return a sentence if a run trained fewer steps than it was asked for, else nothing.

    ``steps`` are those of each run, in global batches. The last one may be missing from a trace.
    """
    fewest = round(min(steps))
    if fewest >= asked - 1:
        return ""
    return (
        f"a run ended after {fewest} of the {asked} steps asked for, because the script has no "
        "more epochs; let it train more epochs, or give a lower --steps"
    )


def leader_steps(log: RunLog) -> Iterator[tuple[int, float]]:
    """Yield each step that the leader has measured, and its wall time in seconds."""
    for seen in log.observations:
        if seen.worker == 0:
            for offset, (busy_s, wait_s) in enumerate(zip(seen.busy_s, seen.wait_s, strict=True)):
                yield seen.first_step + offset, busy_s + wait_s


def mean_step_s(traces: Iterable[Path]) -> float:
    """Return the mean wall time of a step over some runs, without the cold block of each."""
    times_s: list[float] = []
    for trace in traces:
        steps_s = dict(leader_steps(RunLog(trace)))
        warm = [time_s for step, time_s in steps_s.items() if step >= BLOCK_STEPS]
        times_s += warm or steps_s.values()
    if not times_s:
        raise TraceError("no trace holds a measured step; let the runs take more steps")
    return sum(times_s) / len(times_s)


def measured_curve(trace: Path) -> dict[int, float]:
    """Return a lone worker's mean step time at each size, from a calibration's trace.

    The first step of each observation is left out where there are others. A lone worker decides in
    the midst of training, and what that takes is in it: five milliseconds of processor time or
    more, which at a sixth of a core is a third of a small step, and which a worker of many would
    spend elsewhere.
    """
    times_s: dict[int, list[float]] = {}
    for seen in RunLog(trace).observations:
        if seen.modelled:
            times_s.setdefault(seen.share, []).extend(undisturbed_s(seen))
    if not times_s:
        raise TraceError(f"{trace} holds no measured step, so the worker cannot be calibrated")
    return {size: sum(times) / len(times) for size, times in times_s.items()}


def undisturbed_s(seen: Observation) -> tuple[float, ...]:
    """Return the busy times of an observation, but for the one in which a decision may be."""
    return seen.busy_s[1:] or seen.busy_s


@dataclass(frozen=True, slots=True)
class WorkerRates:
    """What one worker did once all were warm."""

    # That it made; in lockstep its steps. Of one cut by an end of that time, its part.
    updates: float
    period_s: float  # mean seconds from one to the next; 0 if it made none
    waiting: float  # the part of its time in which it waited, from 0 to 1


@dataclass(frozen=True, slots=True)
class Rates:
    """What one trace tells of a run in any mode."""

    sync: str  # mode of synchronisation
    policy: str  # as the run's header names it
    global_batch: int  # samples per step, at first if they changed
    samples_per_s: float  # trained by all workers
    waiting: float  # the part of all workers' time in which they waited
    workers: tuple[WorkerRates, ...]  # in rank order
    # ``mean`` and ``maximum`` of the updates; ``None`` where all wait for all.
    staleness: tuple[float, int] | None
    shares: Shares  # in force at the end
    changes: int  # of the split after the opening
    steps: float  # global batches that were trained


@dataclass(frozen=True, slots=True)
class _Own:
    """One worker's steps, in order, summed up: from its start to the end of each."""

    end_s: FloatArray  # when each ended, and 0 before
    wait_s: FloatArray  # for how long it had waited by then
    samples: FloatArray  # that it had trained
    updates: FloatArray  # that it had made

    def between(self, from_s: float, to_s: float) -> tuple[float, float, float]:
        """Return waiting, samples and updates in a stretch of time; of a step cut, its part."""
        sums = (self.wait_s, self.samples, self.updates)
        waited, trained, made = (np.diff(np.interp((from_s, to_s), self.end_s, s)) for s in sums)
        return float(waited[0]), float(trained[0]), float(made[0])


def rates(trace: Path) -> Rates:
    """Return the rates of a run, in the time in which all workers were warm and at work.

    Every worker's steps, laid end to end, are its time since the start. All are warm when 40
    global batches were trained, or in a short run half of it; and the first to have no further
    step ends what is counted.
    """
    log = RunLog(trace)
    workers = _workers(log)
    from_s, to_s = _warm(workers, log.opening_batch)
    if to_s <= from_s:
        raise TraceError(f"{trace} holds too few measured steps; let the run take more steps")
    length_s = to_s - from_s
    warm = [own.between(from_s, to_s) for own in workers]
    each = tuple(
        WorkerRates(made, length_s / made if made else 0.0, waited_s / length_s)
        for waited_s, _, made in warm
    )
    return Rates(
        sync=log.summary.get("sync", ""),
        policy=log.header["policy"],
        global_batch=log.opening_batch,
        samples_per_s=sum(samples for _, samples, _ in warm) / length_s,
        waiting=sum(one.waiting for one in each) / len(each),
        workers=each,
        staleness=_staleness(log.summary),
        shares=log.splits[-1],
        changes=len(log.splits) - 1,
        steps=sum(float(own.samples[-1]) for own in workers) / log.opening_batch,
    )


def _workers(log: RunLog) -> list[_Own]:
    rows: dict[int, list[tuple[int, float, float, int]]] = {}
    for seen in log.observations:
        steps = range(seen.first_step, seen.first_step + seen.steps)
        mine = zip(steps, seen.busy_s, seen.wait_s, strict=True)
        rows.setdefault(seen.worker, []).extend((*one, seen.share) for one in mine)
    if not rows:
        raise TraceError(f"{log.path} holds no measured step; let the run take more steps")
    return [_own(sorted(rows[worker])) for worker in sorted(rows)]


def _own(rows: list[tuple[int, float, float, int]]) -> _Own:
    _, busy_s, wait_s, samples = np.array([(0,) * 4, *rows], dtype=np.float64).T
    return _Own(*map(np.cumsum, (busy_s + wait_s, wait_s, samples, samples > 0)))


def _warm(workers: list[_Own], global_batch: int) -> tuple[float, float]:
    """Return when all were warm, and when the first had no further step."""
    moments = np.unique(np.concatenate([own.end_s for own in workers]))
    trained = sum(np.interp(moments, own.end_s, own.samples) for own in workers)
    cold = min(BLOCK_STEPS * global_batch, trained[-1] / 2)
    return float(np.interp(cold, trained, moments)), float(min(own.end_s[-1] for own in workers))


def _staleness(summary: dict[str, Any]) -> tuple[float, int] | None:
    stale: dict[str, Any] | None = summary.get("staleness")
    return (stale["mean"], stale["maximum"]) if stale else None
