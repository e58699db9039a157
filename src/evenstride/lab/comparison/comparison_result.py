"""The figures of a comparison on real processes, and the time curves of its workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from evenstride.core.allocation.integer_splits import equal_finish
from evenstride.core.allocation.speedup import Prospect, linear_bound, prospect
from evenstride.core.arrays import Shares
from evenstride.core.fleet import Fleet, Worker, as_shares
from evenstride.core.time_model.estimates import TimeModel
from evenstride.lab.comparison.trace_figures import Rates
from evenstride.lab.processes.speeds import Speeds

Curve = Mapping[int, float]
"""Mean seconds of one worker's step at each batch size that was measured."""
Interval = tuple[float, float]
"""Lower and upper end of a 95 % confidence interval."""

TOLERANCE = 0.05
"""Two calibrations that differ by more than this describe different machines."""


@dataclass(frozen=True, slots=True)
class PolicyRun:
    """The figures of one policy."""

    policy: str  # its specification
    step_s: float  # geometric mean of the step times of the warm blocks
    samples_per_s: float
    efficiency: float | None  # step time of the fastest fixed split divided by ``step_s``
    shares: Shares  # at the end of the run
    final_loss: float | None  # mean training loss over the last steps; ``None`` if unknown
    test_accuracy: float | None
    samples_lost: int | None  # missing from finished epochs, counted from sample ids
    samples_repeated: int | None  # delivered twice in one epoch, counted from sample ids
    changes: int  # changes of the split after the opening
    efficiency_interval: Interval | None = None  # of the efficiency; ``None`` if unknown


@dataclass(frozen=True, slots=True)
class Oracle:
    """The fastest fixed split of the comparison."""

    shares: Shares
    step_s: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """A comparison of policies; the field names are the keys of the JSON output."""

    workers: int
    speeds: Speeds  # as requested
    achieved_speeds: Speeds  # as measured, on the same scale; empty without a calibration
    disturbed: bool  # whether the interval of a ratio is too wide to quote the ratio
    # Largest relative change of a worker's speed during the comparison.
    drift: float
    limits: str  # how the CPU limits are enforced
    global_batch: int
    runs: list[PolicyRun]
    oracle: Oracle | None  # ``None`` if no fixed split ran
    speedup: float | None  # step time of the equal split divided by that of the balanced policy
    # Step time of the equal split divided by that of the best possible split. ``None`` without a
    # calibration and for speeds that change.
    bound: float | None
    linear_bound: float | None  # mean speed divided by slowest speed; ``None`` in the same cases
    trace: str  # of the balanced run
    caveats: tuple[str, ...] = ()  # sentences on what limits the accuracy of the figures
    speedup_interval: Interval | None = None
    bound_interval: Interval | None = None
    of_bound: float | None = None  # speed-up divided by bound
    of_bound_interval: Interval | None = None
    pairs: int = 0  # of blocks that the intervals follow from
    # Largest half-width of the intervals, as a fraction of the ratio; 0 without an interval.
    uncertainty: float = 0.0
    report: str | None = None  # path of the report page, if there is one

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Cost:
    """A worker's step time as calibrated: ``fixed_s + per_sample_s * samples``."""

    fixed_s: float
    per_sample_s: float


@dataclass(frozen=True, slots=True)
class ModesComparison:
    """A comparison of modes and policies; fields as in `Comparison`, named as in the JSON."""

    workers: int
    speeds: Speeds
    achieved_speeds: Speeds
    costs: tuple[Cost, ...]  # of the workers, as calibrated; empty without a calibration
    disturbed: bool
    drift: float
    limits: str
    global_batch: int  # samples per step, or per round of the workers' own updates
    runs: tuple[Rates, ...]  # in the order they ran
    folder: str  # of traces and logs
    caveats: tuple[str, ...] = ()
    # Largest half-width of the 95 % interval of a ratio, as a fraction of the ratio.
    uncertainty: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def by_arm(self) -> dict[tuple[str, str], list[Rates]]:
        found: dict[tuple[str, str], list[Rates]] = {}
        for run in self.runs:
            found.setdefault((run.sync, run.policy), []).append(run)
        return found


@dataclass(frozen=True, slots=True)
class Calibrated:
    """Speeds, costs and bounds from two calibrations."""

    achieved_speeds: Speeds
    drift: float  # largest relative change of a worker's speed between the two
    bound: float
    linear_bound: float
    costs: tuple[Cost, ...]

    @property
    def disturbed(self) -> bool:
        return self.drift > TOLERANCE


def calibrated(
    before: Sequence[Curve],
    after: Sequence[Curve],
    speeds: Speeds,
    global_batch: int,
    communication_s: float = 0.0,
) -> Calibrated:
    """Return what two calibrations say about the workers."""
    curves = mean_curves(before, after)
    model = true_model(curves)
    return Calibrated(
        achieved_speeds=achieved_speeds(curves, max(speeds)),
        drift=round(drift(before, after), 4),
        bound=prospect_of(curves, global_batch, communication_s).bound,
        linear_bound=linear_bound(1.0 / model.per_sample_s),
        costs=tuple(map(Cost, model.fixed_s.tolist(), model.per_sample_s.tolist())),
    )


def prospect_of(
    curves: Sequence[Curve], global_batch: int, communication_s: float = 0.0
) -> Prospect:
    """Return the step times of the equal and of the best split that follow from the curves."""
    return prospect(true_model(curves), _fleet(len(curves), global_batch), communication_s)


def best_split(curves: Sequence[Curve], global_batch: int) -> Shares:
    """Return the best integer split for the curves."""
    fleet = _fleet(len(curves), global_batch)
    return as_shares(equal_finish(true_model(curves), fleet.lower, fleet.upper, global_batch))


def _fleet(workers: int, global_batch: int) -> Fleet:
    return Fleet(tuple(Worker(str(rank)) for rank in range(workers)), global_batch)


def true_model(curves: Sequence[Curve]) -> TimeModel:
    """Return affine time curves, fitted to each worker's measured points.

    The fit minimises the squares of the relative errors. Fixed times are at least 0.
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
    """Return the means of two calibrations of the same workers."""
    return [
        {size: 0.5 * (a[size] + b[size]) for size in a if size in b}
        for a, b in zip(first, second, strict=True)
    ]


def drift(before: Sequence[Curve], after: Sequence[Curve]) -> float:
    """Return the largest relative change of a worker's speed between two calibrations.

    A worker's speed follows from the sum of its times over the sizes of both calibrations. The sum
    averages the noise of single short measurements.
    """
    changes = []
    for a, b in zip(before, after, strict=True):
        common = a.keys() & b.keys()
        changes.append(abs(sum(b[size] for size in common) / sum(a[size] for size in common) - 1))
    return max(changes)


def achieved_speeds(curves: Sequence[Curve], fastest: float) -> tuple[float, ...]:
    """Return each worker's measured speed, on the scale of the requested speeds."""
    per_sample = true_model(curves).per_sample_s
    return tuple(round(float(fastest * per_sample.min() / p), 4) for p in per_sample)
