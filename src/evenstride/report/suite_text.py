"""Results of simulated runs: tables and sentences on policies and synchronisation modes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from math import ceil, inf, isinf

import numpy as np

from evenstride.core.fleet import FloatArray
from evenstride.report.wording import NOTHING, Table, duration
from evenstride.sim.engine.mode_result import ModeResult
from evenstride.sim.engine.mode_runs import SyncRow
from evenstride.sim.scoring.suite import ScoreRow

ALIKE = 0.001
"""Relative difference below which efficiencies count as equal."""
EQUAL = "uniform"
"""The policy of the equal split."""
OURS = "adaptive"
BEHIND = 0.01
"""Relative difference from which another policy's lead is reported."""
RESAMPLES = 10_000
_TWICE = 2.0


def mean_interval(values: FloatArray) -> tuple[float, float] | None:
    """Return the 95 % bootstrap interval of a mean; ``None`` for fewer than two values.

    Differences of pairs give the interval of the paired difference. The result is reproducible.

    Source:
        The percentile bootstrap (Efron, Annals of Statistics 1979).

    >>> import numpy as np
    >>> mean_interval(np.array([0.5, 0.5, 0.5]))
    (0.5, 0.5)
    """
    if len(values) < 2:
        return None
    rng = np.random.default_rng(0)
    means = values[rng.integers(0, len(values), (RESAMPLES, len(values)))].mean(axis=1)
    low, high = np.quantile(means, (0.025, 0.975))
    return float(low), float(high)


def quantile(values: Sequence[float | None], part: float) -> float:
    """Return the smallest value that at least a fraction of the values do not exceed.

    ``None`` stands for never, which is later than any number, so the result may be infinite.

    >>> quantile([4, 1, None, 2], 0.5), quantile([4, 1, None, 2], 0.9)
    (2, inf)
    """
    ordered = sorted(inf if value is None else value for value in values)
    return ordered[max(ceil(part * len(ordered)), 1) - 1]


@dataclass(frozen=True, slots=True)
class Group:
    """The rows of one policy in one setting, a row for each seed."""

    rows: tuple[ScoreRow, ...]  # in order of seed; at least one
    # Seeds without a change that counts; see `sim.scoring.suite.judged`
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
        """Return a figure for each seed; NaN where it is unknown."""
        return np.array([getattr(row, field) for row in self.rows], dtype=np.float64)

    def mean(self, field: str = "efficiency_mean") -> float:
        """Return the mean of a figure over the seeds; NaN if it is unknown."""
        return float(self.all(field).mean())


def grouped(
    rows: Sequence[ScoreRow], unjudged: Collection[tuple[str, int, int]] = ()
) -> list[Group]:
    """Return rows by scenario, lag and policy, in order of first appearance.

    ``unjudged`` has the scenario, lag and seed of runs without a change that counts.
    """
    found: dict[tuple[str, int, str], list[ScoreRow]] = {}
    for row in rows:
        found.setdefault((row.scenario, row.lag, row.policy), []).append(row)
    return [
        Group(tuple(some), frozenset(r.seed for r in some if (*key[:2], r.seed) in unjudged))
        for key, some in found.items()
    ]


def by_setting(groups: Sequence[Group]) -> list[list[Group]]:
    """Return the groups of each scenario and lag together."""
    found: dict[tuple[str, int], list[Group]] = {}
    for group in groups:
        found.setdefault(group.setting, []).append(group)
    return list(found.values())


def simulation_table(groups: Sequence[Group]) -> Table:
    """Return one line for each group."""
    headings = (
        "scenario",
        "policy",
        "lag",
        "efficiency",
        "noise-free",
        "informed",
        "informed,\nreal time",
        "settled",
        "95 % from cold\nmedian / 90 %",
        "95 % after change\nmedian / 90 %",
        "needless\nchanges",
        "decision",
        "speed-up",
        "bound",
        "linear\nbound",
    )
    return Table(headings, tuple(map(_line, groups)), keys=2)


def _line(group: Group) -> tuple[str, ...]:
    scenario, lag = group.setting
    decide_s = group.mean("decide_s")
    judged = [row.steps_to_95_after_change for row in group.rows if row.seed not in group.unjudged]
    return (
        scenario,
        group.policy,
        str(lag),
        part(group.mean("efficiency")),
        part(group.mean()),
        part(group.mean("informed")),
        part(group.mean("informed_real")),
        part(group.mean("efficiency_settled")),
        _steps([row.steps_to_95_cold for row in group.rows]),
        _steps(judged) if judged else NOTHING,
        f"{group.mean('needless_changes'):.1f}",
        NOTHING if np.isnan(decide_s) else f"{decide_s * 1e3:.2f} ms",
        f"{group.mean('speedup'):.2f}",
        f"{group.mean('bound'):.2f}",
        f"{group.mean('linear_bound'):.2f}",
    )


def part(value: float) -> str:
    """Return an efficiency as text."""
    return NOTHING if np.isnan(value) else f"{value:.3f}"


