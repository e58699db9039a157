"""Who waited for whom, and what it cost: totals over all the steps a run has reported.

A step's slowest worker made every other one wait for the difference of their busy times. The
ranks report their steps in windows that need not end alike, so a step is booked when the last
of its workers has told about it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from types import MappingProxyType

import numpy as np

from evenstride.core.fleet import FloatArray, Shares
from evenstride.core.observation import Measured
from evenstride.core.speedup import Yardstick

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
        judged_s: of ``step_s``, the steps that could be compared with other splits.
        judged_steps: their number.
        equal_s: what the equal split would have made of them.
        best_s: what the best split would have.
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
    judged_s: float = 0.0
    judged_steps: int = 0
    equal_s: float = 0.0
    best_s: float = 0.0
    pending: _Steps = field(default_factory=lambda: MappingProxyType({}))

    @classmethod
    def empty(cls, workers: int) -> Ledger:
        """Return the ledger of a run that has not reported anything."""
        zeros = {name: np.zeros(workers) for name in (*_SUMS, *_FROM_STEPS)}
        return cls(workers, **zeros)  # type: ignore[arg-type]

    def compared(self, communication_s: float) -> tuple[float, float, float] | None:
        """Return efficiency, speed-up and bound by the fitted curves; ``None`` before any step.

        Args:
            communication_s: seconds of every step that no split can change.

        Returns:
            The best split's time over the time taken, the equal split's over the time taken, and
            the equal split's over the best split's.
        """
        if not self.judged_s:
            return None
        shared_s = self.judged_steps * communication_s
        judged_s, equal_s, best_s = (
            total_s + shared_s for total_s in (self.judged_s, self.equal_s, self.best_s)
        )
        return best_s / judged_s, equal_s / judged_s, equal_s / best_s

    def add_up(self, observations: Measured) -> Ledger:
        """Return the ledger after observations of workers that do not keep step.

        Who waited for whom has no meaning then, and no step is whole.
        """
        totals = {name: getattr(self, name).copy() for name in (*_SUMS, "busy_s", "waited_s")}
        for seen in observations:
            for name in _SUMS:
                totals[name][seen.worker] += getattr(seen, name)
            totals["busy_s"][seen.worker] += sum(seen.busy_s)
            totals["waited_s"][seen.worker] += sum(seen.wait_s)
        return replace(self, **totals)

    def book(self, observations: Measured, yardstick: Yardstick | None = None) -> Ledger:
        """Return the ledger after some observations; unmodelled steps are booked as well.

        Args:
            observations: of any workers.
            yardstick: compares the steps with other splits, if the curves are known.
        """
        totals = {name: getattr(self, name).copy() for name in _SUMS}
        pending = dict(self.pending)
        for seen in observations:
            for name in _SUMS:
                totals[name][seen.worker] += getattr(seen, name)
            for offset, busy_s in enumerate(seen.busy_s):
                step = seen.first_step + offset
                pending[step] = (*pending.get(step, ()), (seen.worker, seen.share, busy_s))
        whole = sorted(step for step, told in pending.items() if len(told) == self.workers)
        rows = [sorted(pending.pop(step)) for step in whole]
        after = replace(self, **totals, pending=MappingProxyType(pending))
        if not rows:
            return after
        times_s = np.array([[busy_s for _, _, busy_s in row] for row in rows])
        after = after._with_steps(times_s)
        if yardstick is None:
            return after
        splits = [tuple(share for _, share, _ in row) for row in rows]
        return after._judged(times_s.max(axis=1), splits, yardstick)

    def _with_steps(self, times_s: FloatArray) -> Ledger:
        """Book whole steps, given all workers' busy times, shape ``(steps, W)``."""
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
            step_s=self.step_s + float(longest_s.sum()),
        )

    def _judged(self, longest_s: FloatArray, splits: list[Shares], yardstick: Yardstick) -> Ledger:
        """Compare steps with other splits, given their times and the splits they ran under."""
        parts = {split: yardstick.parts(split) for split in set(splits)}
        known = [
            (taken_s, part)
            for taken_s, split in zip(longest_s.tolist(), splits, strict=True)
            if (part := parts[split]) is not None
        ]
        return replace(
            self,
            judged_s=self.judged_s + sum(taken_s for taken_s, _ in known),
            judged_steps=self.judged_steps + len(known),
            equal_s=self.equal_s + sum(taken_s * equal for taken_s, (equal, _) in known),
            best_s=self.best_s + sum(taken_s * best for taken_s, (_, best) in known),
        )


_SUMS = ("data_s", "outside_s", "control_wait_s")
_FROM_STEPS = ("busy_s", "waited_s", "caused_s", "slowest_steps")
