"""Remaining time and cost of a training run in each configuration, from the measured ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import exp, hypot, inf, log, sqrt
from typing import Any

import numpy as np
from pydantic import TypeAdapter

from evenstride.core.gradients.noise_scale import Z95, Interval
from evenstride.core.time_model.observation import median
from evenstride.errors import InfeasibleShares
from evenstride.planner.search.selection import Objective
from evenstride.planner.workload.epochs_to_target import ByNoise, Epochs, KnownEpochs
from evenstride.planner.workload.step_time import (
    Curve,
    StepEstimate,
    Workers,
    exact_step,
    fitted,
    links,
)
from evenstride.planner.workload.workload_profile import Links, Noise, Point
from evenstride.sim.engine.network import Ring

_FEWEST_STEPS = 5
_WIDE = 1.5  # ratio of sizes below which fixed and growing time cannot be separated
_ALIKE_ERROR = 0.02  # error of a line that is copied from another worker
_LEAST_ERROR = 0.01  # difference between measured and future steps, at least


@dataclass(frozen=True, slots=True, order=True)
class Configuration:
    """A number of workers, and their global batch."""

    workers: int
    batch: int

    def __str__(self) -> str:
        plural = "" if self.workers == 1 else "s"
        return f"{self.workers} worker{plural} with {self.batch} samples"


Trained = Mapping[int, float]
"""Samples trained so far, by batch."""


@dataclass(frozen=True, slots=True)
class TrainingJob:
    """The training run and its objective."""

    samples: int  # of an epoch.
    epochs: float  # number of epochs at the base batch.
    base: int  # batch to which ``epochs`` refers.
    gradient_bytes: float  # sent by a worker in a step.
    objective: Objective = Objective.TIME  # time, cost or the knee of both.
    usd_per_h: float = 1.0  # price of a worker.
    # Scale of the gradient; ``None`` if it is not known: then only the base batch can be chosen,
    # because the epochs at others are not known.
    noise: Noise | None = None
    batches: int = 1  # number of batches to choose from
    # Epochs of earlier trainings at several batches, if there were any; they replace the noise.
    fitted: Epochs | None = None

    @property
    def compares(self) -> bool:
        """Whether batches can be compared, or there is only one."""
        return self.batches == 1 or self.noise is not None or self.fitted is not None

    @property
    def lasts(self) -> Epochs:
        if self.fitted is not None:
            return self.fitted
        if self.noise is None:
            return KnownEpochs(self.epochs, self.base)
        return ByNoise(self.epochs, self.base, self.noise)

    def cost_usd(self, workers: int, time_s: float) -> float:
        return workers * self.usd_per_h * time_s / 3600.0

    def left(self, trained: Trained) -> float:
        """Return the fraction of training that is left, by the value of samples at their batch."""
        done = 0.0
        for batch, samples in trained.items():
            whole = self.lasts.at(batch)
            # If nothing is known, a sample counts as much as at the base.
            epochs = self.epochs if whole is None else whole.value
            done += samples / (epochs * self.samples)
        return max(1.0 - done, 0.0)


@dataclass(frozen=True, slots=True)
class Probe:
    """The measurements of a configuration."""

    choice: Configuration
    steps: int  # number of measured steps
    # Mean time of one, from the request of its first sample to that of the next step, with settled
    # shares
    step_s: float
    points: tuple[tuple[Point, ...], ...]  # steps by share, of each worker
    # Time of a step in which no worker waits for a slower one; ``None`` with one worker, or if it
    # was not measured
    communication_s: float | None = None
    noise: Noise | None = None  # scale of the gradient, if measured
    drift: float = 0.0  # relative standard deviation of the mean of later steps
    # Time of an epoch beyond its steps; ``None`` if no whole epoch was measured
    beside_s: float | None = None
    # Relative standard deviation of steps from another search; 0 if measured in this one
    doubt: float = 0.0

    def to_plain(self) -> dict[str, Any]:
        plain = _PROBES.dump_python(self, mode="json")
        return {**plain.pop("choice"), **plain}

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Probe:
        choice = {"workers": plain["workers"], "batch": plain["batch"]}
        return _PROBES.validate_python({**plain, "choice": choice})


_PROBES = TypeAdapter(Probe)


@dataclass(frozen=True, slots=True)
class OnlineForecast:
    """Remaining time and cost of a training run in one configuration; intervals are of 95 %."""

    choice: Configuration
    step_s: Interval  # of a step.
    time_s: Interval  # until the end.
    cost_usd: Interval  # the same.
    epochs: float  # of the whole training, including those already trained.
    measured: bool  # whether this configuration was measured.
    # Like ``time_s``, but without the drift of the machine, which speeds up or slows down all
    # configurations together and cannot be measured in another one.
    own_s: Interval

    @property
    def name(self) -> str:
        return str(self.choice)


def foresee(
    job: TrainingJob, possible: Sequence[Configuration], probes: Sequence[Probe], trained: Trained
) -> list[OnlineForecast]:
    """Return the forecast of each configuration, where one is possible.

    At least one was probed. If one was probed several times, all probes count, weighted by steps.
    """
    model, found = _StepModel.of(job, probes), list[OnlineForecast]()
    left = job.left(trained)
    epochs_so_far, beside_s = sum(trained.values()) / job.samples, _beside_s(probes)
    for choice in possible:
        whole, step = job.lasts.at(choice.batch), model.step(choice)
        if whole is None or step is None:
            continue
        steps = job.samples / choice.batch
        # A trial measures steps and noise, but not the epochs of earlier trainings.
        testable = whole if job.fitted is None else Interval(*(3 * (whole.value,)))
        time_s, own_s = (
            Interval(
                *(
                    left * e * (steps * s + beside_s) if left else 0.0
                    for e, s in zip(_ends(epochs), _ends(one), strict=True)
                )
            )
            for epochs, one in ((whole, step.whole), (testable, step.own))
        )
        cost = Interval(*(job.cost_usd(choice.workers, t) for t in _ends(time_s)))
        total = epochs_so_far + left * whole.value
        known = any(probe.choice == choice and not probe.doubt for probe in probes)
        found.append(OnlineForecast(choice, step.whole, time_s, cost, total, known, own_s))
    return found


def misses(job: TrainingJob, stored: Sequence[Probe], measured: Sequence[Probe]) -> list[float]:
    """Return the logarithm of each measured step over its forecast from another search's probes."""
    model = _StepModel.of(job, stored)
    pairs = [(probe.step_s, model.step(probe.choice)) for probe in measured]
    return [log(step_s / there.value) for step_s, there in pairs if there is not None]


