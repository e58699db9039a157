"""How much longer clusters take for the machines they lose, at least: many at once, by tables."""

from __future__ import annotations

from functools import lru_cache
from math import ceil

import numpy as np

from evenstride.core.fleet import FloatArray, IntArray
from evenstride.planner.spot.preemption_rate import PreemptionRate
from evenstride.planner.spot.restart_cost import SaveCosts, expected_slowdown, loss

_SELDOM, _OFTEN, _POINTS = -10.0, 0.0, 1001  # of hazards per second, their logarithms to base 10
_RATES = 20  # that are equally likely
_LOOKED_AT = (0, 4, 8, 12, 16)  # the least of four each
_MOST = 1e3  # times as long; more counts as that, and up to there the table is fine enough
_UNKNOWN = 1e30  # variance, beyond that
_OFF = 0.01  # by which the table may be above what is between its points, of what losses cost


@lru_cache(maxsize=64)
def _table(saves: SaveCosts) -> FloatArray:
    """Return the mean over restarts, at points; never falling."""
    hazards = np.logspace(_SELDOM, _OFTEN, _POINTS).tolist()
    cases = saves.drifted()
    found = [sum(expected_slowdown(one, h) for one in cases) / len(cases) for h in hazards]
    return _never_falling(found)


@lru_cache(maxsize=64)
def _worst_tables(saves: SaveCosts) -> tuple[FloatArray, FloatArray]:
    """Return mean and variance of a second of progress where restarts are at their longest."""
    worst = saves.drifted()[-1]
    means, variances = list[float](), list[float]()
    for hazard in np.logspace(_SELDOM, _OFTEN, _POINTS).tolist():
        mean = expected_slowdown(worst, hazard)
        means.append(mean)
        variances.append(loss(worst, hazard).variance if mean < _MOST else _UNKNOWN)
    return _never_falling(means), np.maximum.accumulate(variances)


def _never_falling(found: list[float]) -> FloatArray:
    kept = np.minimum(found, _MOST)
    return np.asarray(np.minimum.accumulate(kept[::-1])[::-1])


def _at(table: FloatArray, hazards_per_s: FloatArray) -> FloatArray:
    logarithms = np.log10(np.maximum(hazards_per_s, 10.0**_SELDOM))
    found: FloatArray = np.interp(logarithms, np.linspace(_SELDOM, _OFTEN, _POINTS), table)
    return found


def stretches(saves: SaveCosts, hazards_per_s: FloatArray) -> FloatArray:
    """Return how many seconds a second of progress takes on average, by hazard.

    Returns:
        At most `expected_slowdown`, and off by less than 2 % of it where that is below 1,000.
    """
    found = _at(_table(saves), hazards_per_s)
    return found - _OFF * (found - 1.0)


def mean_stretches(
    saves: SaveCosts, one: PreemptionRate | None, two: PreemptionRate | None, machines: IntArray
) -> FloatArray:
    """Return the same for clusters of two kinds, averaged over what their rates may be, at least.

    Rates of both kinds are high together. Of the twenty that are equally likely each fourth counts,
    for the three above it, too.
    """
    return _mean(saves, one, two, machines, _LOOKED_AT)


def finer_stretches(
    saves: SaveCosts, one: PreemptionRate | None, two: PreemptionRate | None, machines: IntArray
) -> FloatArray:
    """Return the same, closer: all twenty rates count."""
    return _mean(saves, one, two, machines, range(_RATES))


def _mean(
    saves: SaveCosts,
    one: PreemptionRate | None,
    two: PreemptionRate | None,
    machines: IntArray,
    which: tuple[int, ...] | range,
) -> FloatArray:
    total = np.zeros(machines.shape[1])
    for index in which:
        total += stretches(saves, _hazards(one, two, machines, index))
    return total / len(which)


def _hazards(
    one: PreemptionRate | None, two: PreemptionRate | None, machines: IntArray, index: int
) -> FloatArray:
    rates = [kind.rates_per_s[index] if kind else 0.0 for kind in (one, two)]
    found: FloatArray = rates[0] * machines[0] + rates[1] * machines[1]
    return found


def high_stretches(
    saves: SaveCosts,
    one: PreemptionRate | None,
    two: PreemptionRate | None,
    machines: IntArray,
    useful_s: FloatArray,
) -> FloatArray:
    """Return at least how many times as long 97.5 % of runs take, as `slowdown` has it.

    At the highest of twenty rates half of all runs, one in forty, take longer than the mean there
    less a standard deviation (Cantelli's inequality). Where restarts may differ, too, it is the
    highest rates at the longest restarts, as many of them.
    """
    cases = _RATES * len(saves.drifted())
    least = _hazards(one, two, machines, _RATES - ceil(0.05 * cases))
    most = _hazards(one, two, machines, _RATES - 1)
    means, variances = _worst_tables(saves)
    mean = _at(means, least)
    # The points of the table are 2 % apart; a variance grows hardly faster than the hazard.
    deviation = np.sqrt(1.1 * _at(variances, most) / useful_s)
    return mean - _OFF * (mean - 1.0) - deviation
