"""Splits that need no measurement, and what balancing can give beyond them.

An opening split is equal, or by declared resources. The *bound* compares the equal split with the
best integer split under the same true curves; the *linear bound* is mean speed over slowest speed,
which the papers use and which holds only for times that are proportional to the share.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from evenstride.core.allocation.integer_splits import apportion, equal_finish
from evenstride.core.arrays import FloatArray, IntArray, Shares
from evenstride.core.fleet import Fleet, Worker, as_array, as_shares
from evenstride.core.time_model.estimates import TimeModel
from evenstride.errors import ConfigError

Resource = Literal["flops", "cores"]

WORTH_IT = 0.03
"""Smallest gain, as a part of the step time, that we would tell anyone to bother about."""


def equal_split(fleet: Fleet) -> Shares:
    """Return equal shares, apart from a remainder and from bounds."""
    equal = apportion(np.ones(len(fleet)), fleet.global_batch, fleet.lower, fleet.upper)
    return as_shares(equal)


def split_by(resource: Resource, fleet: Fleet) -> Shares | None:
    """Return the split in proportion to a resource, or ``None`` if it is not known for all."""
    weights = [v for v in known_of(resource, fleet) if v is not None]
    if len(weights) < len(fleet):
        return None
    return as_shares(apportion(np.array(weights), fleet.global_batch, fleet.lower, fleet.upper))


def known_of(resource: Resource, fleet: Fleet) -> list[float | None]:
    """Return the resource of each worker, ``None`` where it cannot be used."""
    values = [w.cores if resource == "cores" else w.flops_per_s for w in fleet.workers]
    return [v if v is not None and v > 0 else None for v in values]


@dataclass(frozen=True, slots=True)
class Prospect:
    """What the equal and the best split would take, in seconds per step."""

    equal_shares: Shares
    best_shares: Shares
    equal_s: float
    best_s: float
    linear_bound: float

    @property
    def bound(self) -> float:
        """Step time of the equal split over that of the best one; 1 means nothing to gain."""
        return self.equal_s / self.best_s

    @property
    def gain(self) -> float:
        """Part of the equal split's step time that balancing can save."""
        return 1.0 - self.best_s / self.equal_s

    @property
    def worth_it(self) -> bool:
        """Whether the gain is at least 3 % of the step."""
        return self.gain >= WORTH_IT


