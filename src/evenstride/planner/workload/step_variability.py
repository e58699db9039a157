"""How steps scatter: what makes the last of several workers late, and what a mean may be off by.

Steps are not normal. Most take about as long, and some take many times that; and a machine that
others use as well has good minutes and bad ones. So noise is told by what it does, which is to make
the last worker late, and a mean is doubted by how far blocks of steps lie apart, not by its
standard error, which knows nothing of minutes to come.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import comb, log, log1p, pi, sqrt

import numpy as np

from evenstride.core.convergence.regression import t975
from evenstride.core.fleet import FloatArray
from evenstride.core.gradients.noise_scale import Z95

_TOGETHER = 4  # workers, by whose last one the noise of a lone process is told
_LAST_OF_FOUR = 1.0293753730039643  # by how many deviations the last of four normal ones is late
_WINDOW = 16  # steps, within which a machine does not wander
MOST_NOISE = 100.0
_BLOCKS = (4, 8)
_FEWEST_IN_BLOCK = 4
_MOST = 0.7  # that a mean of seconds is off by, a factor of 4 with 95 %; assumed
_LEAST = 0.02  # that is never known better, per square root of a factor e in duration; assumed


def scatter(times_s: Sequence[float] | FloatArray) -> float:
    """Return the deviation, as a part, of normal steps the last of which is as late as of these.

    How late is the last of four workers whose steps are like these, drawn from 16 steps in a row:
    for normal steps that gives their own deviation, and for others the one that counts. What
    changes over longer than that is no noise, as it is balanced, or common to all.

    Args:
        times_s: of consecutive steps, in seconds, at least one.
    """
    steps = np.asarray(times_s, dtype=np.float64)
    if len(steps) < _TOGETHER:
        return _two_by_two(steps)
    size = min(_WINDOW, len(steps))
    windows = np.sort(steps[: len(steps) // size * size].reshape(-1, size), axis=1)
    # How likely it is that each of a window's steps is the last of four different ones of them.
    weights = np.array([comb(n, _TOGETHER - 1) for n in range(size)]) / comb(size, _TOGETHER)
    late_s = float((windows @ weights - windows.mean(axis=1)).mean())
    return min(late_s / _LAST_OF_FOUR / float(windows.mean()), MOST_NOISE)


def _two_by_two(steps: FloatArray) -> float:
    if len(steps) < 2:
        return 0.0
    apart = float(np.mean([abs(a - b) for a, b in pairwise(steps.tolist())]))
    return min(0.5 * sqrt(pi) * apart / float(steps.mean()), MOST_NOISE)


def drift(times_s: Sequence[float] | FloatArray, ahead: float) -> float:
    """Return by which part the mean of steps to come may differ, as a standard deviation.

    Apart from what single steps scatter, which a mean of many takes out, there is what a machine
    wanders by. It is told by how much further blocks of steps lie apart than their steps explain,
    and taken to grow with time as flicker noise does: each doubling adds as much variance.

    Args:
        times_s: of consecutive steps, in seconds, at least one.
        ahead: how many times as long as these the steps to come last, above 0.

    Source:
        The law of flicker noise, by which the variance of a mean over ``T`` within ``k T`` grows
        with ``log k``; ours for machines. On two recorded runs of minutes among other work, 95 %
        intervals from the first seconds held the rest in 60 to 85 % of cases, those of standard
        errors in 30 %.
    """
    steps = np.asarray(times_s, dtype=np.float64) / float(np.mean(times_s))
    white = float(np.mean(np.square(np.diff(steps)))) / 2 if len(steps) > 1 else 0.0
    wanders = max((_wanders(steps, blocks, white) for blocks in _BLOCKS), default=0.0)
    found = sqrt(white / len(steps) + max(wanders, _LEAST**2) * log1p(ahead))
    return min(found, _MOST)


def _wanders(steps: FloatArray, blocks: int, white: float) -> float:
    """Return the variance that each factor e in time adds, for Student's t of so few blocks."""
    size = len(steps) // blocks
    if size < _FEWEST_IN_BLOCK:
        return 0.0
    means = steps[: size * blocks].reshape(blocks, size).mean(axis=1)
    beyond = max(float(means.var(ddof=1)) - white / size, 0.0)
    return beyond / log(blocks) * (t975(blocks - 1) / Z95) ** 2
