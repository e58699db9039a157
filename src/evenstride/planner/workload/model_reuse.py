"""What a job takes from the models of other jobs: step times, and epochs by batch.

Scavenger calls it no-search. A model of the same or a similar job says how times and epochs change;
the job's own measurement or ``--epochs`` says how large they are. The universal model is the
average of all stored jobs, whatever they are. Leaving out each stored job in turn shows how far
both are off.

Source:
    Tyagi and Sharma, "Scavenger", CCGRID 2023: no-search and the universal model, whose error they
    give as 4 to 20 %. The scaling to the job's own figure is ours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import date
from math import exp, hypot, log
from statistics import mean
from typing import Any

from evenstride.core.convergence.batch_laws import MeasuredTraining, fit_best
from evenstride.planner.workload.model_store import JobLikeness, Ranked, StoredModel, similar
from evenstride.planner.workload.step_time import fitted
from evenstride.planner.workload.workload_profile import (
    DeviceProfile,
    Point,
    ReachedTraining,
    WorkloadProfile,
)

_ASSUMED_ERROR = 0.2  # of times scaled from another job, if none can be left out
_WIDE = 1.5  # ratio of sizes from which a job's own points show how its time grows
_FEWEST_JOBS = 2  # of an average

Anchor = tuple[int, float]
"""A batch, and the epochs of the job there."""


@dataclass(frozen=True, slots=True)
class ReusedPart:
    """One thing that was taken from the store."""

    what: str  # such as ``epochs by batch``
    models: tuple[StoredModel, ...]  # one, or those of the average
    likeness: JobLikeness | None  # ``None`` for the universal model
    errors: Errors | None = None  # of such models

    @property
    def kind(self) -> str:
        if self.likeness is None:
            return "universal"
        return "same" if self.likeness.same else "similar"

    def sentence(self, today: date) -> str:
        """Return where it comes from, how old and how similar that is, and the known errors."""
        like, newest = self.likeness, max(model.profile.made_on for model in self.models)
        age = _age(newest, today)
        if like is None:
            source = f"the universal model, the average of the {len(self.models)} stored jobs"
            source += f", the newest of them {age}"
        else:
            source = f"the stored model of {'the same' if like.same else 'a similar'} job"
            similarity = "" if like.same else f"similarity {like.part:.0%}: "
            source += f" ({similarity}{like.why}), {age}: {self.models[0].file}"
        return f"{self.what}: from {source}{self._errors}"

    @property
    def _errors(self) -> str:
        one = self.errors
        if one is None:
            return ""
        return (
            f"; of {one.jobs} stored jobs that were left out in turn, the most similar other job "
            f"misses the measurement by {one.similar:.1%}, the universal model by "
            f"{one.universal:.1%}"
        )

    def to_dict(self) -> dict[str, Any]:
        like = self.likeness
        return {
            "what": self.what,
            "model": self.kind,
            "similarity": None if like is None else like.part,
            "why": "the average of all stored jobs" if like is None else like.why,
            "files": [str(model.file) for model in self.models],
            "measured_on": [model.profile.made_on for model in self.models],
            "errors": None if self.errors is None else self.errors.to_dict(),
        }


def _age(day: str, today: date) -> str:
    try:
        days = (today - date.fromisoformat(day)).days
    except ValueError:
        return f"measured on {day}"
    return f"measured {days} day{'' if days == 1 else 's'} ago" if days > 0 else "measured today"


@dataclass(frozen=True, slots=True)
class Errors:
    """Mean relative errors of stored jobs that are left out in turn."""

    similar: float  # with the model of the most similar other job
    universal: float  # with the average of all others
    jobs: int

    def to_dict(self) -> dict[str, float]:
        return {"similar": self.similar, "universal": self.universal, "jobs": self.jobs}


@dataclass(frozen=True, slots=True)
class Reuse:
    """A job with what the store adds."""

    profile: WorkloadProfile
    epochs: float | None  # at its own batch, unless trainings contain them
    parts: tuple[ReusedPart, ...] = ()


def completed(
    job: WorkloadProfile,
    epochs: float | None,
    models: Sequence[StoredModel],
    accepts: Callable[[DeviceProfile], bool] = lambda _: True,
) -> Reuse:
    """Return a job with what it lacks, from the same or similar jobs, else from all of them.

    Nothing that the job measured is replaced. ``epochs`` are those at its own batch, if given.
    ``accepts`` says which stored devices count.
    """
    ranked = similar(job, models)
    steps = _with_steps(job, ranked, models, accepts)
    return _with_epochs(steps, epochs, ranked, models)


def _with_steps(
    job: WorkloadProfile,
    ranked: Ranked,
    models: Sequence[StoredModel],
    accepts: Callable[[DeviceProfile], bool],
) -> Reuse:
    """Add step times of types that were not measured, or at one size only."""
    devices, parts = {one.type: one for one in job.devices}, list[ReusedPart]()
    known = {one.type for one in job.devices if _width(one.points) >= _WIDE}
    stored = {one.type for model in models for one in model.profile.devices if accepts(one)}
    errors = step_errors(models) if stored - known else None
    for name in sorted(stored - known):
        for every, like in _sources(ranked, models):
            sources = tuple(one for one in every if _scaled_device(job, [one.profile], name))
            found = _scaled_device(job, [one.profile for one in sources], name)
            if found is None or not accepts(found) or not (like or len(sources) >= _FEWEST_JOBS):
                continue
            doubt, own = doubt_of(like, errors), devices.get(name)
            points = tuple(_doubted(point, doubt) for point in found.points)
            update = {"points": (*(own.points if own else ()), *points)}
            devices[name] = (own or found).model_copy(update=update)
            parts.append(ReusedPart(f"step times on {name}", sources, like, errors))
            break
    whole = job.model_copy(update={"devices": tuple(devices.values())})
    return Reuse(whole, None, tuple(parts))


def _sources(
    ranked: Ranked, models: Sequence[StoredModel]
) -> Iterable[tuple[tuple[StoredModel, ...], JobLikeness | None]]:
    """Yield the models to try: each similar one, and the average of all."""
    yield from (((model,), like) for model, like in ranked)
    if len(models) >= _FEWEST_JOBS:
        yield tuple(models), None


def doubt_of(like: JobLikeness | None, errors: Errors | None) -> float:
    """Return the error of scaled times; that of the same job is in its own points."""
    if like is not None and like.same:
        return 0.0
    if errors is None:
        return _ASSUMED_ERROR
    return errors.universal if like is None else errors.similar


def _doubted(point: Point, doubt: float) -> Point:
    return point.model_copy(update={"drift": hypot(point.drift, doubt)})


def _scaled_device(
    job: WorkloadProfile, sources: Sequence[WorkloadProfile], name: str
) -> DeviceProfile | None:
    """Return a type's steps in other jobs, scaled to this one; the average of several jobs."""
    found = [
        (device, ratio)
        for source in sources
        for device in source.devices
        if device.type == name and (ratio := _ratio(job, source)) is not None
    ]
    if not found or (len(sources) > 1 and len(found) < _FEWEST_JOBS):
        return None
    points = tuple(
        point.model_copy(update={"step_s": ratio * point.step_s})
        for device, ratio in found
        for point in device.points
    )
    # Other jobs need other amounts of memory, so the lowest limit counts.
    limits = [device.most_samples for device, _ in found if device.most_samples is not None]
    return found[0][0].model_copy(
        update={"points": points, "most_samples": min(limits, default=None)}
    )


