"""A workload from the trace of a run: steps by size, links, overheads, and noise.

A resumed run has several processes. Steps are not normally distributed. Most take about the same
time, and some take many times as long; and a shared machine has fast and slow minutes. So
noise is measured by its effect, which is the delay of the last worker. The error of a mean is the
scatter between blocks of steps, not its standard error, which ignores changes over minutes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from itertools import pairwise
from math import comb, inf, isfinite, log, log1p, pi, sqrt
from operator import add
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import ValidationError

from evenstride.core.convergence.regression import t975
from evenstride.core.convergence.settled_noise import settling
from evenstride.core.fleet import FloatArray, Shares
from evenstride.core.gradients.noise_scale import Z95, NoiseEstimate
from evenstride.core.sampling.partition import UNKNOWN_LENGTH
from evenstride.core.time_model.observation import Measurements, Observation, communication_s
from evenstride.errors import ConfigError, TraceError
from evenstride.planner.workload.step_time import lateness as of_normal
from evenstride.planner.workload.step_time import links
from evenstride.planner.workload.workload_profile import (
    DeviceProfile,
    Links,
    MeasuredCluster,
    Model,
    Noise,
    Point,
    WorkloadProfile,
)
from evenstride.trace.read import pass_of
from evenstride.trace.run_log import ProcessLog, RunLog, TrainingHistory, course_of, field_of


@dataclass(frozen=True, slots=True)
class Facts:
    """The properties of a trace's workload."""

    evenstride: str  # version of the run.
    torch: str  # the same.
    global_batch: int  # samples per step.
    workers: int  # their number.
    parameters: int  # number of trained values.
    gradient_bytes: float  # of all of them.
    digest: str  # of their names and shapes.
    samples: int  # of an epoch.
    device: str  # the maker's name of the leader's device; empty for a processor.
    started_unix_s: float  # start of the run.

    @property
    def computed_on(self) -> Literal["cpu", "cuda"]:
        """What computes the steps: ``cuda`` or ``cpu``, wherever the parameters are."""
        return "cuda" if self.device else "cpu"


@dataclass(frozen=True, slots=True)
class ProcessRecord:
    """The records of one process of the leader: from its header to the next one."""

    facts: Facts  # of its workload
    workers: tuple[str, ...]  # names of the workers, as ``host/rank``
    shares: Shares  # the last ones in force
    observations: tuple[Observation, ...]  # measurements, in the order of the reports
    # Start of each pass over the data, in seconds, and its first step
    passes: tuple[tuple[float, int], ...] = ()


def facts(log: RunLog) -> Facts:
    """Return the properties of a trace's workload; of a resumed run, those of its last process.

    Raises:
        TraceError: a record is invalid, or the trace ends before the first step.
    """
    known = [_facts(process, log.path) for process in log.processes]
    return _last_known(known, log.path)


def lives_of(log: RunLog) -> tuple[ProcessRecord, ...]:
    """Return the processes of a run, without those that completed no step.

    Processes with another model than the last one's have another workload and are left out.

    Raises:
        TraceError: a record is invalid, or there is no such process.
    """
    known = [(_facts(process, log.path), process) for process in log.processes]
    last = _last_known([of for of, _ in known], log.path)
    return tuple(
        ProcessRecord(
            facts=of,
            workers=process.generations[-1].workers if process.generations else (),
            shares=next(reversed(list(process.splits)), ()),
            observations=tuple(process.observations),
            passes=tuple(_begun_passes(process, log.path)),
        )
        for of, process in known
        if of is not None and of.digest == last.digest
    )


def _begun_passes(process: ProcessLog, trace: Path) -> Iterator[tuple[float, int]]:
    """Yield when passes began and with which step, if the trace has the time."""
    for record in process.of_kind("pass"):
        begun = pass_of(record, process.header.get("global_batch"), trace)
        if begun.at_s is not None:
            yield begun.at_s, begun.step


def _facts(process: ProcessLog, trace: Path) -> Facts | None:
    workload = next(reversed(list(process.of_kind("workload"))), None)
    if workload is None:
        return None

    def value(record: dict[str, Any], name: str, kind: Any) -> Any:
        return field_of(record, name, kind, trace)

    return Facts(
        evenstride=value(process.header, "evenstride", str),
        torch=value(process.header, "torch", str),
        global_batch=value(process.header, "global_batch", int),
        workers=value(process.header, "world_size", int),
        parameters=value(workload, "parameters", int),
        gradient_bytes=value(workload, "gradient_bytes", int | float),
        digest=value(workload, "digest", str),
        samples=value(workload, "samples", int),
        device=value(workload, "device", str),
        started_unix_s=value(process.header, "started_unix_s", int | float),
    )


