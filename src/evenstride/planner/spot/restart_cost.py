"""What losses of machines cost a run: work thrown away, and how much longer it takes.

One loss stops all: what was trained since the last save is trained again, after a restart on as
many machines as before. With a hazard ``h`` of all machines together, ``w`` seconds of training
between saves of ``C`` seconds, and ``R`` seconds from a loss until training goes on, a second of
progress takes

    (exp(h (w + C)) - 1) (1 / h + R) / w

seconds on average. Daly has ``exp(h R) / h`` for the second factor, as losses may interrupt the
restart, too; here they do not, since most of ``R`` may be a wait for machines that are not there.

How far a single run may be from that average follows from the same model: the number of losses
has a negative binomial distribution, and each costs what was trained since the last save, and a
restart.

Source:
    Young, "A first order approximation to the optimum checkpoint interval", CACM 1974,
    doi:10.1145/361147.361115; Daly, "A higher order estimate of the optimum checkpoint interval for
    restart dumps", FGCS 2006, doi:10.1016/j.future.2004.11.016. How often to save is decided in
    `core.reliability.checkpoint_interval`, which runs use to save, too. The distribution is ours.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import exp, expm1, inf, sqrt
from statistics import NormalDist

import numpy as np

from evenstride.core.fleet import FloatArray
from evenstride.core.gradients.noise_scale import Interval
from evenstride.core.reliability.checkpoint_interval import Saving, next_save_in_s
from evenstride.core.reliability.lifetimes import Exponential
from evenstride.errors import ConfigError
from evenstride.planner.spot.preemption_rate import (
    TOGETHER,
    WAITS_DRIFT,
    PreemptionRate,
    drift_factors,
)
from evenstride.sim.scenario.spot_traces import Machines

_CELLS = 8192  # of a distribution of lost time
_POINTS = 64  # at which the age of the last save is looked at
_NEVER = 1e6  # times as long: it will not end
_HALVINGS = 60
_DRIFTS = 5  # at which restarts that are not as they were are looked at
_MOST_RESTARTS = 40  # equally likely ones that recorded waits are made into
_LARGEST = 600.0  # exponent whose power is a float, also times some seconds


@dataclass(frozen=True, slots=True)
class SaveCosts:
    """What saves and losses take.

    Raises:
        ConfigError: one is no such time.
    """

    save_s: float  # how long training stands still for a save, above 0
    # From a loss until training goes on: times that are equally likely, one or more
    restart_s: tuple[float, ...]
    # Of training between saves; ``None`` for as often as runs decide it themselves
    every_s: float | None = None
    # By what all restarts of a run may be off together, standard deviation of the logarithm;
    # `transience.WAITS_DRIFT` for waits that were recorded
    drift: float = 0.0
    together: float = TOGETHER  # correlation of that with what rates of losses are off by, -1 to 1

    def __post_init__(self) -> None:
        sound = 0.0 < self.save_s < inf and (self.every_s is None or 0.0 < self.every_s < inf)
        sound = sound and 0.0 <= self.drift < inf and -1.0 <= self.together <= 1.0
        if not sound or not self.restart_s or not all(0.0 <= r < inf for r in self.restart_s):
            raise ConfigError(
                f"saves of {self.save_s} s every {self.every_s} s, restarts of {self.restart_s} s: "
                "the first two are above 0, restarts at least 0 and at least one; measure them"
            )

    @property
    def mean_restart_s(self) -> float:
        """Mean time from a loss until training goes on."""
        return sum(self.restart_s) / len(self.restart_s)

    def waiting(self, kinds: Iterable[PreemptionRate | None]) -> SaveCosts:
        """Return what restarts take with the waits that were recorded of some kinds of machines.

        These count for all machines of a cluster, and drift as they did from one recording's half
        to the other. Where none were recorded it stays as it is.
        """
        waits_s = sorted(wait_s for kind in kinds if kind for wait_s in kind.waits_s)
        if not waits_s:
            return self
        restarts = np.add.outer(self.restart_s, waits_s)
        if restarts.size > _MOST_RESTARTS:
            parts = (np.arange(_MOST_RESTARTS) + 0.5) / _MOST_RESTARTS
            # What is kept must have the mean of all, on which the expected time hangs.
            some = np.quantile(restarts, parts)
            restarts = some * (restarts.mean() / some.mean() if some.any() else 1.0)
        return replace(self, restart_s=tuple(restarts.ravel().tolist()), drift=WAITS_DRIFT)

    def drifted(self, rate_at: float = 0.5) -> list[SaveCosts]:
        """Return equally likely ones whose restarts are what they are.

        Args:
            rate_at: part of likely rates of losses that lie below the one these go with, 0 to 1:
                where machines are lost more often than usual, one waits longer for them, too.
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
    """Return how much time before a loss is thrown away on average, restart not counted.

    That is the time since the last save was done, given that a loss came before the next: half
    of ``w + C`` if losses are rare.

    Args:
        saves: how often is saved.
        hazard_per_s: of all machines together, at least 0.

    >>> round(lost_s(SaveCosts(60.0, (0.0,), every_s=3540.0), 1e-9), 1)
    1800.0
    """
    stretch_s = saves.interval_s(hazard_per_s) + saves.save_s
    likely = hazard_per_s * stretch_s
    if likely < 1e-4:
        return stretch_s * (0.5 - likely / 12.0)
    return 1.0 / hazard_per_s - (stretch_s / expm1(likely) if likely < _LARGEST else 0.0)


