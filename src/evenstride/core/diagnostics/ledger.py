"""Which worker waited for which, and the cost: totals over all reported steps of a run.

A step's slowest worker made every other one wait for the difference of their busy times. The
ranks report their steps in windows that may end at different steps. So a step is booked when the
last of its workers has reported it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from evenstride.core.allocation.speedup import JudgedTime, SplitReference, judged_time
from evenstride.core.arrays import FloatArray
from evenstride.core.time_model.observation import Measurements


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
    # Reports of steps that not all have reported yet; see `_reports`.
    pending: FloatArray = field(default_factory=lambda: np.zeros((5, 0)))

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
        for name, sums_s in zip(_SUMS, observations.sums_s, strict=True):
            np.add.at(totals[name], observations.worker, sums_s)
        reports = np.concatenate([self.pending, _reports(observations)], axis=1)
        # By step, then in order of rank, because reports come in any order.
        reports = reports[:, np.lexsort((reports[1], reports[0]))]
        _, counts = np.unique(reports[0], return_counts=True)
        whole = np.repeat(counts == self.workers, counts)
        after = replace(self, **totals, pending=reports[:, ~whole])
        if not whole.any():
            return after
        _, _, splits, times_s, waits_s = reports[:, whole].reshape(5, -1, self.workers)
        # The mean: a worker that is late in one step makes up for it in the next. The sum of the
        # longest times would exceed the duration of the run.
        lasting_s = (times_s + waits_s).mean(axis=1)
        after = after._with_steps(times_s, lasting_s)
        if reference is None:
            return after
        # By the measured shares, which may differ from those in force now.
        slowest_s = times_s.max(axis=1)
        others_s = reference.judge(splits.astype(np.int64), slowest_s)
        judged = judged_time(lasting_s, slowest_s, others_s)
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


def _reports(observations: Measurements) -> FloatArray:
    """Return step, worker, share, busy and waiting seconds of each step of each, ``(5, n)``."""
    whose, shares = (
        np.repeat(column, observations.steps)
        for column in (observations.worker, observations.share)
    )
    step = observations.step_of_times()
    return np.stack([step, whose, shares, observations.busy_s, observations.wait_s])


_SUMS = ("data_s", "outside_s", "control_wait_s")
_FROM_STEPS = ("busy_s", "waited_s", "caused_s", "slowest_steps")
