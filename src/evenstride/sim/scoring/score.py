"""What a simulated run is worth, as a row of a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from evenstride.core.fleet import FloatArray
from evenstride.core.policies import policy_from_spec
from evenstride.core.policy import Policy
from evenstride.sim.engine.lockstep import SimulatedSteps, Simulation
from evenstride.sim.scenario.scenario_model import Scenario
from evenstride.sim.scenario.timeline import Timeline
from evenstride.sim.scoring.oracle import Yardsticks, informed_mean_s, yardsticks

AHEAD = 10
"""Steps over which a split must be good to count as found."""

ROOM = 10
"""Steps that an answer to an event may take beyond the lag and still be found."""

FOUND = 0.95
_ROUNDING = 1e-9
NEEDLESS = 0.005
"""A re-split with a smaller true gain, as a part of the step, was needless."""


@dataclass(frozen=True, slots=True)
class ScoreRow:
    """One policy in one scenario under one seed."""

    scenario: str
    policy: str  # specification
    lag: int  # steps from a measured step to its decision
    seed: int  # of noise and random events
    efficiency: float  # time of the oracle's split over the policy's, same noise for both
    efficiency_mean: float  # the same on noise-free curves
    informed: float  # `efficiency_mean` of a controller told the true curves, with the same lag
    # `efficiency_mean` over the steps later than ``2 (lag + 3)`` after any event; ``None`` if there
    # are none
    efficiency_settled: float | None
    speedup: float  # time of the equal split over the policy's, same noise
    bound: float  # time of the equal split over the oracle's, noise-free
    # The bound if times were in proportion to the share; mean over slowest speed where nothing
    # changes
    linear_bound: float
    # First step from which the mean `efficiency_mean` of the next ten steps is at least 0.95;
    # ``None`` if there is none, as in a run of fewer than ten steps
    steps_to_95_cold: int | None
    # The same after an event, counted from it; the worst of them. Only those of
    # `ScoredScenario.judged` count; ``None`` if there is none of them too
    steps_to_95_after_change: int | None
    needless_changes: int  # re-splits whose true gain was under 0.5 %
    decide_s: float | None  # median time of a decision, in seconds; ``None`` if none was worked out


FIELDS = tuple(field.name for field in fields(ScoreRow))


@dataclass(slots=True, eq=False)
class ScoredScenario:
    """A scenario under one seed, ready for any number of policies."""

    scenario: Scenario
    seed: int
    yardsticks: Yardsticks
    informed: float
    timeline: Timeline

    @classmethod
    def of(cls, scenario: Scenario, seed: int) -> ScoredScenario:
        """Work out what all policies are compared with."""
        timeline = Timeline(scenario, seed)
        sticks = yardsticks(scenario, seed, timeline)
        informed = _ratio(sticks.oracle_mean_s, informed_mean_s(scenario, seed, timeline))
        return cls(scenario, seed, sticks, informed, timeline)

    def run(self, spec: str, policy: Policy[Any] | None = None) -> tuple[ScoreRow, SimulatedSteps]:
        """Simulate a policy and return its row, and what it did step by step."""
        policy = policy_from_spec(spec) if policy is None else policy
        track = Simulation(self.scenario, policy, self.seed, self.timeline).run()
        return self.row(spec, track), track

    @property
    def judged(self) -> tuple[int, ...]:
        """The events after which it counts how long a policy takes to find the split again."""
        return judged(self.scenario, self.timeline)

    def row(self, spec: str, track: SimulatedSteps) -> ScoreRow:
        """Return what a run under a policy is worth."""
        sticks, lag = self.yardsticks, self.scenario.exchange.lag
        cold, *found = steps_to_find(sticks.oracle_mean_s / track.mean_s, (0, *self.judged))
        settled = _settled(len(track.mean_s), self.timeline.changes, 2 * (lag + 3))
        return ScoreRow(
            scenario=self.scenario.name,
            policy=spec,
            lag=lag,
            seed=self.seed,
            efficiency=_ratio(sticks.oracle_s, track.real_s),
            efficiency_mean=_ratio(sticks.oracle_mean_s, track.mean_s),
            informed=self.informed,
            efficiency_settled=_ratio(sticks.oracle_mean_s[settled], track.mean_s[settled])
            if settled.any()
            else None,
            speedup=_ratio(sticks.equal_s, track.real_s),
            bound=_ratio(sticks.equal_mean_s, sticks.oracle_mean_s),
            linear_bound=sticks.linear_bound,
            steps_to_95_cold=cold,
            steps_to_95_after_change=_worst(found),
            needless_changes=sum(move.gain < NEEDLESS for move in track.decisions),
            decide_s=float(np.median(track.decide_s)) if track.decide_s else None,
        )


def judged(scenario: Scenario, timeline: Timeline) -> tuple[int, ...]:
    """Return the events that are so early that an answer to them could still be judged.

    An answer may come ten steps later than the lag has it, and is then seen over ten more. Of a
    later event it could not be told whether it was answered too slowly or the run ended too soon.
    Whoever has no such event is neither slow nor quick to answer one.
    """
    last = scenario.steps - (scenario.exchange.lag + ROOM + AHEAD)
    return tuple(step for step in timeline.changes if step <= last)


def _ratio(one: FloatArray, other: FloatArray) -> float:
    return float(one.sum() / other.sum())


def steps_to_find(parts: FloatArray, events: Sequence[int]) -> list[int | None]:
    """Return how many steps after each event the split is good over the next ten steps.

    Returns:
        For each event, the steps from it to the first one from which the mean of the next ten
        parts is at least 0.95; ``None`` where there is none. Where fewer than ten are left,
        nothing is found: one good step at the end is no split that holds.
    """
    sums = np.concatenate([[0.0], np.cumsum(parts)])
    means = (sums[AHEAD:] - sums[:-AHEAD]) / AHEAD  # none at all in a run of fewer steps
    good = np.flatnonzero(means >= FOUND - _ROUNDING)
    following = np.searchsorted(good, events)
    return [
        int(good[index]) - event if index < len(good) else None
        for event, index in zip(events, following.tolist(), strict=True)
    ]


def _worst(found: Sequence[int | None]) -> int | None:
    known = [steps for steps in found if steps is not None]
    return max(known) if known and len(known) == len(found) else None


def _settled(steps: int, changes: Sequence[int], after: int) -> npt.NDArray[np.bool_]:
    """Return which steps are later than ``after`` steps after any event, the start included."""
    settled = np.ones(steps, dtype=np.bool_)
    for event in (0, *changes):
        settled[event : event + after + 1] = False
    return settled
