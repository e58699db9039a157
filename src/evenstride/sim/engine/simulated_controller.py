"""The controller among virtual workers: what it is told, and when what it says holds."""

from __future__ import annotations

import time
from collections import deque
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
from evenstride.core.policy import Policy
from evenstride.core.time_model.observation import Measurements
from evenstride.sim.engine.simulated_measurements import Bands, Notes
from evenstride.sim.engine.virtual_workers import Cluster, TrueTimes
from evenstride.sim.scenario.scenario_model import Scenario
from evenstride.sim.scenario.timeline import Timeline


class SimulatedController:
    """What every simulated run does with its controller, however its workers come together.

    A subclass lets time pass. It goes through the steps in order, begins each with `_turn`, and
    calls `_exchange` after those that `_exchange_due` names.

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
        self._changes = frozenset(self._timeline.changes)
        self._groups = frozenset(self._timeline.groups)
        self._control = Control(policy)
        self._pending: deque[tuple[int, IntArray, str]] = deque()
        self._verdict, self._due = Verdict(0, None), 0
        self._formed = 0
        self._begin(0)

    def _turn(self, step: int) -> None:
        """Let happen what happens at the beginning of a step."""
        if step in self._groups:
            self._begin(step)
        elif step in self._changes:
            self._curves = self._curves_at(step)
        self._notify(step)
        self._take_effect(step)

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
        self._control, verdict = advance(self._control, event)
        self._pending.clear()
        self._forget(len(workers))
        self._shares = np.zeros(0, dtype=np.int64)
        self._cold = True
        self._obey(verdict)
        self._due = step + self._verdict.exchange_after

    def _happenings(self, step: int, *, told: bool) -> tuple[Happening, ...]:
        """Return the notices that come at a step and those that are withdrawn, or all else."""
        workers = self._cluster.workers
        return tuple(
            Happening(workers[k].name, change)
            for k, change in self._timeline.happenings(step)
            if (change in (MembershipEvent.NOTICE, MembershipEvent.WITHDRAWN)) == told
        )

    def _notify(self, step: int) -> None:
        """Let the controller know who is told to leave, or to stay."""
        happenings = self._happenings(step, told=True)
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
            before, self._shares = self._shares, after
            self._moved(step, before, reason)

    def _moved(self, step: int, before: IntArray, reason: str) -> None:
        """Take note that other shares are in force; there are none before a fleet's first."""

    def _mean_s(self, shares: IntArray) -> FloatArray:
        """Return the workers' true mean times; a share of 0 is a ghost, and takes one sample."""
        return self._curves.at(np.maximum(shares, 1))

    def _exchange_due(self, step: int) -> bool:
        every = self._scenario.exchange.every
        if every == "leader":
            return step + 1 >= self._due
        return (step + 1) % every == 0

    def _exchange(self, step: int) -> None:
        asked = self._scenario.exchange
        # The first exchange is a cold one for every policy, so that all pay the same for it.
        lag = asked.lag
        if asked.cold_lag is not None and (self._cold or self._verdict.opening):
            lag = asked.cold_lag
        self._cold = False
        effective = self._effective(step, lag)
        self._tell(self._control.membership)
        load = self._timeline.load(step)[self._present]
        epoch = self._scenario.epoch_of(step + 1)
        event = Exchanged(step + 1, effective, self._told(load), epoch=epoch)
        started_s = time.perf_counter()
        self._control, verdict = advance(self._control, event)
        self._took(time.perf_counter() - started_s)
        self._obey(verdict)
        self._due = step + 1 + self._verdict.exchange_after

    def _took(self, decide_s: float) -> None:
        """Take note of how long a decision took to work out."""

    def _obey(self, verdict: Verdict) -> None:
        self._verdict = verdict
        if verdict.shares is not None:
            shares = as_array(verdict.shares)
            self._pending.append((verdict.effective, shares, verdict.reason))
        if verdict.expected_s:
            self._expect(Expect(verdict.expected_s, verdict.band))

    def _forget(self, workers: int) -> None:
        """Begin to measure workers, of whom nothing is expected."""
        self._bands = Bands(workers)
        self._notes = Notes(workers)

    def _note(self, step: int, shares: IntArray, busy_s: FloatArray, wait_s: FloatArray) -> None:
        """Keep a step of all workers for the next exchange, which it may ask for."""
        self._notes.add(step, shares, busy_s, wait_s)
        asked = self._bands.step(shares, busy_s)
        if asked.any():
            self._due = step + 1

    def _told(self, cpu_load: FloatArray) -> Measurements:
        """Return what was measured since the exchange before."""
        return self._notes.take(self._bands.broke, cpu_load)

    def _expect(self, expect: Expect) -> None:
        self._bands.expect(expect, self._control.rank_shares)
