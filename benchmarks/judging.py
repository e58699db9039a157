"""Evaluates the suite: where adaptive is behind other policies, and whether it meets its aims."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from evenstride.core.fleet import FloatArray
from evenstride.report.suite_text import mean_interval, quantile
from evenstride.sim.scoring.suite import ScoreRow

OURS = "adaptive"
MOST_BEHIND, LEAST_OF_INFORMED, LEAST_ON_EQUAL = 0.01, 0.985, 0.995
COLD, AFTER_CHANGE = "steps_to_95_cold", "steps_to_95_after_change"


@dataclass(frozen=True, slots=True, eq=False)
class Place:
    """The results of one scenario at one lag.

    Args:
        scenario: Name of the scenario.
        lag: Lag of all rows.
        changes: For each seed, whether any speed changes early enough to be followed.
        rows: Rows of each policy, in the same order of seeds.
    """

    scenario: str
    lag: int
    changes: tuple[bool, ...]
    rows: dict[str, tuple[ScoreRow, ...]]

    def each(self, policy: str, figure: str) -> FloatArray:
        """Return a figure of a policy for each seed, NaN if it is missing."""
        values = [getattr(row, figure) for row in self.rows[policy]]
        known = [math.nan if value is None else value for value in values]
        return np.array(known, dtype=np.float64)

    def mean(self, policy: str, figure: str = "efficiency_mean") -> float:
        """Return the mean of a figure over the seeds that have it, NaN if none has."""
        values = self.each(policy, figure)
        known = values[~np.isnan(values)]
        return float(known.mean()) if len(known) else math.nan

    def steps(self, figure: str) -> tuple[float, float]:
        """Return median and 90th percentile of adaptive's steps, infinite for never.

        For steps after a change, seeds without a change do not count. Without any seed, both are
        NaN.
        """
        counts = self.changes if figure == AFTER_CHANGE else (True,) * len(self.changes)
        rows = zip(self.rows[OURS], counts, strict=True)
        found: list[int | None] = [getattr(row, figure) for row, counted in rows if counted]
        return (quantile(found, 0.5), quantile(found, 0.9)) if found else (math.nan, math.nan)

    @property
    def of_informed(self) -> float:
        """Mean ratio of adaptive's efficiency to that of an informed controller."""
        return float((self.each(OURS, "efficiency_mean") / self.each(OURS, "informed")).mean())


@dataclass(frozen=True, slots=True)
class Comparison:
    """Adaptive compared with the best other policy.

    Args:
        best: The other policy with the best mean over the seeds.
        ahead: Mean relative lead of adaptive over the seeds, negative if it is behind.
        interval: 95 % interval of that mean; ``None`` for a single seed.
    """

    best: str
    ahead: float
    interval: tuple[float, float] | None

    @property
    def behind(self) -> bool:
        """Whether adaptive is behind by more than the allowance."""
        return self.ahead < -MOST_BEHIND

    def __str__(self) -> str:
        around = "" if self.interval is None else "[{:+.2%}, {:+.2%}] ".format(*self.interval)
        return f"{self.ahead:+.2%} {around}{self.best}"


@dataclass(frozen=True, slots=True)
class Check:
    """A figure that adaptive has to reach."""

    name: str
    seen: str
    kept: bool


def compare(place: Place, figure: str = "efficiency_mean") -> Comparison | None:
    """Compare adaptive with the best other policy. Return ``None`` if there is no other."""
    others = [policy for policy in place.rows if policy != OURS]
    if not others:
        return None
    best = max(others, key=lambda policy: place.mean(policy, figure))
    ahead = place.each(OURS, figure) / place.each(best, figure) - 1.0
    return Comparison(best, float(ahead.mean()), mean_interval(ahead))


def is_behind(place: Place, figure: str) -> bool:
    """Return whether adaptive is behind the best other policy by more than the allowance."""
    against = compare(place, figure)
    return against is not None and against.behind


def marks(place: Place) -> str:
    """Return marks for the problems of adaptive in this place, empty without problems."""
    wrong = {
        "low": place.of_informed < LEAST_OF_INFORMED,
        "FLAG": is_behind(place, "efficiency_mean"),
        "noisy": is_behind(place, "efficiency"),
    }
    return " ".join(mark for mark, holds in wrong.items() if holds)


def checks(places: Sequence[Place]) -> Iterator[Check]:
    """Yield the checks whose scenarios were run."""
    for place in places:
        if place.scenario == "reference":
            yield from reference_checks(place)
        elif place.scenario in ("equal-8", "equal-64", "equal-1000"):
            seen, noisy = place.mean(OURS), place.mean(OURS, "efficiency")
            name = f"{place.scenario}, lag {place.lag}: at least {LEAST_ON_EQUAL}"
            yield Check(name, f"{seen:.4f} (efficiency {noisy:.4f})", seen >= LEAST_ON_EQUAL)


