"""Choose one of the best clusters: by time, cost, or where more money stops buying time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import ceil, floor, inf, log10
from statistics import NormalDist

from evenstride.core.gradient_noise import Z95, Interval
from evenstride.errors import ConfigError
from evenstride.planner.outlook import Outlook


class Objective(StrEnum):
    """What a choice is to be best in."""

    TIME = "time"
    COST = "cost"
    KNEE = "knee"


@dataclass(frozen=True, slots=True)
class Wishes:
    """What a choice must keep to.

    Args:
        objective: what it is to be best in; ``None`` for cost where a deadline is given, time where
            a budget is, and else the knee.
        deadline_s: for the whole training; infinite for none.
        budget_usd: likewise.
        confidence: probability with which deadline and budget are to be kept, and at which times
            and costs are compared; one half (the expected case) or more, below 1.
    """

    objective: Objective | None = None
    deadline_s: float = inf
    budget_usd: float = inf
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
class Chosen:
    """The choice, and why."""

    outlook: Outlook
    reason: str


class NothingFits(ConfigError):
    """No cluster keeps to the limits; the message says which binds, and how far to relax it."""


def choose(outlooks: Sequence[Outlook], wishes: Wishes) -> Chosen:
    """Return the best of some outlooks.

    Args:
        outlooks: that no other beats in time and cost, the quickest first.
        wishes: what it must keep to.

    Raises:
        NothingFits: none keeps to the limits, or there is none at all.
    """
    if not outlooks:
        raise NothingFits(
            "no cluster can train this: no batch fits the memory of so few machines, or is as "
            "large as their number; allow more machines, other types or other batches"
        )

    def time_s(one: Outlook) -> float:
        return at_most(one.time_s, wishes.confidence)

    def usd(one: Outlook) -> float:
        return at_most(one.cost_usd, wishes.confidence)

    fitting = [
        o for o in outlooks if time_s(o) <= wishes.deadline_s and usd(o) <= wishes.budget_usd
    ]
    if not fitting:
        raise NothingFits(_binding(outlooks, wishes, time_s, usd))
    within = _limits(wishes)
    match wishes.aim:
        case Objective.TIME:
            return Chosen(min(fitting, key=time_s), f"the quickest{within}")
        case Objective.COST:
            return Chosen(min(fitting, key=usd), f"the cheapest{within}")
    best = list[Outlook]()  # at the end of the intervals others may be beaten than in expectation
    for one in sorted(fitting, key=lambda o: (time_s(o), usd(o))):
        if not best or usd(one) < usd(best[-1]):
            best.append(one)
    at = knee([time_s(one) for one in best], [usd(one) for one in best])
    return Chosen(best[at], f"the knee of time and cost{within}: beyond it, money buys less time")


def at_most(one: Interval, confidence: float) -> float:
    """Return what a figure is at most, with a probability.

    Its logarithm is taken to be normal, on either side of the expected figure by that side's half
    of the interval.

    Args:
        one: the figure with its 95 % interval, above 0.
        confidence: the probability, above 0 and below 1.

    >>> round(at_most(Interval(100.0, 80.0, 125.0), 0.975), 3)
    125.0
    """
    z = NormalDist().inv_cdf(confidence) / Z95
    if z == 0 or one.high == one.value == one.low:
        return one.value
    end, part = (one.high, z) if z > 0 else (one.low, -z)
    if not 0 < end < inf:
        return end
    found: float = one.value * (end / one.value) ** part
    return round(found, 12)


def knee(times_s: Sequence[float], usd: Sequence[float]) -> int:
    """Return which point of a frontier is its knee; the middle of two is the cheaper one.

    Args:
        times_s: rising.
        usd: falling.

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
        parts.append(f"{wishes.deadline_s / 3600:.4g} h")
    if wishes.budget_usd < inf:
        parts.append(f"{wishes.budget_usd:.4g} USD")
    sure = f" with a probability of {wishes.confidence:.0%}" if wishes.confidence != 0.5 else ""
    return f" within {' and '.join(parts)}{sure}" if parts else sure


def _binding(
    outlooks: Sequence[Outlook],
    wishes: Wishes,
    time_s: Callable[[Outlook], float],
    usd: Callable[[Outlook], float],
) -> str:
    quickest, cheapest = min(outlooks, key=time_s), min(outlooks, key=usd)
    sure = f" with a probability of {wishes.confidence:.0%}" if wishes.confidence != 0.5 else ""
    if time_s(quickest) > wishes.deadline_s:
        hours = time_s(quickest) / 3600
        return (
            f"no cluster ends within {wishes.deadline_s / 3600:.4g} h{sure}: the quickest, "
            f"{quickest.choice.name}, takes {hours:.4g} h; raise --deadline by "
            f"{_up(hours - wishes.deadline_s / 3600)} h, or allow more machines"
        )
    if usd(cheapest) > wishes.budget_usd:
        return (
            f"no cluster costs at most {wishes.budget_usd:.4g} USD{sure}: the cheapest, "
            f"{cheapest.choice.name}, costs {usd(cheapest):.4g}; raise --budget by "
            f"{_up(usd(cheapest) - wishes.budget_usd)}, or allow spot machines"
        )
    soon = min((o for o in outlooks if time_s(o) <= wishes.deadline_s), key=usd)
    cheap = min((o for o in outlooks if usd(o) <= wishes.budget_usd), key=time_s)
    return (
        f"no cluster keeps both limits{sure}: within {wishes.deadline_s / 3600:.4g} h the cheapest "
        f"costs {usd(soon):.4g} USD (raise --budget by {_up(usd(soon) - wishes.budget_usd)}), and "
        f"for {wishes.budget_usd:.4g} USD the quickest takes {time_s(cheap) / 3600:.4g} h (raise "
        f"--deadline by {_up((time_s(cheap) - wishes.deadline_s) / 3600)} h)"
    )


def _up(amount: float) -> str:
    """Return an amount with two digits, rounded up, so that it is enough."""
    unit = 10.0 ** (floor(log10(amount)) - 1)
    return f"{ceil(amount / unit - 1e-9) * unit:.6g}"