def carried_over(
    job: TrainingJob, stored: Sequence[Probe], measured: Sequence[Probe], doubt: float | None
) -> tuple[Probe, ...]:
    """Return what another search measured elsewhere, scaled to the steps that this one measured.

    Its error is ``doubt``. ``None`` is for the same job: there it is how far the other search
    misses the measured steps. Without a measurement in common, nothing is carried over.
    """
    here = {probe.choice for probe in measured}
    missed = misses(job, stored, measured) if stored else []
    if not missed:
        return ()
    by = exp(float(np.mean(missed)))
    # Lines need the points of all stored probes, also of those measured here. They count once.
    points, rest = _scaled(stored, measured), [one for one in stored if one.choice not in here]
    own = float(np.sqrt(np.mean(np.square(missed))))
    error = max(own, _LEAST_ERROR) if doubt is None else doubt
    return tuple(
        replace(probe, step_s=by * probe.step_s, points=() if number else points, doubt=error)
        for number, probe in enumerate(rest)
    )


def _scaled(stored: Sequence[Probe], measured: Sequence[Probe]) -> tuple[tuple[Point, ...], ...]:
    """Return each worker's stored points, scaled to the measured ones.

    Their factor is not that of steps, which last longer by more than the workers' own times.
    """
    each = [_points(stored, worker) for worker in range(_most_workers(stored))]
    ratios = [
        log(point.step_s / curve.at(point.samples))
        for worker, curve in enumerate(_curves(each))
        for point in _points(measured, worker)
    ]
    by = exp(float(np.mean(ratios)))
    return tuple(
        tuple(point.model_copy(update={"step_s": by * point.step_s}) for point in points)
        for points in each
    )


def _most_workers(probes: Sequence[Probe]) -> int:
    return max(len(probe.points) for probe in probes)


def _beside_s(probes: Sequence[Probe]) -> float:
    """Return the time of an epoch beyond its steps, as far as measured."""
    known = [probe.beside_s for probe in probes if probe.beside_s is not None]
    return float(np.mean(known)) if known else 0.0


def _ends(one: Interval) -> tuple[float, float, float]:
    return one.value, one.low, one.high


@dataclass(frozen=True, slots=True)
class _UncertainStep:
    """A value and its relative standard deviation: its own, and that common to all."""

    value: float
    error: float
    drift: float

    @property
    def own(self) -> Interval:
        """The value for comparison with others."""
        return _about(self.value, self.error)

    @property
    def whole(self) -> Interval:
        """The value with its full error."""
        return _about(self.value, hypot(self.error, self.drift))


def _by_choice(probes: Sequence[Probe]) -> dict[Configuration, list[Probe]]:
    """Return the probes of each configuration, in the order of their last ones."""
    found = dict[Configuration, list[Probe]]()
    for probe in probes:
        found[probe.choice] = [*found.pop(probe.choice, []), probe]
    return found


