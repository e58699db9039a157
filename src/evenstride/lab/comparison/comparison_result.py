"""What comparisons on real processes came to, and how true workers' curves judge them.

Every worker's curve is measured with all at work and no synchronisation, before and after the
runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from evenstride.core.allocation.integer_splits import equal_finish
from evenstride.core.allocation.speedup import linear_bound, prospect
from evenstride.core.arrays import Shares
from evenstride.core.fleet import Fleet, Worker, as_shares
from evenstride.core.time_model.estimates import TimeModel
from evenstride.lab.comparison.trace_figures import Rates
from evenstride.lab.processes.speeds import Speeds

Curve = Mapping[int, float]
"""Mean seconds of one worker's step at each batch size that was measured."""

TOLERANCE = 0.05
"""Two calibrations that differ by more than this part mean that the machine was disturbed."""


@dataclass(frozen=True, slots=True)
class PolicyRun:
    """One policy's figures."""

    policy: str  # its specification
    step_s: float  # median over the warm blocks of their median step
    samples_per_s: float  # global batch over that
    efficiency: float | None  # time of the fastest fixed split that was run over ``step_s``
    shares: Shares  # in force at the end
    final_loss: float | None  # mean training loss over the last steps; ``None`` where not known
    test_accuracy: float | None  # on the held-out samples; ``None`` where not known
    samples_lost: int | None  # delivered to nobody in an epoch that was finished, counted from ids
    samples_repeated: int | None  # delivered more than once in one epoch, counted from ids
    changes: int  # changes of the split after the opening


@dataclass(frozen=True, slots=True)
class Oracle:
    """The fastest fixed split that was run in the same comparison."""

    shares: Shares
    step_s: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """A whole comparison of policies; field names are those of the JSON output."""

    workers: int  # their number
    speeds: Speeds  # asked for
    achieved_speeds: Speeds  # as calibrated, on the same scale; empty without a calibration
    disturbed: bool  # whether the calibrations before and after differ by more than 5 %
    drift: float  # by how much they differ
    limits: str  # how the speeds were kept
    global_batch: int  # samples per step
    runs: list[PolicyRun]  # one per policy
    oracle: Oracle | None  # the fastest fixed split, if one was run
    speedup: float | None  # time of the equal split over that of the balanced one, both as run
    # Equal over best split under the calibrated curves and communication; ``None`` without a
    # calibration, or where speeds that changed leave it no meaning.
    bound: float | None
    linear_bound: float | None  # mean over slowest speed; ``None`` in the same cases
    trace: str  # of the balanced run
    caveats: tuple[str, ...] = ()  # sentences on what makes the figures less than they could be

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Cost:
    """What one worker's step takes, as calibrated: ``fixed_s + per_sample_s * samples``."""

    fixed_s: float
    per_sample_s: float


@dataclass(frozen=True, slots=True)
class ModesComparison:
    """What modes and policies came to; fields as in `Comparison`, named as in the JSON output."""

    workers: int
    speeds: Speeds
    achieved_speeds: Speeds
    costs: tuple[Cost, ...]  # of the workers' steps, as calibrated; empty without a calibration
    disturbed: bool
    drift: float
    limits: str
    global_batch: int  # samples per step, or per round of the workers' own updates
    runs: tuple[Rates, ...]  # one after the other, as they ran
    folder: str  # of traces and logs
    caveats: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def by_arm(self) -> dict[tuple[str, str], list[Rates]]:
        found: dict[tuple[str, str], list[Rates]] = {}
        for run in self.runs:
            found.setdefault((run.sync, run.policy), []).append(run)
        return found


@dataclass(frozen=True, slots=True)
class Calibrated:
    """What two calibrations say about the workers, and what balancing can give on them."""

    achieved_speeds: Speeds
    disturbed: bool
    drift: float
    bound: float
    linear_bound: float
    costs: tuple[Cost, ...]


def calibrated(
    before: list[Curve],
    after: list[Curve],
    speeds: Speeds,
    global_batch: int,
    communication_s: float = 0.0,
) -> Calibrated:
    """Return the verdict of a calibration before and one after."""
    curves = mean_curves(before, after)
    model = true_model(curves)
    hope = prospect(model, _fleet(len(curves), global_batch), communication_s)
    moved = drift(before, after)
    return Calibrated(
        achieved_speeds=achieved_speeds(curves, max(speeds)),
        disturbed=moved > TOLERANCE,
        drift=round(moved, 4),
        bound=hope.bound,
        linear_bound=linear_bound(1.0 / model.per_sample_s),
        costs=tuple(map(Cost, model.fixed_s.tolist(), model.per_sample_s.tolist())),
    )


def best_split(curves: Sequence[Curve], global_batch: int) -> Shares:
    """Return the best integer split for the calibrated curves."""
    fleet = _fleet(len(curves), global_batch)
    return as_shares(equal_finish(true_model(curves), fleet.lower, fleet.upper, global_batch))


def _fleet(workers: int, global_batch: int) -> Fleet:
    return Fleet(tuple(Worker(str(rank)) for rank in range(workers)), global_batch)


def true_model(curves: Sequence[Curve]) -> TimeModel:
    """Return the affine curves through each worker's measured points.

    Fitted by least squares on relative errors, with a fixed time of at least 0.
    """
    fits = [_affine(curve) for curve in curves]
    return TimeModel.affine([fixed for fixed, _ in fits], [per_sample for _, per_sample in fits])


def _affine(curve: Curve) -> tuple[float, float]:
    sizes = np.array(sorted(curve), dtype=np.float64)
    times_s = np.array([curve[int(b)] for b in sizes])
    proportional = float((times_s / sizes).mean())
    if len(sizes) < 2:
        return 0.0, proportional
    design = np.stack([1.0 / times_s, sizes / times_s], axis=1)
    fixed, per_sample = np.linalg.lstsq(design, np.ones(len(sizes)), rcond=None)[0]
    if fixed < 0 or per_sample <= 0:
        return 0.0, proportional
    return float(fixed), float(per_sample)


def mean_curves(first: Sequence[Curve], second: Sequence[Curve]) -> list[dict[int, float]]:
    """Return the curves between two calibrations of the same workers."""
    return [
        {size: 0.5 * (a[size] + b[size]) for size in a if size in b}
        for a, b in zip(first, second, strict=True)
    ]


def drift(before: Sequence[Curve], after: Sequence[Curve]) -> float:
    """Return the largest change of a worker's speed between two calibrations, as a part.

    A worker's speed is judged on the sum of its times over all sizes, which averages out what
    a single short measurement is off by.
    """
    changes = []
    for a, b in zip(before, after, strict=True):
        common = a.keys() & b.keys()
        changes.append(abs(sum(b[size] for size in common) / sum(a[size] for size in common) - 1))
    return max(changes)


def achieved_speeds(curves: Sequence[Curve], fastest: float) -> tuple[float, ...]:
    """Return each worker's speed as measured, on the scale of the speeds that were asked for."""
    per_sample = true_model(curves).per_sample_s
    return tuple(round(float(fastest * per_sample.min() / p), 4) for p in per_sample)
