"""How much longer clusters take for the machines they lose: many at once, by a table."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from evenstride.core.fleet import FloatArray, IntArray
from evenstride.planner.losses import Saves, expected_slowdown
from evenstride.planner.transience import Transience

_SELDOM, _OFTEN, _POINTS = -10.0, 0.0, 201  # of hazards per second, their logarithms to base 10
_LOOKED_AT = (1, 5, 9, 14, 18)  # of the twenty rates that are equally likely


@lru_cache(maxsize=8)
def _table(saves: Saves) -> FloatArray:
    hazards = np.logspace(_SELDOM, _OFTEN, _POINTS)
    return np.array([expected_slowdown(saves, hazard) for hazard in hazards.tolist()])


def stretches(saves: Saves, hazards_per_s: FloatArray) -> FloatArray:
    """Return how many seconds a second of progress takes on average, by hazard.

    Args:
        saves: what saves and restarts take.
        hazards_per_s: of all machines together, any shape; 0 costs as much as next to nothing.

    Returns:
        `expected_slowdown`, between the points of a table off by less than 1 %; infinite where
        nearly no stretch between saves survives.
    """
    logarithms = np.log10(np.maximum(hazards_per_s, 10.0**_SELDOM))
    found: FloatArray = np.interp(
        logarithms, np.linspace(_SELDOM, _OFTEN, _POINTS), _table(saves), right=np.inf
    )
    return found


def mean_stretches(
    saves: Saves, one: Transience | None, two: Transience | None, machines: IntArray
) -> FloatArray:
    """Return the same for clusters of two kinds, averaged over what their rates may be.

    Rates of both kinds are high together. Five of the twenty that are equally likely are looked at.

    Args:
        saves: what saves and restarts take.
        one: how soon machines of the first kind are taken away; ``None`` for never.
        two: the same of the second.
        machines: of both kinds, ``(2, n)``.

    Returns:
        ``(n,)``.
    """
    rates = [kind.rates_per_s if kind else (0.0,) * 20 for kind in (one, two)]
    total = np.zeros(machines.shape[1])
    for index in _LOOKED_AT:
        total += stretches(saves, rates[0][index] * machines[0] + rates[1][index] * machines[1])
    return total / len(_LOOKED_AT)
