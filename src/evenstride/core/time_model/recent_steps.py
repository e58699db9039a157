"""The times of all workers in the recent steps, step by step.

The estimate follows each worker alone. What the workers did in the same step, and how often their
speeds came back, is known only from the steps themselves.
"""

from __future__ import annotations

import numpy as np

from evenstride.core.time_model.estimates import RecentSteps
from evenstride.core.time_model.observation import Measurements

_STEPS = 160  # steps to keep: about two periods of the slowest change that is looked for
# With more workers nothing is kept: some of them are always slow, and decisions must stay cheap.
_MOST_WORKERS = 128


def with_recent(recent: RecentSteps, measured: Measurements) -> RecentSteps:
    """Return the steps with new ones; ``measured`` has usable observations only.

    Cost: ``O(n W)`` for copies.
    """
    workers = recent.share.shape[1]
    if workers > _MOST_WORKERS or not len(measured):
        return recent
    step = measured.step_of_times()
    end = max(recent.end, int(step.max()) + 1)
    # After a gap, as after a restart, earlier steps say nothing about what follows.
    kept = recent if int(step.min()) <= recent.end + _STEPS else RecentSteps.none(workers)
    first = max(end - _STEPS, kept.end - len(kept.share) if len(kept.share) else int(step.min()))
    share, time_s = np.zeros((2, end - first, workers))
    old = kept.share[max(len(kept.share) - (kept.end - first), 0) :]
    share[: len(old)], time_s[: len(old)] = old, kept.time_s[len(kept.share) - len(old) :]
    here = step >= first
    at = step[here] - first, np.repeat(measured.worker, measured.steps)[here]
    share[at] = np.repeat(measured.share, measured.steps)[here]
    time_s[at] = measured.busy_s[here]
    return RecentSteps(end, share, time_s)
