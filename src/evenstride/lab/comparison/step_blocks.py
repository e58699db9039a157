"""A run's speed from its trace: blocks of steps, the cold one apart."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from evenstride.core.arrays import Shares
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
    """Return the figures of a run.

    A step's wall time is the leader's work and waiting in it.

    Raises:
        TraceError: the trace cannot be read, or holds no measured step.
    """
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

    Args:
        steps: of each run, in global batches. The last one may be missing from a trace.
        asked: of each run.
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
    """Return the mean wall time of a step over some runs, without the cold block of each.

    Raises:
        TraceError: a trace cannot be read, or none holds a measured step.
    """
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

    Raises:
        TraceError: the trace holds no measured step.
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
