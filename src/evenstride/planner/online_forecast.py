"""What is left of a training, in each configuration, from those that were measured."""

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
_WIDE = 1.5  # sizes that differ by less do not tell a fixed time from one that grows
_ALIKE_ERROR = 0.02  # by which a line is off that is taken from another worker
_LEAST_ERROR = 0.01  # by which even a measured step differs from those to come


@dataclass(frozen=True, slots=True, order=True)
class Configuration:
    """A number of workers, and the global batch that they train."""

    workers: int
    batch: int

    def __str__(self) -> str:
        plural = "" if self.workers == 1 else "s"
        return f"{self.workers} worker{plural} with {self.batch} samples"


Trained = Mapping[int, float]
"""Samples trained so far, by the batch they were trained at."""


@dataclass(frozen=True, slots=True)
class TrainingJob:
    """What is trained, and what is to be best."""

    samples: int  # of an epoch
    epochs: float  # that it lasts at the base batch
    base: int  # batch at which they count
    gradient_bytes: float  # that a worker sends in a step
    objective: Objective = Objective.TIME  # time, cost or the knee of both
    usd_per_h: float = 1.0  # price of a worker
    # Scale of the gradient; ``None`` if it is not known: then only the base batch can be chosen, as
    # what others need is not known
    noise: Noise | None = None
    batches: int = 1  # how many there are to choose from

    @property
    def compares(self) -> bool:
        """Whether batches can be compared, or there is nothing to compare."""
        return self.batches == 1 or self.noise is not None

    @property
    def lasts(self) -> Epochs:
        if self.noise is None:
            return KnownEpochs(self.epochs, self.base)
        return ByNoise(self.epochs, self.base, self.noise)

    def cost_usd(self, workers: int, time_s: float) -> float:
        return workers * self.usd_per_h * time_s / 3600.0

    def left(self, trained: Trained) -> float:
        """Return which part of the training is left, by what samples are worth at their batch."""
        done = 0.0
        for batch, samples in trained.items():
            whole = self.lasts.at(batch)
            # Where nothing is known, a sample is taken to be worth what it is at the base.
            epochs = self.epochs if whole is None else whole.value
            done += samples / (epochs * self.samples)
        return max(1.0 - done, 0.0)


@dataclass(frozen=True, slots=True)
class Probe:
    """What a configuration was measured to take."""

    choice: Configuration
    steps: int  # that were measured
    # Mean time of one, from the first sample asked for to the next one's, once shares had settled
    step_s: float
    points: tuple[tuple[Point, ...], ...]  # own steps by share, of each worker
    # Part of a step in which nobody waits for a slower worker; ``None`` with one worker, or if it
    # was not measured
    communication_s: float | None = None
    noise: Noise | None = None  # scale of the gradient, if it was measured
    drift: float = 0.0  # standard deviation of the mean of later steps, as a part of it
    # Of an epoch beside its steps; ``None`` if no whole one was measured
    beside_s: float | None = None

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
    """What is left of a training in one configuration; intervals are of 95 %."""

    choice: Configuration
    step_s: Interval  # of a step
    time_s: Interval  # until the end
    cost_usd: Interval  # the same
    epochs: float  # that the whole training lasts, those that are trained already included
    measured: bool  # whether this configuration itself was
    # As ``time_s``, but without what the machine wanders by, which makes all configurations quicker
    # or slower together, and which no look at another one tells
    own_s: Interval

    @property
    def name(self) -> str:
        return str(self.choice)


def foresee(
    job: TrainingJob, possible: Sequence[Configuration], probes: Sequence[Probe], trained: Trained
) -> list[OnlineForecast]:
    """Return what is left in each configuration of which something can be said.

    At least one was probed; where one was several times, all count, by their steps.
    """
    model, found = _StepModel.of(job, probes), list[OnlineForecast]()
    left = job.left(trained)
    epochs_so_far, beside_s = sum(trained.values()) / job.samples, _beside_s(probes)
    for choice in possible:
        whole, step = job.lasts.at(choice.batch), model.step(choice)
        if whole is None or step is None:
            continue
        steps = job.samples / choice.batch
        time_s, own_s = (
            Interval(
                *(
                    left * e * (steps * s + beside_s) if left else 0.0
                    for e, s in zip(_ends(whole), _ends(one), strict=True)
                )
            )
            for one in (step.whole, step.own)
        )
        cost = Interval(*(job.cost_usd(choice.workers, t) for t in _ends(time_s)))
        total = epochs_so_far + left * whole.value
        known = choice in model.measured
        found.append(OnlineForecast(choice, step.whole, time_s, cost, total, known, own_s))
    return found


