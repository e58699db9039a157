"""Run the real controller on virtual workers, step by step, under bulk-synchronous training.

`SimulatedController` connects a simulated run to its controller: it passes on measurements, and
applies decisions. `Simulation` is a run in ``bsp``.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from evenstride.core.control.advance import advance
from evenstride.core.control.events import (
    Exchanged,
    Expect,
    FleetFormed,
    MembersChanged,
    Verdict,
)
from evenstride.core.control.state import Control
from evenstride.core.fleet import FloatArray, IntArray, as_array
from evenstride.core.membership.member_table import Happening, Membership, MembershipEvent
from evenstride.core.policy import Policy, follows_epochs
from evenstride.core.sync_modes.mode_specs import AllReduce
from evenstride.core.time_model.observation import Measurements
from evenstride.errors import ConfigError
from evenstride.sim.engine.virtual_workers import Bands, Cluster, Notes, TrueTimes
from evenstride.sim.scenario.scenario_model import Scenario
from evenstride.sim.scenario.timeline import Timeline


class SimulatedController:
    """The connection of every simulated run to its controller, in any mode.

    A subclass advances time. It goes through the steps in order, begins each with `_turn`, and
    calls `_exchange` after those that `_exchange_due` names. The seed determines noise and random
    events: the same seed gives every policy the same ones.
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
        self._changes = frozenset(self._timeline.changes)
        self._groups = frozenset(self._timeline.groups)
        self._control = Control(policy)
        self._pending: deque[tuple[int, IntArray, str]] = deque()
        self._verdict, self._due = Verdict(0, None), 0
        self._formed = 0
        self._begin(0)

    def _turn(self, step: int) -> None:
        if step in self._groups:
            self._begin(step)
        elif step in self._changes:
            self._curves = self.curves_at(step)
        self._notify(step)
        self._take_effect(step)

    def _begin(self, step: int) -> None:
        self._present = self._timeline.group(step)
        workers = tuple(self._cluster.workers[k] for k in self._present)
        self._curves = self.curves_at(step)
        happenings = self._happenings(step, notices=False) if step else ()
        self._tell(Membership.formed(0, tuple(worker.name for worker in workers)))
        batch = self._scenario.global_batch
        event = FleetFormed(self._formed, step, batch, workers, happenings)
        self._formed += 1
        self._control, verdict = advance(self._control, event)
        self._pending.clear()
        self._forget(len(workers))
        self._shares = np.zeros(0, dtype=np.int64)
        self._cold = True
        self._obey(verdict)
        self._due = step + self._verdict.exchange_after

    def _happenings(self, step: int, *, notices: bool) -> tuple[Happening, ...]:
        """Return the notices of a step and those withdrawn, or all other changes."""
        workers = self._cluster.workers
        return tuple(
            Happening(workers[k].name, change)
            for k, change in self._timeline.happenings(step)
            if (change in (MembershipEvent.NOTICE, MembershipEvent.WITHDRAWN)) == notices
        )

    def _notify(self, step: int) -> None:
        happenings = self._happenings(step, notices=True)
        if not happenings:
            return
        self._tell(self._control.membership.after_all(happenings)[0])
        event = MembersChanged(step, self._effective(step, self._scenario.exchange.lag), happenings)
        self._control, verdict = advance(self._control, event)
        self._obey(verdict)
        self._due = step + self._verdict.exchange_after

    def _effective(self, step: int, lag: int) -> int:
        return max(step + lag, self._pending[-1][0] if self._pending else 0)

    def _tell(self, membership: Membership) -> None:
        """Pass the curves of the workers that will serve to a policy with a ``tell`` method."""
        tell = getattr(self._policy, "tell", None)
        if tell is not None:
            serving = membership.serving
            whole = len(serving) == len(self._present)
            tell(self._curves if whole else self._curves.of(np.array(serving)))

    def curves_at(self, step: int) -> TrueTimes:
        """Return the true times of the workers that take part in a step."""
        return self._cluster.usual.at_speed(self._timeline.speed(step)).of(self._present)

    def _take_effect(self, step: int) -> None:
        while self._pending and self._pending[0][0] <= step:
            _, after, reason = self._pending.popleft()
            before, self._shares = self._shares, after
            self._moved(step, before, reason)

    def _moved(self, step: int, before: IntArray, reason: str) -> None:
        """Record that other shares apply; ``before`` is empty for a fleet's first shares."""

    def _mean_s(self, shares: IntArray) -> FloatArray:
        """Return the workers' true mean times; a share of 0 takes one ghost sample."""
        return self._curves.at(np.maximum(shares, 1))

    def _epoch_of(self, step: int) -> int | None:
        """Return the epoch of the current step; ``None`` if no length of an epoch is given."""
        return self._scenario.epoch_of(step)

    def _epoch_ends(self, step: int) -> bool:
        """Return whether all workers exchange after a step because it ends an epoch."""
        ends = self._scenario.epoch_of(step + 1) != self._scenario.epoch_of(step)
        return ends and follows_epochs(self._policy)

    def _exchange_due(self, step: int) -> bool:
        if self._epoch_ends(step):
            return True
        every = self._scenario.exchange.every
        if every == "leader":
            return step + 1 >= self._due
        return (step + 1) % every == 0

    def _exchange(self, step: int) -> None:
        asked = self._scenario.exchange
        # The first exchange is cold for every policy, so that all have the same cost.
        lag = asked.lag
        if asked.cold_lag is not None and (self._cold or self._verdict.opening):
            lag = asked.cold_lag
        self._cold = False
        # At the end of an epoch all workers wait for the decision.
        over = self._epoch_ends(step)
        effective = self._effective(step, 1 if over else lag)
        self._tell(self._control.membership)
        load = self._timeline.load(step)[self._present]
        seen, epoch = self._measured(load), self._epoch_of(step)
        event = Exchanged(step + 1, effective, seen, epoch=epoch, epoch_over=over)
        started_s = time.perf_counter()
        self._control, verdict = advance(self._control, event)
        self._took(time.perf_counter() - started_s)
        self._obey(verdict)
        self._due = step + 1 + self._verdict.exchange_after

    def _took(self, decide_s: float) -> None:
        """Record the time that a decision took to compute."""

    def _obey(self, verdict: Verdict) -> None:
        self._verdict = verdict
        if verdict.shares is not None:
            shares = as_array(verdict.shares)
            self._pending.append((verdict.effective, shares, verdict.reason))
        if verdict.expected_s:
            self._expect(Expect(verdict.expected_s, verdict.band))

    def _forget(self, workers: int) -> None:
        """Begin to measure workers, without expected times."""
        self._bands = Bands(workers)
        self._notes = Notes(workers)

    def _note(self, step: int, shares: IntArray, busy_s: FloatArray, wait_s: FloatArray) -> None:
        """Record a step of all workers for the next exchange, and schedule that if requested."""
        self._notes.add(step, shares, busy_s, wait_s)
        asked = self._bands.step(shares, busy_s)
        if asked.any():
            self._due = step + 1

    def _measured(self, cpu_load: FloatArray) -> Measurements:
        return self._notes.take(self._bands.broke, cpu_load)

    def _expect(self, expect: Expect) -> None:
        self._bands.expect(expect, self._control.rank_shares)


