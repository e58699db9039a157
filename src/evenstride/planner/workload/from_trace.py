"""What the trace of a run tells of its workload: steps by size, links, and noise."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import date
from math import inf, isfinite
from operator import add
from pathlib import Path

import numpy as np
from pydantic import ValidationError

from evenstride.core.gradients.noise_scale import NoiseEstimate
from evenstride.errors import ConfigError, TraceError
from evenstride.planner.workload.leader_processes import ProcessRecord, lives_of
from evenstride.planner.workload.link_times import lateness, links_of
from evenstride.planner.workload.overheads import Overheads, beside
from evenstride.planner.workload.step_variability import drift, scatter
from evenstride.planner.workload.workload_profile import (
    DeviceProfile,
    Model,
    Noise,
    Point,
    WorkloadProfile,
)
from evenstride.trace.history import TrainingHistory, course_of
from evenstride.trace.run_log import RunLog

_MOST_SIZES = 12  # of a run that balances, in which a worker may have had hundreds of shares
_FEWEST_STEPS = 3
_AHEAD_S = 600.0  # for which a mean is to hold; over longer, what a machine wanders by evens out
_SHOWN = 40  # characters of what cannot be used

_Times = dict[int, list[float]]  # seconds of steps by their samples


def curve_points(trace: Path, worker: int = 0) -> tuple[Point, ...]:
    """Return a worker's steps by size; of a run that was continued, in its last life.

    Means of all steps, with what they took beside, as the sum of them is what a training takes, of
    which much may be in a few slow ones. Of a lone process the first step of each size is left out,
    as the change is in it. Of many sizes, those with the most steps are taken.

    Raises:
        TraceError: none was measured.
    """
    times_s, life = _Times(), lives_of(RunLog(trace))[-1]
    _add_times(times_s, life, worker)
    if not times_s:
        raise TraceError(f"{trace} holds no measured step of worker {worker}")
    return _points(times_s, beside([life]).step_s)


def _add_times(times_s: _Times, life: ProcessRecord, worker: int) -> None:
    alone, before = life.facts.workers == 1, 0
    for seen in life.observations:
        if seen.worker == worker and seen.modelled and seen.share:
            # Alone it waits for nobody, so that its waits are its own: stalls of the machine.
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
    """Return the noise scale that a run's measured steps tell; ``None`` if none was measured.

    It is that of the whole run: all measured steps count alike, since epochs depend on how noisy
    the gradient was on the whole, and it usually is much noisier in the end. The interval takes the
    change over the run as scatter, and is the wider for it.
    """
    estimate, counted = NoiseEstimate(), [one for one in course.steps if not one.epochs > until]
    for step in counted:
        estimate = estimate.after(step.norms, memory=inf)
    if not estimate.steps:
        return None
    found = estimate.scale()
    if not isfinite(found.value):
        return None
    # Where losses are means over tokens, so is the scale: back to samples. The usual step is a full
    # one, which an epoch's last need not be.
    unit = float(np.median([step.samples / step.norms.batch for step in counted]))
    high = unit * found.high if found.high < inf else None
    return Noise(scale=max(unit * found.value, 0.0), low=unit * found.low, high=high)


def profile_of_run(trace: Path, types: Sequence[str]) -> WorkloadProfile:
    """Return the profile that a run makes.

    A run that was continued counts as a whole, but for its links, which are those of its last life.

    Raises:
        ConfigError: there are another number of types.
        TraceError: the trace cannot be read, or tells too little.
    """
    log = RunLog(trace)
    lives = lives_of(log)
    workers = len(lives[-1].workers)
    if len(types) not in (0, 1, workers):
        raise ConfigError(
            f"{len(types)} types for the {workers} workers of {trace}; give one for each, in the "
            "order of their ranks, or one for all"
        )
    try:
        return _profile(log, lives, types)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field, given = ".".join(map(str, first["loc"])), str(first["input"])[:_SHOWN]
        raise TraceError(
            f"{trace} makes no profile: {field} is {given}: {first['msg']}; take the run's own "
            "trace as it was written, and the names of machines that a catalogue has for --as"
        ) from None


def _profile(log: RunLog, lives: Sequence[ProcessRecord], types: Sequence[str]) -> WorkloadProfile:
    known, others = lives[-1].facts, beside(lives)
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
        links=links_of(lives[-1]),
        noise=noise_of(course_of(log)),
        beside_s=others.epoch_s if types else None,
    )


def _day(unix_s: float, trace: Path) -> str:
    try:
        return date.fromtimestamp(unix_s).isoformat()
    except (OverflowError, OSError, ValueError):
        raise TraceError(
            f"{trace} says that it began {unix_s:g} s after 1970, which is no date; take the run's "
            "own trace as it was written"
        ) from None


def _devices(
    lives: Sequence[ProcessRecord], types: Sequence[str], trace: Path, others: Overheads
) -> Iterable[DeviceProfile]:
    """Yield what workers of each type took, over all lives in which their type is known."""
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
            raise TraceError(f"{trace} holds no measured step of a worker of type {of}")
        yield DeviceProfile(
            type=of,
            device=lives[-1].facts.device,
            computed_on=lives[-1].facts.computed_on,
            points=tuple(points),
        )


def _type_of(name: str, workers: Sequence[str], types: Sequence[str]) -> str | None:
    """Return the type of a worker's machine, from those of the last life; ``None`` if not known.

    Launchers deal ranks anew, so a machine is known by its host, unless that has several types.
    """
    if len(types) == 1:
        return types[0]
    named = list(zip(workers, types, strict=True))
    on_host = {kind for worker, kind in named if _host(worker) == _host(name)}
    return on_host.pop() if len(on_host) == 1 else dict(named).get(name)


def _host(worker: str) -> str:
    return worker.rpartition("/")[0] or worker
