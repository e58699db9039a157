"""Who waited for whom, and what it cost: totals over all the steps a run has reported.

A step's slowest worker made every other one wait for the difference of their busy times. The
ranks report their steps in windows that need not end alike, so a step is booked when the last
of its workers has told about it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from types import MappingProxyType

import numpy as np

from evenstride.core.fleet import FloatArray
from evenstride.core.observation import Observation

_Steps = MappingProxyType[int, tuple[tuple[int, int, float], ...]]


@dataclass(frozen=True, slots=True, eq=False)
class Ledger:
    """Totals per worker, float64 of shape ``(W,)`` in seconds unless said otherwise.

    Args:
        workers: ``W``.
        steps: steps booked completely.
        busy_s: time at work (ghost samples included).
        waited_s: time each worker waited for a slower one.
        caused_s: time that others waited because this worker was the slowest.
        slowest_steps: steps in which it was the slowest, a count.
        data_s: time spent waiting for data.
        outside_s: time outside training beyond the usual.
        control_wait_s: time spent waiting for decisions.
        step_s: total of the slowest busy times, a number: what the steps took, communication
            apart.
        pending: steps not yet reported by all, as (worker, share, busy seconds).
    """

    workers: int
    steps: int = 0
    busy_s: FloatArray = field(default_factory=lambda: np.zeros(0))
    waited_s: FloatArray = field(default_factory=lambda: np.zeros(0))
    caused_s: FloatArray = field(default_factory=lambda: np.zeros(0))
    slowest_steps: FloatArray = field(default_factory=lambda: np.zeros(0))
    data_s: FloatArray = field(default_factory=lambda: np.zeros(0))
    outside_s: FloatArray = field(default_factory=lambda: np.zeros(0))
    control_wait_s: FloatArray = field(default_factory=lambda: np.zeros(0))
    step_s: float = 0.0
    pending: _Steps = field(default_factory=lambda: MappingProxyType({}))

    @classmethod
    def empty(cls, workers: int) -> Ledger:
        """Return the ledger of a run that has not reported anything."""
        zeros = {name: np.zeros(workers) for name in (*_SUMS, *_FROM_STEPS)}
        return cls(workers, **zeros)  # type: ignore[arg-type]

    def book(self, observations: tuple[Observation, ...]) -> Ledger:
        """Return the ledger after some observations; unmodelled steps are booked as well."""
        totals = {name: getattr(self, name).copy() for name in _SUMS}
        pending = dict(self.pending)
        for seen in observations:
            for name in _SUMS:
                totals[name][seen.worker] += getattr(seen, name)
            for offset, busy_s in enumerate(seen.busy_s):
                step = seen.first_step + offset
                pending[step] = (*pending.get(step, ()), (seen.worker, seen.share, busy_s))
        whole = [step for step, told in pending.items() if len(told) == self.workers]
        after = self
        for step in sorted(whole):
            after = after._with_step([busy_s for _, _, busy_s in sorted(pending.pop(step))])
        return replace(after, **totals, pending=MappingProxyType(pending))

    def _with_step(self, busy_s: list[float]) -> Ledger:
        times = np.array(busy_s)
        slowest = int(times.argmax())
        waits = times[slowest] - times
        caused, count = self.caused_s.copy(), self.slowest_steps.copy()
        caused[slowest] += waits.sum()
        count[slowest] += 1
        return replace(
            self,
            steps=self.steps + 1,
            busy_s=self.busy_s + times,
            waited_s=self.waited_s + waits,
            caused_s=caused,
            slowest_steps=count,
            step_s=self.step_s + float(times[slowest]),
        )


_SUMS = ("data_s", "outside_s", "control_wait_s")
_FROM_STEPS = ("busy_s", "waited_s", "caused_s", "slowest_steps")
