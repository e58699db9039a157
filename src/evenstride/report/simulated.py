"""What simulated runs came to: one line for each policy in each setting, and a sentence."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from math import isinf

import numpy as np

from evenstride.core.fleet import FloatArray
from evenstride.report.statistics import quantile
from evenstride.report.tables import NOTHING, Table
from evenstride.sim.score import Row


@dataclass(frozen=True, slots=True)
class Group:
    """The rows of one policy in one setting, a row for each seed.

    Args:
        rows: in order of seed; at least one.
        unjudged: seeds under which nothing changes after which it would count how soon a policy
            finds the split again; see `sim.score.judged`.
    """

    rows: tuple[Row, ...]
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


def grouped(rows: Sequence[Row], unjudged: Collection[tuple[str, int, int]] = ()) -> list[Group]:
    """Return rows by scenario, lag and policy, in the order in which they first come.

    Args:
        rows: of any number of runs.
        unjudged: scenario, lag and seed of those in which no change counts.
    """
    found: dict[tuple[str, int, str], list[Row]] = {}
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
        f"{group.mean('decide_s') * 1e3:.2f} ms",
        *(f"{group.mean(figure):.2f}" for figure in ("speedup", "bound", "linear_bound")),
    )


def part(value: float) -> str:
    """Return an efficiency as people read it."""
    return NOTHING if np.isnan(value) else f"{value:.3f}"


def _steps(values: Sequence[int | None]) -> str:
    return " / ".join(_count(quantile(values, at)) for at in (0.5, 0.9))


def _count(steps: float) -> str:
    return "never" if isinf(steps) else f"{steps:g}"


def simulation_sentence(groups: Sequence[Group]) -> str:
    """Say in one sentence what the table says."""
    by_setting: dict[tuple[str, int], list[Group]] = {}
    for group in groups:
        by_setting.setdefault(group.setting, []).append(group)
    if len(groups) == 1:
        return _about_one(groups[0])
    best = [max(some, key=Group.mean) for some in by_setting.values()]
    if len(best) == 1:
        return f"{_setting(best[0])}, {best[0].policy} is the best: {_how_long(best[0])}"
    names = [group.policy for group in best]
    if len({group.policy for group in groups}) == 1:
        worst = min(groups, key=lambda group: group.mean() / group.mean("informed"))
        return f"The furthest from the best possible is this: {_about_one(worst)}"
    counts = sorted({name: names.count(name) for name in names}.items(), key=lambda item: -item[1])
    ahead = ", ".join(f"{name} in {count}" for name, count in counts)
    return f"Of {len(best)} settings, the best policy is {ahead}."


def _about_one(group: Group) -> str:
    return f"{_setting(group)}, {group.policy} is at {group.mean():.3f}: {_how_long(group)}"


def _how_long(group: Group) -> str:
    longer, told = 1 / group.mean() - 1, 1 / group.mean("informed") - 1
    return (
        f"its steps take {longer:.1%} longer than those of the best split at every moment, with "
        f"equal batches they would take {group.mean('bound') - 1:.1%} longer, and with a "
        f"controller that is told the truth {told:.1%}."
    )


def _setting(group: Group) -> str:
    scenario, lag = group.setting
    return f"In {scenario} at lag {lag}"
