"""The time curve of each worker as it was fitted at the end, with what was measured."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from evenstride.core.fleet import FloatArray
from evenstride.report.page import drawing
from evenstride.report.page.frame import axis_labels, figure, legend, plot
from evenstride.report.page.markup import Markup, element
from evenstride.report.page.palette import look
from evenstride.report.page.runs import Leg, Run
from evenstride.report.page.scales import Scale, ticks
from evenstride.report.run.blame import speeds_of

HEIGHT = 240.0
TITLE = "Fitted time curves"


@dataclass(frozen=True, slots=True, eq=False)
class Fitted:
    """A worker's curve and what was measured of it, in seconds.

    Args:
        lane: of the worker.
        fixed_s: seconds of its step whatever its share.
        per_sample_s: seconds for each sample.
        shares: at which it was measured since its speed changed last.
        busy_s: median of its own work at each of them.
        before: shares at which it was measured before that.
        before_s: median of its own work at these.
    """

    lane: int
    fixed_s: float
    per_sample_s: float
    shares: FloatArray
    busy_s: FloatArray
    before: FloatArray
    before_s: FloatArray


def fitted_of(run: Run) -> list[Fitted]:
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


def curves_chart(run: Run, key: str) -> Markup | None:
    """Return the chart; ``None`` where no curves are known.

    Args:
        run: any.
        key: begins its id.
    """
    found = fitted_of(run)
    if not found:
        return None
    most = 1.1 * max(float(np.max(np.append(one.shares, one.before), initial=1.0)) for one in found)
    times_s = np.concatenate([np.append(one.busy_s, one.before_s) for one in found])
    high_s = 1.08 * float(np.max(times_s, initial=1e-6))
    unit_s, unit = (1.0, "s") if high_s >= 2.0 else (1e-3, "ms")
    x, y = Scale(0.0, most, drawing.WIDTH), Scale(high_s / unit_s, 0.0, HEIGHT)
    marks = ticks(0.0, high_s / unit_s, 4)
    grid = drawing.path(drawing.level_way(y([value for value, _ in marks])), "grid")
    drawn = [_one(run, one, x, y, unit_s) for one in found]
    picture = drawing.drawing(HEIGHT, _told(run, found), grid, *drawn, zoomed=False)
    labels = axis_labels(ticks(0.0, most, 6), x, "samples of a worker in a step")
    area = plot(picture, marks, y, labels, unit=f"{unit} of own work")
    entries = legend(
        *[(f"line {look(one.lane)}", f"{run.lanes[one.lane]}: {_formula(one)}") for one in found]
    )
    words = [
        "Lines are what the controller believed at the end. A dot is the median of all steps that "
        "a worker had with that share since its speed changed last; rings are from before."
    ]
    return figure(f"{key}-curves", TITLE, words, area, entries)


def _formula(one: Fitted) -> str:
    return f"{1e3 * one.fixed_s:.3g} ms + {1e3 * one.per_sample_s:.3g} ms per sample"


def _one(run: Run, one: Fitted, x: Scale, y: Scale, unit_s: float) -> Markup:
    ends = np.array([0.0, x.high])
    level = y((one.fixed_s + one.per_sample_s * ends) / unit_s)
    if level[1] < 0.0 < one.per_sample_s:  # it leaves through the upper edge
        ends[1] = (y.low * unit_s - one.fixed_s) / one.per_sample_s
        level[1] = 0.0
    name = run.lanes[one.lane]
    before = drawing.dots_way(x(one.before), y(one.before_s / unit_s))
    return element(
        "g",
        drawing.path(drawing.line_way(x(ends), level), f"line {look(one.lane)}", name),
        drawing.path(before, f"dot {look(one.lane)}", f"{name}, before its speed changed"),
        drawing.path(before, "dot hollow", f"{name}, before its speed changed"),
        drawing.path(
            drawing.dots_way(x(one.shares), y(one.busy_s / unit_s)), f"dot {look(one.lane)}", name
        ),
        data_worker=one.lane,
    )


def _told(run: Run, found: list[Fitted]) -> str:
    told = [f"{run.lanes[one.lane]} {_formula(one)}" for one in found[:12]]
    return f"Fitted time curves: {'; '.join(told)}"
