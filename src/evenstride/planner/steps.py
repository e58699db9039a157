"""What a step of a mix of machines takes: many mixes at once roughly, and one exactly.

The rough way treats shares as numbers that need not be whole. Then the best split of a batch over
two kinds has a closed form, and no integer split is quicker: a lower bound. The exact way is the
allocation that trains, over every single worker.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from evenstride.core.allocation import equal_finish
from evenstride.core.expectation import expected_max
from evenstride.core.fleet import FloatArray, IntArray
from evenstride.core.timemodel import TimeModel
from evenstride.planner.curves import Curve
from evenstride.sim.links import Ring

_MOST = 2.0**53  # samples; infinity times no worker would be no number


@dataclass(frozen=True, slots=True)
class Workers:
    """Workers of one kind.

    Args:
        curve: of each.
        count: how many.
        most_samples: that fit into one's memory; ``None`` for no limit.
    """

    curve: Curve
    count: int
    most_samples: int | None = None


@dataclass(frozen=True, slots=True)
class Step:
    """What a step takes.

    Args:
        compute_s: until the last worker is done, noise included.
        communication_s: after that.
        shares: of one worker of each kind; the largest, where they differ by rounding.
    """

    compute_s: float
    communication_s: float
    shares: tuple[int, ...]

    @property
    def time_s(self) -> float:
        """Seconds of a step."""
        return self.compute_s + self.communication_s


def exact_step(fleet: Sequence[Workers], batch: int, ring: Ring) -> Step:
    """Return what a step takes with the best integer split.

    Noise of single workers' steps makes the last of them later than any is on average; the
    expected maximum counts.

    Args:
        fleet: kinds of workers.
        batch: global batch in samples.
        ring: of the all-reduce.

    Raises:
        InfeasibleShares: no split fits the workers' memory, or there are more workers than samples.

    Cost:
        That of `equal_finish` over all workers.
    """
    counts = np.array([kind.count for kind in fleet])
    fixed_s, per_sample_s, noise = (
        np.repeat([getattr(kind.curve, name) for kind in fleet], counts)
        for name in ("fixed_s", "per_sample_s", "noise")
    )
    most = [batch if kind.most_samples is None else kind.most_samples for kind in fleet]
    model, workers = TimeModel.affine(fixed_s, per_sample_s), int(counts.sum())
    upper = np.repeat(np.array(most, dtype=np.int64), counts)
    shares = equal_finish(model, np.ones(workers, dtype=np.int64), upper, batch)
    times_s = model.at(shares)
    groups = np.split(shares, np.cumsum(counts)[:-1])
    return Step(
        max(expected_max(times_s, times_s * noise), float(times_s.max())),
        ring.all_reduce_s(workers) if workers > 1 else 0.0,
        tuple(int(group.max()) for group in groups),
    )


def least_step_s(
    first: Curve,
    second: Curve,
    counts: IntArray,
    batches: IntArray,
    most: tuple[float, float],
) -> FloatArray:
    """Return the shortest compute time of a step of two kinds, shares not being whole.

    Args:
        first: curve of one kind.
        second: that of the other.
        counts: workers of both, ``(2, n)``; of the second there may be none.
        batches: global batches in samples, ``(n,)``.
        most: samples that fit into a worker of each kind; may be infinite.

    Returns:
        Seconds, ``(n,)``; infinite where a batch does not fit, or is smaller than the workers.

    Cost:
        O(n), vectorised.
    """
    one, two = counts.astype(np.float64)
    rate = one / first.per_sample_s + two / second.per_sample_s
    start = one * first.fixed_s / first.per_sample_s + two * second.fixed_s / second.per_sample_s
    finish_s = (batches + start) / rate
    # One dimension, and convex: the best share within bounds is the nearest to the best of all.
    share = (finish_s - first.fixed_s) / first.per_sample_s
    low = np.maximum(1.0, (batches - two * min(most[1], _MOST)) / one)
    high = np.minimum(most[0], (batches - two) / one)
    share = np.clip(share, low, high)
    with np.errstate(divide="ignore", invalid="ignore"):
        others = np.where(two > 0, (batches - one * share) / two, 0.0)
    times_s = np.maximum(first.at_many(share), np.where(two > 0, second.at_many(others), 0.0))
    return np.where(low <= high * (1 + 1e-12), times_s, np.inf)


@lru_cache(maxsize=8)
def lateness(most: int) -> FloatArray:
    """Return by how many deviations the last of ``0 .. most`` equal workers is late, expected.

    Cost:
        O(most), once.
    """
    late = [0.0, 0.0]
    late += [expected_max(np.zeros(n), np.ones(n)) for n in range(2, most + 1)]
    return np.array(late[: most + 1])
