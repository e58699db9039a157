"""What a comparison of policies on real processes came to."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from evenstride.core.allocation.speedup import linear_bound, prospect
from evenstride.core.arrays import Shares
from evenstride.core.fleet import Fleet, Worker
from evenstride.lab.comparison.worker_curves import (
    TOLERANCE,
    Curve,
    achieved_speeds,
    drift,
    mean_curves,
    true_model,
)
from evenstride.lab.limits.speeds import Speeds


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
    """A whole comparison; field names are those of the JSON output."""

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
class Calibrated:
    """What two calibrations say about the workers, and what balancing can give on them."""

    achieved_speeds: Speeds
    disturbed: bool
    drift: float
    bound: float
    linear_bound: float


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
    fleet = Fleet(tuple(Worker(str(rank)) for rank in range(len(curves))), global_batch)
    hope = prospect(model, fleet, communication_s)
    moved = drift(before, after)
    return Calibrated(
        achieved_speeds=achieved_speeds(curves, max(speeds)),
        disturbed=moved > TOLERANCE,
        drift=round(moved, 4),
        bound=hope.bound,
        linear_bound=linear_bound(1.0 / model.per_sample_s),
    )