def _ratio(job: WorkloadProfile, source: WorkloadProfile) -> float | None:
    """Return the job's time divided by that of another one, on the types that both measured.

    Without such a type, only a job with the same parameters has a ratio, which is 1.
    """
    curves = {device.type: fitted(device.points) for device in source.devices}
    known = [
        log(point.step_s / curves[device.type].at(point.samples))
        for device in job.devices
        if device.type in curves
        for point in device.points
    ]
    if known:
        return exp(mean(known))
    return 1.0 if job.model.digest == source.model.digest and job.model.digest else None


def _width(points: Sequence[Point]) -> float:
    sizes = [point.samples for point in points]
    return max(sizes) / min(sizes)


def _with_epochs(
    reuse: Reuse, epochs: float | None, ranked: Ranked, models: Sequence[StoredModel]
) -> Reuse:
    """Add trainings at several batches, or the noise, which say how epochs follow the batch."""
    job = reuse.profile
    if job.noise is not None or len({one.batch for one in job.trainings}) > 1:
        return Reuse(job, epochs, reuse.parts)
    anchor = _anchor(job, epochs)
    for every, like in _sources(ranked, models):
        if anchor is None and not (like and like.same):
            continue  # epochs of another job say nothing about the number of this one
        sources = tuple(one for one in every if carried([one.profile], anchor))
        trainings = carried([one.profile for one in sources], anchor)
        if trainings and len(sources) >= (1 if like else _FEWEST_JOBS):
            update = {"trainings": trainings, "target": job.target or _target(sources, anchor)}
            target = sources[0].profile.target if like else ""
            what = f"epochs by batch (to {target})" if target else "epochs by batch"
            part = ReusedPart(what, sources, like, epoch_errors(models))
            return Reuse(job.model_copy(update=update), None, (*reuse.parts, part))
    for model, like in ranked:
        if model.profile.noise is not None:
            part = ReusedPart("the gradient noise", (model,), like)
            found = job.model_copy(update={"noise": model.profile.noise})
            return Reuse(found, epochs, (*reuse.parts, part))
    return Reuse(job, epochs, reuse.parts)


