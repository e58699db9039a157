"""The best that any split could do: the oracle, and how close a controller can come to it.

`Informed` is a controller that knows the true speeds, with the same lag.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Self

import numpy as np

from evenstride.core.allocation.integer_splits import StepTimes, equal_finish, in_quanta
from evenstride.core.allocation.speedup import equal_split
from evenstride.core.fleet import Fleet, FloatArray, IntArray, as_array, as_shares
from evenstride.core.policies.static import Uniform
from evenstride.core.policy import Decision, Keep, Move, Situation
from evenstride.sim.engine.virtual_workers import Cluster, TrueTimes
from evenstride.sim.scenario.scenario_model import Scenario
from evenstride.sim.scenario.timeline import Timeline


class InformedRun:
    """The run of `Informed` with an exchange after every step, whatever the scenario's cadence.

    Its decisions do not depend on measurements, so the run needs no estimation.
    """

    def __init__(self, scenario: Scenario, seed: int, timeline: Timeline | None = None) -> None:
        self._scenario = scenario
        self._cluster, self._kinds = Cluster(scenario, seed), kinds_of(scenario)
        self._timeline = timeline or Timeline(scenario, seed)
        self._pending: deque[tuple[int, IntArray]] = deque()
        self._known = np.zeros(scenario.size, dtype=np.bool_)
        self._near: IntArray | None = None

    def run(self) -> tuple[FloatArray, FloatArray]:
        """Return the time of each step, noise-free and with the noise that policies have."""
        changes, moves = frozenset(self._timeline.changes), frozenset(self._timeline.moves)
        mean_s, real_s = np.zeros((2, self._scenario.steps))
        busy_s = np.zeros(0)
        for step in range(self._scenario.steps):
            if step == 0 or step in moves:
                self._form(step)
            if step == 0 or step in changes:
                speed = self._timeline.speed(step)
                self._curves = self._cluster.usual.at_speed(speed).of(self._present)
                alike = Alike.of(self._curves, self._kinds[self._present])
                self._best = self._near = best_split(alike, self._fleet, self._near)
            if step in moves:
                self._open()
            if self._due(step) or step == 0 or step in changes:
                busy_s = self._curves.at(self._shares)
            mean_s[step], real_s[step] = self._times(busy_s)
            self._exchange(step)
        return mean_s, real_s

    def _times(self, busy_s: FloatArray) -> tuple[float, float]:
        communication_s = self._scenario.communication.step_s(len(busy_s))
        noisy_s = busy_s * self._cluster.next_noise()[self._present]
        noisy_s += self._cluster.new_share_s(self._present, self._shares)
        return float(busy_s.max()) + communication_s, float(noisy_s.max()) + communication_s

    def _form(self, step: int) -> None:
        self._present = self._timeline.present(step)
        workers = tuple(self._cluster.workers[k] for k in self._present)
        self._fleet = Fleet(workers, self._scenario.global_batch)
        self._shares = self._decided = equal_multiples(self._fleet)
        self._pending.clear()
        self._cold, self._near = True, None

    def _open(self) -> None:
        """Begin with a decision if the previous fleet's times are known for a worker."""
        stayed = np.zeros_like(self._known)
        stayed[self._present] = self._known[self._present]
        self._known = stayed
        if stayed.any():
            self._shares = self._decided = self._best

    def _due(self, step: int) -> bool:
        """Apply the splits that take effect by now; return whether there were any.

        They are applied in the order of their decisions, as in the simulator.
        """
        before = self._shares
        while self._pending and self._pending[0][0] <= step:
            self._shares = self._pending.popleft()[1]
        return self._shares is not before

    def _exchange(self, step: int) -> None:
        asked = self._scenario.exchange
        lag = asked.lag if asked.cold_lag is None or not self._cold else asked.cold_lag
        self._cold = False
        self._known[self._present] = True
        if (self._best != self._decided).any():
            self._pending.append((step + lag, self._best))
            self._decided = self._best


class Informed:
    """Takes the best split for the true mean curves, at every exchange at which they changed.

    `InformedRun` is the same with an exchange after every step, and what scores compare with.

    It opens with the equal split and has the same lag as the other rows of its table. So it shows
    the loss due to the lag alone. A policy that opens with the workers' declared resources may be
    better until its first decision takes effect.
    """

    opening_steps = 1

    def __init__(self) -> None:
        self._times: TrueTimes | None = None

    def tell(self, times: TrueTimes) -> None:
        self._times = times

    def init(self, fleet: Fleet) -> tuple[None, Move]:
        move = Uniform().init(fleet)[1]
        return None, Move(move.shares, "opening", settled=False)

    def decide(self, state: None, situation: Situation) -> tuple[None, Decision]:
        del state
        fleet = situation.fleet
        assert self._times is not None, "it knows the times before it decides"
        shares = as_shares(best_split(self._times, fleet))
        if shares == situation.shares:
            return None, Keep("the split is already the best")
        return None, Move(shares, "the curves changed")


