"""What a few paired figures say, and how surely."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, inf

import numpy as np

from evenstride.core.fleet import FloatArray

RESAMPLES = 10_000
_PARTS = (0.025, 0.975)


def mean_interval(values: FloatArray) -> tuple[float, float] | None:
    """Return the 95 % bootstrap interval of a mean; ``None`` for fewer than two values.

    Given the differences of pairs, it is the interval of the paired difference. The same values
    always give the same interval.

    Source:
        The percentile bootstrap (Efron, Annals of Statistics 1979).

    >>> import numpy as np
    >>> mean_interval(np.array([0.5, 0.5, 0.5]))
    (0.5, 0.5)
    """
    if len(values) < 2:
        return None
    rng = np.random.default_rng(0)
    means = values[rng.integers(0, len(values), (RESAMPLES, len(values)))].mean(axis=1)
    low, high = np.quantile(means, _PARTS)
    return float(low), float(high)


def quantile(values: Sequence[float | None], part: float) -> float:
    """Return the value that at least a part of the values do not exceed.

    ``None`` stands for never, which is later than anything, so the result may be infinite. What
    has no value at all must not be among the values.

    >>> quantile([4, 1, None, 2], 0.5), quantile([4, 1, None, 2], 0.9)
    (2, inf)
    """
    ordered = sorted(inf if value is None else value for value in values)
    return ordered[max(ceil(part * len(ordered)), 1) - 1]
