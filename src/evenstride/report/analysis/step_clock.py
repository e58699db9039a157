"""When each step began and ended, on the clock of its process.

A trace has how long steps took, and now and then how many were committed at which moment. Between
two such moments steps follow one another; time that none of them accounts for (evaluation, saving)
lies before the step that had it, as far as that is known, else before the first of a pass over the
data, and else before the first. A little of it is no pause, and lies between all steps.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import numpy.typing as npt

from evenstride.core.fleet import FloatArray
from evenstride.report.analysis.run_generation import RecordedGeneration

_NO_PAUSE = 0.05
"""Part of the steps' time: less than that is what their measured times are off the clock by."""


def durations_s(generation: RecordedGeneration) -> FloatArray:
    """Return how long each step took, ``(steps,)``: on average of the workers that told of it.

    They begin and end it together, give or take what each is early or late by. That comes back in
    their next step, so the mean adds up to the clock, and the longest would to more. Where workers
    do not keep step, it is that of the worker that was at it longest. A step that nobody has told
    of yet takes the median.
    """
    table = generation.table
    if not generation.steps:
        return np.zeros(0)
    spent_s = table.busy_s + table.wait_s
    told = ~np.isnan(spent_s)
    counts, spent_s = np.count_nonzero(told, axis=1), np.where(told, spent_s, 0.0)
    if generation.lockstep:
        lasting_s = spent_s.sum(axis=1) / np.maximum(counts, 1)
    else:
        lasting_s = spent_s.max(axis=1)
    known = counts > 0
    return np.where(known, lasting_s, np.median(lasting_s[known]) if known.any() else 0.0)


def spans_s(generation: RecordedGeneration) -> tuple[FloatArray, FloatArray]:
    """Return when steps began and ended, ``(steps,)`` each, in seconds of their process's clock.

    Workers that do not keep step have no such times in common; theirs are those of the one with
    the most to do, step by step.

    Returns:
        Never overlapping, in order, and within what was recorded.
    """
    lasting_s = durations_s(generation)
    apart_s = np.nan_to_num(generation.table.apart_s, nan=0.0).max(axis=1, initial=0.0)
    if not len(lasting_s):
        return np.zeros(0), np.zeros(0)
    ends_s = _ends(generation, lasting_s, apart_s)
    begins_s = np.maximum(ends_s - lasting_s, np.append(generation.anchors[0][0], ends_s[:-1]))
    return begins_s, ends_s


def _ends(generation: RecordedGeneration, lasting_s: FloatArray, apart_s: FloatArray) -> FloatArray:
    """Return the ends of steps: stretched or shrunk to what lies between two known moments."""
    at = [(0, generation.anchors[0][0])]
    for when_s, step in generation.anchors[1:]:
        row = min(step - generation.first, len(lasting_s))
        if row > at[-1][0] and when_s > at[-1][1]:
            at.append((row, when_s))
    ends_s = np.zeros(len(lasting_s))
    fresh = np.asarray(~generation.table.modelled.any(axis=1), dtype=np.bool_)
    for (first, from_s), (last, until_s) in pairwise(at):
        rows = slice(first, last)
        room_s = until_s - from_s
        ends_s[rows] = from_s + _placed(lasting_s[rows], apart_s[rows], fresh[rows], room_s)
    first, from_s = at[-1]
    if first < len(lasting_s):  # steps after the last known moment
        ends_s[first:] = from_s + np.cumsum(lasting_s[first:] + apart_s[first:])
    return ends_s


def _placed(
    lasting_s: FloatArray, apart_s: FloatArray, fresh: npt.NDArray[np.bool_], room_s: float
) -> FloatArray:
    """Return the ends of steps within the room that they have together.

    Args:
        lasting_s: how long each took.
        apart_s: what is known of the time before it.
        fresh: which may be the first of a pass.
        room_s: of all.
    """
    work_s = float(lasting_s.sum())
    left_s = room_s - work_s
    if left_s <= 0.0:
        return np.asarray(np.cumsum(lasting_s) * (room_s / work_s if work_s else 0.0))
    known_s = float(apart_s.sum())
    gaps_s = apart_s * min(left_s / known_s, 1.0) if known_s else np.zeros(len(lasting_s))
    rest_s = max(left_s - float(gaps_s.sum()), 0.0)
    if not fresh.any() and rest_s < _NO_PAUSE * work_s:
        return np.asarray(np.cumsum(gaps_s + lasting_s * (1.0 + rest_s / work_s)))
    before = np.flatnonzero(fresh) if fresh.any() else np.zeros(1, dtype=np.int64)
    gaps_s[before] += rest_s / len(before)
    return np.asarray(np.cumsum(gaps_s + lasting_s))