@dataclass(frozen=True, slots=True, eq=False)
class Alike:
    """The same curves, computed only once for equal workers.

    Among thousands of workers there are few kinds, and the best split is searched at every step
    of a ramp.
    """

    curves: TrueTimes
    each: TrueTimes
    which: IntArray

    @classmethod
    def of(cls, curves: TrueTimes, kinds: IntArray) -> Self:
        """Return them, given the kind of every worker; within a kind only the speed differs."""
        _, speed = np.unique(curves.speed, return_inverse=True)
        _, first, which = np.unique(
            kinds * len(kinds) + speed, return_index=True, return_inverse=True
        )
        return cls(curves, curves.of(first), which)

    def at(self, shares: IntArray) -> FloatArray:
        return self.curves.at(shares)

    def capacity(self, deadline_s: float) -> IntArray:
        return self.each.capacity(deadline_s)[self.which]


def kinds_of(scenario: Scenario) -> IntArray:
    """Return the kind of each worker, ``(size,)``."""
    return np.repeat(np.arange(len(scenario.workers)), [g.count for g in scenario.workers])


def equal_multiples(fleet: Fleet) -> IntArray:
    """Return the equal split as the controller applies it: in multiples of the quanta."""
    equal = as_array(equal_split(fleet))
    return in_quanta(equal, fleet.lower, fleet.upper, fleet.quanta)


def best_split(times: StepTimes, fleet: Fleet, near: IntArray | None = None) -> IntArray:
    """Return the best integer split for some true curves.

    ``near`` is the best split of the same fleet before its curves changed; it only saves time.
    """
    bounds = fleet.lower, fleet.upper
    return equal_finish(times, *bounds, fleet.global_batch, quantum=fleet.quanta, near=near)


@dataclass(frozen=True, slots=True, eq=False)
class ReferenceTimes:
    """The noise-free and noisy times of fixed rules that need no controller."""

    oracle_mean_s: FloatArray  # of the best integer split for the true mean curves, at each step.
    oracle_s: FloatArray  # of the same split with the step's noise.
    equal_mean_s: FloatArray  # of the equal split.
    equal_s: FloatArray  # of the equal split with noise, and with the cost of new shares.
    # Time of the equal split over that of the best one, if times were proportional to the share:
    # mean over slowest speed if nothing changes.
    linear_bound: float
    best: IntArray  # the oracle's split at the start, over the present workers.


def reference_times(
    scenario: Scenario, seed: int, timeline: Timeline | None = None
) -> ReferenceTimes:
    """Return the times of the oracle and of the equal split, with the noise that policies have."""
    cluster = Cluster(scenario, seed)
    times, linear_s = np.zeros((4, scenario.steps)), np.zeros(2)
    opening: IntArray | None = None
    for stretch in _stretches(scenario, timeline or Timeline(scenario, seed), cluster):
        opening = stretch.best if opening is None else opening
        means_s = stretch.curves.at(stretch.best), stretch.curves.at(stretch.equal)
        linear_s += stretch.linear_s()
        communication_s = scenario.communication.step_s(len(stretch.present))
        # The oracle is a bound, so its shares cost nothing when they are new.
        new_s = cluster.new_share_s(stretch.present, stretch.equal)
        for step in range(stretch.steps.start, stretch.steps.stop):
            noise = cluster.next_noise()[stretch.present]
            for row, mean_s in zip((0, 2), means_s, strict=True):
                times[row, step], times[row + 1, step] = mean_s.max(), (mean_s * noise).max()
            if step == stretch.steps.start:
                times[3, step] = (means_s[1] * noise + new_s).max()
            times[:, step] += communication_s
    assert opening is not None, "there is at least one step"
    oracle_mean_s, oracle_s, equal_mean_s, equal_s = times
    bound = float(linear_s[0] / linear_s[1])
    return ReferenceTimes(oracle_mean_s, oracle_s, equal_mean_s, equal_s, bound, opening)


@dataclass(frozen=True, slots=True, eq=False)
class _Stretch:
    """Some steps without changes, and their best and equal split."""

    steps: slice
    present: IntArray
    curves: TrueTimes
    best: IntArray
    equal: IntArray

    def linear_s(self) -> FloatArray:
        """Return the total time of the equal and the best split per sample of the global batch.

        It assumes times proportional to the share, and divisible samples.
        """
        speeds = self.curves.speed / self.curves.per_sample_s
        step_s = np.array([1.0 / (len(speeds) * speeds.min()), 1.0 / speeds.sum()])
        return np.asarray(step_s * (self.steps.stop - self.steps.start))


def _stretches(scenario: Scenario, timeline: Timeline, cluster: Cluster) -> Iterator[_Stretch]:
    begins, moves = (0, *timeline.changes), frozenset((0, *timeline.moves))
    kinds, best = kinds_of(scenario), None
    for begin, end in pairwise((*begins, scenario.steps)):
        if begin in moves:
            present = timeline.present(begin)
            workers = tuple(cluster.workers[k] for k in present)
            fleet = Fleet(workers, scenario.global_batch)
            equal, best = equal_multiples(fleet), None
        curves = cluster.usual.at_speed(timeline.speed(begin)).of(present)
        best = best_split(Alike.of(curves, kinds[present]), fleet, best)
        yield _Stretch(slice(begin, end), present, curves, best, equal)
