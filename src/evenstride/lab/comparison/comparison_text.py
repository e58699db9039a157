"""How the figures of a comparison read on a terminal: ratios with intervals, and what they mean."""

from __future__ import annotations

from collections.abc import Sequence

from evenstride.lab.comparison.comparison_result import Comparison, Interval, ModesComparison
from evenstride.lab.comparison.paired_ratios import UNCERTAIN, paired_ratio
from evenstride.lab.comparison.trace_figures import Rates
from evenstride.lab.processes.speeds import Speeds

_SPEED_TOLERANCE = 1.5


def ratio_text(value: float, interval: Interval | None) -> str:
    """Return a ratio with its interval.

    >>> ratio_text(2.019, (1.951, 2.098)), ratio_text(2.019, None)
    ('2.02 (1.95 to 2.10)', '2.02')
    """
    if interval is None:
        return f"{value:.2f}"
    return f"{value:.2f} ({interval[0]:.2f} to {interval[1]:.2f})"


def rate_over(runs: Sequence[Rates], equal: Sequence[Rates]) -> str:
    """Return the ratio of the rates of some runs to those of others, with its interval."""
    if runs is equal or not all(one.blocks_per_s for one in (*runs, *equal)):
        means = [sum(one.samples_per_s for one in some) / len(some) for some in (runs, equal)]
        return f"{means[0] / means[1]:.2f}"
    found = paired_ratio([one.blocks_per_s for one in runs], [one.blocks_per_s for one in equal])
    return ratio_text(found.value, found.interval)


def bound_lines(outcome: Comparison, name: str = "speed-up") -> list[str]:
    """Return lines about the speed-up and its bound; none without a speed-up."""
    if outcome.speedup is None:
        return []
    line = f"{name} {ratio_text(outcome.speedup, outcome.speedup_interval)}"
    above = _above(outcome)
    if outcome.bound is not None and not above:
        line += f", bound {ratio_text(outcome.bound, outcome.bound_interval)}"
    if outcome.linear_bound is not None:
        line += f", linear bound {outcome.linear_bound:.2f}"
    lines = [line]
    if outcome.speedup_interval is not None:
        lines.append(f"(in brackets: 95 % intervals, from {outcome.pairs} pairs of blocks)")
    sentence = _ABOVE if above else _of_bound(outcome)
    return [*lines, *([sentence] if sentence else [])]


_ABOVE = (
    "The speed-up is above the bound that follows from the workers' busy times, so the bound is "
    "not shown. The speed of the machine changed between the blocks."
)


def _above(outcome: Comparison) -> bool:
    """Return whether the speed-up is above its bound by more than chance explains."""
    if outcome.of_bound is None:
        return False
    return (outcome.of_bound_interval or (outcome.of_bound,))[0] > 1.0


def _of_bound(outcome: Comparison) -> str:
    if outcome.of_bound is None or outcome.of_bound_interval is None or outcome.disturbed:
        return ""
    low, high = outcome.of_bound_interval
    if high >= 1.0:
        return "The speed-up equals the bound, within the intervals."
    return f"The speed-up is {outcome.of_bound:.0%} of the bound ({low:.0%} to {high:.0%})."


def missed_speeds(outcome: Comparison | ModesComparison) -> str:
    """Return a sentence if the workers did not run at about the requested speeds, else nothing."""
    parts = [
        got / asked for got, asked in zip(outcome.achieved_speeds, outcome.speeds, strict=False)
    ]
    if not parts or max(parts) <= _SPEED_TOLERANCE * min(parts):
        return ""
    return (
        f"the workers ran at speeds {_speeds(outcome.achieved_speeds)} instead of "
        f"{_speeds(outcome.speeds)}: other work took processor time, or a step has a large fixed "
        "time. The figures are those of the measured speeds"
    )


def _speeds(speeds: Speeds) -> str:
    return "/".join(f"{speed:.2g}" for speed in speeds)


def disturbance(outcome: Comparison | ModesComparison) -> str:
    """Return why the figures must not be quoted; empty if they may be."""
    if not outcome.disturbed:
        return ""
    return (
        f"disturbed: the ratios are uncertain by {outcome.uncertainty:.0%} (95 % intervals), more "
        f"than the {UNCERTAIN:.0%} allowed, so do not quote the figures. Other work on this "
        f"machine changed the workers' speeds (by {outcome.drift:.0%} from start to end). Run it "
        "again when the machine is quiet."
    )