def _last_known(found: Sequence[Facts | None], trace: Path) -> Facts:
    known = [one for one in found if one is not None]
    if not known:
        raise TraceError(
            f"{trace} does not describe its workload: no step was completed, or no model was "
            "passed to watch(); let the run complete some steps"
        )
    return known[-1]


_TOGETHER = 4  # workers whose last one defines the noise of a single process
_LAST_OF_FOUR = 1.0293753730039643  # expected maximum of four normal values, in deviations
_WINDOW = 16  # steps within which a machine's speed does not drift
MOST_NOISE = 100.0
_BLOCKS = (4, 8)
_FEWEST_IN_BLOCK = 4
_MOST = 0.7  # largest error of a mean of seconds, a factor of 4 with 95 %; assumed
_LEAST = 0.02  # smallest error, per square root of a factor e in duration; assumed


def scatter(times_s: Sequence[float] | FloatArray) -> float:
    """Return the relative deviation of normal steps whose last one is as late as that of these.

    It computes the delay of the last of four workers with steps like these, drawn from 16
    consecutive steps. For normal steps the result is their own deviation, for others the relevant
    one. Slower changes are not noise, because balancing follows them or they are common to all.
    The steps, in seconds, are consecutive.
    """
    steps = np.asarray(times_s, dtype=np.float64)
    if len(steps) < _TOGETHER:
        return _two_by_two(steps)
    size = min(_WINDOW, len(steps))
    windows = np.sort(steps[: len(steps) // size * size].reshape(-1, size), axis=1)
    # Probability that each of a window's steps is the last of four different ones of them.
    weights = np.array([comb(n, _TOGETHER - 1) for n in range(size)]) / comb(size, _TOGETHER)
    late_s = float((windows @ weights - windows.mean(axis=1)).mean())
    return min(late_s / _LAST_OF_FOUR / float(windows.mean()), MOST_NOISE)


def _two_by_two(steps: FloatArray) -> float:
    if len(steps) < 2:
        return 0.0
    apart = float(np.mean([abs(a - b) for a, b in pairwise(steps.tolist())]))
    return min(0.5 * sqrt(pi) * apart / float(steps.mean()), MOST_NOISE)


def drift(times_s: Sequence[float] | FloatArray, ahead: float) -> float:
    """Return the relative standard deviation of the mean of future steps.

    Besides the scatter of single steps, which averages out, a machine's speed drifts. The drift is
    the excess distance between blocks of steps over what their steps explain. It is assumed to grow
    with time as flicker noise does: each doubling adds the same variance. The steps are
    consecutive; the future ones last ``ahead`` times as long.

    Source:
        The law of flicker noise, by which the variance of a mean over ``T`` within ``k T`` grows
        with ``log k``; its use for machines is ours. On two recorded runs of minutes on busy
        machines, 95 % intervals from the first seconds held the rest in 60 to 85 % of cases; those
        from standard errors did in 30 %.
    """
    steps = np.asarray(times_s, dtype=np.float64) / float(np.mean(times_s))
    white = float(np.mean(np.square(np.diff(steps)))) / 2 if len(steps) > 1 else 0.0
    wanders = max((_wanders(steps, blocks, white) for blocks in _BLOCKS), default=0.0)
    found = sqrt(white / len(steps) + max(wanders, _LEAST**2) * log1p(ahead))
    return min(found, _MOST)


def _wanders(steps: FloatArray, blocks: int, white: float) -> float:
    """Return the variance that each factor e in time adds, with Student's t of the few blocks."""
    size = len(steps) // blocks
    if size < _FEWEST_IN_BLOCK:
        return 0.0
    means = steps[: size * blocks].reshape(blocks, size).mean(axis=1)
    beyond = max(float(means.var(ddof=1)) - white / size, 0.0)
    return beyond / log(blocks) * (t975(blocks - 1) / Z95) ** 2


@dataclass(frozen=True, slots=True)
class Overheads:
    """The mean overheads that step times and waiting times do not contain."""

    # Per step: unusual times between steps, and waiting times for decisions
    step_s: float
    # Per pass, beyond its usual steps: evaluation, saving, and the start of loading; ``None`` if
    # no pass was recorded from its start to that of the next one
    epoch_s: float | None


def overheads_of(lives: Iterable[ProcessRecord]) -> Overheads:
    """Return the overheads of a run beyond its steps.

    Of each process with several whole passes the first one is left out, because everything is slow
    in it. Steps and overheads then sum to the measured time of the passes.
    """
    each = list(lives)
    known = [one for life in each for one in _whole_passes(life)]
    if not known:
        return Overheads(_between_s([one for life in each for one in _leaders(life)]), None)
    passes, sums = len(known), np.array(known).sum(axis=0)
    steps, inner_s, outer_s = sums.tolist()
    return Overheads(max(inner_s, 0.0) / max(steps, 1.0), max(outer_s, 0.0) / passes)


def _between_s(seen: Sequence[Observation]) -> float:
    usual = [one for one in seen if one.modelled]
    steps = sum(one.steps for one in usual)
    return sum(one.outside_s + one.control_wait_s for one in usual) / steps if steps else 0.0


def _leaders(life: ProcessRecord) -> list[Observation]:
    return [one for one in life.observations if one.worker == 0]


def _whole_passes(life: ProcessRecord) -> Iterator[tuple[float, float, float]]:
    """Yield steps, seconds between them, and remaining seconds, of each whole pass."""
    seen = sorted(_leaders(life), key=lambda one: one.first_step)
    first_steps, whole = [one.first_step for one in seen], list(pairwise(life.passes))
    for (begun_s, first), (ended_s, end) in whole[1:] or whole:
        own = seen[bisect_left(first_steps, first) : bisect_left(first_steps, end)]
        usual = [time_s for o in own if o.modelled for time_s in map(add, o.busy_s, o.wait_s)]
        if usual and sum(one.steps for one in own) == end - first:
            # A pass's first step counts as a usual one; its excess belongs to the pass.
            left_s = ended_s - begun_s - float(np.mean(usual)) * (end - first)
            inner_s = min(_between_s(own) * (end - first), max(left_s, 0.0))
            yield end - first, inner_s, left_s - inner_s


_FEWEST_COMMON = 20


def lateness(life: ProcessRecord) -> float | None:
    """Return the noise of workers' steps that explains the delay of the last one in a run.

    It is the relative deviation of normal and independent steps. Those of a run are neither, so
    the delay of the last one counts: the mean over all steps of the maximum over workers, each
    relative to its mean at that share. ``None`` with one worker, or if too few steps
    were reported by all.
    """
    workers = [rank for rank, share in enumerate(life.shares) if share]
    if len(workers) < 2:
        return None
    each = [_relative(life, worker) for worker in workers]
    common = set(each[0]).intersection(*each[1:])
    if len(common) < _FEWEST_COMMON:
        return None
    times = np.array([[one[step] for step in sorted(common)] for one in each])
    late = float((times.max(axis=0) - times.mean(axis=0)).mean() / times.mean())
    return min(late / float(of_normal(len(workers))[-1]), MOST_NOISE)


def _relative(life: ProcessRecord, worker: int) -> dict[int, float]:
    """Return a worker's steps, by their numbers, relative to its mean step of that share."""
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


def links_of(life: ProcessRecord) -> Links | None:
    """Return the links from one process: its communication, with its own workers."""
    workers = life.facts.workers
    if workers < 2 or not life.shares:
        return None
    left_s = mean_communication_s(Measurements.of(life.observations), life.shares)
    return None if left_s is None else links([(workers, left_s)], life.facts.gradient_bytes)


def mean_communication_s(measured: Measurements, shares: Shares) -> float | None:
    """Return the mean time of a step in which no worker waits for a slower one.

    The median of `core.time_model.observation.communication_s` describes a usual step. The mean
    represents the sum of all steps: occasionally a message takes many times as long. ``None``
    unless all workers with a share have reported steps.
    """
    if communication_s(measured, shares) is None:
        return None
    least_s, reports = measured.only(measured.modelled).least_waits()
    return float(least_s[reports == reports.max()].mean())


_MOST_SIZES = 12  # of a balanced run, in which a worker may have had hundreds of shares
_FEWEST_STEPS = 3
_AHEAD_S = 600.0  # duration for which a mean must hold; over longer ones, drift averages out
_SHOWN = 40  # characters of an invalid value

_Times = dict[int, list[float]]  # seconds of steps by their samples


def curve_points(trace: Path, worker: int = 0) -> tuple[Point, ...]:
    """Return a worker's steps by size; of a resumed run, those of its last process.

    Means of all steps with their overheads, because training takes their sum, and a few slow steps
    may be much of it. For a single process the first step of each size is left out,
    because it contains the change. Of many sizes, those with the most steps are used.
    """
    times_s, life = _Times(), lives_of(RunLog(trace))[-1]
    _add_times(times_s, life, worker)
    if not times_s:
        raise TraceError(f"{trace} has no measured step of worker {worker}")
    return _points(times_s, overheads_of([life]).step_s)


def _add_times(times_s: _Times, life: ProcessRecord, worker: int) -> None:
    alone, before = life.facts.workers == 1, 0
    for seen in life.observations:
        if seen.worker == worker and seen.modelled and seen.share:
            # A single worker waits for no other, so its waits are its own: stalls of the machine.
            own_s = tuple(map(add, seen.busy_s, seen.wait_s)) if alone else seen.busy_s
            own_s = (own_s[1:] or own_s) if alone and seen.share != before else own_s
            times_s.setdefault(seen.share, []).extend(own_s)
            before = seen.share


def _points(times_s: Mapping[int, Sequence[float]], beside_s: float) -> tuple[Point, ...]:
    enough = {b: t for b, t in times_s.items() if len(t) >= _FEWEST_STEPS} or times_s
    most = sorted(enough, key=lambda size: (-len(enough[size]), size))[:_MOST_SIZES]
    return tuple(_point(size, enough[size], beside_s) for size in sorted(most))


def _point(samples: int, times_s: Sequence[float], beside_s: float) -> Point:
    whole_s = np.array(times_s) + beside_s
    return Point(
        samples=samples,
        step_s=float(whole_s.mean()),
        scatter=scatter(whole_s),
        steps=len(times_s),
        drift=drift(whole_s, max(_AHEAD_S / float(whole_s.sum()), 1.0)),
    )


def noise_of(course: TrainingHistory, until: float = inf) -> Noise | None:
    """Return the noise scale from a run's measured steps; ``None`` if none was measured.

    It is the settled noise: without the first steps, until it no longer changes. If it has not
    settled, all steps count, and the interval includes the change. With ``until``, the epochs of a
    whole training, all its steps count the same: their epochs depend on the overall noise.
    """
    estimate, counted = NoiseEstimate(), [one for one in course.steps if not one.epochs > until]
    found_settling = None if until < inf else settling([one.norms.gain for one in counted])
    if found_settling is not None and found_settling.settled:
        counted = counted[found_settling.left_out :]
    for step in counted:
        estimate = estimate.after(step.norms, memory=inf)
    if not estimate.steps:
        return None
    found = estimate.scale()
    if not isfinite(found.value):
        return None
    # If losses are means over tokens, so is the scale: convert it to samples. The usual step is a
    # full one, but an epoch's last step need not be.
    unit = float(np.median([step.samples / step.norms.batch for step in counted]))
    down, up = 1.0, 1.0
    if found_settling is not None and not found_settling.settled:
        change = found_settling.change
        # Without a bound, if there are too few steps to compare.
        down, up = 1 + min(change.low, 0.0), 1 + max(change.high, 0.0)
    high = unit * found.high * up
    return Noise(
        scale=max(unit * found.value, 0.0),
        low=unit * found.low * down,
        high=high if high < inf else None,
        settled=None if found_settling is None else found_settling.settled,
    )


def profile_of_run(trace: Path, types: Sequence[str]) -> WorkloadProfile:
    """Return the profile of a run.

    A resumed run counts as a whole, except for its links, which are those of its last process.

    Raises:
        ConfigError: the number of types is wrong.
        TraceError: the trace cannot be read, or lacks data.
    """
    log = RunLog(trace)
    lives = lives_of(log)
    workers = len(lives[-1].workers)
    if len(types) not in (0, 1, workers):
        raise ConfigError(
            f"{len(types)} types were given for the {workers} workers of {trace}; give one for "
            "each, in the order of their ranks, or one for all"
        )
    try:
        return _profile(log, lives, types)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field, given = ".".join(map(str, first["loc"])), str(first["input"])[:_SHOWN]
        raise TraceError(
            f"cannot make a profile of {trace}: {field} is {given}: {first['msg']}; use the run's "
            "original trace, and the catalogue's names of machines for --as"
        ) from None


def _profile(log: RunLog, lives: Sequence[ProcessRecord], types: Sequence[str]) -> WorkloadProfile:
    known, others = lives[-1].facts, overheads_of(lives)
    if known.samples >= UNKNOWN_LENGTH:
        raise TraceError(
            f"{log.path} is of data without a known length, so a plan cannot count its epochs; "
            "record a run with evenstride.Stream(source, length=...), or with a data set"
        )
    return WorkloadProfile(
        evenstride=known.evenstride,
        torch=known.torch,
        made_on=_day(known.started_unix_s, log.path),
        model=Model(
            parameters=known.parameters, gradient_bytes=known.gradient_bytes, digest=known.digest
        ),
        samples=known.samples,
        global_batch=known.global_batch,
        devices=tuple(_devices(lives, types, log.path, others)) if types else (),
        clusters=tuple(_clusters(lives[-1], types)),
        links=links_of(lives[-1]),
        noise=noise_of(course_of(log)),
        beside_s=others.epoch_s if types else None,
    )


_MOST_UNSETTLED = 200  # steps


def settled_s(seen: Sequence[Observation]) -> list[float]:
    """Return the step times of the first worker once the shares have settled."""
    # Of few steps, the later half. Each step includes its part of the time outside the steps that
    # were reported with it, so that the sum is the time of the training.
    mine = sorted((one for one in seen if one.worker == 0), key=lambda one: one.first_step)
    times_s = [
        busy_s + wait_s + (one.outside_s + one.control_wait_s) / one.steps
        for one in mine
        for busy_s, wait_s in zip(one.busy_s, one.wait_s, strict=True)
    ]
    return times_s[min(len(times_s) // 2, _MOST_UNSETTLED) :]


def _clusters(life: ProcessRecord, types: Sequence[str]) -> Iterator[MeasuredCluster]:
    """Yield the steps of all workers of a process together, if the types are known."""
    alone, batch = life.facts.workers == 1, life.facts.global_batch
    whole = [
        one
        for one in life.observations
        # A single process may calibrate with other batches.
        if one.modelled and one.share and (one.share == batch or not alone)
    ]
    times_s, workers = settled_s(whole), len({one.worker for one in life.observations})
    if types and times_s:
        yield MeasuredCluster(
            types=tuple(types) if len(types) > 1 else tuple(types) * workers,
            batch=batch,
            step_s=float(np.mean(times_s)),
            drift=drift(times_s, max(_AHEAD_S / sum(times_s), 1.0)),
        )


def _day(unix_s: float, trace: Path) -> str:
    try:
        return date.fromtimestamp(unix_s).isoformat()
    except (OverflowError, OSError, ValueError):
        raise TraceError(
            f"{trace} has an invalid start of {unix_s:g} s after 1970; use the run's original trace"
        ) from None


def _devices(
    lives: Sequence[ProcessRecord], types: Sequence[str], trace: Path, others: Overheads
) -> Iterable[DeviceProfile]:
    """Yield the steps of workers of each type, over all processes in which their type is known."""
    late = lateness(lives[-1])
    times_s: dict[str, dict[str, _Times]] = {name: {} for name in types}
    for life in lives:
        for worker, name in enumerate(life.workers):
            of = _type_of(name, lives[-1].workers, types)
            if of is not None:
                _add_times(times_s[of].setdefault(name, {}), life, worker)
    for of, by_worker in times_s.items():
        points = [
            point if late is None else point.model_copy(update={"scatter": late})
            for each_s in by_worker.values()
            if each_s
            for point in _points(each_s, others.step_s)
        ]
        if not points:
            raise TraceError(f"{trace} has no measured step of a worker of type {of}")
        yield DeviceProfile(
            type=of,
            device=lives[-1].facts.device,
            computed_on=lives[-1].facts.computed_on,
            points=tuple(points),
        )


def _type_of(name: str, workers: Sequence[str], types: Sequence[str]) -> str | None:
    """Return the type of a worker's machine, from the last process; ``None`` if not known.

    Launchers assign ranks again, so a machine is known by its host, unless that has several types.
    """
    if len(types) == 1:
        return types[0]
    named = list(zip(workers, types, strict=True))
    on_host = {kind for worker, kind in named if _host(worker) == _host(name)}
    return on_host.pop() if len(on_host) == 1 else dict(named).get(name)


def _host(worker: str) -> str:
    return worker.rpartition("/")[0] or worker
