"""Measurements of a configuration, from the trace of its phase."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from evenstride.core.time_model.observation import (
    Measurements,
    Observation,
    communication_s,
    median,
)
from evenstride.errors import TraceError
from evenstride.planner.online_forecast import Configuration, Probe
from evenstride.planner.workload.from_trace import (
    Facts,
    drift,
    facts,
    lives_of,
    noise_of,
    overheads_of,
    settled_s,
)
from evenstride.planner.workload.workload_profile import Point
from evenstride.trace.run_log import RunLog, course_of

_AHEAD_S = 600.0  # time ahead for which a mean should hold


def facts_of(trace: Path) -> Facts | None:
    """Return the facts about the workload of a phase; ``None`` before its first step."""
    try:
        return facts(RunLog(trace, notes_only=True))
    except TraceError:
        return None


def mode_of(trace: Path) -> str:
    """Return the synchronisation mode of a phase."""
    return str(RunLog(trace, notes_only=True).header.get("sync", "bsp"))


def probe_of(trace: Path, fewest: int) -> Probe | None:
    """Return the measurement of a configuration; ``None`` before ``fewest`` steps."""
    try:
        log = RunLog(trace)
        known = facts(log)
    except TraceError:  # before its first step
        return None
    seen = [one for one in log.observations if one.modelled and one.share]
    steps = Counter[int]()
    for one in seen:
        steps[one.worker] += one.steps
    least = min(steps[worker] for worker in range(known.workers))
    if least < max(fewest, 1):
        return None
    steps_s = settled_s(seen)
    return Probe(
        Configuration(known.workers, known.global_batch),
        least,
        float(np.mean(steps_s)),
        tuple(_points(seen, worker) for worker in range(known.workers)),
        communication_s(Measurements.of(seen), log.splits[-1]) if known.workers > 1 else None,
        noise_of(course_of(log)),
        drift(steps_s, max(_AHEAD_S / sum(steps_s), 1.0)),
        overheads_of(lives_of(log)).epoch_s,
    )


def _points(seen: Sequence[Observation], worker: int) -> tuple[Point, ...]:
    """Return the step times of a worker by size, for the shape of its time curve."""
    # Medians and median deviations are robust. During the first steps, the processes of the phase
    # before still end, which would raise a mean over forty steps. `Probe.step_s` has the mean.
    times_s: dict[int, list[float]] = {}
    for one in seen:
        if one.worker == worker:
            times_s.setdefault(one.share, []).extend(one.busy_s)
    points = []
    for size, each_s in sorted(times_s.items()):
        usual_s = median(tuple(each_s))
        away = 1.4826 * median(tuple(abs(time_s - usual_s) for time_s in each_s)) / usual_s
        points.append(Point(samples=size, step_s=usual_s, scatter=away, steps=len(each_s)))
    return tuple(points)
