"""What a step of a mix of machines takes: many mixes at once roughly, and one exactly.

The rough way treats shares as numbers that need not be whole. Then the best split of a batch over
two kinds has a closed form, and no integer split is quicker: a lower bound, noise of steps
included. The exact way is the allocation that trains, over every single worker.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from evenstride.core.allocation.min_max import equal_finish
from evenstride.core.fleet import FloatArray, IntArray
from evenstride.core.sync_modes.mode_specs import AllReduce, ParameterServerMode, sync_from_spec
from evenstride.core.time_model.expected_max import expected_max
from evenstride.core.time_model.step_times import TimeModel
from evenstride.errors import ConfigError
from evenstride.planner.workload.step_curve import Curve
from evenstride.sim.engine.network import ParameterServers, Ring

_MOST = 2.0**53  # samples; infinity times no worker would be no number
_LATE = 0.97  # of what noise costs is counted on: expected maxima are known to two digits
_BALANCED = 1e-9  # by which times that are equal may differ


@dataclass(frozen=True, slots=True)
class ServerLinks:
    """Parameter servers, with workers whose steps take equally long.

    ``S`` servers send the weights to ``W`` workers one after the other, a part each. So workers
    begin a step one part's time apart, end it so, and their pushes follow one another without
    waiting in line. From the last update of one step to the last of the next it takes, beside a
    worker's own time,

        2 latency + (W + 2 S - 1) bytes / (S bandwidth) + update / S

    seconds: the last worker's weights come after ``W + S - 1`` parts, and its gradient takes ``S``.

    Source:
        ``sim.engine.network.Queues``, step after step.

    >>> ServerLinks(ParameterServers(1, 0.5, 10.0, 10.0, update_s=2.0)).all_reduce_s(2)
    6.0
    """

    # Servers and links; that a server's machine trains as well, and its link carries both, is not
    # in it
    model: ParameterServers

    def all_reduce_s(self, workers: int) -> float:
        """Return the seconds that a step takes beside the workers' own time."""
        model = self.model
        parts_s = (workers + 2 * model.servers - 1) * model.part_s
        return 2 * model.latency_s + parts_s + model.update_s / model.servers


def servers_of(sync: str) -> int:
    """Return how many parameter servers a mode has; 0 for the all-reduce.

    Raises:
        ConfigError: it is no mode, or one that no plan can be made for.
    """
    mode = sync_from_spec(sync)
    if not isinstance(mode, AllReduce | ParameterServerMode):
        raise ConfigError(
            f"no plan can be made for {sync}, as how many epochs it takes is another question; "
            "plan for bsp, or bsp-ps(servers=1)"
        )
    return mode.servers


Reduces = Ring | ServerLinks
"""Until all workers have the sum of their gradients, or the weights it makes."""


@dataclass(frozen=True, slots=True)
class Workers:
    """Workers of one kind."""

    curve: Curve  # of each
    count: int  # how many
    most_samples: int | None = None  # that fit into one's memory; ``None`` for no limit


@dataclass(frozen=True, slots=True)
class StepEstimate:
    """What a step takes."""

    compute_s: float  # until the last worker is done, noise included
    communication_s: float  # after that
    # Of one worker of each kind; the largest, where they differ by rounding
    shares: tuple[int, ...]

    @property
    def time_s(self) -> float:
        """Seconds of a step."""
        return self.compute_s + self.communication_s


