"""Run the real controller on virtual workers, step by step, under bulk-synchronous training."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from evenstride.core.fleet import FloatArray, IntArray
from evenstride.core.policy import Policy
from evenstride.core.sync_modes.mode_specs import AllReduce
from evenstride.errors import ConfigError
from evenstride.sim.engine.simulated_controller import SimulatedController
from evenstride.sim.scenario.scenario_model import Scenario
from evenstride.sim.scenario.timeline import Timeline


@dataclass(frozen=True, slots=True, eq=False)
class Decided:
    """One change of the split.

    Args:
        step: at which it took effect.
        gain: true part of the step that it saved, noise-free; below 0 if it was a mistake.
        reason: the policy's own.
    """

    step: int
    gain: float
    reason: str


@dataclass(slots=True)
class SimulatedSteps:
    """What a simulated run did, step by step.

    Args:
        mean_s: noise-free time of each step.
        real_s: its time with noise.
        shares: the split in force at each step, as an index into `splits`.
        splits: all splits there were, over all workers there ever are (0 for the absent).
        decisions: changes of the split.
        decide_s: what each decision took to compute.
    """

    mean_s: FloatArray
    real_s: FloatArray
    shares: IntArray
    splits: list[IntArray] = field(default_factory=list)
    decisions: list[Decided] = field(default_factory=list)
    decide_s: list[float] = field(default_factory=list)

    def end(self, mean_s: FloatArray, real_s: FloatArray, shares: IntArray) -> None:
        """Take what is known of the steps when all are over."""
        self.mean_s, self.real_s, self.shares = mean_s, real_s, shares


class Simulation(SimulatedController):
    """One run of one policy in a scenario.

    Args:
        scenario: the cluster and what befalls it.
        policy: decides the shares.
        seed: of noise and random events; the same seed gives every policy the same.
        timeline: that of the scenario and the seed, if it is there already.

    Raises:
        ConfigError: the scenario asks for another mode of synchronisation.
    """

    def __init__(
        self,
        scenario: Scenario,
        policy: Policy[Any],
        seed: int = 0,
        timeline: Timeline | None = None,
    ) -> None:
        if scenario.sync != str(AllReduce()):
            raise ConfigError(
                f"{scenario.name} asks for sync {scenario.sync}, and steps are compared in bsp "
                "only; leave sync out of the scenario, or use evenstride simulate, which tells "
                "the time and the staleness of any mode"
            )
        self.track = SimulatedSteps(np.zeros(0), np.zeros(0), np.zeros(0, dtype=np.int64))
        super().__init__(scenario, policy, seed, timeline)

    def run(self) -> SimulatedSteps:
        """Simulate every step and return what happened."""
        steps = self._scenario.steps
        mean_s, real_s = np.zeros(steps), np.zeros(steps)
        index = np.zeros(steps, dtype=np.int64)
        for step in range(steps):
            self._turn(step)
            mean_s[step], real_s[step] = self._step(step)
            index[step] = len(self.track.splits) - 1
            if self._exchange_due(step):
                self._exchange(step)
        self.track.end(mean_s, real_s, index)
        return self.track

    def _moved(self, step: int, before: IntArray, reason: str) -> None:
        track, after = self.track, self._shares
        if len(before):
            track.decisions.append(Decided(step, self._gain(before, after), reason))
        everyone = np.zeros(self._timeline.size, dtype=np.int64)
        everyone[self._present] = after
        track.splits.append(everyone)

    def _gain(self, before: IntArray, after: IntArray) -> float:
        communication_s = self._scenario.communication.step_s(len(after))
        before_s = float(self._mean_s(before).max()) + communication_s
        return 1.0 - (float(self._mean_s(after).max()) + communication_s) / before_s

    def _step(self, step: int) -> tuple[float, float]:
        mean_s = self._mean_s(self._shares)
        busy_s = mean_s * self._cluster.next_noise()[self._present]
        busy_s += self._cluster.new_share_s(self._present, self._shares)
        communication_s = self._scenario.communication.step_s(len(busy_s))
        longest_s = float(busy_s.max())
        self._note(step, self._shares, busy_s, longest_s - busy_s + communication_s)
        return float(mean_s.max()) + communication_s, longest_s + communication_s

    def _took(self, decide_s: float) -> None:
        self.track.decide_s.append(decide_s)
