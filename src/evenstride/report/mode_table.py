"""What simulated runs in several modes of synchronisation came to: a line for each."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from evenstride.report.text_tables import NOTHING, Table
from evenstride.report.wording import duration
from evenstride.sim.engine.mode_runs import SyncRow
from evenstride.sim.scoring.mode_result import ModeResult

_HEADINGS = (
    *("scenario", "sync", "policy", "lag", "time", "per epoch", "updates"),
    *("staleness\nmean", "staleness\nmost", "waiting", "period\nshortest", "period\nlongest"),
)


def sync_table(rows: Sequence[SyncRow]) -> Table:
    """Return a line for each scenario, mode, policy and lag: means over the seeds."""
    groups: dict[tuple[str, str, str, int], list[ModeResult]] = {}
    for row in rows:
        key = row.scenario, row.outcome.sync, row.policy, row.lag
        groups.setdefault(key, []).append(row.outcome)
    return Table(_HEADINGS, tuple(_line(*key, some) for key, some in groups.items()), keys=3)


def _line(
    scenario: str, sync: str, policy: str, lag: int, some: list[ModeResult]
) -> tuple[str, ...]:
    def mean(figure: Callable[[ModeResult], float]) -> float:
        return sum(map(figure, some)) / len(some)

    periods = [[w.period_s for w in one.workers if w.updates] for one in some]
    return (
        *(scenario, sync, policy, str(lag)),
        duration(mean(lambda one: one.time_s)),
        duration(mean(lambda one: one.time_s / one.epochs)),
        f"{mean(lambda one: one.updates):.0f}",
        f"{mean(lambda one: one.staleness.mean):.2f}",
        str(max(one.staleness.maximum for one in some)),
        f"{mean(lambda one: one.waiting):.1%}",
        *(mean_edge(periods, edge) for edge in (min, max)),
    )


def mean_edge(periods: Sequence[Sequence[float]], edge: Callable[[Sequence[float]], float]) -> str:
    """Return the shortest or the longest of the workers' periods, as people read it.

    Args:
        periods: in seconds, of each run's workers that made an update.
        edge: ``min`` or ``max``; its mean over the runs is told.
    """
    found = [edge(some) for some in periods if some]
    return duration(sum(found) / len(found)) if found else NOTHING
