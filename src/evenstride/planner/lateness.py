"""How late the last of a run's workers is, from steps that all of them have told of."""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from evenstride.core.fleet import FloatArray
from evenstride.planner.lives import Life
from evenstride.planner.scattering import MOST_NOISE
from evenstride.planner.steps import lateness as of_normal

_FEWEST_STEPS = 20


def lateness(life: Life) -> float | None:
    """Return the noise of workers' steps that makes the last one as late as it was in a run.

    As the deviation, as a part, of normal and independent steps. Those of a run are neither, so
    what counts is how late the last one was: the mean over all steps of the maximum over workers,
    each in proportion to its mean at that share.

    Args:
        life: of a run.

    Returns:
        ``None`` with one worker, or where too few steps were told of by all.

    Cost:
        O(steps of all workers).
    """
    workers = [rank for rank, share in enumerate(life.shares) if share]
    if len(workers) < 2:
        return None
    each = [_relative(life, worker) for worker in workers]
    common = set(each[0]).intersection(*each[1:])
    if len(common) < _FEWEST_STEPS:
        return None
    times = np.array([[one[step] for step in sorted(common)] for one in each])
    late = float((times.max(axis=0) - times.mean(axis=0)).mean() / times.mean())
    return min(late / float(of_normal(len(workers))[-1]), MOST_NOISE)


def _relative(life: Life, worker: int) -> dict[int, float]:
    """Return a worker's steps, by their numbers, as parts of its mean step of that share."""
    by_share = defaultdict[int, dict[int, float]](dict)
    for one in life.observations:
        if one.worker == worker and one.modelled and one.share:
            numbered = zip(
                range(one.first_step, one.first_step + one.steps), one.busy_s, strict=True
            )
            by_share[one.share].update(numbered)
    found = dict[int, float]()
    for steps_s in by_share.values():
        means: FloatArray = np.array(list(steps_s.values())) / np.mean(list(steps_s.values()))
        found.update(zip(steps_s, means.tolist(), strict=True))
    return found
