"""Measurements of workers: a time is always paired with the share it was measured at."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import nan
from typing import Any

import numpy as np
import numpy.typing as npt

from evenstride.core.arrays import FloatArray, IntArray, Mask, Shares, Which

# Times of half a year or more are rejected.
_LONGEST_S = 1.5e7
SHORTEST_S = 1e-9
"""Lower limit of a step's time, whatever a clock returns; it keeps quotients of times finite."""


@dataclass(frozen=True, slots=True)
class Observation:
    """Consecutive steps of one worker, all at one share.

    If a time is paired with the latest decision instead, every controller oscillates as soon
    as the data loader prefetches, because the decision runs ahead of the batch.
    """

    worker: int  # rank of the worker in its fleet.
    share: int  # samples in each of these steps; 0 is a ghost sample and is never modelled.
    first_step: int  # global index of the first step.
    # Per step: data, compute and the running median of the time between steps.
    busy_s: tuple[float, ...]
    wait_s: tuple[float, ...]  # per step, waiting time for others (communication included)
    data_s: float = 0.0  # total waiting time for the next batch
    # Total time outside training (evaluation, saving) beyond the median.
    outside_s: float = 0.0
    control_wait_s: float = 0.0  # total waiting time for decisions
    modelled: bool = True  # false for steps that say nothing about speed (first of later passes)
    # Fraction of its machine's processor time in use, from 0 to 1; NaN if unknown.
    cpu_load: float = nan
    memory_load: float = nan  # the same for its machine's memory

    @property
    def steps(self) -> int:
        return len(self.busy_s)


@dataclass(frozen=True, slots=True)
class PeakMemory:
    """The peak memory of one worker between two exchanges."""

    worker: int  # rank
    samples: int  # size of the largest batch it held at once
    peak_bytes: int | None  # its peak; ``None`` if not known
    limit_bytes: int | None  # its current limit; ``None`` if not known


