"""What balancing can give: the bound, and how close a split comes to it.

*bound* compares the equal split with the best integer split under the same true curves;
*linear bound* is mean speed over slowest speed, which the papers use and which holds only for
times that are proportional to the share.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from evenstride.core.allocation import apportion, equal_finish
from evenstride.core.fleet import Fleet, FloatArray, Shares, Worker, as_array, as_shares
from evenstride.core.timemodel import TimeModel
from evenstride.errors import ConfigError

WORTH_IT = 0.03
"""Smallest gain, as a part of the step time, that we would tell anyone to bother about."""


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


def equal_split(fleet: Fleet) -> Shares:
    """Return the split that is as equal as the bounds allow."""
    equal = apportion(np.ones(len(fleet)), fleet.global_batch, fleet.lower, fleet.upper)
    return as_shares(equal)


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

    Args:
        model: time curves as they are believed to be.
        global_batch: samples of a full step; others are not judged.
        equal_s: predicted busy time of the equal split's slowest worker.
        best_s: the same of the best split.
    """

    model: TimeModel
    global_batch: int
    equal_s: float
    best_s: float

    @classmethod
    def of(cls, model: TimeModel, fleet: Fleet, equal: Shares) -> Yardstick:
        """Return the yardstick of a fleet under some curves, given its `equal_split`."""
        best = equal_finish(model, fleet.lower, fleet.upper, fleet.global_batch)
        equal_s = model.makespan_s(as_array(equal))
        return cls(model, fleet.global_batch, equal_s, model.makespan_s(best))

    def parts(self, shares: Shares) -> tuple[float, float] | None:
        """Return the equal and the best split's time as parts of the one under ``shares``."""
        if sum(shares) != self.global_batch:
            return None
        now_s = self.model.makespan_s(as_array(shares))
        return self.equal_s / now_s, min(self.best_s / now_s, 1.0)


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
