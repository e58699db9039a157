"""A run's rates from its trace, in any mode of synchronisation: by time, not by step."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from evenstride.core.arrays import FloatArray, Shares
from evenstride.errors import TraceError
from evenstride.lab.comparison.step_blocks import BLOCK_STEPS
from evenstride.trace.run_log import RunLog


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

    Raises:
        TraceError: the trace cannot be read, or holds too few measured steps.
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
