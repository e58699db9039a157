"""What a simulated run is worth, as a row of a table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from evenstride.core.fleet import FloatArray
from evenstride.core.policies import policy_from_spec
from evenstride.core.policy import Policy
from evenstride.sim.oracle import Informed, Yardsticks, yardsticks
from evenstride.sim.run import Simulation, Track
from evenstride.sim.scenario import Scenario
from evenstride.sim.timeline import Timeline

AHEAD = 10
"""Steps over which a split must be good to count as found."""

FOUND = 0.95
NEEDLESS = 0.005
"""A re-split with a smaller true gain, as a part of the step, was needless."""


@dataclass(frozen=True, slots=True)
class Row:
    """One policy in one scenario under one seed.

    Args:
        scenario: its name.
        policy: specification.
        lag: steps from a measured step to its decision.
        seed: of noise and random events.
        efficiency: time of the oracle's split over the policy's, same noise for both.
        efficiency_mean: the same on noise-free curves.
        informed: `efficiency_mean` of a controller told the true curves, with the same lag.
        efficiency_settled: `efficiency_mean` over the steps later than ``2 (lag + 3)`` after
            any event; ``None`` if there are none.
        speedup: time of the equal split over the policy's, same noise.
        bound: time of the equal split over the oracle's, noise-free.
        linear_bound: mean over slowest speed at the start.
        steps_to_95_cold: first step from which the mean `efficiency_mean` of the next ten steps
            is at least 0.95; ``None`` if there is none.
        steps_to_95_after_change: the same after an event, counted from it; the worst of them.
        needless_changes: re-splits whose true gain was under 0.5 %.
        decide_s: median time of a decision, in seconds.
    """

    scenario: str
    policy: str
    lag: int
    seed: int
    efficiency: float
    efficiency_mean: float
    informed: float
    efficiency_settled: float | None
    speedup: float
    bound: float
    linear_bound: float
    steps_to_95_cold: int | None
    steps_to_95_after_change: int | None
    needless_changes: int
    decide_s: float


@dataclass(slots=True, eq=False)
class Stage:
    """A scenario under one seed, ready for any number of policies."""

    scenario: Scenario
    seed: int
    yardsticks: Yardsticks
    informed: float
    timeline: Timeline

    @classmethod
    def of(cls, scenario: Scenario, seed: int) -> Stage:
        """Work out what all policies are compared with."""
        sticks = yardsticks(scenario, seed)
        told = Simulation(scenario, Informed(), seed).run()
        informed = float(sticks.oracle_mean_s.sum() / told.mean_s.sum())
        return cls(scenario, seed, sticks, informed, Timeline(scenario, seed))

    def run(self, spec: str, policy: Policy[Any] | None = None) -> tuple[Row, Track]:
        """Simulate a policy and return its row, and what it did step by step."""
        policy = policy_from_spec(spec) if policy is None else policy
        track = Simulation(self.scenario, policy, self.seed).run()
        return self._row(spec, track), track

    def _row(self, spec: str, track: Track) -> Row:
        sticks, lag = self.yardsticks, self.scenario.exchange.lag
        parts = sticks.oracle_mean_s / track.mean_s
        found = [steps_to_find(parts, event) for event in self.timeline.changes]
        worst = None if None in found or not found else max(f for f in found if f is not None)
        settled = _settled(len(parts), self.timeline.changes, 2 * (lag + 3))
        return Row(
            scenario=self.scenario.name,
            policy=spec,
            lag=lag,
            seed=self.seed,
            efficiency=float(sticks.oracle_s.sum() / track.real_s.sum()),
            efficiency_mean=_ratio(sticks.oracle_mean_s, track.mean_s),
            informed=self.informed,
            efficiency_settled=_ratio(sticks.oracle_mean_s[settled], track.mean_s[settled])
            if settled.any()
            else None,
            speedup=float(sticks.equal_s.sum() / track.real_s.sum()),
            bound=_ratio(sticks.equal_mean_s, sticks.oracle_mean_s),
            linear_bound=sticks.linear_bound,
            steps_to_95_cold=steps_to_find(parts, 0),
            steps_to_95_after_change=worst,
            needless_changes=sum(move.gain < NEEDLESS for move in track.decisions),
            decide_s=float(np.median(track.decide_s)) if track.decide_s else 0.0,
        )


def _ratio(one: FloatArray, other: FloatArray) -> float:
    return float(one.sum() / other.sum())


def steps_to_find(parts: FloatArray, event: int) -> int | None:
    """Return how many steps after an event the split is good over the next ten steps.

    Args:
        parts: oracle's time over the policy's, step by step, noise-free.
        event: the step to count from.
    """
    for step in range(event, len(parts)):
        if parts[step : step + AHEAD].mean() >= FOUND:
            return step - event
    return None


def _settled(steps: int, changes: tuple[int, ...], after: int) -> Any:
    settled = np.ones(steps, dtype=np.bool_)
    for event in (0, *changes):
        settled[event : event + after + 1] = False
    return settled
