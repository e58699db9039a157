"""The split that was in force at each step: an epoch's last one has fewer samples than that."""

from __future__ import annotations

import numpy as np

from evenstride.core.fleet import FloatArray, IntArray
from evenstride.report.analysis.run_generation import RecordedGeneration


def split_rows(generation: RecordedGeneration) -> IntArray:
    """Return for each step the row of a step that shows its split whole, ``(steps,)``.

    That is its own, unless it had fewer samples than the global batch: then that of the latest one
    before it that did not, or of the first. Where no step had them all, each has its own.
    """
    share = generation.table.share
    rows = np.arange(generation.steps)
    if not generation.lockstep:  # each takes steps of its own, and no step is all of theirs
        return rows
    short = (share >= 0).all(axis=1) & (share.sum(axis=1) < generation.global_batch)
    if short.all():
        return rows
    before = np.maximum.accumulate(np.where(short, -1, rows))
    return np.where(before < 0, np.argmin(short), before)


def split_share(generation: RecordedGeneration, rank: int, rows: IntArray) -> FloatArray:
    """Return a worker's samples in the split of each step, ``(steps,)``.

    Args:
        generation: of it.
        rank: of it.
        rows: that `split_rows` returned.

    Returns:
        Not a number where nothing was told.
    """
    share = generation.table.share[rows, rank].astype(np.float64)
    return np.where(share < 0, np.nan, share)
