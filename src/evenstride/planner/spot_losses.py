"""The rate of preemptions of spot machines, and what a preemption costs a run.

A catalogue's band and a recording (`spot_recordings`) both give a rate of preemptions, but not
exactly. So besides the model of one machine's life there are twenty equally likely rates. The cost
of a run (`slowdown`) is computed at each of them.

One preemption stops all workers. What was trained since the last save is trained again, after a
restart on as many machines as before. With a hazard ``h`` of all machines together, ``w`` seconds
of training between saves of ``C`` seconds, and ``R`` seconds from a preemption until training
continues, a second of progress takes on average

    (exp(h (w + C)) - 1) (1 / h + R) / w

seconds. Daly has ``exp(h R) / h`` for the second factor, because preemptions may also interrupt
the restart. Here they do not, because most of ``R`` may be a wait for missing machines.

The deviation of a single run from that average follows from the same model. The number of
preemptions has a negative binomial distribution. Each costs the training since the last save, and a
restart. `mean_stretches` and similar functions bound this for many clusters at once, with tables.

Source:
    Young, "A first order approximation to the optimum checkpoint interval", CACM 1974,
    doi:10.1145/361147.361115; Daly, "A higher order estimate of the optimum checkpoint interval for
    restart dumps", FGCS 2006, doi:10.1016/j.future.2004.11.016. The checkpoint interval comes from
    `core.reliability.checkpoint_interval`, which runs also use. The distribution is ours.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil, exp, expm1, inf, log1p, sqrt
from statistics import NormalDist

import numpy as np

from evenstride.core.fleet import FloatArray, IntArray
from evenstride.core.gradients.noise_scale import Interval
from evenstride.core.reliability.checkpoint_interval import Saving, next_save_in_s
from evenstride.core.reliability.lifetimes import DAY_S, Exponential, Lifetime
from evenstride.errors import ConfigError
from evenstride.planner.catalogue.offers import Offer

MONTH_S = DAY_S * 365.25 / 12.0
SHORTEST_MEAN_S = 3600.0
"""Shortest assumed mean life for a band without an upper end."""

DRIFT, WAITS_DRIFT, TOGETHER = 0.64, 0.70, 0.54
"""How much rates, and waiting times, differ between one stretch of a recording and the next
(standard deviation of the logarithm), and the correlation of the two, over the halves of 27
recordings of 6 to 45 days (``benchmarks/spot_intervals.py``)."""

QUANTILES = np.array([(n + 0.5) / 20.0 for n in range(20)])  # of equally likely rates
_LEAST_PART = 1e-4  # monthly fraction that stands for 0 in a band
_UNKNOWN = (0.01, 1.0)


@dataclass(frozen=True, slots=True)
class PreemptionRate:
    """The rate of preemptions of a kind of machine."""

    lifetime: Lifetime  # of one machine
    # Of preemptions of one machine: twenty equally likely values, ascending
    rates_per_s: tuple[float, ...]
    reason: str  # where they come from, one plain sentence
    # Recorded waits until as many machines are up as before, equally likely; empty if not known
    waits_s: tuple[float, ...] = ()

    @property
    def losses_per_h(self) -> Interval:
        """Preemptions of one machine per hour, with a 95 % interval."""
        mean = 3600.0 / float(self.lifetime.mean_left_s(0.0))
        low, high = 3600.0 * self.rates_per_s[0], 3600.0 * self.rates_per_s[-1]
        return Interval(mean, min(low, mean), max(high, mean))


def from_band(low: float, high: float) -> PreemptionRate:
    """Return the rate of preemptions from the fraction of machines preempted within a month.

    A fraction ``p`` of the machines that run all month is a rate of ``-ln(1 - p)`` per month;
    within a band all fractions are equally likely. A band that ends at 1 has no upper end ("more
    than 20 %"): its rates are equally likely on a logarithmic scale, up to a mean life of 1 h.
    This is an assumption, from 18 recordings of V100 machines in regions with the open
    band: mean lives were 0.7 to 17 hours. Raises a `ConfigError` for an invalid band.

    >>> band = from_band(0.05, 0.10)
    >>> [round(24 * x, 4) for x in (band.losses_per_h.low, band.losses_per_h.high)]  # per day
    [0.0017, 0.0034]
    """
    if not 0.0 <= low <= high <= 1.0 or low == 1.0:
        raise ConfigError(
            f"invalid band from {low} to {high}: expected monthly fractions from 0 to 1, the "
            "smaller one first; write 0.2, 1.0 for more than 20 %"
        )
    slow = _rate_per_s(max(low, _LEAST_PART))
    if high < 1.0:
        parts = np.maximum(low + (high - low) * QUANTILES, _LEAST_PART)
        rates = np.array([_rate_per_s(part) for part in parts.tolist()])
        reason = f"{low:.0%} to {high:.0%} of machines are preempted in a month"
    else:
        fast = max(1.0 / SHORTEST_MEAN_S, slow)
        rates = slow * (fast / slow) ** QUANTILES
        reason = (
            f"more than {low:.0%} of machines are preempted in a month; the upper limit is "
            f"unknown, and the mean life may be as short as {SHORTEST_MEAN_S / 3600.0:.0f} h"
        )
    middle = sqrt(float(rates[9] * rates[10]))
    return PreemptionRate(Exponential(1.0 / middle), tuple(rates.tolist()), reason)


def _rate_per_s(part: float) -> float:
    return -log1p(-part) / MONTH_S


def from_offer(offer: Offer) -> PreemptionRate:
    """Return a catalogue's rate of preemptions of a machine.

    If the catalogue has none, the range is as wide as possible: from 1 % in a month upwards.
    """
    if offer.interruption is not None:
        return from_band(*offer.interruption)
    reason = (
        f"the preemption rate of {offer.instance_type} is unknown; the plan assumes between "
        f"{_UNKNOWN[0]:.0%} of machines in a month and a mean life of "
        f"{SHORTEST_MEAN_S / 3600.0:.0f} h"
    )
    return replace(from_band(*_UNKNOWN), reason=reason)


def drift_factors(drift: float, count: int) -> FloatArray:
    """Return ``count`` equally likely factors of a log-normal distribution, ascending."""
    normal = NormalDist()
    return np.exp([drift * normal.inv_cdf((n + 0.5) / count) for n in range(count)])


_CELLS = 8192  # of a distribution of lost time
_AGES = 64  # ages of the last save to evaluate
_NEVER = 1e6  # slow-down above which a run never ends
_HALVINGS = 60
_DRIFTS = 5  # factors of restart times to evaluate
_MOST_RESTARTS = 40  # equally likely restart times from recorded waits
_LARGEST = 600.0  # largest exponent whose power is a finite float, also times some seconds


@dataclass(frozen=True, slots=True)
class SaveCosts:
    """Times of saves and preemptions; raises a `ConfigError` for invalid times."""

    save_s: float  # time for which a save stops training, above 0
    # From a preemption until training continues: equally likely times, one or more
    restart_s: tuple[float, ...]
    # Training time between saves; ``None`` for the interval that runs choose themselves
    every_s: float | None = None
    # Common error of all restarts of a run, as the standard deviation of the logarithm;
    # `WAITS_DRIFT` for recorded waits
    drift: float = 0.0
    together: float = TOGETHER  # its correlation with the error of preemption rates, -1 to 1

    def __post_init__(self) -> None:
        sound = 0.0 < self.save_s < inf and (self.every_s is None or 0.0 < self.every_s < inf)
        sound = sound and 0.0 <= self.drift < inf and -1.0 <= self.together <= 1.0
        if not sound or not self.restart_s or not all(0.0 <= r < inf for r in self.restart_s):
            raise ConfigError(
                f"invalid costs: saves of {self.save_s} s every {self.every_s} s, restarts of "
                f"{self.restart_s} s: expected save times above 0 s, and at least one restart time "
                "of at least 0 s; measure them"
            )

    @property
    def mean_restart_s(self) -> float:
        return sum(self.restart_s) / len(self.restart_s)

    def waiting(self, kinds: Iterable[PreemptionRate | None]) -> SaveCosts:
        """Return the costs with the recorded waits of some kinds of machines.

        These count for all machines of a cluster, and drift as they did between the halves of a
        recording. Without recorded waits the costs stay unchanged.
        """
        waits_s = sorted(wait_s for kind in kinds if kind for wait_s in kind.waits_s)
        if not waits_s:
            return self
        restarts = np.add.outer(self.restart_s, waits_s)
        if restarts.size > _MOST_RESTARTS:
            parts = (np.arange(_MOST_RESTARTS) + 0.5) / _MOST_RESTARTS
            # The sample must have the mean of all, which determines the expected time.
            some = np.quantile(restarts, parts)
            restarts = some * (restarts.mean() / some.mean() if some.any() else 1.0)
        return replace(self, restart_s=tuple(restarts.ravel().tolist()), drift=WAITS_DRIFT)

    def drifted(self, rate_at: float = 0.5) -> list[SaveCosts]:
        """Return equally likely costs, each with one drift of the restart times.

        ``rate_at`` is the quantile of the rate of preemptions to which they belong:
        when machines are preempted more often than usual, waits for them are longer, too.
        """
        leaning = exp(self.drift * self.together * NormalDist().inv_cdf(rate_at))
        own = self.drift * sqrt(1.0 - self.together**2)
        factors = (leaning * drift_factors(own, _DRIFTS)).tolist() if self.drift else [1.0]
        return [
            replace(self, restart_s=tuple(f * one for one in self.restart_s), drift=0.0)
            for f in factors
        ]

    def interval_s(self, hazard_per_s: float) -> float:
        """Return the seconds of training between saves at a hazard of all machines together."""
        if self.every_s is not None:
            return self.every_s
        saving = Saving()
        if hazard_per_s * saving.longest_s < 1e-9:
            return max(saving.longest_s, self.save_s / saving.most_part)
        together = Saving(lifetime=Exponential(1.0 / hazard_per_s))
        return next_save_in_s(self.save_s, np.zeros(1), saving=together).in_s


def lost_s(saves: SaveCosts, hazard_per_s: float) -> float:
    """Return the mean time before a preemption that is lost, without the restart.

    That is the time since the end of the last save, given a preemption before the next: half of
    ``w + C`` if preemptions are rare. The hazard is of all machines together.

    >>> round(lost_s(SaveCosts(60.0, (0.0,), every_s=3540.0), 1e-9), 1)
    1800.0
    """
    stretch_s = saves.interval_s(hazard_per_s) + saves.save_s
    likely = hazard_per_s * stretch_s
    if likely < 1e-4:
        return stretch_s * (0.5 - likely / 12.0)
    return 1.0 / hazard_per_s - (stretch_s / expm1(likely) if likely < _LARGEST else 0.0)


def expected_slowdown(saves: SaveCosts, hazard_per_s: float) -> float:
    """Return the mean time of a second of progress, in seconds, saves included.

    The hazard is of all machines together. At least 1; infinite if almost no stretch between
    saves succeeds.
    """
    every_s = saves.interval_s(hazard_per_s)
    likely = hazard_per_s * (every_s + saves.save_s)
    if likely > _LARGEST:
        return inf
    again = expm1(likely)  # preemptions per stretch
    held_s = again / hazard_per_s if likely > 0.0 else every_s + saves.save_s
    return (held_s + again * saves.mean_restart_s) / every_s


@dataclass(frozen=True, slots=True)
class Loss:
    """The cost of preemptions at one hazard."""

    count: float  # mean number of preemptions in a second of progress
    mean_s: float  # cost of one
    # Of the lengthening of a second of progress; that of a run grows with its length
    variance: float
    costs_s: FloatArray  # cost of one, equally likely, ``(n,)``


def loss(saves: SaveCosts, hazard_per_s: float) -> Loss:
    """Return the cost of preemptions; their number in a stretch has a geometric distribution.

    The hazard is of all machines together, above 0, and low enough for stretches to succeed.
    """
    every_s = saves.interval_s(hazard_per_s)
    likely = hazard_per_s * (every_s + saves.save_s)
    count = expm1(likely) / every_s
    at_s = -np.log1p(expm1(-likely) * (np.arange(_AGES) + 0.5) / _AGES) / hazard_per_s
    costs_s = np.add.outer(at_s, np.asarray(saves.restart_s)).ravel()
    mean_s = float(costs_s.mean())
    variance = count * (float(costs_s.var()) + mean_s**2 * exp(likely))
    return Loss(count, mean_s, variance, costs_s)


def slowdown(
    transience: PreemptionRate,
    machines: int,
    useful_s: float,
    saves: SaveCosts,
    level: float = 0.9,
) -> Interval:
    """Return the slow-down of a run on spot machines, with an interval for one run.

    ``machines`` is the number of spot machines, each of this ``transience``; ``useful_s`` is the
    training time without saves and preemptions; ``level`` is the probability of the interval.

    The value is the mean. The interval includes the uncertainty of the rate and the chance of
    preemptions. If preemptions are rare the mean lies above the interval, because most runs have
    none. Infinite if some rate prevents the run from ending.

    Cost:
        About twenty transforms of 8,192 values, five times as many with a drift.
    """
    if machines < 1 or not 0.0 < useful_s < inf or not 0.0 < level < 1.0:
        raise ConfigError(
            f"invalid run of {useful_s} s on {machines} spot machines at a level of {level}: "
            "expected at least one machine, a time above 0 s and a level between 0 and 1"
        )
    rates = transience.rates_per_s
    hazards = [((n + 0.5) / len(rates), machines * rate) for n, rate in enumerate(rates)]
    cases = [(one, hazard) for at, hazard in hazards for one in saves.drifted(at)]
    mean = sum(expected_slowdown(*case) for case in cases) / len(cases)
    found = [_taken(*case, useful_s) for case in cases]
    ends = [_quantile(found, at) / useful_s for at in (0.5 - 0.5 * level, 0.5 + 0.5 * level)]
    return Interval(mean, *ends)


@dataclass(frozen=True, slots=True, eq=False)
class _Taken:
    """The duration of a run, as a distribution."""

    least_s: float  # without preemptions
    cell_s: float  # width of a cell of the time that preemptions add
    upto: FloatArray  # fraction of runs that end by the end of each cell, ``(cells,)``

    @property
    def most_s(self) -> float:
        """Time after which all runs have ended."""
        return self.least_s + self.cell_s * len(self.upto)

    def over(self, after_s: float) -> float:
        if after_s < self.least_s:
            return 0.0
        cell = int((after_s - self.least_s) / self.cell_s) if self.cell_s else 0
        return float(self.upto[min(cell, len(self.upto) - 1)])


def _taken(saves: SaveCosts, hazard_per_s: float, useful_s: float) -> _Taken | None:
    """Return the duration of a run at one rate; ``None`` if it does not end.

    Each stretch is repeated until it succeeds: the number of preemptions is negative binomial, and
    the distribution of their total cost follows from its characteristic function.
    """
    every_s = saves.interval_s(hazard_per_s)
    stretch_s, stretches = every_s + saves.save_s, useful_s / every_s
    likely = hazard_per_s * stretch_s
    if hazard_per_s == 0.0:
        return _Taken(stretches * stretch_s, 0.0, np.ones(1))
    if expected_slowdown(saves, hazard_per_s) > _NEVER:
        return None
    one = loss(saves, hazard_per_s)
    costs_s = one.costs_s
    most_s = useful_s * one.count * one.mean_s + 12.0 * (useful_s * one.variance) ** 0.5
    cell_s = float(most_s + 4.0 * costs_s.max()) / (_CELLS - 2)
    seen = np.fft.rfft(_in_cells(costs_s / cell_s))
    summed = np.exp(-stretches * (likely + np.log(1.0 + expm1(-likely) * seen)))
    upto = np.clip(np.cumsum(np.fft.irfft(summed, _CELLS)), 0.0, 1.0)
    return _Taken(stretches * stretch_s, cell_s, upto)


def _in_cells(places: FloatArray) -> FloatArray:
    """Return equally likely places as a distribution over cells, with the same mean."""
    lower = np.floor(places).astype(np.int64)
    above = (places - lower) / len(places)
    parts = np.bincount(lower, 1.0 / len(places) - above, _CELLS)
    return np.asarray(parts + np.bincount(lower + 1, above, _CELLS))


def _quantile(found: Sequence[_Taken | None], part: float) -> float:
    """Return the time by which a fraction of all runs has ended; infinite if too many never do."""
    ending = [taken for taken in found if taken is not None]
    low, high = 0.0, max((taken.most_s for taken in ending), default=0.0)
    if len(ending) < part * len(found):
        return inf
    for _ in range(_HALVINGS):
        middle = 0.5 * (low + high)
        early = sum(taken.over(middle) for taken in ending) < part * len(found)
        low, high = (middle, high) if early else (low, middle)
    return high


_SELDOM, _OFTEN, _POINTS = -10.0, 0.0, 1001  # hazards per second, as logarithms to base 10.
_RATES = 20  # equally likely ones.
_LOOKED_AT = (0, 4, 8, 12, 16)  # the lowest of four each.
_MOST = 1e3  # largest slow-down in the table, which is accurate up to there.
_NO_VARIANCE = 1e30  # variance beyond that.
_OFF = 0.01  # largest error of the table between its points, as a fraction of the slow-down.


@lru_cache(maxsize=64)
def _table(saves: SaveCosts) -> FloatArray:
    """Return the mean over restart times at the table's points; never falling."""
    hazards = np.logspace(_SELDOM, _OFTEN, _POINTS).tolist()
    cases = saves.drifted()
    found = [sum(expected_slowdown(one, h) for one in cases) / len(cases) for h in hazards]
    return _never_falling(found)


@lru_cache(maxsize=64)
def _worst_tables(saves: SaveCosts) -> tuple[FloatArray, FloatArray]:
    """Return mean and variance of a second of progress at the longest restart times."""
    worst = saves.drifted()[-1]
    means, variances = list[float](), list[float]()
    for hazard in np.logspace(_SELDOM, _OFTEN, _POINTS).tolist():
        mean = expected_slowdown(worst, hazard)
        means.append(mean)
        variances.append(loss(worst, hazard).variance if mean < _MOST else _NO_VARIANCE)
    return _never_falling(means), np.maximum.accumulate(variances)


def _never_falling(found: list[float]) -> FloatArray:
    kept = np.minimum(found, _MOST)
    return np.asarray(np.minimum.accumulate(kept[::-1])[::-1])


def _at(table: FloatArray, hazards_per_s: FloatArray) -> FloatArray:
    logarithms = np.log10(np.maximum(hazards_per_s, 10.0**_SELDOM))
    return np.asarray(np.interp(logarithms, np.linspace(_SELDOM, _OFTEN, _POINTS), table))


def stretches(saves: SaveCosts, hazards_per_s: FloatArray) -> FloatArray:
    """Return the mean time of a second of progress in seconds, by hazard.

    At most `expected_slowdown`, and off by less than 2 % of it below 1,000.
    """
    found = _at(_table(saves), hazards_per_s)
    return found - _OFF * (found - 1.0)


def mean_stretches(
    saves: SaveCosts,
    one: PreemptionRate | None,
    two: PreemptionRate | None,
    machines: IntArray,
    *,
    fine: bool = False,
) -> FloatArray:
    """Return a lower bound of the mean slow-down of clusters of two kinds, averaged over rates.

    Rates of both kinds are high together. Of the twenty equally likely rates each fourth counts,
    also for the three above it; with ``fine``, all count.
    """
    which = range(_RATES) if fine else _LOOKED_AT
    total = np.zeros(machines.shape[1])
    for index in which:
        total += stretches(saves, _hazards(one, two, machines, index))
    return total / len(which)


def _hazards(
    one: PreemptionRate | None, two: PreemptionRate | None, machines: IntArray, index: int
) -> FloatArray:
    rates = [kind.rates_per_s[index] if kind else 0.0 for kind in (one, two)]
    return np.asarray(rates[0] * machines[0] + rates[1] * machines[1])


def high_stretches(
    saves: SaveCosts,
    one: PreemptionRate | None,
    two: PreemptionRate | None,
    machines: IntArray,
    useful_s: FloatArray,
) -> FloatArray:
    """Return a lower bound of the slow-down of 97.5 % of runs, as `slowdown` defines it.

    At the highest of twenty rates, half of all runs (one in forty overall) take longer than the
    mean at that rate minus a standard deviation (Cantelli's inequality). If restart times vary,
    too, it uses the highest rates at the longest restart times, as many of them.
    """
    cases = _RATES * len(saves.drifted())
    least = _hazards(one, two, machines, _RATES - ceil(0.05 * cases))
    most = _hazards(one, two, machines, _RATES - 1)
    means, variances = _worst_tables(saves)
    mean = _at(means, least)
    # The points of the table are 2 % apart; a variance hardly grows faster than the hazard.
    deviation = np.sqrt(1.1 * _at(variances, most) / useful_s)
    return mean - _OFF * (mean - 1.0) - deviation
