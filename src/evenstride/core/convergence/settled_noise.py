"""Whether the gradient's noise has settled, and from which measured step on.

The noise is low in the first steps of a training and rises. Scavenger therefore waits before it
uses it: 2,000 to 10,000 iterations, depending on the model. Here the measurements decide. Noise has
settled if it is the same in both halves of the steps that are kept, and the steps prove it.

The compared noise is ``A / T - 1``, the part of a step's gain beyond 1, relative to the gradient.
Early in a training it is small at a large batch, and may grow tenfold while ``A / T`` rises from
1.01 to 1.1 only. The noise scale follows the part beyond 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, inf, log, sqrt

import numpy as np

from evenstride.core.convergence.regression import t975
from evenstride.core.gradients.noise_scale import Interval

MOST_CHANGE = 0.25
"""Largest change of settled noise between two halves of the measured steps, as a fraction."""

_PARTS = 8  # of the measured steps; up to half of them are left out, part by part
_FEWEST = 4  # steps in each half


@dataclass(frozen=True, slots=True)
class Settling:
    """How much the noise changes within the measured steps."""

    left_out: int  # measured steps at the beginning that are left out
    # Noise in the second half of the others, relative to the first half, minus 1.
    change: Interval

    @property
    def settled(self) -> bool:
        """Whether the change is small with a confidence of 95 %.

        Few or scattered steps give a wide interval. So a lack of data never counts as settled.
        """
        least, most = 1 / (1 + MOST_CHANGE), 1 + MOST_CHANGE
        return least <= 1 + self.change.low and 1 + self.change.high <= most


def settling(gains: Sequence[float]) -> Settling:
    """Return from where on the noise has settled, or that it has not.

    Args:
        gains: Scavenger's noise of each measured step, ``A / T``, in order. Those without noise, at
            most 1, and infinite ones are skipped. The number of parts is the same in all.

    Leaves out none of the steps, then an eighth of them, and so on up to half, until the rest has
    settled. If none has, the result is for the later half. Steps count as independent. The change
    is that of the mean logarithm, which a few large values hardly move. O(steps).

    Source:
        The tests of Geweke (1992) and of Heidelberger and Welch (1983), which compare parts of a
        series and leave out its beginning. They ask whether a change is proved. We ask whether its
        absence is.
    """
    logs = np.log([gain - 1 for gain in gains if 1 < gain < inf])
    found = Settling(0, Interval(0.0, -1.0, inf))
    for part in range(_PARTS // 2 + 1):
        left_out = part * len(logs) // _PARTS
        first, second = np.array_split(logs[left_out:], 2)
        if len(second) < _FEWEST:
            return found
        found = Settling(left_out, _change(first, second))
        if found.settled:
            return found
    return found


def _change(first: np.ndarray, second: np.ndarray) -> Interval:
    by = float(second.mean() - first.mean())
    error = sqrt(float(first.var(ddof=1)) / len(first) + float(second.var(ddof=1)) / len(second))
    half = t975(len(first) + len(second) - 2) * error
    return Interval(*(exp(min(end, log(1e6))) - 1 for end in (by, by - half, by + half)))
