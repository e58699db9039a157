"""Ratios of step times from paired blocks of steps, each with a 95 % confidence interval.

A machine's speed drifts by several per cent within minutes. Blocks that run one after the other
drift together, so the ratio of their times is far more certain than either time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from evenstride.core.convergence.regression import t975

Rounds = Sequence[Sequence[float]]
"""Times in seconds of the blocks of each round of a comparison."""

UNCERTAIN = 0.1
"""Largest half-width of an interval, as a fraction of the ratio, in a run that is not disturbed.

At 10 %, a speed-up of 2.0 may as well be 1.8 or 2.2.
"""


@dataclass(frozen=True, slots=True)
class Ratio:
    """A ratio of two times."""

    value: float  # geometric mean over the pairs
    interval: tuple[float, float] | None  # 95 % confidence; ``None`` for a single pair

    @property
    def half_width(self) -> float | None:
        """Half the width of the interval, relative to the ratio; ``None`` without an interval."""
        if self.interval is None:
            return None
        low, high = self.interval
        return float(np.sqrt(high / low) - 1.0)

    def widened(self, drift: float) -> Ratio:
        """Return the ratio with an interval that allows for a drift between the two times."""
        if self.interval is None:
            return self
        low, high = self.interval
        return Ratio(self.value, (low / (1.0 + drift), high * (1.0 + drift)))


def paired_ratio(numerators: Rounds, denominators: Rounds) -> Ratio:
    """Return the ratio of times that were measured in pairs, with its interval.

    Both arguments have the same number of rounds, and each round the same number of blocks; a
    surplus is left out. Blocks of one round share what the machine did in it. So the standard error
    is the larger of two: that of the mean of all pairs, and that of the mean of the rounds.

    Source:
        Student's t interval of the mean (Student, Biometrika 1908) of the logarithms of the ratios.
        Ours is the larger of the two standard errors. The percentile bootstrap, which suits many
        pairs, is too narrow for ten or fewer.

    >>> paired_ratio([[2.0, 4.0]], [[1.0, 2.0]])
    Ratio(value=2.0, interval=(2.0, 2.0))
    """
    rounds = [
        np.log([a / b for a, b in zip(above, below, strict=False)])
        for above, below in zip(numerators, denominators, strict=True)
    ]
    logs = np.concatenate(rounds)
    mean = float(logs.mean())
    if len(logs) < 2:
        return Ratio(float(np.exp(mean)), None)
    error = max(_standard_error(logs), _standard_error(np.array([r.mean() for r in rounds])))
    half = t975(len(logs) - 1) * error
    value, low, high = np.exp([mean, mean - half, mean + half]).tolist()
    return Ratio(value, (low, high))


def _standard_error(values: np.ndarray[tuple[int, ...], np.dtype[np.float64]]) -> float:
    return float(values.std(ddof=1) / np.sqrt(len(values))) if len(values) > 1 else 0.0


def middle_mean(values: Sequence[float]) -> float:
    """Return the mean of the middle half of the values.

    Steps under a CPU limit last whole periods of it, so their median jumps between two of these.
    The mean does not, but a single interrupted step would move it.

    >>> middle_mean([0.1, 0.2, 9.0])
    0.2
    """
    ordered = sorted(values)
    cut = (len(ordered) + 1) // 4
    middle = ordered[cut : len(ordered) - cut]
    return sum(middle) / len(middle)


def geometric_mean(rounds: Rounds) -> float:
    """Return the geometric mean of all times, whose ratios are those of `paired_ratio`."""
    return float(np.exp(np.log(np.concatenate([np.asarray(r) for r in rounds])).mean()))
