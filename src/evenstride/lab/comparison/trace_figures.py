"""Figures of a run from its trace: step times, rates in any mode, and curves of a calibration.

The first 40 steps of a run are its cold block, which no figure includes. Each function raises
`TraceError` if the trace cannot be read or holds too few measured steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from evenstride.core.arrays import FloatArray, Shares
from evenstride.core.time_model.observation import (
    Measurements,
    Observation,
    communication_s,
)
from evenstride.errors import TraceError
from evenstride.lab.comparison.paired_ratios import middle_mean
from evenstride.trace.run_log import RunLog

BLOCK_STEPS = 40
"""Steps of the cold block."""
PAIRED_STEPS = 20
"""Steps of each later block; blocks of two policies are compared in pairs."""

_QUARTERS = 4

Work = Sequence[tuple[int, float]]
"""Share and busy time in seconds of some steps of one worker."""


@dataclass(frozen=True, slots=True)
class RunFigures:
    """Figures of one trace."""

    policy: str  # from the header of the trace
    global_batch: int  # samples per step, before any change
    # Step time of each block; the first block is cold.
    blocks_s: tuple[float, ...]
    shares: Shares  # at the end of the run
    changes: int  # changes of the split after the opening
    # Waiting time per step of the worker that waits least.
    communication_s: float
    sync: str  # synchronisation mode; empty if the run was interrupted
    steps: int  # measured steps of the run
    work: tuple[Work, ...] = ()  # of each worker, in the steps after the cold block

    @property
    def warm_s(self) -> tuple[float, ...]:
        """Step times of the blocks after the cold one, or of the cold one if it is the only one."""
        return self.blocks_s[1:] or self.blocks_s


def run_figures(trace: Path) -> RunFigures:
    """Return the figures of a run.

    The step time is the sum of the leader's busy time and waiting time.
    """
    log = RunLog(trace)
    steps_s = dict(leader_steps(log))
    if not steps_s:
        raise TraceError(f"{trace} holds no measured step; let the run take more steps")
    steps = sorted(steps_s)
    return RunFigures(
        policy=log.header["policy"],
        global_batch=log.opening_batch,
        blocks_s=tuple(map(middle_mean, _blocks([steps_s[step] for step in steps]))),
        shares=log.splits[-1],
        changes=len(log.splits) - 1,
        communication_s=communication_s(Measurements.of(log.observations), log.splits[-1]) or 0.0,
        sync=log.summary.get("sync", ""),
        steps=len(steps),
        work=_work(log, steps[_cold_steps(len(steps))]),
    )


def _blocks(times_s: list[float]) -> list[list[float]]:
    """Cut the steps into the cold block and paired ones; leave out a last one of under half."""
    paired = range(BLOCK_STEPS, len(times_s), PAIRED_STEPS)
    blocks = [times_s[first : first + PAIRED_STEPS] for first in paired]
    return [times_s[:BLOCK_STEPS], *(one for one in blocks if len(one) >= PAIRED_STEPS // 2)]


def _cold_steps(steps: int) -> int:
    """Return how many steps of a run are cold: half of one that is too short for a paired block."""
    return BLOCK_STEPS if steps >= BLOCK_STEPS + PAIRED_STEPS // 2 else steps // 2


def _work(log: RunLog, first_step: int) -> tuple[Work, ...]:
    """Return the work of each worker from a step on, in steps whose times describe its speed."""
    found: list[list[tuple[int, float]]] = [[] for _ in log.splits[-1]]
    for seen in log.observations:
        if seen.modelled and seen.share and seen.worker < len(found):
            cold = max(first_step - seen.first_step, 0)
            found[seen.worker] += [(seen.share, busy_s) for busy_s in seen.busy_s[cold:]]
    return tuple(found)


def ended_early(steps: Iterable[float], asked: int) -> str:
    """Return a sentence if a run trained fewer steps than requested, else an empty string.

    ``steps`` are those of each run, in global batches. The last one may be missing from a trace.
    """
    fewest = round(min(steps))
    if fewest >= asked - 1:
        return ""
    return (
        f"a run ended after {fewest} of the {asked} requested steps, because the script has no "
        "more epochs; train more epochs in the script, or give a lower --steps"
    )


def leader_steps(log: RunLog) -> Iterator[tuple[int, float]]:
    """Yield each step that the leader measured, and its wall time in seconds."""
    for seen in log.observations:
        if seen.worker == 0:
            for offset, (busy_s, wait_s) in enumerate(zip(seen.busy_s, seen.wait_s, strict=True)):
                yield seen.first_step + offset, busy_s + wait_s


def mean_step_s(traces: Iterable[Path]) -> float:
    """Return the mean step time of some runs, without the cold block of each."""
    times_s: list[float] = []
    for trace in traces:
        steps_s = dict(leader_steps(RunLog(trace)))
        warm = [time_s for step, time_s in steps_s.items() if step >= BLOCK_STEPS]
        times_s += warm or steps_s.values()
    if not times_s:
        raise TraceError("no trace holds a measured step; let the runs take more steps")
    return sum(times_s) / len(times_s)


def measured_curve(trace: Path) -> dict[int, float]:
    """Return the mean step time at each size, from the trace of a worker that was calibrated alone.

    The first step of each observation is left out if there are others. A worker that trains alone
    is its own leader. It makes its decisions in that step, which takes 5 ms of processor time or
    more. At a sixth of a core this is a third of a small step. In a group, only the leader spends
    this time.
    """
    times_s: dict[int, list[float]] = {}
    for seen in RunLog(trace).observations:
        if seen.modelled:
            times_s.setdefault(seen.share, []).extend(undisturbed_s(seen))
    if not times_s:
        raise TraceError(
            f"{trace} holds no measured step, so the worker cannot be calibrated; the script must "
            "train at least a few steps"
        )
    return {size: sum(times) / len(times) for size, times in times_s.items()}


def undisturbed_s(seen: Observation) -> tuple[float, ...]:
    """Return the busy times of an observation without its first step, which may hold a decision."""
    return seen.busy_s[1:] or seen.busy_s


@dataclass(frozen=True, slots=True)
class WorkerRates:
    """Rates of one worker after the cold steps of all workers."""

    # Updates that it made: in lockstep its steps. An update at an end of the time counts in part.
    updates: float
    period_s: float  # mean seconds from one update to the next; 0 without updates
    waiting: float  # waiting time as a fraction of its time, from 0 to 1


@dataclass(frozen=True, slots=True)
class Rates:
    """Rates of a run in any mode, from its trace."""

    sync: str  # synchronisation mode
    policy: str  # from the header of the trace
    global_batch: int  # samples per step, before any change
    samples_per_s: float
    waiting: float  # waiting time of all workers as a fraction of their time
    workers: tuple[WorkerRates, ...]  # in rank order
    # Mean and maximum over the updates; ``None`` in synchronous modes.
    staleness: tuple[float, int] | None
    shares: Shares  # at the end of the run
    changes: int  # changes of the split after the opening
    steps: float  # trained global batches
    blocks_per_s: tuple[float, ...] = ()  # samples per second of all workers, in quarters


@dataclass(frozen=True, slots=True)
class _WorkerSums:
    """Cumulative sums over one worker's steps, from its start to the end of each step."""

    end_s: FloatArray  # end of each step, after a first 0
    wait_s: FloatArray  # waiting time
    samples: FloatArray  # trained samples
    updates: FloatArray  # updates made

    def between(self, from_s: float, to_s: float) -> tuple[float, float, float]:
        """Return waiting time, samples and updates between two times; steps count in part."""
        sums = (self.wait_s, self.samples, self.updates)
        waited, trained, made = (np.diff(np.interp((from_s, to_s), self.end_s, s)) for s in sums)
        return float(waited[0]), float(trained[0]), float(made[0])