def _steps(values: Sequence[int | None]) -> str:
    found = (quantile(values, at) for at in (0.5, 0.9))
    return " / ".join("never" if isinf(steps) else f"{steps:g}" for steps in found)


def means_line(groups: Sequence[Group]) -> str:
    """Return a sentence on the figures of the table."""
    of = "Figures of" if seeds_of(groups) == "one seed" else "Means over"
    return f"{of} {seeds_of(groups)}; decision: median time to compute one."


def seeds_of(groups: Sequence[Group]) -> str:
    """Return the number of seeds, which differs between groups after an interruption."""
    counts = sorted({len(group.rows) for group in groups})
    if counts == [1]:
        return "one seed"
    return f"{' to '.join(map(str, dict.fromkeys((counts[0], counts[-1]))))} seeds"


def times_sentence(best_s: Sequence[float], equal_s: Sequence[float]) -> str:
    """Return the range of mean step times, which shows a wrong unit in a scenario."""
    return f"A step takes {_span(best_s)} with the best split, {_span(equal_s)} with the equal one."


def _span(values_s: Sequence[float]) -> str:
    return " to ".join(dict.fromkeys(map(duration, (min(values_s), max(values_s)))))


def longer(ratio: float) -> str:
    """Return the comparison of two times. The second one follows in the sentence.

    >>> longer(1.071), longer(7.5), longer(1.0)
    ('7.1% longer than', '7.5 times as long as', 'as long as')
    """
    if ratio >= _TWICE:
        return f"{ratio:.1f} times as long as"
    if abs(ratio - 1) < ALIKE / 2:
        return "as long as"
    return f"{abs(ratio - 1):.1%} {'longer' if ratio > 1 else 'shorter'} than"


def leaders(groups: Sequence[Group]) -> list[Group]:
    """Return the best groups of one setting, which do not differ from each other."""
    most = max(group.mean() for group in groups)
    return [group for group in groups if group.mean() >= most * (1 - ALIKE)]


def simulation_sentence(groups: Sequence[Group]) -> str:
    """Return the table's main result in one or two sentences."""
    settings = by_setting(groups)
    if len(groups) == 1:
        return _about_one(groups[0])
    if len(settings) == 1:
        return _about_setting(groups)
    if len({group.policy for group in groups}) == 1:
        worst = min(groups, key=Group.mean)
        return f"Lowest noise-free efficiency: {_about_one(worst)}"
    return _about_many([leaders(some) for some in settings])


def _about_one(group: Group) -> str:
    return f"{_setting(group)}, {group.policy} has {group.mean():.3f}: {_how_long(group)}"


def _about_setting(groups: Sequence[Group]) -> str:
    best, where = leaders(groups), _setting(groups[0])
    if len(best) == 1:
        return f"{where}, {best[0].policy} is the best: {_how_long(best[0])}"
    times = _how_long(max(best, key=Group.mean), "their")
    if len(best) == len(groups):
        return f"{where}, the policies do not differ (under {ALIKE:.1%}): {times}"
    *most, last = [group.policy for group in best]
    named = f"{', '.join(most)} and {last}"
    return f"{where}, {named} are the best and do not differ (under {ALIKE:.1%}): {times}"


def _about_many(best: Sequence[Sequence[Group]]) -> str:
    names = [some[0].policy for some in best if len(some) == 1]
    level = len(best) - len(names)
    if not names:
        return f"No policy is ahead (by {ALIKE:.1%} or more) in any of {len(best)} settings."
    counts = sorted({name: names.count(name) for name in names}.items(), key=lambda item: -item[1])
    ahead = ", ".join(f"{name} in {count}" for name, count in counts)
    more = f"; in {level} the best ones do not differ (under {ALIKE:.1%})"
    return f"The best policy in {len(best)} settings: {ahead}{more if level else ''}."


def _how_long(group: Group, whose: str = "its") -> str:
    best = "with the best split"
    informed = f"The informed controller takes {longer(1 / group.mean('informed'))} {best}"
    equal = f", the equal split {longer(group.mean('bound'))} {best}"
    return (
        f"{whose} steps take {longer(1 / group.mean())} {best} at every moment. "
        f"{informed}{'' if group.policy == EQUAL else equal}."
    )


def _setting(group: Group) -> str:
    scenario, lag = group.setting
    return f"In {scenario} at lag {lag}"


@dataclass(frozen=True, slots=True)
class Advantage:
    """The lead of our policy over the best other one in one setting, paired by seed."""

    setting: tuple[str, int]  # scenario and lag
    other: str  # the best other policy
    ahead: float  # mean difference as a fraction of the other's efficiency; negative if behind
    interval: tuple[float, float] | None  # 95 % interval of that mean; ``None`` for one seed

    def text(self) -> str:
        """Return the lead as text."""
        if self.interval is None:
            return f"{self.ahead:+.1%}"
        low, high = self.interval
        return f"{self.ahead:+.1%} [{low:+.1%}, {high:+.1%}]"


