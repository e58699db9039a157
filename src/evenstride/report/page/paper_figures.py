"""The charts of a report as PNG and SVG, for papers. Needs matplotlib.

They use the descriptions and colours of the page, on a white background.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from evenstride.report.page.chart import Chart, ChartMark, ChartPanel
from evenstride.report.page.page_runs import ReportedRun
from evenstride.report.page.series_charts import curves_chart, shares_chart, steptime_chart, top_s
from evenstride.report.page.worker_charts import (
    closeup_chart,
    last_window,
    times_chart,
    usual_span_s,
    windows_of,
)
from evenstride.report.plotting import literal, repeatable, save
from evenstride.report.wording import shorten

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


_WIDTH = 7.0  # inches
_PIXELS = 78.0  # of the page, per inch of a figure
_DPI = 200
_LONGEST = 120
_MOST_LEGEND = 60  # characters of an entry of the legend
Dashes = Literal["-", "--", ":", "-."]
_DASHES: tuple[Dashes, ...] = ("-", "--", ":", "-.")
# Colours that are distinct for any colour vision: Okabe and Ito, "Color Universal Design" (2008),
# https://jfly.uni-koeln.de/color/, without its yellow, which is invisible on white.
_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
_NAMED: dict[str, tuple[str, Dashes]] = {
    "own": (_COLORS[0], "-"),
    "equal": (_COLORS[1], ":"),
    "best": (_COLORS[2], "--"),
    "busy": (_COLORS[0], "-"),
    "waiting": (_COLORS[4], "-"),
    "communication": ("#7f7f7f", "-"),
    "apart": ("#e6e6e6", "-"),
    "range": (_COLORS[0], "-"),
}


def figures_of(runs: Sequence[ReportedRun], folder: Path) -> list[Path]:
    """Write each chart as PNG and SVG, and return the files.

    The same runs give byte-identical SVG. Runs without steps have no charts.
    """
    recorded = [run for run in runs if run.legs]
    found: list[Path] = []
    for name, run in zip(_names(recorded), recorded, strict=True):
        for chart in _charts(run):
            found += _saved([chart], folder / f"{name}{chart.key}")
    close = [run for run in recorded if run.lockstep]
    if len(close) > 1:
        windows = [last_window(run, usual_span_s(close)) for run in close]
        found += _saved([closeup_chart(windows, "")], folder / "compared-closeup")
        times = [steptime_chart(run, run.length_s, "", top_s(close), run.name) for run in close]
        found += _saved(times, folder / "compared-steptime")
    return found


def _charts(run: ReportedRun) -> Iterator[Chart]:
    yield times_chart(run, run.length_s, "")
    yield steptime_chart(run, run.length_s, "", top_s([run]))
    yield shares_chart(run, run.length_s, "")
    if (curves := curves_chart(run, "")) is not None:
        yield curves
    if windows := windows_of(run) if run.lockstep else []:
        yield closeup_chart(windows, "")


def _names(runs: Sequence[ReportedRun]) -> list[str]:
    """Return distinct, valid file names."""
    found: list[str] = []
    for run in runs:
        name = re.sub(r"[^\w.+-]+", "-", run.name).strip("-.")[:_LONGEST] or "run"
        found.append(name if name not in found else f"{name}-{len(found)}")
    return found


def _saved(charts: Sequence[Chart], path: Path) -> list[Path]:
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    files = [path.with_name(path.name + suffix) for suffix in (".png", ".svg")]
    with repeatable(), rc_context({"hatch.linewidth": 0.6, "font.size": 9}):
        rows = sum(_pixels(panel) for chart in charts for panel in chart.panels)
        height = 0.7 + rows / _PIXELS + 0.09 * len(charts[0].legend)
        figure = Figure(figsize=(_WIDTH, height), layout="constrained")
        _draw_charts(charts, figure)
        for file in files:
            save(figure, file, _DPI)
    return files


def _pixels(panel: ChartPanel) -> float:
    return panel.height + (16.0 if panel.heading else 0.0)


def _draw_charts(charts: Sequence[Chart], figure: Figure) -> None:
    """Draw charts one below the other, with shared axes and one legend."""
    panels = [(chart, panel) for chart in charts for panel in chart.panels]
    heights = [panel.height for _, panel in panels]
    grid = np.atleast_1d(figure.subplots(len(panels), 1, sharex=True, height_ratios=heights))
    for axes, (chart, panel) in zip(grid, panels, strict=True):
        for mark in panel.marks:
            _draw_mark(axes, mark)
        axes.set(ylim=(panel.y_low, panel.y_high))
        if panel.name:
            axes.set(yticks=[])
            axes.spines[:].set_visible(False)
            name = literal(shorten(panel.name))
            axes.set_ylabel(name, rotation=0, ha="right", va="center", fontsize=8)
        else:
            axes.set_ylabel(panel.y_name)
        title = "".join(panel.heading or ()) or (chart.title if len(charts) > 1 else "")
        axes.set_title(literal(title), loc="left", fontsize=8)
        axes.tick_params(bottom=axes is grid[-1] or not panel.name)
    grid[-1].set_xlabel(charts[0].x_name)
    if panels[0][1].name:
        grid[-1].set_xlim(charts[0].x_low, charts[0].x_high)
    entries = charts[0].legend
    columns = 2 if len(entries) > 4 or any(len(text) > 30 for _, text in entries) else 4
    figure.legend(
        handles=[_entry(style, text) for style, text in entries],
        loc="outside lower left",
        ncols=columns,
        frameon=False,
        fontsize=8,
    )


def _draw_mark(axes: Axes, mark: ChartMark) -> None:
    color, dashes = pen_of(mark.style)
    stairs = np.stack([mark.x, mark.right], axis=1).reshape(-1) if len(mark.right) else mark.x
    match mark.shape:
        case "stairs":
            wide = 0.6 if "peak" in mark.style else 1.2
            axes.plot(stairs, np.repeat(mark.y, 2), dashes, color=color, linewidth=wide)
        case "band":
            low, high = np.repeat(mark.y, 2), np.repeat(mark.top, 2)
            axes.fill_between(stairs, low, high, **_fill(mark.style))
        case "boxes":
            heights, widths = mark.top - mark.y, mark.right - mark.x
            axes.bar(mark.x, heights, widths, mark.y, align="edge", **_fill(mark.style))
        case "line":
            axes.plot(mark.x, mark.y, dashes, color=color, linewidth=1.2)
        case "dots":
            fill = "none" if "hollow" in mark.style else "full"
            axes.plot(mark.x, mark.y, "o", color=color, markersize=4, fillstyle=fill)
        case "upright":
            axes.vlines(mark.x, mark.y, mark.top, color=color)


def pen_of(style: str) -> tuple[str, Dashes]:
    """Return the colour and the dashes of some style sheet classes.

    >>> pen_of("line c1 d1"), pen_of("line best")
    (('#D55E00', '--'), ('#009E73', '--'))
    """
    words = style.split()
    for word in words:
        if word in _NAMED:
            return _NAMED[word]
    numbers = {word[0]: int(word[1:]) for word in words if word[1:].isdigit()}
    if "c" in numbers:
        return _COLORS[numbers["c"]], _DASHES[numbers.get("d", 0)]
    return "black", "-"


def _fill(style: str) -> dict[str, Any]:
    """Return the matplotlib fill of an area. Waiting is hatched, to be visible without colours."""
    color, words = pen_of(style)[0], style.split()
    if "waiting" in words:
        return {"facecolor": "white", "edgecolor": color, "hatch": "////", "linewidth": 0.0}
    edges = {"edgecolor": "white", "linewidth": 0.3} if "outlined" in words else {"linewidth": 0.0}
    alpha = 0.25 if "range" in words or "band" in words else 1.0
    return {"facecolor": color, "alpha": alpha, **edges}


def _entry(style: str, text: str) -> Artist:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    label = literal(shorten(text, _MOST_LEGEND))
    if style.startswith("bar"):
        return Patch(label=label, **_fill(style))
    color, dashes = pen_of(style)
    upright = "|" if "mark" in style else ""
    line = "" if upright else dashes
    return Line2D([], [], color=color, linestyle=line, marker=upright, linewidth=1.2, label=label)
