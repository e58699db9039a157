"""Synthetic runs: the real controller on workers with computed times, and the trace of the run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np

from evenstride.core.control.advance import advance
from evenstride.core.control.events import (
    EpochEnded,
    Event,
    Exchanged,
    FleetFormed,
)
from evenstride.core.control.schedule import Schedule
from evenstride.core.control.state import Control
from evenstride.core.fleet import FloatArray, IntArray, Shares, Worker
from evenstride.core.policies import policy_from_spec
from evenstride.core.time_model.observation import Measurements, Observation, PeakMemory
from evenstride.trace.codec import TraceWriter

Times = Callable[[int, IntArray], FloatArray]
"""Returns busy times of some steps in seconds, from the number of the first step and all shares."""


class VirtualRun:
    """Trains in windows of steps, each followed by an exchange, and writes the trace.

    Args:
        writer: Writer of the trace.
        policy: Specification of the policy.
        batch: Samples per step.
        names: Names of the workers.
        times: Function for busy times. Shares and times are ``(steps, workers)``.
        communication_s: Communication time of every step.
        held: Memory that the workers report in each exchange.
        fresh: Whether the first step is the first of a pass, which is not modelled.
        begins_s: Start time on the leader's clock.
    """

    def __init__(
        self,
        writer: TraceWriter,
        policy: str,
        batch: int,
        names: Sequence[str],
        times: Times,
        communication_s: float,
        *,
        held: tuple[PeakMemory, ...] = (),
        fresh: bool = False,
        begins_s: float = 0.0,
    ) -> None:
        self.writer, self.names, self._batch = writer, tuple(names), batch
        self._times, self._communication_s, self.held = times, communication_s, held
        self._control, self._schedule = Control(policy_from_spec(policy)), Schedule(())
        self._fresh, self._apart_s = fresh, 0.0
        self.step, self.clock_s, self.after = 0, begins_s, 1

    def begin(self, generation: int = 0) -> None:
        """Form the process group of all workers."""
        workers = tuple(map(Worker, self.names))
        self.put(FleetFormed(generation, self.step, self._batch, workers))

    def shares_at(self, step: int) -> Shares:
        """Return the shares of a step."""
        return self._schedule.shares_at(step)

    def pause(self, seconds: float) -> None:
        """Spend time outside training before the next step."""
        self.clock_s += seconds
        self._apart_s = seconds

    def window(self, steps: int) -> FloatArray:
        """Train some steps, exchange, and return the busy times.

        Afterwards, `after` is the number of steps until the next exchange.
        """
        first = self.step
        shares = np.array([self.shares_at(step) for step in range(first, first + steps)])
        busy_s = self._times(first, shares)
        self.step += steps
        self.clock_s += float(busy_s.max(axis=1).sum()) + steps * self._communication_s
        seen = Measurements.of(self._observed(first, shares, busy_s))
        self.put(Exchanged(self.step, self.step + 1, seen, self.held))
        return busy_s

    def turn(self, batch: int) -> None:
        """Continue with another global batch."""
        self.put(EpochEnded(self.step, self.step, batch, batch))

    def _observed(self, first: int, shares: IntArray, busy_s: FloatArray) -> list[Observation]:
        """Return the observations of each worker, one per stretch of steps with equal shares."""
        wait_s = busy_s.max(axis=1)[:, np.newaxis] - busy_s + self._communication_s
        apart_s, self._apart_s = self._apart_s, 0.0
        fresh, count = self._fresh and first == 0, len(shares)
        changes = (np.diff(shares, axis=0) != 0).any(axis=1)
        edges = sorted({0, *(np.flatnonzero(changes) + 1).tolist(), count, *([1] * fresh)})
        return [
            Observation(
                worker=worker,
                share=int(shares[begin, worker]),
                first_step=first + begin,
                busy_s=tuple(np.round(busy_s[begin:end, worker], 7).tolist()),
                wait_s=tuple(np.round(wait_s[begin:end, worker], 7).tolist()),
                outside_s=apart_s if begin == 0 else 0.0,
                modelled=not (fresh and begin == 0),
            )
            for worker in range(len(self.names))
            for begin, end in pairwise(edges)
        ]

    def put(self, event: Event) -> None:
        self._control, verdict = advance(self._control, event)
        self.writer.event(self.clock_s, event, verdict)
        if verdict.shares is not None:
            self._schedule = self._schedule.replaced_from(verdict.effective, verdict.shares)
        self.after = verdict.exchange_after
