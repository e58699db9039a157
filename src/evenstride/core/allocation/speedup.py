"""Splits that need no measurement, and what balancing can gain over them.

An opening split is equal, or proportional to declared resources. The *bound* compares the equal
split with the best integer split under the same true curves. The *linear bound* is mean speed over
slowest speed; the papers use it. It holds only if times are proportional to the share.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np

from evenstride.core.allocation.integer_splits import apportion, equal_finish
from evenstride.core.arrays import FloatArray, IntArray, Shares
from evenstride.core.fleet import Fleet, Worker, as_array, as_shares
from evenstride.core.time_model.estimates import TimeModel
from evenstride.errors import ConfigError

Resource = Literal["flops", "cores"]

WORTH_IT = 0.03
"""Smallest gain, as a fraction of the step time, for which we recommend balancing."""


@lru_cache(maxsize=4)  # policies ask in every decision
def equal_split(fleet: Fleet) -> Shares:
    """Return equal shares, except for a remainder and for bounds."""
    equal = apportion(np.ones(len(fleet)), fleet.global_batch, fleet.lower, fleet.upper)
    return as_shares(equal)


def split_by(resource: Resource, fleet: Fleet) -> Shares | None:
    """Return the split in proportion to a resource; ``None`` if one worker's is not known."""
    weights = [v for v in known_of(resource, fleet) if v is not None]
    if len(weights) < len(fleet):
        return None
    return as_shares(apportion(np.array(weights), fleet.global_batch, fleet.lower, fleet.upper))


def known_of(resource: Resource, fleet: Fleet) -> list[float | None]:
    """Return the resource of each worker; ``None`` if it is not usable."""
    values = [w.cores if resource == "cores" else w.flops_per_s for w in fleet.workers]
    return [v if v is not None and v > 0 else None for v in values]


@dataclass(frozen=True, slots=True)
class Prospect:
    """Predicted times of the equal and of the best split, in seconds per step."""

    equal_shares: Shares
    best_shares: Shares
    equal_s: float
    best_s: float
    linear_bound: float

    @property
    def bound(self) -> float:
        """Step time of the equal split divided by that of the best one; 1 means no gain."""
        return self.equal_s / self.best_s

    @property
    def gain(self) -> float:
        """Fraction of the equal split's step time that balancing can save."""
        return 1.0 - self.best_s / self.equal_s

    @property
    def worth_it(self) -> bool:
        """Whether the gain is at least 3 % of the step time."""
        return self.gain >= WORTH_IT


def prospect(model: TimeModel, fleet: Fleet, communication_s: float = 0.0) -> Prospect:
    """Return the times of equal and balanced steps under known time curves.

    Args:
        model: ``W`` time curves, in seconds.
        fleet: the workers' bounds and the global batch.
        communication_s: seconds of every step that do not depend on the split.
    """
    equal = equal_split(fleet)
    best = equal_finish(model, fleet.lower, fleet.upper, fleet.global_batch)
    return Prospect(
        equal,
        as_shares(best),
        model.makespan_s(as_array(equal)) + communication_s,
        model.makespan_s(best) + communication_s,
        linear_bound(1.0 / model.per_sample_s * model.speed),
    )


