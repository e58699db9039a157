"""Choose one of the best clusters: by time, cost, or where more money stops buying time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import ceil, floor, inf, log10
from statistics import NormalDist

from evenstride.core.gradients.noise_scale import Z95, Interval
from evenstride.errors import ConfigError
from evenstride.planner.search.training_forecast import TrainingForecast


class Objective(StrEnum):
    """What a choice is to be best in."""

    TIME = "time"
    COST = "cost"
    KNEE = "knee"


@dataclass(frozen=True, slots=True)
class Wishes:
    """What a choice must keep to."""

    # What it is to be best in; ``None`` for cost where a deadline is given, time where a budget is,
    # and else the knee
    objective: Objective | None = None
    deadline_s: float = inf  # for the whole training; infinite for none
    budget_usd: float = inf  # likewise
    # Probability with which deadline and budget are to be kept, and at which times and costs are
    # compared; one half (the expected case) or more, below 1
    confidence: float = 0.5

    @property
    def aim(self) -> Objective:
        """The objective, chosen by the limits where none is given."""
        if self.objective is not None:
            return self.objective
        if self.deadline_s < inf:
            return Objective.COST
        return Objective.TIME if self.budget_usd < inf else Objective.KNEE


@dataclass(frozen=True, slots=True)
class ChosenCluster:
    """The choice, and why."""

    outlook: TrainingForecast
    reason: str


class NothingFits(ConfigError):
    """No cluster keeps to the limits; the message says which binds, and how far to relax it."""


def choose(outlooks: Sequence[TrainingForecast], wishes: Wishes) -> ChosenCluster:
    """Return the best of some outlooks.

    Raises:
        NothingFits: none keeps to the limits, or there is none at all.
    """
    if not outlooks:
        raise NothingFits(
            "no cluster can train this: no batch fits the memory of so few machines, or is as "
            "large as their number; allow more machines, other types or other batches"
        )

    def time_s(one: TrainingForecast) -> float:
        return at_most(one.time_s, wishes.confidence)

    def usd(one: TrainingForecast) -> float:
        return at_most(one.cost_usd, wishes.confidence)

    fitting = [
        o for o in outlooks if time_s(o) <= wishes.deadline_s and usd(o) <= wishes.budget_usd
    ]
    if not fitting:
        raise NothingFits(_binding(outlooks, wishes, time_s, usd))
    within = _limits(wishes)
    match wishes.aim:
        case Objective.TIME:
            return ChosenCluster(min(fitting, key=time_s), f"the quickest{within}")
        case Objective.COST:
            return ChosenCluster(min(fitting, key=usd), f"the cheapest{within}")
    # At the end of the intervals other clusters may be beaten than in expectation.
    best: list[TrainingForecast] = []
    for one in sorted(fitting, key=lambda o: (time_s(o), usd(o))):
        if not best or usd(one) < usd(best[-1]):
            best.append(one)
    at = knee([time_s(one) for one in best], [usd(one) for one in best])
    return ChosenCluster(
        best[at], f"the knee of time and cost{within}: beyond it, money buys less time"
    )


def at_most(one: Interval, confidence: float) -> float:
    """Return what a figure is at most, with a probability.

    Its logarithm is taken to be normal, on either side of the expected figure by that side's half
    of the interval.

    Args:
        one: the figure with its 95 % interval, above 0.
        confidence: the probability, above 0 and below 1.

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
    """Return which point of a frontier is its knee; the middle of two is the cheaper one.

    Raises:
        ConfigError: kneed is not installed.

    Source:
        Kneedle: Satopaa et al., "Finding a 'Kneedle' in a Haystack", ICDCS workshops 2011, as the
        package kneed has it. Where it finds none (fewer than three points, or a straight line), the
        point furthest below the line between the ends is taken, both axes from 0 to 1; of equals,
        the cheapest.
    """
    if len(times_s) > 2 and (found := _kneedle(times_s, usd)) is not None:
        return found
    span_s, span = times_s[-1] - times_s[0] or 1.0, usd[0] - usd[-1] or 1.0
    below = [
        (t - times_s[0]) / span_s + (c - usd[-1]) / span for t, c in zip(times_s, usd, strict=True)
    ]
    least = min(below)
    return max(index for index, value in enumerate(below) if value <= least + 1e-9)


