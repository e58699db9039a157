"""Workers with true times, driven by a policy through the real control."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import nan
from typing import Any

import numpy as np

from evenstride.core.allocation.integer_splits import equal_finish
from evenstride.core.control.advance import advance
from evenstride.core.control.events import (
    Exchanged,
    FleetFormed,
    Instruction,
    KeepShares,
    SetShares,
)
from evenstride.core.control.state import Control
from evenstride.core.fleet import Fleet, Shares, Worker
from evenstride.core.policies import policy_from_spec
from evenstride.core.policy import Decision, Policy, Situation
from evenstride.core.time_model.estimates import Estimate, TimeModel
from evenstride.core.time_model.observation import Measurements, Observation


def workers(count: int, **facts: Any) -> tuple[Worker, ...]:
    return tuple(Worker(f"host/{rank}", **facts) for rank in range(count))


class Plant:
    """Noise-free affine workers; a decision takes effect ``lag`` steps after the step it is from.

    Args:
        spec: of the policy.
        batch: samples per step.
        fixed_s: of each worker.
        per_sample_s: of each worker.
        lag: 1 for the very next step.
        members: who they are, with their bounds.
    """

    def __init__(
        self,
        spec: str,
        batch: int,
        fixed_s: Sequence[float],
        per_sample_s: Sequence[float],
        *,
        lag: int = 1,
        members: tuple[Worker, ...] | None = None,
        epoch_steps: int | None = None,
    ) -> None:
        self.fixed_s, self.per_sample_s = np.array(fixed_s), np.array(per_sample_s)
        self.batch, self.lag, self.step = batch, lag, 0
        self.epoch_steps = epoch_steps  # of the data
        self.control = Control(policy_from_spec(spec))
        self.pending: list[tuple[int, Shares]] = []
        self.reasons: list[str] = []
        self.kept = ""
        self.form(workers(len(self.fixed_s)) if members is None else members)

    def form(self, members: tuple[Worker, ...]) -> None:
        """Begin with these workers, or go on with them."""
        event = FleetFormed(self.control.generation + 1, self.step, self.batch, members)
        self.control, instructions = advance(self.control, event)
        self.pending.clear()
        self._obey(tuple(instructions))
        self.shares = self.pending.pop()[1]

    def exchange(self, steps: int = 1) -> Shares:
        """Run some steps, tell what they took, and return what the policy now wants."""
        seen = [observation for _ in range(steps) for observation in self._step()]
        return self.tell(seen)

    def tell(self, seen: Iterable[Observation]) -> Shares:
        """Tell of steps and return what the policy now wants."""
        epoch, over = divmod(self.step, self.epoch_steps or 1)
        event = Exchanged(
            self.step,
            self.step + self.lag - 1,
            Measurements.of(seen),
            epoch=None if self.epoch_steps is None else epoch - (over == 0),
            epoch_over=self.epoch_steps is not None and over == 0,
        )
        self.control, instructions = advance(self.control, event)
        self._obey(tuple(instructions))
        return self.control.shares

    def run(self, exchanges: int, steps: int = 1) -> Shares:
        """Exchange several times."""
        for _ in range(exchanges):
            self.exchange(steps)
        return self.control.shares

    def step_s(self) -> float:
        """Return the time of a step at the shares that the policy wants."""
        return self._times().makespan_s(self.control.shares)

    def best_s(self) -> float:
        """Return the time of a step at the best split."""
        fleet = self.control.fleet
        assert fleet is not None
        times = self._times()
        return times.makespan_s(tuple(equal_finish(times, fleet.lower, fleet.upper, self.batch)))

    def _times(self) -> TimeModel:
        return TimeModel.affine(self.fixed_s, self.per_sample_s)

    def _step(self) -> list[Observation]:
        while self.pending and self.pending[0][0] <= self.step:
            self.shares = self.pending.pop(0)[1]
        times_s = self._times().at(np.array(self.shares))
        self.step += 1
        return [
            Observation(k, share, self.step - 1, (float(times_s[k]),), (0.0,), modelled=share > 0)
            for k, share in enumerate(self.shares)
        ]

    def _obey(self, instructions: tuple[Instruction, ...]) -> None:
        for instruction in instructions:
            if isinstance(instruction, SetShares):
                self.pending.append((instruction.effective, instruction.shares))
                self.reasons.append(instruction.reason)
            elif isinstance(instruction, KeepShares):
                self.kept = instruction.reason


class PolicyDriver:
    """A policy that is asked directly, so that anything can be reported to it."""

    def __init__(self, policy: Policy[Any], fleet: Fleet) -> None:
        self.policy, self.fleet = policy, fleet
        self.state, self.opening = policy.init(fleet)

    def ask(
        self,
        shares: Shares,
        times_s: Sequence[float],
        *,
        steps: int = 1,
        reported: Shares | None = None,
        step: int = 1,
        loads: tuple[float, float] = (nan, nan),
        modelled: bool = True,
    ) -> Decision:
        """Tell of some steps of each worker, at ``reported`` or the shares in force, and decide."""
        seen = [
            Observation(
                *(k, share, max(0, step - steps), (float(times_s[k]),) * steps, (0.0,) * steps),
                cpu_load=loads[0],
                memory_load=loads[1],
                modelled=modelled,
            )
            for k, share in enumerate(shares if reported is None else reported)
        ]
        return self.decide(shares, seen, step)

    def decide(self, shares: Shares, seen: Iterable[Observation], step: int = 1) -> Decision:
        """Decide on some observations."""
        unknown = Estimate.unknown(len(self.fleet))
        situation = Situation(self.fleet, shares, step, Measurements.of(seen), unknown)
        self.state, decision = self.policy.decide(self.state, situation)
        return decision


# Four GPUs that share 512 samples (LBB: github.com/FLYING37520/LBB): 128 each take these times,
# 167/167/158/20 take about 104 ms each. Assumed: affine times through these two points.
LBB_EQUAL_S = np.array([0.0818, 0.0815, 0.0854, 0.3929])
LBB_SPLIT = (167, 167, 158, 20)
LBB_FINISH_S = 0.104
LBB_PER_SAMPLE_S = (LBB_FINISH_S - LBB_EQUAL_S) / (np.array(LBB_SPLIT) - 128)
LBB_FIXED_S = LBB_EQUAL_S - 128 * LBB_PER_SAMPLE_S