def expected_slowdown(saves: SaveCosts, hazard_per_s: float) -> float:
    """Return how many seconds a second of progress takes on average, saves included.

    Args:
        saves: what saves and restarts take.
        hazard_per_s: of all machines together, at least 0.

    Returns:
        At least 1; infinite where nearly no stretch between saves survives.
    """
    every_s = saves.interval_s(hazard_per_s)
    likely = hazard_per_s * (every_s + saves.save_s)
    if likely > _LARGEST:
        return inf
    again = expm1(likely)  # losses per stretch
    held_s = again / hazard_per_s if likely > 0.0 else every_s + saves.save_s
    return (held_s + again * saves.mean_restart_s) / every_s


@dataclass(frozen=True, slots=True)
class Loss:
    """What losses cost at one hazard."""

    count: float  # of losses in a second of progress, on average
    mean_s: float  # what one costs
    # Of what a second of progress is lengthened by; that of a run grows with its length
    variance: float
    costs_s: FloatArray  # what one costs, equally likely, ``(n,)``


def loss(saves: SaveCosts, hazard_per_s: float) -> Loss:
    """Return what losses cost: those of a stretch are geometric, those of a run so many of these.

    Args:
        saves: what saves and restarts take.
        hazard_per_s: of all machines together, above 0; not so high that no stretch survives.
    """
    every_s = saves.interval_s(hazard_per_s)
    likely = hazard_per_s * (every_s + saves.save_s)
    count = expm1(likely) / every_s
    at_s = -np.log1p(expm1(-likely) * (np.arange(_POINTS) + 0.5) / _POINTS) / hazard_per_s
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
    """Return how many times as long a run takes on spot machines, with an interval for one run.

    Args:
        transience: of one of them.
        machines: that are spot, at least 1; those on demand are not lost.
        useful_s: what training takes without saves and losses, above 0.
        saves: what saves and restarts take.
        level: part of runs that are to lie within the interval.

    Returns:
        The mean; and an interval in which both count, that the rate is not known and that losses
        come by chance. Where losses are rare the mean lies above it, as most runs have none.
        Infinite where some rate lets it never end.

    Raises:
        ConfigError: there is no machine, or nothing to do.

    Cost:
        some twenty transforms of 8,192 values, with a drift five times as many.
    """
    if machines < 1 or not 0.0 < useful_s < inf or not 0.0 < level < 1.0:
        raise ConfigError(
            f"a run of {useful_s} s on {machines} spot machines, at a level of {level}: it takes "
            "at least one machine, a time above 0 and a level between 0 and 1"
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
    """How long a run takes, as a distribution."""

    least_s: float  # without any loss
    cell_s: float  # width of a cell of what losses add
    upto: FloatArray  # part of runs that are over by the end of each cell, ``(cells,)``

    @property
    def most_s(self) -> float:
        """After which all are over."""
        return self.least_s + self.cell_s * len(self.upto)

    def over(self, after_s: float) -> float:
        """Return the part of runs that are over after a time."""
        if after_s < self.least_s:
            return 0.0
        cell = int((after_s - self.least_s) / self.cell_s) if self.cell_s else 0
        return float(self.upto[min(cell, len(self.upto) - 1)])


def _taken(saves: SaveCosts, hazard_per_s: float, useful_s: float) -> _Taken | None:
    """Return how long a run takes at one rate; nothing if it does not end.

    Stretches that are tried until one survives: the number of losses is negative binomial, and the
    sum of what they cost is found by its characteristic function.
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
    """Return the time by which a part of all runs is over; infinite if too many never are."""
    ending = [taken for taken in found if taken is not None]
    low, high = 0.0, max((taken.most_s for taken in ending), default=0.0)
    if len(ending) < part * len(found):
        return inf
    for _ in range(_HALVINGS):
        middle = 0.5 * (low + high)
        early = sum(taken.over(middle) for taken in ending) < part * len(found)
        low, high = (middle, high) if early else (low, middle)
    return high


def waits_s(recorded: Machines, machines: int) -> tuple[float, ...]:
    """Return how long it took in a recording until enough machines were up again.

    Returns:
        A wait for each tick at which a machine was lost and as many had been up: 0 where enough
        were left. What the end of the recording cuts off counts as far as it goes.
    """
    up = (recorded.who >= 0).sum(axis=1)
    ticks = len(up)
    lost = np.unique(recorded.gone[recorded.gone < ticks])
    lost = lost[up[lost - 1] >= machines]
    enough = np.append(np.flatnonzero(up >= machines), ticks)
    back = enough[np.searchsorted(enough, lost)]
    return tuple(((back - lost) * recorded.gap_s).tolist())