def reference_checks(place: Place) -> Iterator[Check]:
    """Yield the checks of the reference scenario, with 5 % noise and 1 % spikes."""
    where, lag = f"reference, lag {place.lag}", place.lag
    part, settled = place.of_informed, place.mean(OURS, "efficiency_settled")
    itself = f"{place.mean(OURS):.4f} itself, efficiency {place.mean(OURS, 'efficiency'):.4f}"
    name = f"{where}: of informed at least {LEAST_OF_INFORMED}"
    yield Check(name, f"{part:.4f} ({itself})", part >= LEAST_OF_INFORMED)
    name = f"{where}: settled at least {LEAST_OF_INFORMED}"
    yield Check(name, f"{settled:.4f}", settled >= LEAST_OF_INFORMED)
    for what, figure in (("cold", COLD), ("change", AFTER_CHANGE)):
        usual, late = place.steps(figure)
        name = f"{where}: steps to 95 % ({what}) at most {lag + 3}, 90th percentile {lag + 6}"
        yield Check(name, counted(usual, late), usual <= lag + 3 and late <= lag + 6)


def counted(*steps: float) -> str:
    """Return numbers of steps as text."""
    if any(map(math.isnan, steps)):
        return "-"
    return "/".join("never" if math.isinf(value) else f"{value:g}" for value in steps)


def policy_table(places: Sequence[Place], policies: Sequence[str]) -> Iterator[str]:
    """Yield a table of the mean efficiency of each policy, line by line."""
    widths = {policy: 2 + max(6, len(policy)) for policy in policies}
    heads = "".join(f"{policy:>{width}}" for policy, width in widths.items())
    yield f"{'scenario':24}{'lag':>4}{'informed':>10}{heads}"
    for place in places:
        means = {p: f"{place.mean(p):.4f}" if p in place.rows else "-" for p in policies}
        figures = "".join(f"{means[policy]:>{width}}" for policy, width in widths.items())
        yield f"{place.scenario:24}{place.lag:>4}{place.mean(OURS, 'informed'):>10.4f}{figures}"


def our_table(places: Sequence[Place]) -> Iterator[str]:
    """Yield a table of adaptive's results, line by line."""
    yield (
        f"{'scenario':24}{'lag':>4}{'of inf.':>9}  {'against the best other, 95 %':<52}"
        f"{'effic.':>8}{'noisy':>8}{'settled':>9}{'cold':>9}{'change':>13}{'idle':>6}"
    )
    for place in places:
        mean, noisy = compare(place), compare(place, "efficiency")
        settled = place.mean(OURS, "efficiency_settled")
        yield (
            f"{place.scenario:24}{place.lag:>4}{place.of_informed:>9.4f}"
            f"  {'-' if mean is None else str(mean):<52}"
            f"{place.mean(OURS, 'efficiency'):>8.4f}"
            f"{'-' if noisy is None else f'{noisy.ahead:+.1%}':>8}"
            f"{'-' if math.isnan(settled) else f'{settled:.4f}':>9}"
            f"{counted(*place.steps(COLD)):>9}{counted(*place.steps(AFTER_CHANGE)):>13}"
            f"{place.mean(OURS, 'needless_changes'):>6.1f}  {marks(place)}".rstrip()
        )


def verdict(places: Sequence[Place]) -> str:
    """Return one sentence on where adaptive is behind the best other policy."""
    compared = [against for place in places if (against := compare(place)) is not None]
    if not compared:
        return "verdict: no other policy was run, so adaptive cannot be compared"
    low = sum(place.of_informed < LEAST_OF_INFORMED for place in places)
    little = sum(against.ahead < 0 and not against.behind for against in compared)
    return (
        f"verdict over {len(places)} scenarios and lags: adaptive is behind the best other policy "
        f"by more than {MOST_BEHIND:.0%} {listed(places, 'efficiency_mean')}, by less in {little}; "
        f"with noise (efficiency) by more than {MOST_BEHIND:.0%} {listed(places, 'efficiency')}; "
        f"below {LEAST_OF_INFORMED} of the informed controller in {low}"
    )


def listed(places: Sequence[Place], figure: str) -> str:
    """Return the places in which adaptive is behind by more than the allowance."""
    names = [f"{place.scenario} (lag {place.lag})" for place in places if is_behind(place, figure)]
    return f"in {len(names)}: {', '.join(names)}" if names else "in none"