def exact_step(fleet: Sequence[Workers], batch: int, ring: Reduces) -> StepEstimate:
    """Return what a step takes with the best integer split.

    Noise of single workers' steps makes the last of them later than any is on average; the
    expected maximum counts.

    Args:
        fleet: kinds of workers.
        batch: global batch in samples.
        ring: of the all-reduce, or the servers in its place.

    Raises:
        InfeasibleShares: no split fits the workers' memory, or there are more workers than samples.
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
    return StepEstimate(
        max(expected_max(times_s, times_s * noise), float(times_s.max())),
        ring.all_reduce_s(workers) if workers > 1 else 0.0,
        tuple(int(group.max()) for group in groups),
    )


def least_compute_s(
    first: Curve,
    second: Curve,
    counts: IntArray,
    batches: IntArray,
    most: tuple[float, float],
    late: FloatArray,
) -> tuple[FloatArray, FloatArray]:
    """Return what the compute time of a step is at least, with whole shares and with noise.

    With whole shares no kind's workers get less on average than the best share less one sample:
    who has room and could take another sample would end later than the best split allows. The
    expected maximum is convex in the means and grows with each of them, so it is at least that of
    equal means within a kind; and, by its slope where all are equal, hardly less for two kinds of
    which one has a little more than its part, and the other a little less.

    Args:
        first: curve of one kind.
        second: that of the other.
        counts: workers of both, ``(2, n)``.
        batches: global batches in samples, ``(n,)``.
        most: samples that fit into a worker of each kind; may be infinite.
        late: as `lateness` has it.

    Returns:
        Seconds, ``(n,)``, never above `exact_step`, infinite where a batch does not fit; and their
        deviation as a part, at least.
    """
    shares = _best_shares(first, second, counts, batches, most)
    both, fits = counts[1] > 0, shares[2]
    one_s = first.at_many(shares[0])
    two_s = np.where(both, second.at_many(shares[1]), one_s)
    least_s = np.maximum(one_s, two_s)
    if max(first.noise, second.noise) > 0.0:
        means = [
            curve.at_many(np.maximum(share - both, 1.0))
            for curve, share in zip((first, second), shares[:2], strict=True)
        ]
        late = _LATE * late
        alone = [
            mean * (1.0 + curve.noise * late[count])
            for mean, curve, count in zip(means, (first, second), counts, strict=True)
        ]
        least_s = np.maximum(least_s, np.maximum(alone[0], np.where(both, alone[1], 0.0)))
        noise = min(first.noise, second.noise)
        together = 1.0 + noise * late[counts.sum(axis=0)]
        even_s = _even_s(first, second, counts, one_s, two_s)
        lower_s = np.where(both, np.minimum(*means), 0.0)
        least_s = np.maximum(least_s, together * np.maximum(lower_s, even_s))
    return np.where(fits, least_s, np.inf), _least_error((first, second), shares[:2], both)


def _least_error(
    curves: tuple[Curve, Curve],
    shares: tuple[FloatArray, FloatArray],
    both: npt.NDArray[np.bool_],
) -> FloatArray:
    """Return the error of the less sure of two curves, at least: it grows with larger shares."""
    one, two = (
        curve.errors_at(np.maximum(share - 1.0, max(curve.surest, 1.0)))
        for curve, share in zip(curves, shares, strict=True)
    )
    found: FloatArray = np.where(both, np.maximum(one, two), one)
    return found


def _even_s(
    first: Curve, second: Curve, counts: IntArray, one_s: FloatArray, two_s: FloatArray
) -> FloatArray:
    """Return the mean over all workers, at least, where both kinds could end together; else 0."""
    apart_s = first.per_sample_s - second.per_sample_s
    moved = np.maximum(counts[0] * apart_s, -counts[1] * apart_s) / counts.sum(axis=0)
    equal = np.abs(one_s - two_s) <= _BALANCED * one_s
    found: FloatArray = np.where(equal & (counts[1] > 0), one_s - moved, 0.0)
    return found


def _best_shares(
    first: Curve, second: Curve, counts: IntArray, batches: IntArray, most: tuple[float, float]
) -> tuple[FloatArray, FloatArray, npt.NDArray[np.bool_]]:
    """Return the best shares of both kinds, not whole, and whether the batch fits at all."""
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
    return share, others, low <= high * (1 + 1e-12)


@lru_cache(maxsize=8)
def lateness(most: int) -> FloatArray:
    """Return by how many deviations the last of ``0 .. most`` equal workers is late, expected."""
    late = [0.0, 0.0]
    late += [expected_max(np.zeros(n), np.ones(n)) for n in range(2, most + 1)]
    return np.array(late[: most + 1])
