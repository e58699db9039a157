"""Compares the policies of a figure, seed by seed, as a table and as a plot."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from math import ceil
from statistics import mean
from typing import Any

from benchmarks.papers.cells import ADAPTIVE, FIXED, UNIFORM, Record, mark, session

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
    apart = any(session(one) != session(other) for one, other in pairs)
    return mark(*chain.from_iterable(pairs)) + ("†" if apart else "")


def paired(
    records: Iterable[Record], job: str, one: tuple[str, str], other: tuple[str, str]
) -> list[tuple[Record, Record]]:
    """Return the results of two policies, each with its cluster, in the seeds that both have."""
    found = {
        (record["policy"], record["cluster"], record["seed"]): record
        for record in records
        if (record["job"], record["sync"]) == (job, "bsp")
    }
    return [
        (mine, found[*other, seed])
        for (policy, cluster, seed), mine in found.items()
        if (policy, cluster) == one and (*other, seed) in found
    ]


def compared(records: Iterable[Record]) -> list[PolicyRow]:
    """Return a row for each place and policy, in the order in which they first occur."""
    found: dict[tuple[Place, str], dict[int, Record]] = {}
    for record in records:
        place = record["job"], record["cluster"], record["sync"]
        found.setdefault((place, record["policy"]), {})[record["seed"]] = record
    rows = []
    for (place, policy), mine in found.items():
        equal = found.get((place, UNIFORM), {})
        common = {seed: one for seed, one in mine.items() if seed in equal}
        if common:
            fixed = [by for (at, name), by in found.items() if at == place and is_fixed(name)]
            rows.append(_row(place, policy, common, equal, fixed))
    return rows


def _row(
    place: Place,
    policy: str,
    mine: dict[int, Record],
    equal: dict[int, Record],
    fixed: Sequence[dict[int, Record]],
) -> PolicyRow:
    splits = {seed: [by[seed] for by in fixed if seed in by] for seed in mine}
    known = [seed for seed in mine if any(one["policy"] == FIXED for one in splits[seed])]
    best = [(min(splits[seed], key=partial(faster, fast=mine[seed])), mine[seed]) for seed in known]
    whole = [faster(split, one) for split, one in best]
    late = [min(map(late_s, splits[seed])) / late_s(mine[seed]) for seed in known]
    return PolicyRow(
        place,
        policy,
        len(mine),
        mean(map(whole_s, mine.values())),
        geometric_mean([(faster(equal[seed], one),) for seed, one in mine.items()]),
        min(whole, default=None),
        _mean_ratio(whole),
        _mean_ratio(late),
        tuple(list(mine.values())[-1]["shares"]),
        marks([(equal[seed], one) for seed, one in mine.items()]),
        marks(best),
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
