"""Workers that keep step, in simulated time: ``bsp``, ``bsp-ps``, ``local-sgd``, ``delayed``.

As in `Simulation`, one step after the other; but workers may begin a step at different times, and
what a step did may become part of the model later. A change of the fleet and the end of an epoch
bring all together first. Who is lost leaves the others what it had not brought in: its samples of
the epoch are trained again.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np

from evenstride.core.fleet import IntArray, as_array, as_shares
from evenstride.core.handout import Handout, Piece
from evenstride.core.membership import Change
from evenstride.core.partition import step_shares
from evenstride.core.policy import Policy
from evenstride.core.sync import Served, SyncMode
from evenstride.sim.meetings import Met, meeting
from evenstride.sim.outcome import Applied, Begun, Entry, Gone, Outcome, Tally
from evenstride.sim.scenario import Scenario
from evenstride.sim.steering import Steering
from evenstride.sim.timeline import Timeline


class Rounds(Steering):
    """One run of one policy in a scenario, in a mode in which workers keep step.

    Args:
        scenario: the cluster and what befalls it.
        policy: decides the shares.
        mode: of synchronisation.
        seed: of noise and random events.
        timeline: that of the scenario and the seed, if it is there already.
        record: takes what happens, in order; nothing is kept if left out.

    Cost:
        ``O(W^2)`` per step: 40 ms with 1,000 workers.
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
        self._mode, self._tally = mode, Tally(scenario.size, record)
        self._meeting = meeting(mode, scenario.communication)
        self._handling_s = np.zeros(scenario.size)  # by parameter servers alone
        self._begin_s = np.zeros(scenario.size)
        self._handout = Handout.of(0, scenario.size)
        self._open: deque[dict[int, Piece]] = deque()  # of each step not applied, who trained what
        self._epoch = self._step = 0
        super().__init__(scenario, policy, seed, timeline)
        if isinstance(mode, Served):
            self._handling_s = self._cluster.handling_s

    def run(self) -> Outcome:
        """Simulate until all samples are trained and return what happened."""
        epochs = epochs_of(self._scenario)
        for epoch, samples in enumerate(epochs):
            self._epoch, self._handout = epoch, Handout.of(samples, self._scenario.size)
            while not self._handout.done:
                self._train()
        end_s = float(self._begin_s[self._present].max())
        names = (worker.name for worker in self._cluster.workers)
        return self._tally.outcome(str(self._mode), end_s, len(epochs), names)

    def _train(self) -> None:
        """Let one step pass."""
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

    def _compute(self, step: int) -> None:
        here, left = self._present, self._handout.left
        window = min(left, self._scenario.global_batch)
        shares = as_array(step_shares(as_shares(self._shares), window))
        busy_s = self._mean_s(shares) * self._cluster.next_noise()[here]
        self._open.append(self._give(here, shares))
        done_s = self._begin_s[here] + busy_s
        met = self._meeting.after(step, done_s + self._handling_s[here])
        for k, own_s in zip(here.tolist(), busy_s.tolist(), strict=True):
            self._tally.accounts[k].busy_s += own_s
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
        """Let the oldest steps become part of the model."""
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
        """Bring in all work before the fleet changes, but that of those who are lost."""
        lost = [k for k, change in self._timeline.happenings(step) if change is Change.LOST]
        for k in lost:
            self._handout = self._handout.lost(k)
            for given in self._open:
                given.pop(k, None)
            self._tally.keep(Gone(k, float(self._begin_s[k])))
        self._present = self._present[~np.isin(self._present, lost)]
        if len(self._present):
            self._bring_in(self._meeting.gather(self._begin_s[self._present]))

    def _begin(self, step: int) -> None:
        """Form the fleet; who comes begins when those who stay are ready, and all others go."""
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
        self._tally.moves += len(before) > 0


def epochs_of(scenario: Scenario) -> list[int]:
    """Return the samples of each epoch: as many in all as the scenario's steps train in ``bsp``."""
    samples = scenario.steps * scenario.global_batch
    whole, rest = divmod(samples, scenario.epoch_samples or samples)
    return [scenario.epoch_samples or samples] * whole + [rest] * (rest > 0)