def prospect(model: TimeModel, fleet: Fleet, communication_s: float = 0.0) -> Prospect:
    """Return what equal and balanced steps take under known time curves.

    Args:
        model: ``W`` time curves, in seconds.
        fleet: the workers' bounds and the global batch.
        communication_s: seconds of every step that no split can change.
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
class Yardstick:
    """What the equal and the best split would have made of a step that was run under another.

    A step's time is multiplied by the ratio of two predictions, so that all three splits see
    the same noise and no error that the predictions have in common counts.
    """

    model: TimeModel  # time curves as they are believed to be
    global_batch: int  # samples of a full step; others are not judged
    equal_s: float  # predicted busy time of the equal split's slowest worker
    best_s: float  # the same of the best split

    @classmethod
    def of(cls, model: TimeModel, fleet: Fleet, equal: Shares) -> Yardstick:
        best = equal_finish(model, fleet.lower, fleet.upper, fleet.global_batch)
        equal_s = model.makespan_s(as_array(equal))
        return cls(model, fleet.global_batch, equal_s, model.makespan_s(best))

    def judge(self, splits: IntArray, slowest_s: FloatArray) -> FloatArray:
        """Return what the equal and the best split would have made of steps, seconds ``(2, n)``.

        ``splits`` are the samples of each worker in each step, ``(n, W)``, and ``slowest_s`` the
        busy times of the steps' slowest workers, ``(n,)``. Not a number for steps that cannot be
        compared.
        """
        rows = [tuple(split) for split in splits.tolist()]
        # Most steps share a split, so there are few predictions to make.
        parts = {split: self.parts(split) or (np.nan, np.nan) for split in set(rows)}
        return np.array([parts[split] for split in rows]).reshape(-1, 2).T * slowest_s

    def parts(self, shares: Shares) -> tuple[float, float] | None:
        """Return the equal and the best split's time as parts of the one under ``shares``."""
        # The tail of an epoch trains fewer samples, so its time compares with nothing.
        if sum(shares) != self.global_batch:
            return None
        now_s = self.model.makespan_s(as_array(shares))
        return self.equal_s / now_s, min(self.best_s / now_s, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class JudgedTime:
    """What steps took, against what other splits would have made of them.

    What is left of a step after its slowest worker's busy time, as communication, is the same in
    all splits.
    """

    judged_steps: int = 0  # steps that could be compared with other splits
    judged_s: float = 0.0  # seconds that these took
    equal_s: float = 0.0  # what the equal split would have made of them
    best_s: float = 0.0  # what the best split would have

    @property
    def compared(self) -> bool:
        """Whether there is a comparison: steps that have one, of times that fit together."""
        # If a worker reports no wait for a slower one, nothing may be left of a balanced step.
        return min(self.judged_s, self.equal_s, self.best_s) > 0.0

    @property
    def efficiency_model(self) -> float | None:
        """The best split's time over the time taken, from fitted curves; 1 is perfect."""
        return self.best_s / self.judged_s if self.compared else None

    @property
    def speedup_model(self) -> float | None:
        """The equal split's time over the time taken, from fitted curves."""
        return self.equal_s / self.judged_s if self.compared else None

    @property
    def bound_model(self) -> float | None:
        """The equal split's time over the best split's, from fitted curves."""
        return self.equal_s / self.best_s if self.compared else None

    @property
    def saved_s(self) -> float | None:
        """What the equal split would have taken more, in the steps that were compared."""
        return self.equal_s - self.judged_s if self.compared else None


def judged_time(lasting_s: FloatArray, slowest_s: FloatArray, other_s: FloatArray) -> JudgedTime:
    """Return the sums over the steps that could be compared.

    Of each step ``lasting_s`` is what it took and ``slowest_s`` the busy time of its slowest
    worker, ``(n,)``; ``other_s`` is what `Yardstick.judge` returned, ``(2, n)``.
    """
    rows = ~np.isnan(other_s).any(axis=0)
    taken_s = lasting_s[rows]
    shared_s = taken_s - slowest_s[rows]
    # Summed as `taken_s` is: along an axis numpy may round in another order, and a run that had the
    # equal split all along would seem to have lost a tiny time to it.
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
    """Return the prospect for relative speeds alone, before anything was measured.

    Args:
        speeds: relative speeds of the workers, above 0; the unit does not matter.
        global_batch: samples per step; ``None`` stands for 64 per worker.
        fixed: part of the fastest worker's equal step that does not depend on its share,
            from 0 up to (not including) 1.

    Returns:
        Times as multiples of the fastest worker's equal step.

    Raises:
        ConfigError: a speed is not a positive number, or ``fixed`` is outside its range.
        InfeasibleShares: the global batch is smaller than the number of workers.
    """
    values = np.array(speeds, dtype=np.float64)
    if not len(values) or not np.isfinite(values).all() or not (values > 0).all():
        raise ConfigError(
            f"speeds {speeds} cannot be used: give one positive number per worker, such as 1,1,0.4"
        )
    if not 0 <= fixed < 1:
        raise ConfigError(f"a fixed part of {fixed} cannot be: it is at least 0 and below 1")
    batch = 64 * len(values) if global_batch is None else global_batch
    fleet = Fleet(tuple(Worker(str(rank)) for rank in range(len(values))), batch)
    equal, values = batch / len(values), values / values.max()
    per_sample_s = (1 - fixed) / (equal * values)
    return prospect(TimeModel.affine(fixed / values, per_sample_s), fleet)
