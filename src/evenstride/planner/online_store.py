"""What an online search takes from the store, and what it adds.

Searches have a folder of their own in the store. Their machine types are the workers of one
machine, which no catalogue offers. Epochs by batch, and the noise, also come from stored plans.

Source:
    Tyagi and Sharma, "Scavenger", CCGRID 2023: no-search. The confirmation by the first measured
    configuration is ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from math import inf

from evenstride.core.convergence.batch_laws import MeasuredTraining
from evenstride.core.gradients.noise_scale import Z95
from evenstride.planner.online_forecast import Configuration, Probe, TrainingJob, misses
from evenstride.planner.online_policy import best_known
from evenstride.planner.workload.epochs_to_target import Epochs, epochs_of_runs
from evenstride.planner.workload.from_trace import Facts
from evenstride.planner.workload.model_reuse import ReusedPart, completed, doubt_of, step_errors
from evenstride.planner.workload.model_store import StoredModel, similar
from evenstride.planner.workload.step_time import links
from evenstride.planner.workload.workload_profile import (
    DeviceProfile,
    MeasuredCluster,
    Model,
    Noise,
    Point,
    ReachedTraining,
    WorkloadProfile,
    surest,
)
from evenstride.sim.engine.network import Ring

FOLDER = "online"
"""Folder of the searches, in that of the store."""

_ELSEWHERE = 0.01  # least error of a step that another search measured
_CONFIRMED = 0.1  # difference of a step to that of the stored model, in the logarithm


@dataclass(frozen=True, slots=True)
class SearchStore:
    """The stored models for a search on the workers of this machine."""

    types: tuple[str, ...] = ()  # of the workers, in rank order
    searches: tuple[StoredModel, ...] = ()
    plans: tuple[StoredModel, ...] = ()


@dataclass(frozen=True, slots=True)
class StoredKnowledge:
    """What the store knows of a job."""

    probes: tuple[Probe, ...] = ()  # of the same or a similar job, as measured there
    doubt: float | None = None  # error of its steps if scaled; ``None`` for the same job
    fitted: Epochs | None = None  # epochs by batch, scaled to those of this job
    noise: Noise | None = None
    noise_is_own: bool = False  # of the same job
    parts: tuple[ReusedPart, ...] = ()  # where it comes from

    @property
    def settled(self) -> bool:
        """Whether the epochs by batch are known without a measurement of noise."""
        own = self.noise is not None and self.noise_is_own and self.noise.settled is True
        return self.fitted is not None or own

    def noise_with(self, probes: Sequence[Probe]) -> Noise | None:
        """Return the best known noise; that of a similar job only counts without a measurement."""
        measured = surest([probe.noise for probe in probes])
        own = self.noise_is_own or measured is None
        return surest([measured, self.noise if own else None])


def worker_types(machine: str, count: int, speeds: Sequence[float]) -> tuple[str, ...]:
    """Return the types of a machine's workers. Each is a type, as each has its own limits.

    >>> worker_types("box", 2, (1.0, 0.5))
    ('box/0 at 1', 'box/1 at 0.5')
    """
    limits = [f" at {speed:g}" for speed in speeds] or [""] * count
    return tuple(f"{machine}/{worker}{limit}" for worker, limit in enumerate(limits))


def search_profile(
    known: Facts, probes: Sequence[Probe], types: Sequence[str], script: str, base: int
) -> WorkloadProfile:
    """Return what a search measured; ``base`` is the batch to which its epochs refer."""
    latest = {probe.choice: probe for probe in probes}
    points = [_points(probes, worker) for worker in range(len(types))]
    times = [(one.choice.workers, one.communication_s) for one in probes if one.communication_s]
    beside = [probe.beside_s for probe in probes if probe.beside_s is not None]
    return WorkloadProfile(
        evenstride=known.evenstride,
        torch=known.torch,
        made_on=date.fromtimestamp(known.started_unix_s).isoformat(),
        script=script,
        model=Model(
            parameters=known.parameters, gradient_bytes=known.gradient_bytes, digest=known.digest
        ),
        samples=known.samples,
        global_batch=base,
        devices=tuple(
            DeviceProfile(type=name, device=known.device, points=each)
            for name, each in zip(types, points, strict=True)
            if each
        ),
        clusters=tuple(
            MeasuredCluster(
                types=tuple(types[: choice.workers]),
                batch=choice.batch,
                step_s=probe.step_s,
                drift=probe.drift,
            )
            for choice, probe in latest.items()
        ),
        links=links(times, known.gradient_bytes),
        noise=surest([probe.noise for probe in probes]),
        beside_s=beside[-1] if beside else None,
    )


def _points(probes: Sequence[Probe], worker: int) -> tuple[Point, ...]:
    return tuple(p for one in probes if worker < len(one.points) for p in one.points[worker])


def probes_in(profile: WorkloadProfile, types: Sequence[str]) -> tuple[Probe, ...]:
    """Return the probes of a stored search on the same workers."""
    found, points = list[Probe](), {one.type: one.points for one in profile.devices}
    clusters = [one for one in profile.clusters if one.types == tuple(types[: len(one.types)])]
    for one in sorted(clusters, key=lambda one: len(one.types), reverse=True):
        workers, first = len(one.types), not found
        # All sizes of a worker are in its type. They count once.
        each = tuple(points.get(name, ()) for name in one.types) if first else ((),) * workers
        found.append(
            Probe(
                Configuration(workers, one.batch),
                1,
                one.step_s,
                each,
                _communication_s(profile, workers),
                drift=one.drift,
                beside_s=profile.beside_s,
                doubt=_ELSEWHERE,
            )
        )
    return tuple(found) if found and all(found[0].points) else ()


def _communication_s(profile: WorkloadProfile, workers: int) -> float | None:
    if profile.links is None or workers == 1:
        return None
    ring = Ring(
        profile.links.latency_s,
        profile.links.bytes_per_s or inf,
        profile.model.gradient_bytes,
    )
    return ring.all_reduce_s(workers)


def knowledge_of(
    job: WorkloadProfile, epochs: float | None, batches: Sequence[int], store: SearchStore
) -> StoredKnowledge:
    """Return what the store knows of a job and its batches.

    ``epochs`` are those at the job's batch; ``None`` if they need nothing of the store.
    """
    found = _by_batch(job, epochs, batches, store) if epochs else StoredKnowledge()
    for model, like in similar(job, store.searches):
        if probes := probes_in(model.profile, store.types):
            errors = step_errors(store.searches)
            what = f"step times of {len(probes)} configuration{'s' if len(probes) > 1 else ''}"
            return StoredKnowledge(
                probes,
                None if like.same else doubt_of(like, errors),
                found.fitted,
                found.noise,
                found.noise_is_own,
                (ReusedPart(what, (model,), like, errors), *found.parts),
            )
    return found


def confirms(
    job: TrainingJob,
    possible: Sequence[Configuration],
    stored: StoredKnowledge,
    measured: Sequence[Probe],
) -> bool:
    """Return whether the only measurement so far confirms the stored model of the same job.

    It must be of the best configuration by that model, and miss it by no more than its own error.
    """
    if len(measured) != 1 or stored.doubt is not None or len(stored.probes) < 2:
        return False
    ranked = best_known(job, possible, stored.probes)
    if not ranked or ranked[0].choice != measured[0].choice:
        return False
    allowed = max(_CONFIRMED, Z95 * measured[0].drift)
    return all(abs(missed) <= allowed for missed in misses(job, stored.probes, measured))


def _by_batch(
    job: WorkloadProfile, epochs: float, batches: Sequence[int], store: SearchStore
) -> StoredKnowledge:
    """Return how epochs follow the batch, from the same or a similar job."""
    bare = job.model_copy(update={"devices": (), "noise": None, "trainings": ()})
    models = (*store.searches, *store.plans)
    found = completed(bare, epochs, models, lambda _: False)
    if not found.parts or found.parts[0].likeness is None or len(set(batches)) < 2:
        return StoredKnowledge()
    if found.profile.noise is not None:
        same = found.parts[0].likeness.same
        return StoredKnowledge(noise=found.profile.noise, noise_is_own=same, parts=found.parts)
    fitted = _fitted(found.profile.trainings)
    if any(fitted.at(batch) is None for batch in batches):
        return StoredKnowledge()
    return StoredKnowledge(fitted=fitted, parts=found.parts)


def _fitted(trainings: Sequence[ReachedTraining]) -> Epochs:
    return epochs_of_runs([MeasuredTraining(one.batch, one.epochs) for one in trainings])
