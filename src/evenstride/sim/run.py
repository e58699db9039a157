"""Run the real controller on virtual workers, step by step, under bulk-synchronous training."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from evenstride.core.control import advance
from evenstride.core.events import (
    ExchangeAfter,
    Exchanged,
    Expect,
    FleetFormed,
    Instruction,
    MembersChanged,
    SetShares,
)
from evenstride.core.fleet import FloatArray, IntArray, as_array
from evenstride.core.membership import Change, Happening, Membership
from evenstride.core.policy import Policy
from evenstride.core.state import Control
from evenstride.sim.bands import Bands
from evenstride.sim.cluster import Cluster, TrueTimes
from evenstride.sim.measuring import Notes
from evenstride.sim.scenario import Scenario
from evenstride.sim.timeline import Timeline


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
class Track:
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


class Simulation:
    """One run of one policy in a scenario.

    Args:
        scenario: the cluster and what befalls it.
        policy: decides the shares.
        seed: of noise and random events; the same seed gives every policy the same.
        timeline: that of the scenario and the seed, if it is there already.
    """

    def __init__(
        self,
        scenario: Scenario,
        policy: Policy[Any],
        seed: int = 0,
        timeline: Timeline | None = None,
    ) -> None:
        self._scenario, self._policy = scenario, policy
        self._timeline = timeline or Timeline(scenario, seed)
        self._cluster = Cluster(scenario, seed)
        self._control = Control(policy)
        self._pending: deque[tuple[int, IntArray, str]] = deque()
        self._after, self._due = ExchangeAfter(1, False), 0
        self._formed = 0
        self.track = Track(np.zeros(0), np.zeros(0), np.zeros(0, dtype=np.int64))
        self._begin(0)

    def run(self) -> Track:
        """Simulate every step and return what happened."""
        steps = self._scenario.steps
        mean_s, real_s = np.zeros(steps), np.zeros(steps)
        index = np.zeros(steps, dtype=np.int64)
        changes, groups = frozenset(self._timeline.changes), frozenset(self._timeline.groups)
        for step in range(steps):
            if step in groups:
                self._begin(step)
            elif step in changes:
                self._curves = self._curves_at(step)
            self._notify(step)
            self._take_effect(step)
            mean_s[step], real_s[step] = self._step(step)
            index[step] = len(self.track.splits) - 1
            if self._exchange_due(step):
                self._exchange(step)
        self.track.mean_s, self.track.real_s, self.track.shares = mean_s, real_s, index
        return self.track

    def _begin(self, step: int) -> None:
        """Form the fleet of those who are there."""
        self._present = self._timeline.group(step)
        workers = tuple(self._cluster.workers[k] for k in self._present)
        self._curves = self._curves_at(step)
        happenings = self._happenings(step, told=False) if step else ()
        self._tell(Membership.formed(0, tuple(worker.name for worker in workers)))
        batch = self._scenario.global_batch
        event = FleetFormed(self._formed, step, batch, workers, happenings)
        self._formed += 1
        self._control, instructions = advance(self._control, event)
        self._pending.clear()
        self._bands = Bands(len(workers))
        self._notes = Notes(len(workers))
        self._shares = np.zeros(0, dtype=np.int64)
        self._cold = True
        self._obey(instructions)
        self._due = step + self._after.steps

    def _happenings(self, step: int, *, told: bool) -> tuple[Happening, ...]:
        """Return the notices that come at a step and those that are withdrawn, or all else."""
        workers = self._cluster.workers
        return tuple(
            Happening(workers[k].name, change)
            for k, change in self._timeline.happenings(step)
            if (change in (Change.NOTICE, Change.WITHDRAWN)) == told
        )

    def _notify(self, step: int) -> None:
        """Let the controller know who is told to leave, or to stay."""
        happenings = self._happenings(step, told=True)
        if not happenings:
            return
        self._tell(self._control.membership.after_all(happenings)[0])
        event = MembersChanged(step, self._effective(step, self._scenario.exchange.lag), happenings)
        self._control, instructions = advance(self._control, event)
        self._obey(instructions)
        self._due = step + self._after.steps

    def _effective(self, step: int, lag: int) -> int:
        return max(step + lag, self._pending[-1][0] if self._pending else 0)

    def _tell(self, membership: Membership) -> None:
        """Let a policy that is to know it all know the curves of those who will serve."""
        tell = getattr(self._policy, "tell", None)
        if tell is not None:
            serving = membership.serving
            whole = len(serving) == len(self._present)
            tell(self._curves if whole else self._curves.of(np.array(serving)))

    def _curves_at(self, step: int) -> TrueTimes:
        return self._cluster.usual.at_speed(self._timeline.speed(step)).of(self._present)

    def _take_effect(self, step: int) -> None:
        while self._pending and self._pending[0][0] <= step:
            _, after, reason = self._pending.popleft()
            track, before = self.track, self._shares
            if len(before):
                track.decisions.append(Decided(step, self._gain(before, after), reason))
            self._shares = after
            everyone = np.zeros(self._timeline.size, dtype=np.int64)
            everyone[self._present] = after
            track.splits.append(everyone)

    def _gain(self, before: IntArray, after: IntArray) -> float:
        communication_s = self._scenario.communication.step_s(len(after))
        before_s = float(self._mean_s(before).max()) + communication_s
        return 1.0 - (float(self._mean_s(after).max()) + communication_s) / before_s

    def _mean_s(self, shares: IntArray) -> FloatArray:
        """Return the workers' true mean times; a share of 0 is a ghost, and takes one sample."""
        return self._curves.at(np.maximum(shares, 1))

    def _step(self, step: int) -> tuple[float, float]:
        mean_s = self._mean_s(self._shares)
        busy_s = mean_s * self._cluster.next_noise()[self._present]
        communication_s = self._scenario.communication.step_s(len(busy_s))
        longest_s = float(busy_s.max())
        self._notes.add(step, self._shares, busy_s, longest_s - busy_s + communication_s)
        asked = self._bands.step(self._shares, busy_s)
        if asked.any():
            self._due = step + 1
        return float(mean_s.max()) + communication_s, longest_s + communication_s

    def _exchange_due(self, step: int) -> bool:
        every = self._scenario.exchange.every
        if every == "leader":
            return step + 1 >= self._due
        return (step + 1) % every == 0

    def _exchange(self, step: int) -> None:
        asked = self._scenario.exchange
        # The first exchange is a cold one for every policy, so that all pay the same for it.
        lag = asked.lag
        if asked.cold_lag is not None and (self._cold or self._after.blocking):
            lag = asked.cold_lag
        self._cold = False
        effective = self._effective(step, lag)
        self._tell(self._control.membership)
        told = self._notes.take(self._bands.broke, self._timeline.load(step)[self._present])
        event = Exchanged(step + 1, effective, told)
        started_s = time.perf_counter()
        self._control, instructions = advance(self._control, event)
        self.track.decide_s.append(time.perf_counter() - started_s)
        self._obey(instructions)
        self._due = step + 1 + self._after.steps

    def _obey(self, instructions: tuple[Instruction, ...]) -> None:
        for instruction in instructions:
            match instruction:
                case SetShares():
                    shares = as_array(instruction.shares)
                    self._pending.append((instruction.effective, shares, instruction.reason))
                case Expect():
                    self._bands.expect(instruction, self._control.rank_shares)
                case ExchangeAfter():
                    self._after = instruction
