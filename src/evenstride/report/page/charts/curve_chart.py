"""The time curve of each worker as it was fitted at the end, with what was measured."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from evenstride.core.fleet import FloatArray
from evenstride.report.analysis.attribution import speeds_of
from evenstride.report.page.charts.chart import Chart, ChartMark, ChartPanel, look
from evenstride.report.page.page_runs import Leg, ReportedRun


@dataclass(frozen=True, slots=True, eq=False)
class Fitted:
    """A worker's curve and what was measured of it, in seconds."""

    lane: int
    fixed_s: float
    per_sample_s: float
    shares: FloatArray  # at which it was measured since its speed changed last
    busy_s: FloatArray  # median of its own work at each of them
    before: FloatArray  # the same before that change
    before_s: FloatArray


def fitted_of(run: ReportedRun) -> list[Fitted]:
    """Return the curves of the latest generation that has some; empty if none has."""
    leg = next((one for one in reversed(run.legs) if one.generation.curves is not None), None)
    if leg is None:
        return []
    drawn = [rank for rank in leg.generation.serving if leg.lanes[rank] in run.drawn]
    return [_fitted(leg, rank) for rank in drawn]


def _fitted(leg: Leg, rank: int) -> Fitted:
    table, curves = leg.generation.table, leg.generation.curves
    assert curves is not None
    place = leg.generation.serving.index(rank)
    speeds = speeds_of(leg.generation, rank)
    phases = leg.phases(rank)
    says = ~np.isnan(speeds)
    now = np.arange(len(says)) >= (phases[-1].first if phases else 0)
    busy_s, share = table.busy_s[:, rank], table.share[:, rank].astype(np.float64)
    return Fitted(
        leg.lanes[rank],
        float(curves.fixed_s[place]),
        float(curves.per_sample_s[place]),
        *_medians(share[says & now], busy_s[says & now]),
        *_medians(share[says & ~now], busy_s[says & ~now]),
    )


def _medians(shares: FloatArray, busy_s: FloatArray) -> tuple[FloatArray, FloatArray]:
    found = np.unique(shares)
    return found, np.array([float(np.median(busy_s[shares == one])) for one in found])


def curves_chart(run: ReportedRun, key: str) -> Chart | None:
    """Return the chart; ``None`` where no curves are known."""
    found = fitted_of(run)
    if not found:
        return None
    most = 1.1 * max(float(np.max(np.append(one.shares, one.before), initial=1.0)) for one in found)
    times_s = np.concatenate([np.append(one.busy_s, one.before_s) for one in found])
    high_s = 1.08 * float(np.max(times_s, initial=1e-6))
    unit_s, unit = (1.0, "s") if high_s >= 2.0 else (1e-3, "ms")
    panel = ChartPanel(
        marks=tuple(mark for one in found for mark in _marks(run, one, most, unit_s)),
        told=_told(run, found),
        height=240.0,
        y_high=high_s / unit_s,
        y_name=f"{unit} of own work",
    )
    return Chart(
        key=f"{key}-curves",
        title="Fitted time curves",
        words=(
            "Lines are what the controller believed at the end. A dot is the median of all steps "
            "that a worker had with that share since its speed changed last; rings are from "
            "before.",
        ),
        panels=(panel,),
        x_high=most,
        x_name="samples of a worker in a step",
        legend=tuple(
            (f"line {look(one.lane)}", f"{run.lanes[one.lane]}: {_formula(one)}") for one in found
        ),
    )


def _formula(one: Fitted) -> str:
    return f"{1e3 * one.fixed_s:.3g} ms + {1e3 * one.per_sample_s:.3g} ms per sample"


def _marks(run: ReportedRun, one: Fitted, most: float, unit_s: float) -> tuple[ChartMark, ...]:
    lane, name, style = one.lane, run.lanes[one.lane], look(one.lane)
    ends = np.array([0.0, most])
    line = (one.fixed_s + one.per_sample_s * ends) / unit_s
    ring, before = f"dot {style} hollow", f"{name}, before its speed changed"
    return (
        ChartMark("line", f"line {style}", ends, line, name=name, worker=lane),
        ChartMark("dots", ring, one.before, one.before_s / unit_s, name=before, worker=lane),
        ChartMark("dots", f"dot {style}", one.shares, one.busy_s / unit_s, name=name, worker=lane),
    )


def _told(run: ReportedRun, found: list[Fitted]) -> str:
    told = [f"{run.lanes[one.lane]} {_formula(one)}" for one in found[:12]]
    return f"Fitted time curves: {'; '.join(told)}"
