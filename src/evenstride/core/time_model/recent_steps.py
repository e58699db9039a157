"""The times of all workers in the recent steps, step by step.

The estimate follows each worker alone. What the workers did in the same step, and how often their
speeds came back, is known only from the steps themselves.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from evenstride.core.arrays import FloatArray, IntArray
from evenstride.core.time_model.observation import Measurements

_STEPS = 160  # steps to keep: about two periods of the slowest change that is looked for
# With more workers nothing is kept: some of them are always slow, and decisions must stay cheap.
_MOST_WORKERS = 128


@dataclass(frozen=True, slots=True, eq=False)
class RecentSteps:
    """Shares and times of ``W`` workers in up to 160 consecutive steps, the latest last."""

    end: int  # the step after the latest
    share: FloatArray  # ``(n, W)``; 0 where a worker has no usable time
    time_s: FloatArray  # ``(n, W)``, seconds of each step

    @classmethod
    def none(cls, workers: int) -> RecentSteps:
        return cls(0, np.zeros((0, workers)), np.zeros((0, workers)))

    def after(self, measured: Measurements) -> RecentSteps:
        """Return the steps with new ones; ``measured`` has usable observations only.

        Cost: ``O(n W)`` for copies.
        """
        workers = self.share.shape[1]
        if workers > _MOST_WORKERS or not len(measured):
            return self
        step = measured.step_of_times()
        end = max(self.end, int(step.max()) + 1)
        # After a gap, as after a restart, earlier steps say nothing about what follows.
        kept = self if int(step.min()) <= self.end + _STEPS else RecentSteps.none(workers)
        first = max(
            end - _STEPS, kept.end - len(kept.share) if len(kept.share) else int(step.min())
        )
        share, time_s = np.zeros((2, end - first, workers))
        old = kept.share[max(len(kept.share) - (kept.end - first), 0) :]
        share[: len(old)], time_s[: len(old)] = old, kept.time_s[len(kept.share) - len(old) :]
        here = step >= first
        at = step[here] - first, np.repeat(measured.worker, measured.steps)[here]
        share[at], time_s[at] = (
            np.repeat(measured.share, measured.steps)[here],
            measured.busy_s[here],
        )
        return RecentSteps(end, share, time_s)

    def taking(self, other: RecentSteps, here: IntArray, there: IntArray) -> RecentSteps:
        """Return no steps: another group of workers has no steps in common yet."""
        del other, here, there
        return self