def rates(trace: Path) -> Rates:
    """Return the rates of a run, in the time in which all workers were warm and training.

    A worker's time since the start is the sum of its step times. The time counts from the moment at
    which 40 global batches are trained, or half of a shorter run. It ends with the last step of the
    worker that stops first.
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
        blocks_per_s=tuple(_samples_per_s(workers, *ends) for ends in _quarters(from_s, to_s)),
        waiting=sum(one.waiting for one in each) / len(each),
        workers=each,
        staleness=_staleness(log.summary),
        shares=log.splits[-1],
        changes=len(log.splits) - 1,
        steps=sum(float(own.samples[-1]) for own in workers) / log.opening_batch,
    )


def _quarters(from_s: float, to_s: float) -> Iterator[tuple[float, float]]:
    return pairwise(np.linspace(from_s, to_s, _QUARTERS + 1).tolist())


def _samples_per_s(workers: list[_WorkerSums], from_s: float, to_s: float) -> float:
    return sum(own.between(from_s, to_s)[1] for own in workers) / (to_s - from_s)


def _workers(log: RunLog) -> list[_WorkerSums]:
    rows: dict[int, list[tuple[int, float, float, int]]] = {}
    for seen in log.observations:
        steps = range(seen.first_step, seen.first_step + seen.steps)
        mine = zip(steps, seen.busy_s, seen.wait_s, strict=True)
        rows.setdefault(seen.worker, []).extend((*one, seen.share) for one in mine)
    if not rows:
        raise TraceError(f"{log.path} holds no measured step; let the run take more steps")
    return [_own(sorted(rows[worker])) for worker in sorted(rows)]


def _own(rows: list[tuple[int, float, float, int]]) -> _WorkerSums:
    _, busy_s, wait_s, samples = np.array([(0,) * 4, *rows], dtype=np.float64).T
    return _WorkerSums(*map(np.cumsum, (busy_s + wait_s, wait_s, samples, samples > 0)))


def _warm(workers: list[_WorkerSums], global_batch: int) -> tuple[float, float]:
    """Return the time at which all workers are warm, and the time at which the first one stops."""
    moments = np.unique(np.concatenate([own.end_s for own in workers]))
    trained = sum(np.interp(moments, own.end_s, own.samples) for own in workers)
    cold = min(BLOCK_STEPS * global_batch, trained[-1] / 2)
    return float(np.interp(cold, trained, moments)), float(min(own.end_s[-1] for own in workers))


def _staleness(summary: dict[str, Any]) -> tuple[float, int] | None:
    stale: dict[str, Any] | None = summary.get("staleness")
    return (stale["mean"], stale["maximum"]) if stale else None
