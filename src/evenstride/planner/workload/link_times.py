"""The links between workers, and how late the last of them is, from a run's communication times."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import numpy as np

from evenstride.core.fleet import FloatArray, Shares
from evenstride.core.time_model.observation import Measurements, communication_s
from evenstride.planner.search.step_time import lateness as of_normal
from evenstride.planner.workload.leader_processes import ProcessRecord
from evenstride.planner.workload.step_variability import MOST_NOISE
from evenstride.planner.workload.workload_profile import Links

_FEWEST_STEPS = 20


def lateness(life: ProcessRecord) -> float | None:
    """Return the noise of workers' steps that makes the last one as late as it was in a run.

    As the deviation, as a part, of normal and independent steps. Those of a run are neither, so
    what counts is how late the last one was: the mean over all steps of the maximum over workers,
    each in proportion to its mean at that share.

    Returns:
        ``None`` with one worker, or where too few steps were told of by all.
    """
    workers = [rank for rank, share in enumerate(life.shares) if share]
    if len(workers) < 2:
        return None
    each = [_relative(life, worker) for worker in workers]
    common = set(each[0]).intersection(*each[1:])
    if len(common) < _FEWEST_STEPS:
        return None
    times = np.array([[one[step] for step in sorted(common)] for one in each])
    late = float((times.max(axis=0) - times.mean(axis=0)).mean() / times.mean())
    return min(late / float(of_normal(len(workers))[-1]), MOST_NOISE)


def _relative(life: ProcessRecord, worker: int) -> dict[int, float]:
    """Return a worker's steps, by their numbers, as parts of its mean step of that share."""
    by_share = defaultdict[int, dict[int, float]](dict)
    for one in life.observations:
        if one.worker == worker and one.modelled and one.share:
            numbered = zip(
                range(one.first_step, one.first_step + one.steps), one.busy_s, strict=True
            )
            by_share[one.share].update(numbered)
    found = dict[int, float]()
    for steps_s in by_share.values():
        means: FloatArray = np.array(list(steps_s.values())) / np.mean(list(steps_s.values()))
        found.update(zip(steps_s, means.tolist(), strict=True))
    return found


_USUAL_LATENCY_S = 1e-4
_NOTHING_S = 1e-15  # per byte; less is rounding, as no link is that fast


def links(measured: Iterable[tuple[int, float]], gradient_bytes: float) -> Links | None:
    """Return the links that communication measured with several numbers of workers means.

    A ring of ``W`` takes ``2 (W - 1) (latency + bytes / W / bandwidth)``, fitted by least squares
    on relative errors, neither part below 0. With one number of workers only, a latency of 0.1 ms
    is taken out, and the rest is bandwidth.

    Returns:
        ``None`` if nothing was measured.
    """
    every = [(workers, time_s) for workers, time_s in measured if workers > 1]
    rows = [(workers, time_s) for workers, time_s in every if time_s > 0]
    if not rows:
        return Links(latency_s=0.0) if every else None
    workers, times_s = (np.array(column, dtype=np.float64) for column in zip(*rows, strict=True))
    messages = 2 * (workers - 1)
    carried = messages * gradient_bytes / workers
    if len(set(workers.tolist())) == 1:
        latency_s = min(_USUAL_LATENCY_S, float((times_s / messages).mean()))
        per_byte_s = _least(carried, times_s - latency_s * messages)
    else:
        latency_s, per_byte_s = _least_of_both(messages / times_s, carried / times_s)
    rate = 1 / per_byte_s if per_byte_s > _NOTHING_S else None
    return Links(latency_s=latency_s, bytes_per_s=rate)


def _least_of_both(first: FloatArray, second: FloatArray) -> tuple[float, float]:
    """Return how much of two things, neither below 0, comes nearest to 1 everywhere."""
    ones = np.ones(len(first))
    found = np.linalg.lstsq(np.stack([first, second], axis=1), ones, rcond=None)[0]
    if (found >= 0).all():
        return float(found[0]), float(found[1])
    alone = (_least(first, ones), 0.0), (0.0, _least(second, ones))
    return min(alone, key=lambda one: float(((one[0] * first + one[1] * second - 1) ** 2).sum()))


def _least(by: FloatArray, wanted: FloatArray) -> float:
    """Return the multiple of a thing, not below 0, that comes nearest to what is wanted."""
    square = float(by @ by)
    return max(float(by @ wanted) / square, 0.0) if square > 0 else 0.0


def links_of(life: ProcessRecord) -> Links | None:
    """Return the links as one life tells them: its communication, with its own workers."""
    workers = life.facts.workers
    if workers < 2 or not life.shares:
        return None
    left_s = mean_communication_s(Measurements.of(life.observations), life.shares)
    return None if left_s is None else links([(workers, left_s)], life.facts.gradient_bytes)


def mean_communication_s(measured: Measurements, shares: Shares) -> float | None:
    """Return the mean part of a step in which nobody waits for a slower worker.

    As `evenstride.core.time_model.observation.communication_s`, whose median is what a usual step
    takes. The mean stands for the sum of all steps: now and then a message takes many times as
    long.

    Returns:
        ``None`` unless all workers with a share have told of steps.
    """
    if communication_s(measured, shares) is None:
        return None
    least_s, reports = measured.only(measured.modelled).least_waits()
    return float(least_s[reports == reports.max()].mean())