def _pooled(probes: Sequence[Probe]) -> _UncertainStep:
    """Return the mean step over all visits of a configuration; their scatter is its error."""
    times_s = [probe.step_s for probe in probes]
    value = float(np.average(times_s, weights=[probe.steps for probe in probes]))
    apart = max(float(np.std(times_s)) / value, *(probe.doubt for probe in probes))
    drift = sqrt(sum(probe.drift**2 for probe in probes)) / len(probes)
    return _UncertainStep(value, max(apart, _LEAST_ERROR), drift)


@dataclass(frozen=True, slots=True)
class _StepModel:
    """Predicts any step: the workers' lines, the ring, and the excess of measured steps."""

    curves: tuple[Curve, ...]
    ring: Ring
    measured: Mapping[Configuration, _UncertainStep]
    longer: Mapping[int, _UncertainStep]  # by number of workers, as logarithms
    doubt: float = 0.0  # the largest of the probes

    @classmethod
    def of(cls, job: TrainingJob, probes: Sequence[Probe]) -> _StepModel:
        curves = _curves([_points(probes, worker) for worker in range(_most_workers(probes))])
        times = [(p.choice.workers, p.communication_s) for p in probes if p.communication_s]
        ring = _ring(links(times, job.gradient_bytes), job.gradient_bytes)
        plain, longer = cls(curves, ring, {}, {}), dict[int, _UncertainStep]()
        measured = {choice: _pooled(own) for choice, own in _by_choice(probes).items()}
        for choice, step in measured.items():
            bare = plain._bare(choice)
            if bare is not None:
                longer[choice.workers] = replace(step, value=log(step.value / bare.time_s))
        return cls(curves, ring, measured, longer, max(probe.doubt for probe in probes))

    def step(self, choice: Configuration) -> _UncertainStep | None:
        """Return a step; ``None`` if a worker was not measured, or gets no sample."""
        if choice in self.measured:
            return self.measured[choice]
        bare = self._bare(choice)
        if bare is None:
            return None
        known = list(self.longer.values()) or [_UncertainStep(0.0, 0.0, 0.0)]
        longer = float(np.mean([one.value for one in known]))
        usual = _UncertainStep(longer, 0.0, max(one.drift for one in known))
        more = self.longer.get(choice.workers, usual)
        apart = max(float(np.ptp([one.value for one in known])) / 2, _LEAST_ERROR)
        # All workers are assumed to have the same error, which is the worst case.
        own = max(
            curve.error_at(share) for curve, share in zip(self.curves, bare.shares, strict=False)
        )
        return _UncertainStep(
            bare.time_s * exp(more.value), hypot(apart, own, self.doubt), more.drift
        )

    def _bare(self, choice: Configuration) -> StepEstimate | None:
        if choice.workers > len(self.curves):
            return None
        fleet = [Workers(curve, 1) for curve in self.curves[: choice.workers]]
        try:
            return exact_step(fleet, choice.batch, self.ring)
        except InfeasibleShares:
            return None


def _about(value: float, error: float) -> Interval:
    return Interval(value, value * exp(-Z95 * error), value * exp(Z95 * error))


def _points(probes: Sequence[Probe], worker: int) -> list[Point]:
    """Return a worker's steps of all its sizes, without rare ones."""
    points = [point for p in probes if worker < len(p.points) for point in p.points[worker]]
    return [point for point in points if point.steps >= _FEWEST_STEPS] or points


def _curves(each: Sequence[Sequence[Point]]) -> tuple[Curve, ...]:
    """Return the workers' lines.

    A balanced worker has nearly the same share all the time, which does not show the fixed part of
    its step. It runs the same program as the others. So its line is that of the worker with the
    most different sizes, multiplied by a factor.
    """
    widest = max(each, key=_width)
    known = fitted(widest)
    return tuple(
        fitted(points) if _width(points) >= _WIDE or points is widest else _alike(points, known)
        for points in each
    )


def _width(points: Sequence[Point]) -> float:
    return max(p.samples for p in points) / min(p.samples for p in points)


def _alike(points: Sequence[Point], known: Curve) -> Curve:
    ratios = [point.step_s / known.at(point.samples) for point in points]
    by = float(np.exp(np.mean(np.log(ratios))))
    c00, c01, c11 = (by * by * one for one in known.spread)
    return replace(
        known,
        spread=(c00, c01, c11),
        fixed_s=by * known.fixed_s,
        per_sample_s=by * known.per_sample_s,
        error=float(np.hypot(known.error, _ALIKE_ERROR)),
        noise=median(tuple(point.scatter for point in points)),
    )


def _ring(found: Links | None, gradient_bytes: float) -> Ring:
    if found is None:
        return Ring(0.0, inf, gradient_bytes)
    return Ring(found.latency_s, found.bytes_per_s or inf, gradient_bytes)
