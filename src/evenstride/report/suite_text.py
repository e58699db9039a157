"""What simulated runs came to: one line for each policy in each setting, and a sentence."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from math import isinf

import numpy as np

from evenstride.core.fleet import FloatArray
from evenstride.report.paired_statistics import quantile
from evenstride.report.text_tables import NOTHING, Table
from evenstride.report.wording import duration
from evenstride.sim.scoring.score import ScoreRow

ALIKE = 0.001
"""Efficiencies that differ by a smaller part are not called different."""
EQUAL = "uniform"
"""The policy of equal batches, which needs no comparison with them."""
_TWICE = 2.0


@dataclass(frozen=True, slots=True)
class Group:
    """The rows of one policy in one setting, a row for each seed.

    Args:
        rows: in order of seed; at least one.
        unjudged: seeds under which nothing changes after which it would count how soon a policy
            finds the split again; see `sim.scoring.score.judged`.
    """

    rows: tuple[ScoreRow, ...]
    unjudged: frozenset[int] = frozenset()

    @property
    def policy(self) -> str:
        """Specification of the policy."""
        return self.rows[0].policy

    @property
    def setting(self) -> tuple[str, int]:
        """Scenario and lag."""
        return self.rows[0].scenario, self.rows[0].lag

    def all(self, field: str) -> FloatArray:
        """Return a figure for each seed, not a number where it is not known."""
        return np.array([getattr(row, field) for row in self.rows], dtype=np.float64)

    def mean(self, field: str = "efficiency_mean") -> float:
        """Return the mean of a figure over the seeds, not a number if it is not known."""
        return float(self.all(field).mean())


def grouped(
    rows: Sequence[ScoreRow], unjudged: Collection[tuple[str, int, int]] = ()
) -> list[Group]:
    """Return rows by scenario, lag and policy, in the order in which they first come.

    Args:
        rows: of any number of runs.
        unjudged: scenario, lag and seed of those in which no change counts.
    """
    found: dict[tuple[str, int, str], list[ScoreRow]] = {}
    for row in rows:
        found.setdefault((row.scenario, row.lag, row.policy), []).append(row)
    return [
        Group(tuple(some), frozenset(r.seed for r in some if (*key[:2], r.seed) in unjudged))
        for key, some in found.items()
    ]


def simulation_table(groups: Sequence[Group]) -> Table:
    """Return a line for each group."""
    headings = (
        *("scenario", "policy", "lag", "efficiency", "noise-free", "informed", "settled"),
        *("95 % from cold\nmedian / 90 %", "95 % after change\nmedian / 90 %"),
        *("needless\nchanges", "decision", "speed-up", "bound", "linear\nbound"),
    )
    return Table(headings, tuple(map(_line, groups)), keys=2)


def _line(group: Group) -> tuple[str, ...]:
    scenario, lag = group.setting
    judged = [row.steps_to_95_after_change for row in group.rows if row.seed not in group.unjudged]
    return (
        scenario,
        group.policy,
        str(lag),
        part(group.mean("efficiency")),
        part(group.mean()),
        part(group.mean("informed")),
        part(group.mean("efficiency_settled")),
        _steps([row.steps_to_95_cold for row in group.rows]),
        _steps(judged) if judged else NOTHING,
        f"{group.mean('needless_changes'):.1f}",
        _decision(group.mean("decide_s")),
        *(f"{group.mean(figure):.2f}" for figure in ("speedup", "bound", "linear_bound")),
    )


def part(value: float) -> str:
    """Return an efficiency as people read it."""
    return NOTHING if np.isnan(value) else f"{value:.3f}"


def _decision(decide_s: float) -> str:
    return NOTHING if np.isnan(decide_s) else f"{decide_s * 1e3:.2f} ms"


def _steps(values: Sequence[int | None]) -> str:
    return " / ".join(_count(quantile(values, at)) for at in (0.5, 0.9))


def _count(steps: float) -> str:
    return "never" if isinf(steps) else f"{steps:g}"


def means_line(groups: Sequence[Group]) -> str:
    """Say what the figures of the table are."""
    of = "Figures of" if seeds_of(groups) == "one seed" else "Means over"
    return f"{of} {seeds_of(groups)}; decision: the median time that it takes to work one out."


def seeds_of(groups: Sequence[Group]) -> str:
    """Return over how many seeds figures are, which differ where it was interrupted."""
    counts = sorted({len(group.rows) for group in groups})
    if counts == [1]:
        return "one seed"
    return f"{' to '.join(map(str, dict.fromkeys((counts[0], counts[-1]))))} seeds"


def times_sentence(best_s: Sequence[float], equal_s: Sequence[float]) -> str:
    """Say how long steps take, so that a wrong unit in a scenario is noticed.

    Args:
        best_s: mean step in seconds with the best split, of each setting.
        equal_s: the same with equal batches.
    """
    return f"A step takes {_span(best_s)} with the best split, {_span(equal_s)} with equal batches."


def _span(values_s: Sequence[float]) -> str:
    return " to ".join(dict.fromkeys(map(duration, (min(values_s), max(values_s)))))


def longer(ratio: float) -> str:
    """Return how two times compare, as people say it; what they are compared with follows.

    >>> longer(1.071), longer(7.5), longer(1.0)
    ('7.1% longer than', '7.5 times as long as', 'as long as')
    """
    if ratio >= _TWICE:
        return f"{ratio:.1f} times as long as"
    if abs(ratio - 1) < ALIKE / 2:
        return "as long as"
    return f"{abs(ratio - 1):.1%} {'longer' if ratio > 1 else 'shorter'} than"


def leaders(groups: Sequence[Group]) -> list[Group]:
    """Return those of one setting that are the best, or do not differ from it."""
    most = max(group.mean() for group in groups)
    return [group for group in groups if group.mean() >= most * (1 - ALIKE)]


def simulation_sentence(groups: Sequence[Group]) -> str:
    """Say in a sentence or two what the table says."""
    by_setting: dict[tuple[str, int], list[Group]] = {}
    for group in groups:
        by_setting.setdefault(group.setting, []).append(group)
    if len(groups) == 1:
        return _about_one(groups[0])
    if len(by_setting) == 1:
        return _about_setting(groups)
    if len({group.policy for group in groups}) == 1:
        worst = min(groups, key=Group.mean)
        return f"The lowest noise-free efficiency is this: {_about_one(worst)}"
    return _about_many([leaders(some) for some in by_setting.values()])


def _about_one(group: Group) -> str:
    return f"{_setting(group)}, {group.policy} is at {group.mean():.3f}: {_how_long(group)}"


def _about_setting(groups: Sequence[Group]) -> str:
    best, where = leaders(groups), _setting(groups[0])
    if len(best) == 1:
        return f"{where}, {best[0].policy} is the best: {_how_long(best[0])}"
    told = _how_long(max(best, key=Group.mean), "their")
    if len(best) == len(groups):
        return f"{where}, there is no difference between the policies (under {ALIKE:.1%}): {told}"
    *most, last = [group.policy for group in best]
    named = f"{', '.join(most)} and {last}"
    return f"{where}, {named} are the best, with no difference (under {ALIKE:.1%}): {told}"


def _about_many(best: Sequence[Sequence[Group]]) -> str:
    names = [some[0].policy for some in best if len(some) == 1]
    level = len(best) - len(names)
    if not names:
        return f"In none of {len(best)} settings is one policy ahead (by {ALIKE:.1%} or more)."
    counts = sorted({name: names.count(name) for name in names}.items(), key=lambda item: -item[1])
    ahead = ", ".join(f"{name} in {count}" for name, count in counts)
    more = f"; in {level} there is no difference between the best (under {ALIKE:.1%})"
    return f"Of {len(best)} settings, the best policy is {ahead}{more if level else ''}."


def _how_long(group: Group, whose: str = "its") -> str:
    best = "with the best split"
    told = longer(1 / group.mean("informed"))
    informed = f"With a controller that is told the truth they take {told} {best}"
    equal = f", with equal batches {longer(group.mean('bound'))} {best}"
    return (
        f"{whose} steps take {longer(1 / group.mean())} {best} at every moment. "
        f"{informed}{'' if group.policy == EQUAL else equal}."
    )


def _setting(group: Group) -> str:
    scenario, lag = group.setting
    return f"In {scenario} at lag {lag}"
