"""Policies side by side: who is ahead in which setting, and how surely."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from evenstride.report.paired_statistics import mean_interval
from evenstride.report.suite_text import ALIKE, Group, part, simulation_sentence
from evenstride.report.text_tables import NOTHING, Table

OURS = "adaptive"
BEHIND = 0.01
"""Worse than another policy by more than this part is told."""


@dataclass(frozen=True, slots=True)
class Advantage:
    """How far ours is ahead of the best of the others in one setting, paired by seed.

    Args:
        setting: scenario and lag.
        other: the best of the others.
        ahead: mean of the differences, as parts of the other's efficiency; below 0 if behind.
        interval: 95 % of that mean; ``None`` with a single seed.
    """

    setting: tuple[str, int]
    other: str
    ahead: float
    interval: tuple[float, float] | None

    def text(self) -> str:
        """Return the lead as people read it."""
        if self.interval is None:
            return f"{self.ahead:+.1%}"
        low, high = self.interval
        return f"{self.ahead:+.1%} [{low:+.1%}, {high:+.1%}]"


def lead(groups: Sequence[Group]) -> Advantage | None:
    """Return our lead among the policies of one setting; ``None`` if there is nobody to lead."""
    ours = next((group for group in groups if group.policy == OURS), None)
    others = [group for group in groups if group.policy != OURS]
    if ours is None or not others:
        return None
    best = max(others, key=Group.mean)
    ahead = ours.all("efficiency_mean") / best.all("efficiency_mean") - 1.0
    return Advantage(ours.setting, best.policy, float(np.mean(ahead)), mean_interval(ahead))


def by_setting(groups: Sequence[Group]) -> list[list[Group]]:
    """Return groups that stand in one line of the comparison together."""
    found: dict[tuple[str, int], list[Group]] = {}
    for group in groups:
        found.setdefault(group.setting, []).append(group)
    return list(found.values())


def comparison_table(groups: Sequence[Group]) -> Table:
    """Return a line for each setting and a column for each policy; the best is marked."""
    policies = list(dict.fromkeys(group.policy for group in groups))
    names = tuple(map(_heading, policies))
    last = (f"{OURS} against\nthe best other",) if OURS in policies and policies != [OURS] else ()
    rows = []
    for some in by_setting(groups):
        means = {group.policy: group.mean() for group in some}
        most, ours = max(means.values()), lead(some)
        cells = tuple(_cell(means.get(policy), most) for policy in policies)
        told = (ours.text() if ours else NOTHING,) if last else ()
        scenario, lag = some[0].setting
        rows.append((scenario, str(lag), *cells, part(some[0].mean("informed")), *told))
    return Table(("scenario", "lag", *names, "informed", *last), tuple(rows), keys=2)


def _heading(policy: str) -> str:
    """Return a policy's name on two lines if it has a place to break it."""
    for mark in (":", "-"):
        before, found, after = policy.rpartition(mark)
        if found:
            return f"{before}{found}\n{after}"
    return policy


def _cell(mean: float | None, most: float) -> str:
    if mean is None:
        return NOTHING
    return f"{mean:.3f}{'*' if mean >= most - 1e-12 else ' '}"


def comparison_sentence(groups: Sequence[Group]) -> str:
    """Say in one sentence how ours stands, or who is best if ours is alone or not there."""
    leads = [found for some in by_setting(groups) if (found := lead(some)) is not None]
    if not leads:
        return simulation_sentence(groups)
    if len(leads) == 1:
        return _about_one(leads[0])
    ahead = sum(found.ahead >= ALIKE for found in leads)
    level = sum(abs(found.ahead) < ALIKE for found in leads)
    where = f"in {ahead} of {len(leads)} settings"
    even = f", level with the best of them (under {ALIKE:.1%}) in {level}" if level else ""
    told = f"{OURS} is ahead of every other policy {where}{even}"
    behind = [found for found in leads if found.ahead < -BEHIND]
    if not behind:
        return f"{told}, and nowhere behind the best of them by more than {BEHIND:.0%}."
    named = ", ".join(f"{name} at lag {lag}" for name, lag in (b.setting for b in behind))
    return f"{told}, and behind the best of them by more than {BEHIND:.0%} in {named}."


def _about_one(found: Advantage) -> str:
    if abs(found.ahead) < ALIKE:
        return (
            f"{OURS} and the best of the others, {found.other}, do not differ (under {ALIKE:.1%})."
        )
    told = "ahead of" if found.ahead > 0 else "behind"
    return f"{OURS} is {told} the best of the others, {found.other}, by {abs(found.ahead):.1%}."