def lead(groups: Sequence[Group], figure: str = "efficiency_mean") -> Advantage | None:
    """Return our lead in one setting; ``None`` without our policy or without others."""
    ours = next((group for group in groups if group.policy == OURS), None)
    others = [group for group in groups if group.policy != OURS]
    if ours is None or not others:
        return None
    best = max(others, key=lambda group: group.mean(figure))
    ahead = ours.all(figure) / best.all(figure) - 1.0
    return Advantage(ours.setting, best.policy, float(np.mean(ahead)), mean_interval(ahead))


def comparison_table(groups: Sequence[Group]) -> Table:
    """Return one line for each setting and one column for each policy; a star marks the best."""
    policies = list(dict.fromkeys(group.policy for group in groups))
    names = tuple(map(_heading, policies))
    against = (f"{OURS} against\nthe best other", "the same,\nreal time")
    last = against if OURS in policies and policies != [OURS] else ()
    rows = []
    for some in by_setting(groups):
        means = {group.policy: group.mean() for group in some}
        most = max(means.values())
        leads = [lead(some, figure) for figure in ("efficiency_mean", "efficiency")]
        cells = tuple(_cell(means.get(policy), most) for policy in policies)
        ahead = [found.text() if found else NOTHING for found in leads] if last else []
        scenario, lag = some[0].setting
        rows.append((scenario, str(lag), *cells, part(some[0].mean("informed")), *ahead))
    return Table(("scenario", "lag", *names, "informed", *last), tuple(rows), keys=2)


def _heading(policy: str) -> str:
    """Return a policy's name, on two lines if it contains a colon or hyphen."""
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
    """Return a sentence on our policy's lead, or on the best policy without ours or others."""
    leads = [found for some in by_setting(groups) if (found := lead(some)) is not None]
    if not leads:
        return simulation_sentence(groups)
    if len(leads) == 1:
        return _about_lead(leads[0])
    ahead = sum(found.ahead >= ALIKE for found in leads)
    level = sum(abs(found.ahead) < ALIKE for found in leads)
    where = f"in {ahead} of {len(leads)} settings"
    even = f", equal to the best other one (under {ALIKE:.1%}) in {level}" if level else ""
    result = f"{OURS} is ahead of every other policy {where}{even}"
    behind = [found for found in leads if found.ahead < -BEHIND]
    if not behind:
        return f"{result}, and never behind the best other one by more than {BEHIND:.0%}."
    named = ", ".join(f"{name} at lag {lag}" for name, lag in (b.setting for b in behind))
    return f"{result}, and behind the best other one by more than {BEHIND:.0%} in {named}."


def _about_lead(found: Advantage) -> str:
    if abs(found.ahead) < ALIKE:
        return (
            f"{OURS} and the best other policy, {found.other}, do not differ (under {ALIKE:.1%})."
        )
    where = "ahead of" if found.ahead > 0 else "behind"
    return f"{OURS} is {where} the best other policy, {found.other}, by {abs(found.ahead):.1%}."


def sync_table(rows: Sequence[SyncRow]) -> Table:
    """Return one line with means over the seeds for each scenario, mode, policy and lag."""
    groups: dict[tuple[str, str, str, int], list[ModeResult]] = {}
    for row in rows:
        key = row.scenario, row.outcome.sync, row.policy, row.lag
        groups.setdefault(key, []).append(row.outcome)
    headings = (
        "scenario",
        "sync",
        "policy",
        "lag",
        "time",
        "per epoch",
        "updates",
        "staleness\nmean",
        "staleness\nmost",
        "waiting",
        "period\nshortest",
        "period\nlongest",
    )
    return Table(headings, tuple(_sync_line(*key, some) for key, some in groups.items()), keys=3)


def _sync_line(
    scenario: str, sync: str, policy: str, lag: int, some: list[ModeResult]
) -> tuple[str, ...]:
    def mean(figure: Callable[[ModeResult], float]) -> float:
        return sum(map(figure, some)) / len(some)

    periods = [[w.period_s for w in one.workers if w.updates] for one in some]
    return (
        scenario,
        sync,
        policy,
        str(lag),
        duration(mean(lambda one: one.time_s)),
        duration(mean(lambda one: one.time_s / one.epochs)),
        f"{mean(lambda one: one.updates):.0f}",
        f"{mean(lambda one: one.staleness.mean):.2f}",
        str(max(one.staleness.maximum for one in some)),
        f"{mean(lambda one: one.waiting):.1%}",
        mean_edge(periods, min),
        mean_edge(periods, max),
    )


def mean_edge(periods: Sequence[Sequence[float]], edge: Callable[[Sequence[float]], float]) -> str:
    """Return the mean over the runs of the ``min`` or ``max`` of their periods, as text."""
    found = [edge(some) for some in periods if some]
    return duration(sum(found) / len(found)) if found else NOTHING
