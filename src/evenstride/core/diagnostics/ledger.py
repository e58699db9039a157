"""Which worker waited for which, and the cost: totals over all reported steps of a run.

A step's slowest worker made every other one wait for the difference of their busy times. The
ranks report their steps in windows that may end at different steps. So a step is booked when the
last of its workers has reported it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from types import MappingProxyType

import numpy as np

from evenstride.core.allocation.speedup import JudgedTime, SplitReference, judged_time
from evenstride.core.arrays import FloatArray
from evenstride.core.time_model.observation import Measurements

_Steps = MappingProxyType[int, tuple[tuple[int, int, float, float], ...]]


@dataclass(frozen=True, slots=True, eq=False)
class Ledger(JudgedTime):
    """Totals per worker, float64 of shape ``(W,)`` in seconds unless stated otherwise."""

    workers: int  # ``W``
    steps: int = 0  # steps booked completely
    # Busy time (ghost samples included).
    busy_s: FloatArray = field(default_factory=lambda: np.zeros(0))
    # Time that each worker waited for a slower one.
    waited_s: FloatArray = field(default_factory=lambda: np.zeros(0))
    # Time that others waited because this worker was the slowest.
    caused_s: FloatArray = field(default_factory=lambda: np.zeros(0))
    # Number of steps in which it was the slowest.
    slowest_steps: FloatArray = field(default_factory=lambda: np.zeros(0))
    data_s: FloatArray = field(default_factory=lambda: np.zeros(0))  # time spent waiting for data
    # Time outside training beyond the usual.
    outside_s: FloatArray = field(default_factory=lambda: np.zeros(0))
    # Time spent waiting for decisions.
    control_wait_s: FloatArray = field(default_factory=lambda: np.zeros(0))
    # Duration of the steps, a number: for each step the mean over the workers. They begin and end
    # it together, except for delays that they make up in the next step.
    took_s: float = 0.0
    # Steps not yet reported by all, as (worker, share, busy and waiting seconds).
    pending: _Steps = field(default_factory=lambda: MappingProxyType({}))

    @classmethod
    def empty(cls, workers: int) -> Ledger:
        zeros = {name: np.zeros(workers) for name in (*_SUMS, *_FROM_STEPS)}
        return cls(workers, **zeros)  # type: ignore[arg-type]

    def add_up(self, observations: Measurements) -> Ledger:
        """Return the ledger after observations of workers that do not run in lockstep.

        Waiting for other workers has no meaning then, and no step is complete.
        """
        totals = {name: getattr(self, name).copy() for name in (*_SUMS, "busy_s", "waited_s")}
        for seen in observations:
            for name in _SUMS:
                totals[name][seen.worker] += getattr(seen, name)
            totals["busy_s"][seen.worker] += sum(seen.busy_s)
            totals["waited_s"][seen.worker] += sum(seen.wait_s)
        return replace(self, **totals)

    def book(self, observations: Measurements, reference: SplitReference | None = None) -> Ledger:
        """Return the ledger after some observations; unmodelled steps are booked as well."""
        totals = {name: getattr(self, name).copy() for name in _SUMS}
        # Lists, because a tuple copied for each row would cost W squared per step.
        pending = {step: list(rows) for step, rows in self.pending.items()}
        for seen in observations:
            for name in _SUMS:
                totals[name][seen.worker] += getattr(seen, name)
            of_steps = zip(seen.busy_s, seen.wait_s, strict=True)
            for step, both_s in enumerate(of_steps, start=seen.first_step):
                pending.setdefault(step, []).append((seen.worker, seen.share, *both_s))
        whole = sorted(step for step, rows in pending.items() if len(rows) == self.workers)
        # In order of rank, because reports come in any order.
        rows = [sorted(pending.pop(step)) for step in whole]
        left = MappingProxyType({step: tuple(rows) for step, rows in pending.items()})
        after = replace(self, **totals, pending=left)
        if not rows:
            return after
        times_s = np.array([[busy_s for _, _, busy_s, _ in row] for row in rows])
        spent_s = times_s + np.array([[wait_s for *_, wait_s in row] for row in rows])
        # The mean: a worker that is late in one step makes up for it in the next. The sum of the
        # longest times would exceed the duration of the run.
        lasting_s = spent_s.mean(axis=1)
        after = after._with_steps(times_s, lasting_s)
        if reference is None:
            return after
        # By the measured shares, which may differ from those in force now.
        splits = np.array([[share for _, share, *_ in row] for row in rows])
        slowest_s = times_s.max(axis=1)
        judged = judged_time(lasting_s, slowest_s, reference.judge(splits, slowest_s))
        return replace(
            after,
            judged_steps=after.judged_steps + judged.judged_steps,
            judged_s=after.judged_s + judged.judged_s,
            equal_s=after.equal_s + judged.equal_s,
            best_s=after.best_s + judged.best_s,
        )

    def _with_steps(self, times_s: FloatArray, lasting_s: FloatArray) -> Ledger:
        """Book complete steps, given all workers' busy times, ``(steps, W)``, and the durations."""
        slowest, longest_s = times_s.argmax(axis=1), times_s.max(axis=1)
        waits_s = longest_s[:, np.newaxis] - times_s
        caused_s = np.bincount(slowest, weights=waits_s.sum(axis=1), minlength=self.workers)
        return replace(
            self,
            steps=self.steps + len(times_s),
            busy_s=self.busy_s + times_s.sum(axis=0),
            waited_s=self.waited_s + waits_s.sum(axis=0),
            caused_s=self.caused_s + caused_s,
            slowest_steps=self.slowest_steps + np.bincount(slowest, minlength=self.workers),
            took_s=self.took_s + float(lasting_s.sum()),
        )


_SUMS = ("data_s", "outside_s", "control_wait_s")
_FROM_STEPS = ("busy_s", "waited_s", "caused_s", "slowest_steps")
