"""A scenario in any synchronisation mode, in simulated time, with the controller of real runs.

`AsyncRun` has the modes without lockstep. This module has those with lockstep: ``bsp``, ``bsp-ps``,
``local-sgd``, ``delayed``. As in `Simulation`, steps follow one another. But workers may begin a
step at different times, and a step may become part of the model later. A change of the fleet and
the end of an epoch synchronise all workers first. The unapplied samples of a lost worker are
trained again by the others.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, Protocol

import numpy as np

from evenstride.core.fleet import FloatArray, IntArray, as_array, as_shares
from evenstride.core.membership.member_table import MembershipEvent
from evenstride.core.policies import policy_from_spec
from evenstride.core.policy import Policy, follows_epochs
from evenstride.core.sampling.partition import step_shares
from evenstride.core.sync_modes.async_schedule import Piece, WorkQueue
from evenstride.core.sync_modes.mode_specs import (
    Asynchronous,
    DelayedMode,
    LocalSgd,
    ParameterServerMode,
    StaleSynchronous,
    SyncMode,
)
from evenstride.sim.engine.asynchronous import AsyncRun
from evenstride.sim.engine.lockstep import SimulatedController
from evenstride.sim.engine.mode_result import Applied, Begun, Entry, Gone, ModeResult, RunTotals
from evenstride.sim.engine.network import Queues
from evenstride.sim.scenario.scenario_model import Communication, Scenario, epochs_of
from evenstride.sim.scenario.timeline import Timeline


@dataclass(frozen=True, slots=True, eq=False)
class Met:
    """The result of a step."""

    begin_s: FloatArray  # time at which each worker may begin the next one, ``(W,)``
    # Number of steps that became part of the model with it, the oldest first
    steps: int = 0
    staleness: tuple[int, ...] = ()  # of each update of the model that applied them


class SyncRound(Protocol):
    """The synchronisation between the workers' steps; all times are absolute, in seconds."""

    def after(self, step: int, done_s: FloatArray) -> Met:
        """Return the result of a step that each worker has computed by ``done_s``, ``(W,)``."""
        ...

    def gather(self, done_s: FloatArray) -> Met:
        """Synchronise all workers, with all work that is not part of the model yet."""
        ...


class AllTogether:
    """All workers wait for the slowest, then for an all-reduce: ``bsp``."""

    def __init__(self, links: Communication) -> None:
        self._links = links

    def after(self, step: int, done_s: FloatArray) -> Met:
        del step
        return Met(_reduced(self._links, done_s), 1, (0,))

    def gather(self, done_s: FloatArray) -> Met:
        return Met(done_s)


class AtServers:
    """Workers push; servers update when all have pushed, and send the weights: ``bsp-ps``."""

    def __init__(self, links: Communication, servers: int) -> None:
        self._queues = Queues(links.served_by(servers))

    def after(self, step: int, done_s: FloatArray) -> Met:
        del step
        order = np.argsort(done_s, kind="stable")
        arrived_s = list[float]()
        for at_s in done_s[order].tolist():
            arrived_s = self._queues.push(at_s)
        updated_s = self._queues.update(arrived_s)
        begin_s = np.empty_like(done_s)
        begin_s[order] = [self._queues.pull(updated_s) for _ in order]
        return Met(begin_s, 1, (0,))

    def gather(self, done_s: FloatArray) -> Met:
        return Met(done_s)


class Averages:
    """Workers train on their own, and average their weights from time to time: ``local-sgd``.

    There are ``every`` steps between two averages, and ``after`` steps of ``bsp`` first.
    """

    def __init__(self, links: Communication, every: int, after: int) -> None:
        self._links, self._every, self._first = links, every, after
        self._open = 0

    def after(self, step: int, done_s: FloatArray) -> Met:
        self._open += 1
        if step >= self._first and self._open < self._every:
            return Met(done_s)
        return self.gather(done_s)

    def gather(self, done_s: FloatArray) -> Met:
        steps, self._open = self._open, 0
        if not steps:
            return Met(done_s)
        return Met(_reduced(self._links, done_s), steps, (0,))