def _kneedle(times_s: Sequence[float], usd: Sequence[float]) -> int | None:
    try:
        from kneed import KneeLocator
    except ImportError:
        raise ConfigError(
            "the knee is found by the package kneed, which is not installed; run pip install "
            "'evenstride[plan]', or give --objective time or cost"
        ) from None
    located = KneeLocator(list(times_s), list(usd), curve="convex", direction="decreasing")
    return None if located.knee is None else list(times_s).index(located.knee)


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


def _binding(
    outlooks: Sequence[TrainingForecast],
    wishes: Wishes,
    time_s: Callable[[TrainingForecast], float],
    usd: Callable[[TrainingForecast], float],
) -> str:
    quickest, cheapest = min(outlooks, key=time_s), min(outlooks, key=usd)
    late, dear = time_s(quickest) > wishes.deadline_s, usd(cheapest) > wishes.budget_usd
    if late:
        told = (
            f"no cluster ends within {length(wishes.deadline_s)}{_sure(wishes)}: the quickest, "
            f"{quickest.choice.name}, takes {length(time_s(quickest))}; raise --deadline to "
            f"{_to(time_s(quickest))}"
        )
        return told + _also(outlooks, wishes, time_s, usd) + ", or allow more machines"
    if dear:
        told = (
            f"no cluster costs at most {wishes.budget_usd:.4g} USD{_sure(wishes)}: the cheapest, "
            f"{cheapest.choice.name}, costs {usd(cheapest):.4g}; raise --budget to "
            f"{_up(usd(cheapest))}"
        )
        needs_s = time_s(cheapest)
        also = needs_s > wishes.deadline_s
        more = f" and, as it takes {length(needs_s)}, --deadline to {_to(needs_s)}" if also else ""
        return told + more + ", or allow spot machines"
    soon = min((o for o in outlooks if time_s(o) <= wishes.deadline_s), key=usd)
    cheap = min((o for o in outlooks if usd(o) <= wishes.budget_usd), key=time_s)
    return (
        f"no cluster keeps both limits{_sure(wishes)}: within {length(wishes.deadline_s)} the "
        f"cheapest costs {usd(soon):.4g} USD (raise --budget to {_up(usd(soon))}), and for "
        f"{wishes.budget_usd:.4g} USD the quickest takes {length(time_s(cheap))} (raise --deadline "
        f"to {_to(time_s(cheap))})"
    )


def _also(
    outlooks: Sequence[TrainingForecast],
    wishes: Wishes,
    time_s: Callable[[TrainingForecast], float],
    usd: Callable[[TrainingForecast], float],
) -> str:
    """Return what a deadline that the quickest keeps needs of the budget; empty if nothing."""
    quickest = min(outlooks, key=time_s)
    if usd(quickest) <= wishes.budget_usd:
        return ""
    more = f" and, as that costs {usd(quickest):.4g} USD, --budget to {_up(usd(quickest))}"
    within = [one for one in outlooks if usd(one) <= wishes.budget_usd]
    if not within:
        return more
    needs_s = min(map(time_s, within))
    return f"{more}; or --deadline to {_to(needs_s)}, which the budget is enough for"


def length(seconds: float) -> str:
    """Return a length of time as people read it, with three digits.

    >>> length(0.5), length(90.0), length(5400.0)
    ('0.5 s', '1.5 min', '1.5 h')
    """
    if seconds >= 3600:
        hours = seconds / 3600
        return f"{hours:,.0f} h" if hours >= 1000 else f"{hours:.3g} h"
    return f"{seconds / 60:.3g} min" if seconds >= 60 else f"{seconds:.3g} s"


def _to(seconds: float) -> str:
    """Return a time as an option takes it, rounded up so that it is enough."""
    each_s, unit = next((s, u) for s, u in ((3600.0, "h"), (60.0, "m"), (0.0, "s")) if seconds >= s)
    return f"{_up(seconds / (each_s or 1.0))}{unit}"


def _up(amount: float) -> str:
    """Return an amount with three digits, rounded up, so that it is enough."""
    unit = 10.0 ** (floor(log10(amount)) - 2)
    for more in (0, 1):  # the nearest may be too little by rounding
        rounded = (ceil(amount / unit - 1e-9) + more) * unit
        told = f"{rounded:.0f}" if rounded >= 1000 else f"{rounded:.3g}"
        if float(told) >= amount:
            break
    return told
