"""The best that any split could do: the oracle, and a controller that is told the truth."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from evenstride.core.allocation import equal_finish
from evenstride.core.fleet import Fleet, FloatArray, IntArray, as_shares
from evenstride.core.policies.uniform import Uniform
from evenstride.core.policy import Decision, Keep, Move, Situation
from evenstride.core.speedup import equal_split, linear_bound
from evenstride.sim.cluster import Cluster, TrueTimes
from evenstride.sim.scenario import Scenario
from evenstride.sim.timeline import Timeline


class Informed:
    """Takes the best split for the true mean curves, at every exchange at which they changed.

    It opens with the equal split and pays the same lag as any controller, so it is the most
    that a controller could reach in the same row of a table.
    """

    opening_steps = 1

    def __init__(self) -> None:
        self._times: TrueTimes | None = None

    def tell(self, times: TrueTimes) -> None:
        """Take note of the true curves."""
        self._times = times

    def init(self, fleet: Fleet) -> tuple[None, Move]:
        """Return the equal split."""
        move = Uniform().init(fleet)[1]
        return None, Move(move.shares, "opening", settled=False)

    def decide(self, state: None, situation: Situation) -> tuple[None, Decision]:
        """Return the best split."""
        del state
        fleet = situation.fleet
        assert self._times is not None, "it is told before it decides"
        best = equal_finish(self._times, fleet.lower, fleet.upper, fleet.global_batch)
        shares = as_shares(best)
        if shares == situation.shares:
            return None, Keep("the split is the best")
        return None, Move(shares, "the curves changed")


@dataclass(frozen=True, slots=True, eq=False)
class Yardsticks:
    """The noise-free and noisy times of fixed rules that need no controller.

    Args:
        oracle_mean_s: of the best integer split for the true mean curves, at each step.
        oracle_s: of the same split with the step's noise.
        equal_mean_s: of the equal split.
        equal_s: of the equal split with noise.
        linear_bound: mean over slowest speed at the start.
        best: the oracle's split at the start, over those present.
    """

    oracle_mean_s: FloatArray
    oracle_s: FloatArray
    equal_mean_s: FloatArray
    equal_s: FloatArray
    linear_bound: float
    best: IntArray


def yardsticks(scenario: Scenario, seed: int) -> Yardsticks:
    """Return what the oracle and the equal split take, under the same noise as any policy."""
    timeline, cluster = Timeline(scenario, seed), Cluster(scenario, seed)
    changes = frozenset(timeline.changes)
    times = np.zeros((4, scenario.steps))
    opening: tuple[float, IntArray] | None = None
    for step in range(scenario.steps):
        if step == 0 or step in changes:
            present = timeline.present(step)
            curves = cluster.usual.at_speed(timeline.speed(step)).of(present)
            fleet = Fleet(tuple(cluster.workers[k] for k in present), scenario.global_batch)
            best = equal_finish(curves, fleet.lower, fleet.upper, fleet.global_batch)
            equal = np.array(equal_split(fleet), dtype=np.int64)
            means_s = curves.at(best), curves.at(equal)
            opening = opening or (linear_bound(curves.speed / curves.per_sample_s), best)
        noise = cluster.next_noise()[present]
        for row, mean_s in zip((0, 2), means_s, strict=True):
            times[row, step], times[row + 1, step] = mean_s.max(), (mean_s * noise).max()
        times[:, step] += scenario.communication.step_s(len(present))
    assert opening is not None, "there is at least one step"
    bound, best = opening
    oracle_mean_s, oracle_s, equal_mean_s, equal_s = times
    return Yardsticks(oracle_mean_s, oracle_s, equal_mean_s, equal_s, bound, best)