class Measurements:
    """Observations of many workers as columns, to process thousands of them at once.

    Iteration yields them one by one. Two objects are equal if they hold the same observations. The
    first four columns are int64 ``(n,)``. ``busy_s`` and ``wait_s`` hold the times of all
    observations in order, ``(sum steps,)``. ``sums_s`` are the data, outside and control-wait
    seconds of each, ``(3, n)``. ``modelled`` says whether each has information about speed,
    ``(n,)``. ``loads`` are the processor and memory load of each one's machine, ``(2, n)``.
    """

    def __init__(
        self,
        worker: IntArray,
        share: IntArray,
        first_step: IntArray,
        steps: IntArray,
        busy_s: FloatArray,
        wait_s: FloatArray,
        sums_s: FloatArray | None = None,
        modelled: Mask | None = None,
        loads: FloatArray | None = None,
    ) -> None:
        self.worker, self.share, self.first_step, self.steps = worker, share, first_step, steps
        self.busy_s, self.wait_s = busy_s, wait_s
        self.sums_s = np.zeros((3, len(worker))) if sums_s is None else sums_s
        self.modelled = np.ones(len(worker), dtype=np.bool_) if modelled is None else modelled
        self.loads = np.full((2, len(worker)), nan) if loads is None else loads

    @classmethod
    def of(cls, observations: Iterable[Observation]) -> Measurements:
        """Return the columns of some observations; every step needs both times."""
        seen = tuple(observations)
        if not all(len(o.wait_s) == o.steps for o in seen):
            raise ValueError("each step needs both times, busy time and waiting time")

        def whole(values: Iterable[int]) -> IntArray:
            return np.fromiter(values, dtype=np.int64, count=len(seen))

        sums_s = [(o.data_s, o.outside_s, o.control_wait_s) for o in seen]
        return cls(
            worker=whole(o.worker for o in seen),
            share=whole(o.share for o in seen),
            first_step=whole(o.first_step for o in seen),
            steps=whole(o.steps for o in seen),
            busy_s=np.array([t for o in seen for t in o.busy_s], dtype=np.float64),
            wait_s=np.array([t for o in seen for t in o.wait_s], dtype=np.float64),
            sums_s=np.array(sums_s, dtype=np.float64).reshape(len(seen), 3).T,
            modelled=np.array([o.modelled for o in seen], dtype=np.bool_),
            loads=np.array([(o.cpu_load, o.memory_load) for o in seen]).reshape(len(seen), 2).T,
        )

    @classmethod
    def joined(cls, parts: Sequence[Measurements]) -> Measurements:
        if not parts:
            return cls.of(())
        columns = zip(*(part.__reduce__()[1] for part in parts), strict=True)
        return cls(*(np.concatenate(column, axis=-1) for column in columns))

    def __len__(self) -> int:
        return len(self.worker)

    def __iter__(self) -> Iterator[Observation]:
        busy_s, wait_s, stop = self.busy_s.tolist(), self.wait_s.tolist(), 0
        columns = zip(
            self.worker.tolist(),
            self.share.tolist(),
            self.first_step.tolist(),
            self.steps.tolist(),
            self.sums_s.T.tolist(),
            self.modelled.tolist(),
            self.loads.T.tolist(),
            strict=True,
        )
        for worker, share, first_step, steps, sums_s, modelled, (cpu, memory) in columns:
            data_s, outside_s, control_s = sums_s
            start, stop = stop, stop + steps
            busy, wait = tuple(busy_s[start:stop]), tuple(wait_s[start:stop])
            yield Observation(
                *(worker, share, first_step, busy, wait),
                *(data_s, outside_s, control_s, modelled, cpu, memory),
            )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Measurements):
            return NotImplemented
        # Only the columns: only one of the two may have computed its medians.
        mine, others = self.__reduce__()[1], other.__reduce__()[1]
        return all(map(_equal, mine, others))

    __hash__ = None  # type: ignore[assignment]

    def __reduce__(self) -> tuple[type[Measurements], tuple[npt.NDArray[Any], ...]]:
        # Without the cached medians, which can be computed again after unpickling.
        columns = (self.worker, self.share, self.first_step, self.steps, self.busy_s, self.wait_s)
        return Measurements, (*columns, self.sums_s, self.modelled, self.loads)

    def __repr__(self) -> str:
        return f"Measurements.of({tuple(self)!r})"

    @cached_property
    def median_s(self) -> FloatArray:
        """Median busy time of each observation, ``(n,)``."""
        return self._medians(self.busy_s)

    def step_of_times(self) -> IntArray:
        """Return the step of each of the times, ``(sum steps,)``."""
        begins = np.repeat(self.first_step - np.cumsum(self.steps) + self.steps, self.steps)
        return begins + np.arange(len(self.wait_s))

    def least_waits(self) -> tuple[FloatArray, IntArray]:
        """Return the shortest waiting time in each reported step, and the number of reports."""
        step = self.step_of_times()
        # The usual case of one step from every worker, which needs no sort.
        if len(step) and (step == step[0]).all():
            return np.array([self.wait_s.min()]), np.array([len(step)])
        order = np.argsort(step, kind="stable")
        begins = np.flatnonzero(np.diff(step[order], prepend=-1))
        least_s = np.minimum.reduceat(self.wait_s[order], begins)
        return least_s, np.diff(np.append(begins, len(step)))

    def step_by_step(self) -> Iterator[tuple[IntArray, IntArray]]:
        """Yield one step of each worker, then the next: indices of observations and of times."""
        starts = np.cumsum(self.steps) - self.steps
        # In the order of training, for averages that weight the latest most.
        for turn in self.turns():
            for step in range(int(self.steps[turn].max(initial=0))):
                here = turn[self.steps[turn] > step]
                yield here, starts[here] + step

    def _medians(self, times_s: FloatArray) -> FloatArray:
        if (self.steps == 1).all():
            return times_s
        return medians(times_s, np.repeat(np.arange(len(self)), self.steps), len(self))

    @cached_property
    def least_s(self) -> FloatArray:
        """Shortest busy time of each observation, ``(n,)``; each must have a step."""
        if (self.steps == 1).all():
            return self.busy_s
        return np.asarray(np.minimum.reduceat(self.busy_s, np.cumsum(self.steps) - self.steps))

    @cached_property
    def relative_variance(self) -> FloatArray:
        """Robust relative variance of each observation's busy times, ``(n,)``.

        From the median absolute deviation; NaN for fewer than four steps.
        """
        if (self.steps < 4).all():
            return np.full(len(self), nan)
        away_s = np.abs(self.busy_s - np.repeat(self.median_s, self.steps))
        # The factor makes it a standard deviation for normal noise; spikes hardly affect it.
        deviation_s = 1.4826 * self._medians(away_s)
        variance = (deviation_s / np.maximum(self.median_s, 1e-12)) ** 2
        return np.where(self.steps < 4, np.nan, variance)

    def only(self, mask: Mask) -> Measurements:
        """Return the observations that a mask ``(n,)`` selects."""
        if mask.all():
            return self
        of_times = np.repeat(mask, self.steps)
        return Measurements(
            self.worker[mask],
            self.share[mask],
            self.first_step[mask],
            self.steps[mask],
            self.busy_s[of_times],
            self.wait_s[of_times],
            self.sums_s[:, mask],
            self.modelled[mask],
            self.loads[:, mask],
        )

    def first_s(self, places: IntArray) -> FloatArray:
        return np.asarray(self.busy_s[(np.cumsum(self.steps) - self.steps)[places]])

    def without_slow_first(self, places: IntArray, factor: float) -> Measurements:
        """Return the observations without first steps that are slower than the later ones.

        ``places`` are of observations of at least two steps. A slow first step takes more than
        ``factor`` times the median of the later ones.
        """
        if not len(places):
            return self
        short = self._short(places)
        slow = places[self.first_s(places) > factor * short.median_s[places]]
        return self._short(slow)

    def _short(self, places: IntArray) -> Measurements:
        steps, first_step = self.steps.copy(), self.first_step.copy()
        of_times = np.ones(len(self.busy_s), dtype=np.bool_)
        of_times[(np.cumsum(steps) - steps)[places]] = False
        steps[places] -= 1
        first_step[places] += 1
        columns = (self.worker, self.share, first_step, steps)
        times_s = (self.busy_s[of_times], self.wait_s[of_times])
        return Measurements(*columns, *times_s, self.sums_s, self.modelled, self.loads)

    def renumbered(self, worker: IntArray) -> Measurements:
        columns = (self.share, self.first_step, self.steps, self.busy_s, self.wait_s)
        return Measurements(worker, *columns, self.sums_s, self.modelled, self.loads)

    def turns(self) -> Iterator[IntArray]:
        """Yield indices so that each yield has every worker at most once, in order of step."""
        if (self.worker[1:] > self.worker[:-1]).all():  # one of each
            yield from [np.arange(len(self))] if len(self) else []
            return
        # Reports may arrive in any order, but a worker's times are learned in order of step.
        order = np.lexsort((self.first_step, self.worker))
        worker = self.worker[order]
        first = np.searchsorted(worker, worker, side="left")
        turn = np.arange(len(worker)) - first
        for number in range(int(turn.max()) + 1 if len(turn) else 0):
            yield order[turn == number]

    @cached_property
    def sound(self) -> Mask:
        """Which observations are valid, bool ``(n,)``.

        All their times are at least 0 and less than half a year, their busy times are above 0, and
        they have at least one. (Comparisons with NaN are false.)
        """
        with np.errstate(invalid="ignore"):
            good = (self.busy_s > 0) & (self.busy_s < _LONGEST_S)
            good &= (self.wait_s >= 0) & (self.wait_s < _LONGEST_S)
            sums = ((self.sums_s >= 0) & (self.sums_s < _LONGEST_S)).all(axis=0)
        owner = np.repeat(np.arange(len(self)), self.steps)
        bad = np.bincount(owner, weights=~good, minlength=len(self))
        return np.asarray((bad == 0) & sums & (self.steps > 0))