@dataclass(frozen=True, slots=True, eq=False)
class Decided:
    """One change of the split."""

    step: int  # step at which it took effect
    gain: float  # true fraction of the step that it saved, noise-free; below 0 for a mistake
    reason: str  # the policy's reason


@dataclass(frozen=True, slots=True, eq=False)
class SimulatedSteps:
    """The record of a simulated run, step by step."""

    mean_s: FloatArray  # noise-free time of each step
    real_s: FloatArray  # its time with noise
    shares: IntArray  # the split of each step, as an index into `splits`
    # All splits, over all workers of the scenario (0 for absent ones)
    splits: list[IntArray] = field(default_factory=list)
    decisions: list[Decided] = field(default_factory=list)  # changes of the split
    decide_s: list[float] = field(default_factory=list)  # computing time of each decision
    exchanges: list[int] = field(default_factory=list)  # steps after which they were made


class Simulation(SimulatedController):
    """One run of one policy in a scenario; raises a `ConfigError` for any mode but ``bsp``."""

    def __init__(
        self,
        scenario: Scenario,
        policy: Policy[Any],
        seed: int = 0,
        timeline: Timeline | None = None,
    ) -> None:
        if scenario.sync != str(AllReduce()):
            raise ConfigError(
                f"{scenario.name} has sync {scenario.sync}, but steps can be compared only in bsp; "
                "leave sync out of the scenario, or use evenstride simulate, which reports the "
                "time and the staleness of any mode"
            )
        steps = scenario.steps
        index = np.zeros(steps, dtype=np.int64)
        self.track = SimulatedSteps(np.zeros(steps), np.zeros(steps), index)
        super().__init__(scenario, policy, seed, timeline)

    def run(self) -> SimulatedSteps:
        track = self.track
        for step in range(self._scenario.steps):
            self._turn(step)
            track.mean_s[step], track.real_s[step] = self._step(step)
            track.shares[step] = len(track.splits) - 1
            if self._exchange_due(step):
                track.exchanges.append(step)
                self._exchange(step)
        return track

    def _moved(self, step: int, before: IntArray, reason: str) -> None:
        track, after = self.track, self._shares
        if len(before):
            track.decisions.append(Decided(step, self._gain(before, after), reason))
        of_all = np.zeros(self._timeline.size, dtype=np.int64)
        of_all[self._present] = after
        track.splits.append(of_all)

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