def _anchor(job: WorkloadProfile, epochs: float | None) -> Anchor | None:
    if epochs is not None:
        return job.global_batch, epochs
    if job.trainings:
        return job.trainings[0].batch, mean(one.epochs for one in job.trainings)
    return None


def _target(sources: Sequence[StoredModel], anchor: Anchor | None) -> str:
    return "" if anchor is not None else sources[0].profile.target


def carried(
    sources: Sequence[WorkloadProfile], anchor: Anchor | None
) -> tuple[ReachedTraining, ...]:
    """Return the trainings of other jobs, scaled to the epochs of one; empty if unknown.

    Each job's law at the anchor's batch gives its factor. Jobs that did not train on both sides of
    this batch are left out. Without an anchor, the epochs of one job are taken as they are.
    """
    found, jobs = list[ReachedTraining](), 0
    for source in sources:
        trainings = source.trainings
        if len({one.batch for one in trainings}) < 2:
            continue
        factor = 1.0 if anchor is None else _factor(trainings, anchor)
        if factor is not None:
            jobs += 1
            # Noise belongs to the job; without it, the law is fitted in the same variable.
            found += [
                ReachedTraining(batch=one.batch, epochs=factor * one.epochs) for one in trainings
            ]
    return tuple(found) if jobs >= min(len(sources), _FEWEST_JOBS) else ()


def _factor(trainings: Iterable[ReachedTraining], anchor: Anchor) -> float | None:
    law = fit_best([MeasuredTraining(one.batch, one.epochs) for one in trainings])
    if not law.smallest <= anchor[0] <= law.largest:
        return None
    there = law.epochs(anchor[0]).value
    return anchor[1] / there if there > 0 else None


def step_errors(models: Sequence[StoredModel]) -> Errors | None:
    """Return the errors of step times, of jobs that measured only their largest step.

    The other sizes and the other types of machine are forecast from other jobs.
    """
    return _errors(models, _step_error)


def epoch_errors(models: Sequence[StoredModel]) -> Errors | None:
    """Return the errors of epochs, of jobs that trained only at their middle batch."""
    return _errors(models, _epoch_error)


def _errors(
    models: Sequence[StoredModel],
    error: Callable[[WorkloadProfile, Sequence[WorkloadProfile]], float | None],
) -> Errors | None:
    pairs = list[tuple[float, float]]()
    for left_out in models:
        job = left_out.profile
        # The same job may be in the store twice, with other targets.
        ranked = [(one, like) for one, like in similar(job, models) if not like.same]
        same = {one.file for one, like in similar(job, models) if like.same}
        others = [one.profile for one in models if one.file not in same | {left_out.file}]
        own = next((e for one, _ in ranked if (e := error(job, [one.profile])) is not None), None)
        average = error(job, others) if len(others) >= _FEWEST_JOBS else None
        if own is not None and average is not None:
            pairs.append((own, average))
    if not pairs:
        return None
    return Errors(mean(one for one, _ in pairs), mean(two for _, two in pairs), len(pairs))


def _step_error(job: WorkloadProfile, sources: Sequence[WorkloadProfile]) -> float | None:
    known = [one for one in job.devices if _width(one.points) >= _WIDE]
    if not known:
        return None
    largest = max(known[0].points, key=lambda point: point.samples)
    probe = job.model_copy(
        update={"devices": (known[0].model_copy(update={"points": (largest,)}),)}
    )
    errors = list[float]()
    for device in known:
        found = _scaled_device(probe, sources, device.type)
        if found is not None:
            curve = fitted(found.points)
            errors += [
                abs(curve.at(point.samples) / point.step_s - 1)
                for point in device.points
                if point is not largest
            ]
    return mean(errors) if errors else None


def _epoch_error(job: WorkloadProfile, sources: Sequence[WorkloadProfile]) -> float | None:
    batches = sorted({one.batch for one in job.trainings})
    if len(batches) < 2:
        return None
    by_batch = {
        batch: mean(one.epochs for one in job.trainings if one.batch == batch) for batch in batches
    }
    middle = batches[len(batches) // 2]
    trainings = carried(sources, (middle, by_batch[middle]))
    if not trainings:
        return None
    law = fit_best([MeasuredTraining(one.batch, one.epochs) for one in trainings])
    errors = [
        abs(law.epochs(batch).value / epochs - 1)
        for batch, epochs in by_batch.items()
        if batch != middle and law.smallest <= batch <= law.largest
    ]
    return mean(errors) if errors else None
