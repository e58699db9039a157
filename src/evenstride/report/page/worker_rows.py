"""What each worker of a run did, for the page's table and for the output as JSON."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from evenstride.core.fleet import FloatArray
from evenstride.report.page.page_runs import Leg, ReportedRun

RECENT = 20


@dataclass(frozen=True, slots=True)
class WorkerFigures:
    """What one worker of a run did; times are medians of its latest steps.

    Args:
        worker: its name.
        rank: that it had last.
        state: what it is to the run at the end; ``None`` if that is not known.
        share: samples of the last split.
        busy_s: own work in a step.
        wait_s: waiting for slower workers, and communication.
        speed: at the end, as a part of its own best; ``None`` if it is not known.
        since: step from which its speed has been so; ``None`` if all the time, or not known.
        caused_s: seconds that each of the others waited for it, on average, over the whole run.
        part: that as a part of the time of all steps.
        slowest_steps: how many it was the slowest in.
    """

    worker: str
    rank: int
    state: str | None
    share: int
    busy_s: float | None
    wait_s: float | None
    speed: float | None
    since: int | None
    caused_s: float
    part: float
    slowest_steps: int


def figures_of(run: ReportedRun, lane: int) -> WorkerFigures:
    """Return what a worker did."""
    leg = next(one for one in reversed(run.legs) if one.rank(lane) is not None)
    rank = leg.rank(lane)
    assert rank is not None
    held, recent, caused_s = leg.generation.table, slice(-RECENT, None), float(run.caused_s[lane])
    phases = leg.phases(rank)
    return WorkerFigures(
        worker=run.lanes[lane],
        rank=rank,
        state=_state(run, leg, rank),
        share=_latest(leg.share(rank)),
        busy_s=_median(held.busy_s[recent, rank]),
        wait_s=_median(held.wait_s[recent, rank]),
        speed=phases[-1].speed if phases else None,
        since=leg.step_at(phases[-1].first) if len(phases) > 1 else None,
        caused_s=caused_s,
        part=caused_s / max(run.totals.took_s, 1e-12),
        slowest_steps=sum(
            b.slowest_steps for one in run.legs for b in one.blames if one.lanes[b.rank] == lane
        ),
    )


def _state(run: ReportedRun, leg: Leg, rank: int) -> str | None:
    if leg is not run.legs[-1]:
        return "gone"
    standing = leg.generation.standing
    return standing[rank] if rank < len(standing) else None


def _median(values: FloatArray) -> float | None:
    known = values[~np.isnan(values)]
    return float(np.median(known)) if len(known) else None


def _latest(shares: FloatArray) -> int:
    """Return the share of the last step that was told of; 0 if none was."""
    known = shares[~np.isnan(shares)]
    return int(known[-1]) if len(known) else 0