@dataclass(frozen=True, slots=True, eq=False)
class WorkerTimes:
    """One observation each of some workers, as arrays of shape ``(n,)``."""

    workers: Which
    share: IntArray
    time_s: FloatArray  # of one step, the median
    least_s: FloatArray
    steps: IntArray
    spread: FloatArray  # relative variance within the observation, NaN if it is too short
    interval_s: FloatArray  # of work since the previous exchange, this observation included
    cold: Mask  # whether it is a slow first step at a new share.
    new: Mask  # whether it is a single first step at a new share.
    before: IntArray  # its share before this observation.
    # Share whose time its curve keeps if long first steps have bent it, else 0.
    pivot: IntArray
    # How far the time of a share to which a worker has returned is from the one before, in
    # logarithms. Infinite for all others.
    off: FloatArray

    @classmethod
    def of(
        cls, measured: Measurements, at: IntArray, interval_s: FloatArray, cold: Mask, new: Mask
    ) -> WorkerTimes:
        whose: Which = measured.worker[at]
        if len(at) == len(interval_s):
            whose = slice(None)  # all of them, in order of rank
        return cls(
            whose,
            measured.share[at],
            np.maximum(measured.median_s[at], SHORTEST_S),
            measured.least_s[at],
            measured.steps[at],
            measured.relative_variance[at],
            interval_s[whose],
            cold,
            new,
            measured.share[at],
            np.zeros(len(cold), np.int64),
            np.full(len(cold), np.inf),
        )

    def only(self, mask: Mask) -> WorkerTimes:
        if mask.all():
            return self
        return self.at(np.flatnonzero(mask))

    def at(self, places: IntArray) -> WorkerTimes:
        ranks = np.arange(len(self.share)) if isinstance(self.workers, slice) else self.workers
        rest = (getattr(self, name)[places] for name in self.__slots__[1:])
        return WorkerTimes(ranks[places], *rest)

    def variance(self, noise: FloatArray) -> FloatArray:
        """Relative variance of the medians (pi/2 times a mean's, for three steps or more)."""
        median_cost = np.where(self.steps > 2, np.pi / 2, 1.0)
        return np.asarray(noise * median_cost / self.steps)


def _equal(one: npt.NDArray[Any], other: npt.NDArray[Any]) -> bool:
    # Unknown loads are NaN, which does not equal itself.
    return np.array_equal(one, other, equal_nan=one.dtype.kind == "f")