class Behind:
    """A step's all-reduce runs during the next step, at whose end it is applied: ``delayed``."""

    def __init__(self, links: Communication) -> None:
        self._links = links
        self._under_way: deque[tuple[float, int]] = deque()  # ends and staleness, not applied yet
        self._free_s = -inf  # time from which the links are free

    def after(self, step: int, done_s: FloatArray) -> Met:
        del step
        began_s = max(float(done_s.max()), self._free_s)
        self._free_s = began_s + self._links.step_s(len(done_s))
        alone = not self._under_way  # when this step began, all before it was applied
        self._under_way.append((self._free_s, 0 if alone else 1))
        return Met(done_s) if alone else self._applied(done_s, 1)

    def gather(self, done_s: FloatArray) -> Met:
        """Return the result when all wait for the pending all-reduces."""
        if not self._under_way:
            return Met(done_s)
        met = self._applied(done_s, len(self._under_way))
        return Met(np.full_like(done_s, met.begin_s.max()), met.steps, met.staleness)

    def _applied(self, done_s: FloatArray, steps: int) -> Met:
        ends = [self._under_way.popleft() for _ in range(steps)]
        begin_s = np.maximum(done_s, max(end_s for end_s, _ in ends))
        return Met(begin_s, steps, tuple(staleness for _, staleness in ends))


def meeting(mode: SyncMode, links: Communication) -> SyncRound:
    """Return the synchronisation of a mode with lockstep."""
    match mode:
        case ParameterServerMode():
            return AtServers(links, mode.servers)
        case LocalSgd():
            return Averages(links, mode.every, mode.after)
        case DelayedMode():
            return Behind(links)
    return AllTogether(links)


def _reduced(links: Communication, done_s: FloatArray) -> FloatArray:
    """Return when all have the result of an all-reduce that each joins when it is done."""
    return np.full_like(done_s, float(done_s.max()) + links.step_s(len(done_s)))


class Rounds(SimulatedController):
    """One run of one policy in a scenario, in a mode with lockstep.

    Takes ``O(W^2)`` per step: 40 ms with 1,000 workers.
    """

    def __init__(
        self,
        scenario: Scenario,
        policy: Policy[Any],
        mode: SyncMode,
        seed: int = 0,
        timeline: Timeline | None = None,
        record: list[Entry] | None = None,
    ) -> None:
        self._mode, self._tally = mode, RunTotals(scenario.size, record)
        self._meeting = meeting(mode, scenario.communication)
        self._handling_s = np.zeros(scenario.size)  # only with parameter servers
        self._begin_s = np.zeros(scenario.size)
        self._handout = WorkQueue.of(0, scenario.size)
        self._open: deque[dict[int, Piece]] = deque()  # pieces by worker of each unapplied step
        self._epoch = self._step = 0
        super().__init__(scenario, policy, seed, timeline)
        if isinstance(mode, ParameterServerMode):
            self._handling_s = self._cluster.handling_s

    def run(self) -> ModeResult:
        epochs = epochs_of(self._scenario)
        for epoch, samples in enumerate(epochs):
            self._epoch, self._handout = epoch, WorkQueue.of(samples, self._scenario.size)
            while not self._handout.done:
                self._train()
        end_s = float(self._begin_s[self._present].max())
        names = (worker.name for worker in self._cluster.workers)
        return self._tally.outcome(str(self._mode), end_s, len(epochs), names)

    def _train(self) -> None:
        step = self._step
        if step in self._groups:
            self._come_together(step)
        self._turn(step)
        self._compute(step)
        if self._exchange_due(step):
            self._exchange(step)
        self._step += 1
        if not self._handout.left:
            self._bring_in(self._meeting.gather(self._begin_s[self._present]))

    def _epoch_of(self, step: int) -> int | None:
        del step
        return None if self._scenario.epoch_samples is None else self._epoch

    def _epoch_ends(self, step: int) -> bool:
        known = self._epoch_of(step) is not None
        return known and not self._handout.left and follows_epochs(self._policy)

    def _compute(self, step: int) -> None:
        here, left = self._present, self._handout.left
        window = min(left, self._scenario.global_batch)
        shares = as_array(step_shares(as_shares(self._shares), window))
        busy_s = self._mean_s(shares) * self._cluster.next_noise()[here]
        busy_s += self._cluster.new_share_s(here, shares)
        self._open.append(self._give(here, shares))
        done_s = self._begin_s[here] + busy_s
        met = self._meeting.after(step, done_s + self._handling_s[here])
        for k, own_s in zip(here.tolist(), busy_s.tolist(), strict=True):
            self._tally.accounts[k].works(own_s)
        self._note(step, shares, busy_s, met.begin_s - done_s)
        self._bring_in(met)

    def _give(self, here: IntArray, shares: IntArray) -> dict[int, Piece]:
        given = dict[int, Piece]()
        for k, share in zip(here.tolist(), shares.tolist(), strict=True):
            self._handout, piece = self._handout.give(k, share)
            if piece:
                given[k] = piece
            self._tally.keep(Begun(k, float(self._begin_s[k])))
        return given

    def _bring_in(self, met: Met) -> None:
        """Apply the oldest steps to the model."""
        self._begin_s[self._present] = met.begin_s
        at_s = float(met.begin_s.min())
        for number in range(met.steps):
            staleness = met.staleness[min(number, len(met.staleness) - 1)]
            for k, piece in self._open.popleft().items():
                self._handout = self._handout.trained(k)
                self._tally.applied(Applied(k, at_s, self._epoch, piece, staleness))
        for staleness in met.staleness:
            self._tally.update(staleness)

    def _come_together(self, step: int) -> None:
        """Apply all work before the fleet changes, except that of lost workers."""
        lost = [
            k for k, change in self._timeline.happenings(step) if change is MembershipEvent.LOST
        ]
        for k in lost:
            self._handout = self._handout.lost(k)
            for given in self._open:
                given.pop(k, None)
            self._tally.keep(Gone(k, float(self._begin_s[k])))
        self._present = self._present[~np.isin(self._present, lost)]
        if len(self._present):
            self._bring_in(self._meeting.gather(self._begin_s[self._present]))

    def _begin(self, step: int) -> None:
        """Form the fleet; new workers begin when remaining ones are ready, all others leave."""
        super()._begin(step)
        here = self._present.tolist()
        stay = [k for k in here if self._tally.accounts[k].since_s is not None]
        ready_s = float(self._begin_s[stay].max() if stay else self._begin_s.max())
        for k in set(range(self._timeline.size)).difference(here):
            self._tally.accounts[k].goes(ready_s)
        for k in set(here).difference(stay):
            self._begin_s[k] = ready_s
            self._tally.accounts[k].comes(ready_s)

    def _moved(self, step: int, before: IntArray, reason: str) -> None:
        del step, reason
        self._tally.moved(before)


