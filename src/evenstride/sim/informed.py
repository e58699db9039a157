"""How long a controller takes that is told the truth: what the same lag schedule allows."""

from __future__ import annotations

from collections import deque

import numpy as np

from evenstride.core.fleet import Fleet, FloatArray, IntArray, as_array
from evenstride.core.speedup import equal_split
from evenstride.sim.cluster import Cluster, TrueTimes
from evenstride.sim.oracle import Alike, Informed, best_split, kinds_of
from evenstride.sim.run import Simulation
from evenstride.sim.scenario import Scenario
from evenstride.sim.timeline import Timeline


def informed_mean_s(scenario: Scenario, seed: int, timeline: Timeline | None = None) -> FloatArray:
    """Return the noise-free time of each step under `Informed`.

    Its decisions hang on no measurement. So wherever the exchanges do not either, its whole run
    is known without one: the same as by `Simulation`, without estimating what is known.

    Args:
        scenario: to run in.
        seed: of its random events.
        timeline: of both, if it is there already.
    """
    timeline = timeline or Timeline(scenario, seed)
    if scenario.exchange.every == "leader":
        return Simulation(scenario, Informed(), seed, timeline).run().mean_s
    return _Told(scenario, Cluster(scenario, seed), timeline, scenario.exchange.every).mean_s()


class _Told:
    """The run of `Informed` with an exchange every so many steps."""

    def __init__(
        self, scenario: Scenario, cluster: Cluster, timeline: Timeline, every: int
    ) -> None:
        self._scenario, self._every = scenario, every
        self._cluster, self._timeline, self._kinds = cluster, timeline, kinds_of(scenario)
        self._pending: deque[tuple[int, IntArray]] = deque()
        self._known = np.zeros(scenario.size, dtype=np.bool_)
        self._near: IntArray | None = None

    def mean_s(self) -> FloatArray:
        """Return the noise-free time of each step."""
        changes, moves = frozenset(self._timeline.changes), frozenset(self._timeline.moves)
        mean_s = np.zeros(self._scenario.steps)
        step_s = 0.0
        for step in range(self._scenario.steps):
            if step == 0 or step in moves:
                self._form(step)
            if step == 0 or step in changes:
                self._curves = self._curves_at(step)
                self._best = self._near = self._best_split()
            if step in moves:
                self._open()
            if self._due(step) or step == 0 or step in changes:
                step_s = self._step_s()
            mean_s[step] = step_s
            if (step + 1) % self._every == 0:
                self._exchange(step)
        return mean_s

    def _form(self, step: int) -> None:
        self._present = self._timeline.present(step)
        workers = tuple(self._cluster.workers[k] for k in self._present)
        self._fleet = Fleet(workers, self._scenario.global_batch)
        self._shares = self._decided = as_array(equal_split(self._fleet))
        self._pending.clear()
        self._cold, self._near = True, None

    def _open(self) -> None:
        """Begin with a decision where somebody in the new fleet is known from the one before."""
        stayed = np.zeros_like(self._known)
        stayed[self._present] = self._known[self._present]
        self._known = stayed
        if stayed.any():
            self._shares = self._decided = self._best

    def _curves_at(self, step: int) -> TrueTimes:
        return self._cluster.usual.at_speed(self._timeline.speed(step)).of(self._present)

    def _best_split(self) -> IntArray:
        alike = Alike.of(self._curves, self._kinds[self._present])
        return best_split(alike, self._fleet, self._near)

    def _due(self, step: int) -> bool:
        """Take over the splits that are in force by now; return whether there were any.

        They do so in the order in which they were decided, as the simulator's do.
        """
        before = self._shares
        while self._pending and self._pending[0][0] <= step:
            self._shares = self._pending.popleft()[1]
        return self._shares is not before

    def _step_s(self) -> float:
        busy_s = self._curves.at(self._shares)
        return float(busy_s.max()) + self._scenario.communication.step_s(len(busy_s))

    def _exchange(self, step: int) -> None:
        asked = self._scenario.exchange
        lag = asked.lag if asked.cold_lag is None or not self._cold else asked.cold_lag
        self._cold = False
        self._known[self._present] = True
        if (self._best != self._decided).any():
            self._pending.append((step + lag, self._best))
            self._decided = self._best