def _beside_s(probes: Sequence[Probe]) -> float:
    """Return what an epoch takes beside its steps, as far as it was measured."""
    known = [probe.beside_s for probe in probes if probe.beside_s is not None]
    return float(np.mean(known)) if known else 0.0


def _ends(one: Interval) -> tuple[float, float, float]:
    return one.value, one.low, one.high


@dataclass(frozen=True, slots=True)
class _UncertainStep:
    """A figure, and its standard deviation as a part: of its own, and common to all."""

    value: float
    error: float
    drift: float

    @property
    def own(self) -> Interval:
        """The figure as it compares with others."""
        return _about(self.value, self.error)

    @property
    def whole(self) -> Interval:
        """The figure with all that it may be off by."""
        return _about(self.value, hypot(self.error, self.drift))


def _by_choice(probes: Sequence[Probe]) -> dict[Configuration, list[Probe]]:
    """Return the probes of each configuration, in the order of their last ones."""
    found = dict[Configuration, list[Probe]]()
    for probe in probes:
        found[probe.choice] = [*found.pop(probe.choice, []), probe]
    return found


def _pooled(probes: Sequence[Probe]) -> _UncertainStep:
    """Return the mean step over all visits of a configuration, doubted by how they differ."""
    times_s = [probe.step_s for probe in probes]
    value = float(np.average(times_s, weights=[probe.steps for probe in probes]))
    apart = float(np.std(times_s)) / value
    drift = sqrt(sum(probe.drift**2 for probe in probes)) / len(probes)
    return _UncertainStep(value, max(apart, _LEAST_ERROR), drift)


@dataclass(frozen=True, slots=True)
class _StepModel:
    """What any step takes: the workers' lines, the ring, and by what measured steps are longer."""

    curves: tuple[Curve, ...]
    ring: Ring
    measured: Mapping[Configuration, _UncertainStep]
    longer: Mapping[int, _UncertainStep]  # by the number of workers, as logarithms

    @classmethod
    def of(cls, job: TrainingJob, probes: Sequence[Probe]) -> _StepModel:
        most = max(len(probe.points) for probe in probes)
        curves = _curves([_points(probes, worker) for worker in range(most)])
        told = [(p.choice.workers, p.communication_s) for p in probes if p.communication_s]
        ring = _ring(links(told, job.gradient_bytes), job.gradient_bytes)
        plain, longer = cls(curves, ring, {}, {}), dict[int, _UncertainStep]()
        measured = {choice: _pooled(own) for choice, own in _by_choice(probes).items()}
        for choice, step in measured.items():
            bare = plain._bare(choice)
            if bare is not None:
                longer[choice.workers] = replace(step, value=log(step.value / bare.time_s))
        return cls(curves, ring, measured, longer)

    def step(self, choice: Configuration) -> _UncertainStep | None:
        """Return what a step takes; ``None`` if some worker was not measured, or gets no sample."""
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
        # All workers are taken to err alike, which is the worst.
        own = max(
            curve.error_at(share) for curve, share in zip(self.curves, bare.shares, strict=False)
        )
        return _UncertainStep(bare.time_s * exp(more.value), hypot(apart, own), more.drift)

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
    """Return a worker's steps of all sizes it had, but for those that it hardly had."""
    points = [point for p in probes if worker < len(p.points) for point in p.points[worker]]
    return [point for point in points if point.steps >= _FEWEST_STEPS] or points


def _curves(each: Sequence[Sequence[Point]]) -> tuple[Curve, ...]:
    """Return the workers' lines.

    A balanced worker has nearly the same share all the time, which does not tell what of its step
    is fixed. It runs the same program as the others, so its line is taken to be that of the worker
    with the most unlike sizes, longer or shorter as a whole.
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
