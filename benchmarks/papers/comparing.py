"""Compares the policies of a figure, seed by seed, as a table and as a plot."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, product
from math import ceil
from statistics import mean
from typing import Any

from benchmarks.papers.cells import (
    ADAPTIVE,
    FIXED,
    UNIFORM,
    Record,
    disturbance,
    group_of,
    mark,
)

from evenstride.lab.comparison.paired_ratios import geometric_mean
from evenstride.report.wording import Table

Place = tuple[str, str, str]
"""Job, cluster and synchronisation mode."""


@dataclass(frozen=True, slots=True)
class PolicyRow:
    """A policy at a place, over the seeds in which the equal split ran as well."""

    place: Place
    policy: str
    seeds: int
    time_s: float  # to the target; mean
    # Time of the equal split divided by this one's, as `faster` compares them; geometric mean of
    # the seeds.
    speedup: float
    # Time of the fastest fixed split of the same seed divided by this one's; lowest and mean. Only
    # of seeds in which the calibrated split ran: without it, the best split is not known.
    least_efficiency: float | None
    efficiency: float | None
    # The same for the mean step of the second half of the training.
    late_efficiency: float | None
    shares: tuple[int, ...]  # at the end, of the last seed
    mark: str  # of the speed-up; see `marks`
    efficiency_mark: str


def is_fixed(policy: str) -> bool:
    """Return whether a policy never changes the split."""
    return policy in (UNIFORM, FIXED) or policy.startswith("static")


def has_common_steps(record: Record) -> bool:
    """Return whether the training has the same steps with every split, but for rounding."""
    return record["sync"] == "bsp" and not record["policy"].startswith("dbs")


def late_s(record: Record) -> float:
    """Return the mean step time of the second half of a training, in seconds."""
    late = record["steps_ms"][len(record["steps_ms"]) // 2 :]
    return float(mean(late)) / 1e3


def whole_s(record: Record, steps: int | None = None) -> float:
    """Return the time of a training without tests, or of its first steps, in seconds."""
    each = record["steps_ms"]
    return float(record["time_s"] * sum(each[:steps]) / sum(each))


def step_s(record: Record) -> float:
    """Return the mean step time of a training, in seconds."""
    return whole_s(record) / len(record["steps_ms"])


def faster(slow: Record, fast: Record) -> float:
    """Return the time of a training divided by that of another.

    Rounding may move the epoch that reaches the target. So two trainings with the same steps are
    compared over those that both of them have.
    """
    steps = None
    if has_common_steps(slow) and has_common_steps(fast):
        steps = min(len(slow["steps_ms"]), len(fast["steps_ms"]))
    return whole_s(slow, steps) / whole_s(fast, steps)


def marks(pairs: Sequence[tuple[Record, Record]]) -> str:
    """Return the marks of a figure that compares results; `cells.MARKS` explains them."""
    apart = any(group_of(one) != group_of(other) for one, other in pairs)
    return mark(*chain.from_iterable(pairs)) + ("†" if apart else "")


def paired(
    records: Iterable[Record], job: str, one: tuple[str, str], other: tuple[str, str]
) -> list[tuple[Record, Record]]:
    """Return the results of two policies, each with its cluster, in the seeds that both have.

    Pairs of one group are preferred, then those of one day, then undisturbed ones.
    """
    seeds: dict[int, tuple[list[Record], list[Record]]] = {}
    for record in records:
        if (record["job"], record["sync"]) == (job, "bsp"):
            which = record["policy"], record["cluster"]
            for side, wanted in enumerate((one, other)):
                if which == wanted:
                    seeds.setdefault(record["seed"], ([], []))[side].append(record)

    def rank(pair: tuple[Record, Record]) -> tuple[bool, bool, float]:
        a, b = pair
        return group_of(a) != group_of(b), a["date"] != b["date"], max(map(disturbance, pair))

    return [min(product(*both), key=rank) for both in seeds.values() if all(both)]


@dataclass(frozen=True, slots=True)
class _Match:
    """A result with those that it is compared with: of its group of processes, if possible."""

    mine: Record
    equal: Record
    splits: tuple[Record, ...]  # fixed ones, empty unless the calibrated split is among them

    @classmethod
    def of(cls, policy: str, results: Mapping[str, Sequence[Record]]) -> _Match | None:
        """Return the least disturbed match for a policy; ``None`` without an equal split.

        ``results`` are those of one place and seed, by policy.
        """
        if UNIFORM not in results:
            return None
        found = [cls._of_group(one, results) for one in results[policy]]
        return min(found, key=lambda match: match.rank)

    @classmethod
    def _of_group(cls, mine: Record, results: Mapping[str, Sequence[Record]]) -> _Match:
        """Return a result with those of its group; with those of others only if it has none."""
        group = {
            name: same
            for name, every in results.items()
            if (same := [one for one in every if group_of(one) == group_of(mine)])
        }

        def least(name: str) -> Record:
            return min(group.get(name, results[name]), key=disturbance)

        equal = mine if mine["policy"] == UNIFORM else least(UNIFORM)
        if FIXED in group:
            return cls(mine, equal, tuple(least(name) for name in group if is_fixed(name)))
        # The fastest of many splits of other groups would be the fastest by chance.
        return cls(mine, equal, (least(FIXED),) if FIXED in results else ())

    @property
    def rank(self) -> tuple[int, float]:
        """How many of the others are of another group, then the largest disturbance."""
        others = (self.equal, *(one for one in self.splits if one["policy"] == FIXED))
        apart = sum(group_of(one) != group_of(self.mine) for one in others)
        return apart, max(map(disturbance, (self.mine, *others)))

    @property
    def best(self) -> Record:
        return min(self.splits, key=partial(faster, fast=self.mine))


def compared(records: Iterable[Record]) -> list[PolicyRow]:
    """Return a row for each place and policy, in the order in which they first occur.

    ``records`` may have several results of a cell.
    """
    found: dict[Place, dict[int, dict[str, list[Record]]]] = {}
    policies = dict[tuple[Place, str], None]()
    for record in records:
        place, policy = (record["job"], record["cluster"], record["sync"]), record["policy"]
        by_policy = found.setdefault(place, {}).setdefault(record["seed"], {})
        by_policy.setdefault(policy, []).append(record)
        policies[place, policy] = None
    rows = []
    for place, policy in policies:
        seeds = [by for _, by in sorted(found[place].items()) if policy in by]
        matches = [match for by in seeds if (match := _Match.of(policy, by))]
        if matches:
            rows.append(_row(place, policy, matches))
    return rows


def _row(place: Place, policy: str, matches: Sequence[_Match]) -> PolicyRow:
    known = [match for match in matches if match.splits]
    whole = [faster(match.best, match.mine) for match in known]
    late = [min(map(late_s, match.splits)) / late_s(match.mine) for match in known]
    return PolicyRow(
        place,
        policy,
        len(matches),
        mean(whole_s(match.mine) for match in matches),
        geometric_mean([(faster(match.equal, match.mine),) for match in matches]),
        min(whole, default=None),
        _mean_ratio(whole),
        _mean_ratio(late),
        tuple(matches[-1].mine["shares"]),
        marks([(match.equal, match.mine) for match in matches]),
        marks([(match.best, match.mine) for match in known]),
    )


def _mean_ratio(ratios: Sequence[float]) -> float | None:
    return geometric_mean([(one,) for one in ratios]) if ratios else None


def with_mark(ratio: float | None, mark: str) -> str:
    """Return a ratio with its mark, or a dash."""
    return "-" if ratio is None else f"{ratio:.3f}{mark}"


def table(records: Iterable[Record]) -> Table:
    """Return the rows as a table."""
    headings = (
        *("job, cluster, mode", "policy", "seeds", "time", "speed-up", "efficiency", "lowest"),
        *("second half", "samples"),
    )
    rows, last = list[tuple[str, ...]](), None
    for row in compared(records):
        rows.append(
            (
                ", ".join(row.place) if row.place != last else "",
                row.policy,
                str(row.seeds),
                f"{row.time_s:.1f} s",
                f"{row.speedup:.2f}x{row.mark}",
                with_mark(row.efficiency, row.efficiency_mark),
                with_mark(row.least_efficiency, row.efficiency_mark),
                with_mark(row.late_efficiency, row.efficiency_mark),
                "/".join(map(str, row.shares)),
            )
        )
        last = row.place
    return Table(headings, tuple(rows))


def one(records: Iterable[Record], policy: str, *place: str) -> PolicyRow | None:
    """Return the row of a policy at a place; ``None`` if it was not measured."""
    found = [row for row in compared(records) if row.policy == policy and row.place == place]
    return found[0] if found else None


def speedups(records: Sequence[Record], policies: Iterable[str], *place: str) -> str | None:
    """Return the speed-ups at a place in words; ``None`` without any."""
    rows = [one(records, policy, *place) for policy in policies]
    return ", ".join(f"`{row.policy}` {row.speedup:.2f}x{row.mark}" for row in rows if row) or None


def bars(records: Iterable[Record]) -> Any:
    """Draw the speed-up of each policy at each place as a matplotlib figure."""
    from matplotlib.figure import Figure

    places: dict[Place, list[PolicyRow]] = {}
    for row in compared(records):
        places.setdefault(row.place, []).append(row)
    lines = ceil(len(places) / 2)
    drawing = Figure(figsize=(11, 0.6 + 1.9 * lines), layout="constrained")
    for axes in drawing.subplots(lines, 2, squeeze=False).flat[len(places) :]:
        axes.remove()
    for axes, (place, rows) in zip(drawing.axes, places.items(), strict=True):
        colors = ["#E69F00" if row.policy == ADAPTIVE else "#0072B2" for row in rows]
        axes.barh([row.policy for row in rows], [row.speedup for row in rows], color=colors)
        axes.invert_yaxis()
        axes.set_title(", ".join(place), fontsize=9, loc="left")
        axes.tick_params(labelsize=7)
        for number, row in enumerate(rows):
            text = f" {row.speedup:.2f}x{row.mark}"
            axes.text(row.speedup, number, text, va="center", fontsize=7)
    drawing.supxlabel(
        "speed-up over the equal split in the same steps; * and † as in the table", fontsize=8
    )
    return drawing
