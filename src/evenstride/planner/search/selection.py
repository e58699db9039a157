"""Choose among clusters by time, cost, or the knee, beyond which more money saves little time.

`ParetoFront` holds those that no other beats, and the possible gain of an unevaluated one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import ceil, floor, inf, log10
from operator import attrgetter
from statistics import NormalDist
from typing import Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from evenstride.core.fleet import FloatArray, IntArray
from evenstride.core.gradients.noise_scale import Z95, Interval
from evenstride.errors import ConfigError


class Objective(StrEnum):
    """The objective of a choice."""

    TIME = "time"
    COST = "cost"
    KNEE = "knee"


@dataclass(frozen=True, slots=True)
class Wishes:
    """The requirements of a choice."""

    # Objective; ``None`` for cost with a deadline, for time with a budget, and otherwise for the
    # knee.
    objective: Objective | None = None
    deadline_s: float = inf  # for the whole training; infinite for none.
    budget_usd: float = inf  # likewise.
    # Probability with which deadline and budget must hold, and at which times and costs are
    # compared; one half (the expected case) or more, below 1.
    confidence: float = 0.5

    @property
    def aim(self) -> Objective:
        """The objective, derived from the limits if it is not given."""
        if self.objective is not None:
            return self.objective
        if self.deadline_s < inf:
            return Objective.COST
        return Objective.TIME if self.budget_usd < inf else Objective.KNEE


class Outlook(Protocol):
    """One alternative; both values are of the whole training, with 95 % intervals."""

    @property
    def name(self) -> str: ...
    @property
    def time_s(self) -> Interval: ...
    @property
    def cost_usd(self) -> Interval: ...


_Outlook = TypeVar("_Outlook", bound=Outlook)


@dataclass(frozen=True, slots=True)
class ChosenCluster(Generic[_Outlook]):
    """The choice, and why."""

    outlook: _Outlook
    reason: str


class NothingFits(ConfigError):
    """No cluster is within the limits; the message names the limit, and how far to relax it."""


@dataclass(frozen=True, slots=True)
class _Judged(Generic[_Outlook]):
    """An outlook with its values at the requested confidence."""

    outlook: _Outlook
    time_s: float
    usd: float


def choose(outlooks: Sequence[_Outlook], wishes: Wishes) -> ChosenCluster[_Outlook]:
    """Return the best of some outlooks.

    Raises:
        NothingFits: no outlook is within the limits, or the list is empty.
    """
    if not outlooks:
        raise NothingFits(
            "no cluster can train this: each batch exceeds the memory of the allowed machines, or "
            "has fewer samples than workers; allow more machines, other types or other batches"
        )
    judged = [_Judged(one, *_figures(one, wishes.confidence)) for one in outlooks]
    fitting = [o for o in judged if o.time_s <= wishes.deadline_s and o.usd <= wishes.budget_usd]
    if not fitting:
        raise NothingFits(_binding(judged, wishes))
    within = _limits(wishes)
    match wishes.aim:
        case Objective.TIME:
            return ChosenCluster(min(fitting, key=_BY_TIME).outlook, f"the fastest{within}")
        case Objective.COST:
            return ChosenCluster(min(fitting, key=_BY_COST).outlook, f"the cheapest{within}")
    # At the end of the intervals other clusters may be beaten than in expectation.
    best = ParetoFront.of((one.outlook for one in fitting), wishes)
    at = knee(best.time_s.tolist(), best.usd.tolist())
    return ChosenCluster(
        best.outlooks[at], f"the knee of time and cost{within}: beyond it, money saves less time"
    )


_BY_TIME, _BY_COST = attrgetter("time_s"), attrgetter("usd")


def at_most(one: Interval, confidence: float) -> float:
    """Return the upper limit of a value at a probability between 0 and 1.

    Its logarithm is assumed to be normal, on either side of the expected value, with that side's
    half of its 95 % interval.

    >>> round(at_most(Interval(100.0, 80.0, 125.0), 0.975), 6)
    125.0
    """
    z = NormalDist().inv_cdf(confidence) / Z95
    if z == 0 or one.high == one.value == one.low:
        return one.value
    end, part = (one.high, z) if z > 0 else (one.low, -z)
    if not 0 < end < inf:
        return end
    found: float = one.value * (end / one.value) ** part
    return float(f"{found:.12g}")  # the last digits of a power differ between platforms


def knee(times_s: Sequence[float], usd: Sequence[float]) -> int:
    """Return the index of a frontier's knee; of two points it is the cheaper one.

    Args:
        times_s: times in seconds, rising.
        usd: costs in USD, falling.

    Source:
        Kneedle: Satopaa et al., "Finding a 'Kneedle' in a Haystack", ICDCS workshops 2011, for a
        convex falling curve without smoothing, with a sensitivity of 1; the result is that of the
        package kneed. If it finds no knee (fewer than three points, or a straight line), the result
        is the point furthest below the line between the ends; of equals, the cheapest.
    """
    if len(times_s) < 2:
        return 0
    time_s, cost = np.asarray(times_s, np.float64), np.asarray(usd, np.float64)
    # Both axes from 0 to 1.
    right = (time_s - time_s[0]) / (time_s[-1] - time_s[0])
    up = (cost - cost[-1]) / (cost[0] - cost[-1])
    below = (1.0 - up) - right  # how far a point is below the line between the ends
    found = _kneedle(below.tolist(), float(np.diff(right).mean()))
    return int(np.flatnonzero(below >= below.max() - 1e-9)[-1]) if found is None else found


def _kneedle(below: Sequence[float], drop: float) -> int | None:
    """Return the first local maximum after which a curve falls by more than ``drop``.

    A local minimum in between ends the search from that maximum. ``None`` if there is no such
    maximum.
    """
    last = len(below) - 1
    peak: int | None = None
    for at in range(last):
        before, here, after = below[max(at - 1, 0)], below[at], below[at + 1]
        if here >= max(before, after):
            peak = at
        # On a level stretch a point is both.
        if here <= min(before, after):
            peak = None
        if peak is not None and after < below[peak] - drop:
            return peak
    return None


def _limits(wishes: Wishes) -> str:
    parts = []
    if wishes.deadline_s < inf:
        parts.append(length(wishes.deadline_s))
    if wishes.budget_usd < inf:
        parts.append(f"{wishes.budget_usd:.4g} USD")
    sure = _sure(wishes)
    return f" within {' and '.join(parts)}{sure}" if parts else sure


def _sure(wishes: Wishes) -> str:
    return f" with a probability of {wishes.confidence:.0%}" if wishes.confidence != 0.5 else ""


def _binding(judged: Sequence[_Judged[_Outlook]], wishes: Wishes) -> str:
    quickest, cheapest = min(judged, key=_BY_TIME), min(judged, key=_BY_COST)
    soonest_s, least_usd = quickest.time_s, cheapest.usd
    if soonest_s > wishes.deadline_s:
        text = (
            f"no cluster ends within {length(wishes.deadline_s)}{_sure(wishes)}: the fastest, "
            f"{quickest.outlook.name}, takes {length(soonest_s)}; raise --deadline to "
            f"{_to(soonest_s)}"
        )
        return text + _also(judged, quickest, wishes.budget_usd) + ", or allow more machines"
    if least_usd > wishes.budget_usd:
        text = (
            f"no cluster costs at most {wishes.budget_usd:.4g} USD{_sure(wishes)}: the cheapest, "
            f"{cheapest.outlook.name}, costs {least_usd:.4g}; raise --budget to {_up(least_usd)}"
        )
        needs_s = cheapest.time_s
        if needs_s > wishes.deadline_s:
            text += f" and, as it takes {length(needs_s)}, --deadline to {_to(needs_s)}"
        return text + ", or allow spot machines"
    soon = min((o for o in judged if o.time_s <= wishes.deadline_s), key=_BY_COST)
    cheap = min((o for o in judged if o.usd <= wishes.budget_usd), key=_BY_TIME)
    return (
        f"no cluster is within both limits{_sure(wishes)}: within {length(wishes.deadline_s)} the "
        f"cheapest costs {soon.usd:.4g} USD (raise --budget to {_up(soon.usd)}), and for "
        f"{wishes.budget_usd:.4g} USD the fastest takes {length(cheap.time_s)} (raise --deadline "
        f"to {_to(cheap.time_s)})"
    )


def _also(
    judged: Sequence[_Judged[_Outlook]], quickest: _Judged[_Outlook], budget_usd: float
) -> str:
    """Return the budget that the fastest cluster needs as well; empty if the budget is enough."""
    if quickest.usd <= budget_usd:
        return ""
    more = f" and, as that costs {quickest.usd:.4g} USD, --budget to {_up(quickest.usd)}"
    within = [one.time_s for one in judged if one.usd <= budget_usd]
    if not within:
        return more
    return f"{more}; or --deadline to {_to(min(within))}, for which the budget is enough"


def length(seconds: float) -> str:
    """Return a duration as text, with three digits.

    >>> length(0.5), length(90.0), length(5400.0)
    ('0.5 s', '1.5 min', '1.5 h')
    """
    if seconds >= 3600:
        hours = seconds / 3600
        return f"{hours:,.0f} h" if hours >= 1000 else f"{hours:.3g} h"
    return f"{seconds / 60:.3g} min" if seconds >= 60 else f"{seconds:.3g} s"


def _to(seconds: float) -> str:
    """Return a duration in the form of an option, rounded up so that it is enough."""
    each_s, unit = next((s, u) for s, u in ((3600.0, "h"), (60.0, "m"), (0.0, "s")) if seconds >= s)
    return f"{_up(seconds / (each_s or 1.0))}{unit}"


def _up(amount: float) -> str:
    """Return an amount with three digits, rounded up so that it is enough."""
    unit = 10.0 ** (floor(log10(amount)) - 2)
    for more in (0, 1):  # rounding may make the nearest too small
        rounded = (ceil(amount / unit - 1e-9) + more) * unit
        text = f"{rounded:.0f}" if rounded >= 1000 else f"{rounded:.3g}"
        if float(text) >= amount:
            break
    return text


EQUAL = 1e-8
"""Relative difference of equal values, due to rounding of numbers."""
_VERY_MUCH = 1e200


def frontier(outlooks: Iterable[_Outlook], confidence: float = 0.5) -> tuple[_Outlook, ...]:
    """Return the outlooks that no other beats in time and cost, the fastest first."""
    figures = [(*_figures(one, confidence), one) for one in outlooks]
    kept, least = list[_Outlook](), inf
    for time_s, usd, one in sorted(figures, key=lambda figure: figure[:2]):
        if usd < least and time_s < inf:
            kept.append(one)
            least = usd
    return tuple(kept)


def _figures(one: Outlook, confidence: float) -> tuple[float, float]:
    return at_most(one.time_s, confidence), at_most(one.cost_usd, confidence)


@dataclass(frozen=True, slots=True, eq=False)
class ParetoFront(Generic[_Outlook]):
    """A frontier, and the possible gains over it."""

    wishes: Wishes  # with the confidence at which times and costs are compared
    outlooks: tuple[_Outlook, ...]  # not beaten by any other, the fastest first
    time_s: FloatArray  # of each, rising
    usd: FloatArray  # falling

    @classmethod
    def of(cls, outlooks: Iterable[_Outlook], wishes: Wishes) -> ParetoFront[_Outlook]:
        best = frontier(outlooks, wishes.confidence)
        figures = np.array([_figures(one, wishes.confidence) for one in best]).reshape(-1, 2)
        return cls(wishes, best, figures[:, 0], figures[:, 1])

    def with_more(self, outlooks: Iterable[_Outlook]) -> ParetoFront[_Outlook]:
        return ParetoFront.of((*self.outlooks, *outlooks), self.wishes)

    def beaten(self, time_s: FloatArray, usd: FloatArray) -> npt.NDArray[np.bool_]:
        """Return which points one of these beats or equals in both time and cost."""
        found: npt.NDArray[np.bool_] = usd >= self.least_usd(time_s)
        return found

    def least_usd(self, time_s: FloatArray) -> FloatArray:
        """Return the cost of the cheapest of these that is not slower; huge if all are slower."""
        quicker = np.searchsorted(self.time_s, time_s, side="right")
        return np.asarray(np.concatenate([[_VERY_MUCH], self.usd])[quicker])

    def gains(self, time_s: FloatArray, usd: FloatArray) -> FloatArray:
        """Return by how much each of some points beats all of these, as a fraction, ``(n,)``.

        It is the least factor, minus 1, by which its time and cost would both have to grow until
        one of these is neither slower nor more expensive. It is 0 if one is already, or if a value
        is infinite.
        """
        finite = np.isfinite(time_s) & np.isfinite(usd)
        if not len(self.time_s):
            return np.where(finite, inf, 0.0)
        # Times rise and costs fall here: the larger factor is least where both are equal.
        with np.errstate(invalid="ignore"):
            mine, other = self.time_s / self.usd, time_s / usd
        right = np.minimum(np.searchsorted(mine, other), len(mine) - 1)
        left = np.maximum(right - 1, 0)
        factors = [np.maximum(self.time_s[at] / time_s, self.usd[at] / usd) for at in (left, right)]
        found: FloatArray = np.minimum(*factors) - 1.0
        return np.where(finite & (found > EQUAL), found, 0.0)

    def aimed_gains(self, time_s: FloatArray, usd: FloatArray) -> FloatArray:
        """Return by how much each of some points is better than the best, by the objective.

        Points beyond the limits have no gain. If none of these is within the limits, a point that
        is has an infinite gain.
        """
        wishes, keeps = self.wishes, self._keeps(time_s, usd)
        keeps &= np.isfinite(time_s) & np.isfinite(usd)
        if wishes.aim is Objective.KNEE:
            return np.where(keeps, self.gains(time_s, usd), 0.0)
        of_time = wishes.aim is Objective.TIME
        mine, other = (self.time_s, time_s) if of_time else (self.usd, usd)
        best = mine[self._keeps(self.time_s, self.usd)].min(initial=inf)
        with np.errstate(invalid="ignore"):
            found = best / other - 1.0
        return np.where(keeps & (found > EQUAL), found, 0.0)

    def order(self, time_s: FloatArray, usd: FloatArray, gains: FloatArray) -> IntArray:
        """Return the points with a gain, the possibly best ones first."""
        aim = {Objective.TIME: time_s, Objective.COST: usd}.get(self.wishes.aim, -gains)
        some = np.flatnonzero(gains > 0.0)
        return np.asarray(some[np.lexsort((usd[some], aim[some], -gains[some]))])

    def _keeps(self, time_s: FloatArray, usd: FloatArray) -> npt.NDArray[np.bool_]:
        return (time_s <= self.wishes.deadline_s) & (usd <= self.wishes.budget_usd)