@dataclass(frozen=True, slots=True)
class SyncRow:
    """The result of one policy in one scenario and mode under one seed."""

    scenario: str
    policy: str
    lag: int
    seed: int
    outcome: ModeResult

    def to_dict(self) -> dict[str, Any]:
        return {
            "scenario": self.scenario,
            "policy": self.policy,
            "lag": self.lag,
            "seed": self.seed,
            **self.outcome.to_dict(),
        }


def modes_of(scenario: Scenario, asked: Sequence[SyncMode]) -> tuple[SyncMode, ...]:
    return tuple(asked) or (scenario.mode,)


def simulate_modes(
    cases: Iterable[tuple[Scenario, Iterable[str]]],
    seeds: Sequence[int],
    asked: Sequence[SyncMode],
) -> Iterator[SyncRow]:
    """Simulate scenarios with their policies in every mode, and yield each run as it ends.

    In order of scenario, mode, policy and seed, so that comparable runs are adjacent. Without
    requested modes, the scenario's own mode is used.
    """
    for scenario, policies in cases:
        timelines = {seed: Timeline(scenario, seed) for seed in seeds}
        for mode in modes_of(scenario, asked):
            for policy in policies:
                for seed, timeline in timelines.items():
                    outcome = simulate_sync(scenario, policy, mode, seed, timeline=timeline)
                    yield SyncRow(scenario.name, policy, scenario.exchange.lag, seed, outcome)


def simulate_sync(
    scenario: Scenario,
    policy: str | Policy[Any],
    mode: SyncMode | None = None,
    seed: int = 0,
    *,
    timeline: Timeline | None = None,
    record: list[Entry] | None = None,
) -> ModeResult:
    """Return the result of a scenario in a mode, by default its own.

    The samples are those of the scenario's ``steps``, in every mode. Events and decisions that
    count steps count steps in lockstep; in ``asp`` and ``ssp``, global batches of trained samples.
    A worker's n-th step has the same noise in every mode. ``record`` receives the events in order.
    """
    decides = policy_from_spec(policy) if isinstance(policy, str) else policy
    how = scenario.mode if mode is None else mode
    if isinstance(how, Asynchronous | StaleSynchronous):
        return AsyncRun(scenario, decides, how, seed, timeline, record).run()
    return Rounds(scenario, decides, how, seed, timeline, record).run()