@dataclass(frozen=True, slots=True, eq=False)
class SplitReference:
    """Predicted times of a step under the equal and the best split, from its measured time.

    A step's time is multiplied by the ratio of two predictions. So all three splits have the same
    noise, and an error common to the predictions cancels.
    """

    model: TimeModel  # estimated time curves
    global_batch: int  # samples of a full step; other steps are not compared
    equal_s: float  # predicted busy time of the equal split's slowest worker
    best_s: float  # the same for the best split

    @classmethod
    def of(cls, model: TimeModel, fleet: Fleet, equal: Shares) -> SplitReference:
        best = equal_finish(model, fleet.lower, fleet.upper, fleet.global_batch)
        equal_s = model.makespan_s(as_array(equal))
        return cls(model, fleet.global_batch, equal_s, model.makespan_s(best))

    def judge(self, splits: IntArray, slowest_s: FloatArray) -> FloatArray:
        """Return the times of steps under the equal and the best split, seconds ``(2, n)``.

        ``splits`` are the samples of each worker in each step, ``(n, W)``. ``slowest_s`` are the
        busy times of the steps' slowest workers, ``(n,)``. The result is NaN for steps that cannot
        be compared.
        """
        rows = [tuple(split) for split in splits.tolist()]
        # Most steps share a split, so there are few predictions to make.
        parts = {split: self.parts(split) or (np.nan, np.nan) for split in set(rows)}
        return np.array([parts[split] for split in rows]).reshape(-1, 2).T * slowest_s

    def parts(self, shares: Shares) -> tuple[float, float] | None:
        """Return the times of the equal and the best split as fractions of that of ``shares``."""
        # The last step of an epoch has fewer samples, so its time cannot be compared.
        if sum(shares) != self.global_batch:
            return None
        now_s = self.model.makespan_s(as_array(shares))
        return self.equal_s / now_s, min(self.best_s / now_s, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class JudgedTime:
    """Measured times of steps, and their predicted times under other splits.

    The part of a step after its slowest worker's busy time, such as communication, is the same in
    all splits.
    """

    judged_steps: int = 0  # steps that could be compared with other splits
    judged_s: float = 0.0  # seconds that these steps took
    equal_s: float = 0.0  # predicted seconds under the equal split
    best_s: float = 0.0  # predicted seconds under the best split

    @property
    def compared(self) -> bool:
        """Whether a comparison exists: comparable steps with consistent times."""
        # If a worker reports no wait for a slower one, a balanced step may have no time left.
        return min(self.judged_s, self.equal_s, self.best_s) > 0.0

    @property
    def efficiency_model(self) -> float | None:
        """The best split's time over the measured time, from fitted curves; 1 is ideal."""
        return self.best_s / self.judged_s if self.compared else None

    @property
    def speedup_model(self) -> float | None:
        """The equal split's time over the measured time, from fitted curves."""
        return self.equal_s / self.judged_s if self.compared else None

    @property
    def bound_model(self) -> float | None:
        """The equal split's time over the best split's, from fitted curves."""
        return self.equal_s / self.best_s if self.compared else None

    @property
    def saved_s(self) -> float | None:
        """Seconds that the equal split would have taken more, over the compared steps."""
        return self.equal_s - self.judged_s if self.compared else None


def judged_time(lasting_s: FloatArray, slowest_s: FloatArray, other_s: FloatArray) -> JudgedTime:
    """Return the sums over the steps that could be compared.

    ``lasting_s`` are the times of the steps and ``slowest_s`` the busy times of their slowest
    workers, ``(n,)``. ``other_s`` is the result of `SplitReference.judge`, ``(2, n)``.
    """
    rows = ~np.isnan(other_s).any(axis=0)
    taken_s = lasting_s[rows]
    shared_s = taken_s - slowest_s[rows]
    # Summed as `taken_s` is: along an axis numpy may round in another order. A run that always had
    # the equal split would then show a tiny loss against it.
    equal_s, best_s = (float((split_s[rows] + shared_s).sum()) for split_s in other_s)
    return JudgedTime(
        judged_steps=len(taken_s), judged_s=float(taken_s.sum()), equal_s=equal_s, best_s=best_s
    )


def linear_bound(speeds: FloatArray) -> float:
    """Return mean speed over slowest speed.

    >>> import numpy as np
    >>> round(linear_bound(np.array([9.0, 12.0, 18.0])), 2)
    1.44
    """
    return float(speeds.mean() / speeds.min())


def prospect_of_speeds(
    speeds: list[float], *, global_batch: int | None = None, fixed: float = 0.0
) -> Prospect:
    """Return the prospect for relative speeds alone, before any measurement.

    Args:
        speeds: relative speeds of the workers, above 0; the unit does not matter.
        global_batch: samples per step; ``None`` stands for 64 per worker.
        fixed: fraction of the fastest worker's equal step that does not depend on its share,
            at least 0 and below 1.

    Returns:
        Times as multiples of the fastest worker's equal step.

    Raises:
        ConfigError: a speed is not a positive number, or ``fixed`` is outside its range.
        InfeasibleShares: the global batch is smaller than the number of workers.
    """
    values = np.array(speeds, dtype=np.float64)
    if not len(values) or not np.isfinite(values).all() or not (values > 0).all():
        raise ConfigError(
            f"invalid speeds {speeds}: expected one positive number per worker, such as 1,1,0.4"
        )
    if not 0 <= fixed < 1:
        raise ConfigError(f"invalid fixed part {fixed}: expected a number from 0 to below 1")
    batch = 64 * len(values) if global_batch is None else global_batch
    fleet = Fleet(tuple(Worker(str(rank)) for rank in range(len(values))), batch)
    equal, values = batch / len(values), values / values.max()
    per_sample_s = (1 - fixed) / (equal * values)
    return prospect(TimeModel.affine(fixed / values, per_sample_s), fleet)
