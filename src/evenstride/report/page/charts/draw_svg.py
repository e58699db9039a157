"""Draws a chart for the page."""

from __future__ import annotations

import numpy as np

from evenstride.report.page.charts import svg
from evenstride.report.page.charts.axes import Scale, ticks
from evenstride.report.page.charts.chart import ChartMark, LineChart
from evenstride.report.page.charts.chart_frame import TimeAxis, axis_labels, figure, legend, plot
from evenstride.report.page.markup import Markup, data_island


def draw_svg(chart: LineChart) -> Markup:
    """Return the figure of a chart: drawing, axes, legend, and data for read-outs."""
    y, run = Scale(chart.y_high, 0.0, chart.height), chart.run
    marks = ticks(0.0, chart.y_high, 4)
    drawn = [svg.path(svg.level_way(y([value for value, _ in marks])), "grid")]
    if run is None:
        labels = axis_labels(ticks(chart.x.low, chart.x.high, 6), chart.x, chart.x_name)
    else:
        labels = TimeAxis("time", chart.x).labels(run)
        pauses = chart.x([at_s for at_s, _ in run.pauses])
        drawn.append(svg.path(svg.upright_way(pauses, chart.height), "pause"))
    for mark in chart.marks:
        drawn += _paths(mark, chart.x, y)
    picture = svg.drawing(chart.height, chart.told, *drawn, zoomed=run is not None)
    area = plot(picture, marks, y, labels, unit=chart.y_name)
    data = data_island(f"{chart.key}-data", chart.rows) if chart.rows else None
    return figure(chart.key, chart.title, chart.words, area, legend(*chart.legend), data)


def _paths(mark: ChartMark, x: Scale, y: Scale) -> list[Markup]:
    at, right = x(mark.x), x(mark.right)
    # Buckets above the axis run along its upper edge, so that their lines do not end.
    level, top = (np.maximum(y(values), 0.0) for values in (mark.y, mark.top))
    match mark.shape:
        case "stairs":
            way = svg.steps_way(at, right, level)
        case "band":
            way = svg.band_way(at, right, level, top)
        case "line":
            way = svg.line_way(at, y(mark.y))
        case "dots":
            way = svg.dots_way(at, level)
    found = [svg.path(way, mark.style, mark.name, mark.worker)]
    if "hollow" in mark.style:  # a ring is a dot with a smaller one of paper on it
        found[0] = svg.path(way, mark.style.replace(" hollow", ""), mark.name, mark.worker)
        found.append(svg.path(way, "dot hollow", mark.name, mark.worker))
    return found
