"""Which workers are not worth their place: the others alone would end a step as early."""

from __future__ import annotations

import numpy as np

from evenstride.core.allocation.min_max import equal_finish
from evenstride.core.fleet import Fleet, FloatArray, IntArray, Mask
from evenstride.core.time_model.step_times import TimeModel
from evenstride.errors import InfeasibleShares


def unneeded(times: TimeModel, fleet: Fleet, sure: FloatArray) -> Mask:
    """Return which workers are not worth their place, bool ``(W,)``.

    The best split of all ends no earlier than the worker that takes longest for the fewest samples
    it may get. If the others can do the whole batch by then, they alone would be as fast.
    Of several such workers the slowest goes first, and the next one is judged without it.

    Args:
        times: all workers' curves, in seconds.
        fleet: their bounds and the global batch.
        sure: part of each one's time that is beyond doubt, ``(W,)``; above 1 to look with some to
            spare.

    Cost:
        ``O(W)`` vectorised, and as much again for each worker that is found.
    """
    least_s = times.at(fleet.lower) * sure
    out = np.zeros(len(fleet), dtype=np.bool_)
    # Never the quickest: someone has to train the batch.
    for worker in np.argsort(-least_s, kind="stable")[:-1].tolist():
        out[worker] = True
        if not _could_do_without(out, times, fleet, float(least_s[worker])):
            # A quicker one leaves the others even less time, so the search is over.
            out[worker] = False
            break
    return out


def _could_do_without(out: Mask, times: TimeModel, fleet: Fleet, by_s: float) -> bool:
    parts = (by_s * times.speed - times.fixed_s) / times.per_sample_s
    if float(np.where(out, 0.0, np.maximum(parts, 0.0)).sum()) < fleet.global_batch:
        return False  # as nearly always, and sooner found than in whole samples
    # In whole micro-batches, which the quick test above leaves out.
    room = np.minimum(times.capacity(by_s), fleet.upper) // fleet.quanta * fleet.quanta
    return int(np.where(out, 0, room).sum()) >= fleet.global_batch


def best_s(times: TimeModel, fleet: Fleet, without: Mask | None = None) -> float | None:
    """Return the time in seconds of the best split; ``None`` if there is none."""
    lower, upper = fleet.lower, fleet.upper
    if without is not None:
        lower, upper = np.where(without, 0, lower), np.where(without, 0, upper)
    try:
        shares = equal_finish(times, lower, upper, fleet.global_batch, quantum=fleet.quanta)
    except InfeasibleShares:
        return None
    return in_force_s(times, shares)


def in_force_s(times: TimeModel, shares: IntArray) -> float:
    """Return the time in seconds of the slowest of those who have samples."""
    return float(np.where(shares > 0, times.at(shares), 0.0).max())