def communication_s(measured: Measurements, shares: Shares) -> float | None:
    """Return the time of a step, in seconds, that remains without waiting for slower workers.

    The slowest worker of a step waits only for the communication, so this is the least waiting time
    in the step; of several steps, the median counts. (The least of the workers' usual waiting times
    would be too long: among equal workers, no worker is usually the slowest.) ``None`` unless all
    workers with a share have reported.
    """
    seen = measured.only(measured.modelled)
    counts = np.bincount(seen.worker, weights=seen.steps, minlength=len(shares))
    if not counts.any() or any(shares[rank] > 0 for rank in np.flatnonzero(counts == 0)):
        return None
    least_s, reports = seen.least_waits()
    # If some have not reported a step yet, its slowest worker may be one of them.
    # For few values, numpy's own median takes longer than all else here.
    return median(tuple(least_s[reports == reports.max()].tolist()))


def medians(values: FloatArray, owner: IntArray, owners: int) -> FloatArray:
    """Return the median of each owner's values (the mean of the middle two of an even count).

    ``owner`` assigns each value to an owner, from 0 to ``owners - 1``; an owner without values gets
    0. Cost: ``O(m log m)`` for ``m`` values, vectorised.
    """
    counts = np.bincount(owner, minlength=owners)
    if len(values) == owners and counts.all():  # one each
        return np.asarray(np.bincount(owner, weights=values))
    starts = np.cumsum(counts) - counts
    # One more value, because an owner without values may point past the end.
    ordered = np.append(values[np.lexsort((values, owner))], 0.0)
    high = ordered[starts + counts // 2]
    low = ordered[starts + np.maximum(counts - 1, 0) // 2]
    return np.where(counts > 0, np.where(counts % 2, high, 0.5 * (low + high)), 0.0)


def median(values: tuple[float, ...]) -> float:
    """Return the median of at least one value (the mean of the middle two of an even count)."""
    ordered = sorted(values)
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else 0.5 * (ordered[half - 1] + ordered[half])


@dataclass(frozen=True, slots=True, eq=False)
class StepsAtSplit:
    """Successive steps at one split, each measured by all workers that had samples."""

    first: int  # the first step.
    shares: IntArray  # ``(W,)``.
    busy_s: FloatArray  # ``(steps, W)``; 0 for a worker without samples.

    def longest_s(self) -> FloatArray:
        return np.asarray(self.busy_s.max(axis=1))

    def at_least_s(self, other: IntArray) -> FloatArray:
        """Return the shortest times that the same steps may have taken at another split."""
        # Those with as many samples or fewer would not have been faster with the other's shares.
        fewer = self.shares <= other
        return np.asarray(self.busy_s[:, fewer].max(axis=1, initial=0.0))


def whole_steps(seen: Measurements, workers: int, batch: int) -> Iterator[StepsAtSplit]:
    """Yield the whole steps among some measurements, in order; partly reported ones are left out.

    ``workers`` is the number of workers, ``batch`` the sum of their shares.

    Cost:
        ``O(n W)`` for ``n`` steps.
    """
    if not len(seen):
        return
    if _alike_steps(seen, workers, batch):  # the usual case
        busy_s = seen.busy_s.reshape(workers, -1).T
        yield StepsAtSplit(int(seen.first_step[0]), seen.share, busy_s)
        return
    steps = seen.step_of_times()
    numbers, row = np.unique(steps, return_inverse=True)
    owner = np.repeat(np.arange(len(seen)), seen.steps)
    shape = len(numbers), workers
    shares, busy_s = np.zeros(shape, dtype=np.int64), np.zeros(shape)
    at = row, seen.worker[owner]
    shares[at] = seen.share[owner]
    # A placeholder of a worker without samples is no part of the split.
    busy_s[at] = np.where(seen.share[owner] > 0, seen.busy_s, 0.0)
    whole = shares.sum(axis=1) == batch
    odd = ~seen.modelled & (seen.share > 0)
    whole[row[odd[owner]]] = False
    numbers, shares, busy_s = numbers[whole], shares[whole], busy_s[whole]
    begins = np.flatnonzero(np.r_[True, (shares[1:] != shares[:-1]).any(axis=1)])
    for begin, end in zip(begins, [*begins[1:], len(numbers)], strict=True):
        if end > begin:
            yield StepsAtSplit(int(numbers[begin]), shares[begin], busy_s[begin:end])


def _alike_steps(seen: Measurements, workers: int, batch: int) -> bool:
    """Return whether these are the same steps of all workers, each at one share."""
    if len(seen) != workers or int(seen.share.sum()) != batch:
        return False
    same = (seen.worker == np.arange(workers)) & seen.modelled & (seen.share > 0)
    same &= (seen.steps == seen.steps[0]) & (seen.first_step == seen.first_step[0])
    return bool(same.all())
