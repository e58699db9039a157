"""What traces tell of a workload: steps by size, links, noise, and trainings."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import date
from math import inf, isfinite
from pathlib import Path
from typing import Any

import numpy as np

from evenstride.core.events import Exchanged, SetShares
from evenstride.core.fleet import Shares
from evenstride.core.gradient_noise import NoiseEstimate
from evenstride.core.observation import Measured, Observation, communication_s
from evenstride.errors import ConfigError, TraceError
from evenstride.planner.workload import Device, Links, Model, Noise, Point, Profile
from evenstride.trace.codec import decode
from evenstride.trace.read import read_noise, read_records

_MOST_SIZES = 12  # of a run that balances, in which a worker may have had hundreds of shares
_FEWEST_STEPS = 3
_USUAL_LATENCY_S = 1e-4


@dataclass(frozen=True, slots=True)
class Facts:
    """What a trace says of its workload.

    Args:
        evenstride: version that ran.
        torch: the same.
        global_batch: samples per step.
        workers: how many there were.
        parameters: numbers that are trained.
        gradient_bytes: of all of them.
        digest: of their names and shapes.
        samples: of an epoch.
        device: of the leader; empty if not known.
        started_unix_s: when the run began.
    """

    evenstride: str
    torch: str
    global_batch: int
    workers: int
    parameters: int
    gradient_bytes: float
    digest: str
    samples: int
    device: str
    started_unix_s: float


def facts(trace: Path) -> Facts:
    """Return what a trace says of its workload.

    Raises:
        TraceError: it cannot be read, or ends before a step was trained.
    """
    header, workload = dict[str, Any](), dict[str, Any]()
    for record in read_records(trace):
        if record["kind"] == "header":
            header = record
        elif record["kind"] == "workload":
            workload = record
    if not workload:
        raise TraceError(
            f"{trace} does not say what was trained: no step came to its end, or no model was "
            "given to watch(); let the run take some steps"
        )
    return Facts(
        evenstride=header["evenstride"],
        torch=header["torch"],
        global_batch=header["global_batch"],
        workers=header["world_size"],
        parameters=workload["parameters"],
        gradient_bytes=workload["gradient_bytes"],
        digest=workload["digest"],
        samples=workload["samples"],
        device=workload["device"],
        started_unix_s=header["started_unix_s"],
    )


def observed(trace: Path) -> Iterator[Observation]:
    """Yield what was measured, in the order it was reported."""
    for record in read_records(trace):
        if record["kind"] == "event":
            event = decode(record["event"])
            if isinstance(event, Exchanged):
                yield from event.observations


def curve_points(trace: Path, worker: int = 0) -> tuple[Point, ...]:
    """Return a worker's steps by size.

    Of a lone process the first step of each observation is left out, as the decision is in it. Of
    many sizes, those with the most steps are taken.

    Args:
        trace: of the run.
        worker: whose steps.

    Raises:
        TraceError: none was measured.
    """
    times_s: dict[int, list[float]] = {}
    alone = facts(trace).workers == 1
    for seen in observed(trace):
        if seen.worker == worker and seen.modelled and seen.share:
            own_s = (seen.busy_s[1:] or seen.busy_s) if alone else seen.busy_s
            times_s.setdefault(seen.share, []).extend(own_s)
    if not times_s:
        raise TraceError(f"{trace} holds no measured step of worker {worker}")
    enough = {b: t for b, t in times_s.items() if len(t) >= _FEWEST_STEPS} or times_s
    most = sorted(enough, key=lambda size: (-len(enough[size]), size))[:_MOST_SIZES]
    return tuple(_point(size, enough[size]) for size in sorted(most))


def _point(samples: int, times_s: Sequence[float]) -> Point:
    mean_s = float(np.mean(times_s))
    apart = float(np.std(times_s, ddof=1)) / mean_s if len(times_s) > 1 else 0.0
    return Point(samples=samples, step_s=mean_s, scatter=min(apart, 100.0), steps=len(times_s))


def links(measured: Iterable[tuple[int, float]], gradient_bytes: float) -> Links | None:
    """Return the links that communication measured with several numbers of workers means.

    A ring of ``W`` takes ``2 (W - 1) (latency + bytes / W / bandwidth)``. With one number of
    workers only, a latency of 0.1 ms is taken out, and the rest is bandwidth.

    Args:
        measured: workers, at least 2, and seconds of their communication.
        gradient_bytes: that each sends.

    Returns:
        ``None`` if nothing was measured.
    """
    rows = [(workers, time_s) for workers, time_s in measured if workers > 1]
    if not rows:
        return None
    workers, times_s = (np.array(column, dtype=np.float64) for column in zip(*rows, strict=True))
    messages = 2 * (workers - 1)
    design = np.stack([messages, messages * gradient_bytes / workers], axis=1)
    if len(set(workers.tolist())) > 1 and gradient_bytes > 0:
        latency_s, per_byte_s = np.linalg.lstsq(design, times_s, rcond=None)[0]
        if latency_s >= 0 and per_byte_s > 0:
            return Links(latency_s=float(latency_s), bytes_per_s=float(1 / per_byte_s))
        if per_byte_s > 0:
            only = float(design[:, 1] @ times_s / (design[:, 1] @ design[:, 1]))
            return Links(latency_s=0.0, bytes_per_s=1 / only)
    rest_s = times_s - messages * _USUAL_LATENCY_S
    carried = float(design[:, 1] @ rest_s)
    if gradient_bytes > 0 and carried > 0:
        per_byte_s = carried / float(design[:, 1] @ design[:, 1])
        return Links(latency_s=_USUAL_LATENCY_S, bytes_per_s=1 / per_byte_s)
    return Links(latency_s=max(float(messages @ times_s / (messages @ messages)), 0.0))


def noise(trace: Path) -> Noise | None:
    """Return the noise scale that a run's measured steps tell; ``None`` if none was measured.

    Raises:
        TraceError: the trace cannot be read.
    """
    estimate, batches = NoiseEstimate(), list[float]()
    for _, norms in read_noise(trace):
        estimate = estimate.after(norms)
        batches.append(norms.batch)
    if not estimate.steps:
        return None
    found = estimate.scale()
    if not isfinite(found.value):
        return None
    # Where losses are means over tokens, so is the scale: back to samples.
    unit = facts(trace).global_batch / (sum(batches) / len(batches))
    high = unit * found.high if found.high < inf else None
    return Noise(scale=max(unit * found.value, 0.0), low=unit * found.low, high=high)


def profile_of_run(trace: Path, types: Sequence[str]) -> Profile:
    """Return the profile that a run makes.

    Args:
        trace: of the run.
        types: of its workers' machines, one for each, or one for all.

    Raises:
        ConfigError: there are another number of types.
        TraceError: the trace cannot be read, or tells too little.
    """
    known = facts(trace)
    if len(types) not in (1, known.workers):
        raise ConfigError(
            f"{len(types)} types for the {known.workers} workers of {trace}; give one for each, in "
            "the order of their ranks, or one for all"
        )
    each = list(types) if len(types) > 1 else list(types) * known.workers
    devices: dict[str, list[Point]] = {}
    for worker, name in enumerate(each):
        devices.setdefault(name, []).extend(curve_points(trace, worker))
    return Profile(
        evenstride=known.evenstride,
        torch=known.torch,
        made_on=date.fromtimestamp(known.started_unix_s).isoformat(),
        script=str(trace),
        model=Model(
            parameters=known.parameters, gradient_bytes=known.gradient_bytes, digest=known.digest
        ),
        samples=known.samples,
        global_batch=known.global_batch,
        devices=tuple(Device(type=n, points=tuple(points)) for n, points in devices.items()),
        links=_links_of(trace, known),
        noise=noise(trace),
    )


def _links_of(trace: Path, known: Facts) -> Links | None:
    """Return the links as one run tells them: its communication, with its own number of workers."""
    shares: Shares = ()
    for record in read_records(trace):
        if record["kind"] == "instructions":
            for one in map(decode, record["instructions"]):
                shares = one.shares if isinstance(one, SetShares) else shares
    if known.workers < 2 or not shares:
        return None
    left_s = communication_s(Measured.of(observed(trace)), shares)
    return None if left_s is None else links([(known.workers, left_s)], known.gradient_bytes)
