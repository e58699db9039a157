"""The charts of a report as PNG and SVG, for papers. Needs matplotlib.

They show the same figures as the page, in its colours, on white.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from evenstride.core.fleet import FloatArray
from evenstride.errors import ConfigError
from evenstride.report.page.charts.axes import Scale
from evenstride.report.page.charts.chart import ChartMark, LineChart
from evenstride.report.page.charts.closeup import Window, last_window, usual_span_s, windows_of
from evenstride.report.page.charts.curve_chart import curves_chart
from evenstride.report.page.charts.palette import APART, BUSY, COMMUNICATION, WAITING, pen_of
from evenstride.report.page.charts.share_chart import shares_chart
from evenstride.report.page.charts.step_time_chart import steptime_chart, top_s
from evenstride.report.page.charts.svg import WIDTH
from evenstride.report.page.charts.worker_time_chart import parts_of
from evenstride.report.page.page_runs import ReportedRun
from evenstride.report.text_tables import shorten

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_WIDTH = 7.0  # inches
_DPI = 200
_LONGEST = 120
_MOST_LEGEND = 60
"""Characters of an entry of the legend."""
_LOOKS = {"busy": (BUSY, ""), "waiting": (WAITING, "////"), "communication": (COMMUNICATION, "")}


def figures_of(runs: Sequence[ReportedRun], folder: Path) -> list[Path]:
    """Write every chart of some runs twice, as PNG and as SVG; return the files.

    The same runs give the same SVG, byte for byte.

    Args:
        runs: any; those without steps have no charts.
        folder: made if needed.

    Raises:
        ConfigError: a file cannot be written.
    """
    told = [run for run in runs if run.legs]
    found: list[Path] = []
    for name, run in zip(_names(told), told, strict=True):
        charts: dict[str, tuple[float, Callable[[Figure], None]]] = {
            "times": (0.9 + 0.45 * len(run.drawn), partial(_times, run)),
        }
        time = Scale(0.0, run.length_s, WIDTH)
        lines = [steptime_chart(run, time, "", top_s([run])), shares_chart(run, time, "")]
        lines += [one for one in [curves_chart(run, "")] if one is not None]
        for one in lines:
            tall = 2.6 + 0.09 * len(one.legend)
            charts[one.key.removeprefix("-")] = (tall, partial(_drawn, [one]))
        windows = windows_of(run) if run.lockstep else []
        if windows:
            charts["closeup"] = (_tall(windows), partial(_closeup, windows))
        for chart, (height, draw) in charts.items():
            found += _saved(draw, height, folder / f"{name}-{chart}")
    close = [run for run in told if run.lockstep]
    if len(close) > 1:
        windows = [last_window(run, usual_span_s(close)) for run in close]
        found += _saved(partial(_closeup, windows), _tall(windows), folder / "compared-closeup")
        compared = [
            steptime_chart(run, Scale(0.0, run.length_s, WIDTH), "", top_s(close), run.name)
            for run in close
        ]
        tall = 2.1 * len(close) + 0.8
        found += _saved(partial(_drawn, compared), tall, folder / "compared-steptime")
    return found


def _names(runs: Sequence[ReportedRun]) -> list[str]:
    """Return names that files may have, each once."""
    found: list[str] = []
    for run in runs:
        name = re.sub(r"[^\w.+-]+", "-", run.name).strip("-.")[:_LONGEST] or "run"
        found.append(name if name not in found else f"{name}-{len(found)}")
    return found


def _saved(draw: Callable[[Figure], None], height: float, path: Path) -> list[Path]:
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    found = []
    with rc_context({"svg.hashsalt": "evenstride", "hatch.linewidth": 0.6, "font.size": 9}):
        figure = Figure(figsize=(_WIDTH, height), layout="constrained")
        draw(figure)
        for suffix in (".png", ".svg"):
            file = path.with_name(path.name + suffix)
            try:
                file.parent.mkdir(parents=True, exist_ok=True)
                figure.savefig(file, dpi=_DPI, metadata={"Date": None} if suffix == ".svg" else {})
            except OSError as error:
                raise ConfigError(f"cannot write {file} ({error.strerror})") from None
            found.append(file)
    return found


def _literal(text: str) -> str:
    """Return a text that matplotlib shows as it is: a pair of dollars would begin a formula."""
    return text.replace("$", r"\$")


def _short(name: str) -> str:
    """Return a name that leaves room for what is drawn beside it."""
    return _literal(shorten(name))


def _stairs(run: ReportedRun, values: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Return the points of a line that is level within each bucket."""
    left, right = run.edges_s
    return np.stack([left, right], axis=1).reshape(-1), np.repeat(values, 2)


def _times(run: ReportedRun, figure: Figure) -> None:
    from matplotlib.patches import Patch

    lanes = np.atleast_1d(figure.subplots(len(run.drawn), 1, sharex=True))
    for axes, lane in zip(lanes, run.drawn, strict=True):
        parts = [run.of_lane(lane, lambda leg, rank, n=n: parts_of(leg, rank)[n]) for n in range(3)]  # type: ignore[misc]
        base = np.zeros(len(parts[0]))
        for part, state in zip((parts[0], parts[2]), ("busy", "communication"), strict=True):
            x, y = _stairs(run, base + part)
            axes.fill_between(x, np.repeat(base, 2), y, color=_LOOKS[state][0], linewidth=0)
            base = base + np.nan_to_num(part)
        x, y = _stairs(run, 1.0 - parts[1])
        color, hatch = _LOOKS["waiting"]
        axes.fill_between(x, y, 1.0, facecolor="white", edgecolor=color, hatch=hatch, linewidth=0)
        axes.set(ylim=(0, 1), xlim=(0, run.length_s), yticks=[], facecolor=APART)
        axes.set_ylabel(_short(run.lanes[lane]), rotation=0, ha="right", va="center", fontsize=8)
    lanes[-1].set_xlabel("time in s")
    figure.legend(handles=_handles(Patch), loc="outside upper left", ncols=3, frameon=False)


def _handles(patch: type) -> list[object]:
    found = []
    for state, (color, hatch) in _LOOKS.items():
        face = "white" if hatch else color
        found.append(patch(facecolor=face, edgecolor=color, hatch=hatch, label=state, linewidth=0))
    return found


def _tall(windows: Sequence[Window]) -> float:
    return 0.9 + sum(0.5 + 0.22 * len(one.leg.generation.workers) for one in windows)


def _closeup(windows: Sequence[Window], figure: Figure) -> None:
    from matplotlib.patches import Patch

    rows = [len(one.leg.generation.workers) + 1 for one in windows]
    panels = np.atleast_1d(figure.subplots(len(windows), 1, sharex=True, height_ratios=rows))
    for axes, one in zip(panels, windows, strict=True):
        _window(axes, one)
    panels[-1].set_xlabel("time in s since the first step shown")
    figure.legend(handles=_handles(Patch), loc="outside upper left", ncols=3, frameon=False)


def _window(axes: Axes, one: Window) -> None:
    rows, table = slice(one.first, one.last + 1), one.leg.generation.table
    durations_s = one.leg.durations_s[rows]
    begin_s = one.leg.ends_s[rows] - durations_s - one.begin_s
    for rank in range(len(one.leg.generation.workers)):
        busy_s = np.nan_to_num(table.busy_s[rows, rank])
        waited_s = one.leg.waits.waited_s[rows, rank]
        rest_s = np.maximum(durations_s - busy_s - waited_s, 0.0)
        left_s = begin_s
        for state, wide_s in (("busy", busy_s), ("waiting", waited_s), ("communication", rest_s)):
            color, hatch = _LOOKS[state]
            face = "white" if hatch else color
            axes.barh(
                np.full(len(left_s), rank), wide_s, left=left_s, height=0.8, facecolor=face,
                edgecolor=color if hatch else "white", hatch=hatch, linewidth=0.3,
            )  # fmt: skip
            left_s = left_s + wide_s
    axes.set_yticks(range(len(one.leg.generation.workers)), map(_short, one.leg.generation.workers))
    axes.invert_yaxis()
    title = f"{shorten(one.run.name)}, {one.told}: workers wait {one.waiting:.0%} of their time"
    axes.set_title(_literal(title), loc="left", fontsize=9)


def _drawn(charts: Sequence[LineChart], figure: Figure) -> None:
    """Draw charts below each other; several share their axes, and have one legend."""
    panels = np.atleast_1d(figure.subplots(len(charts), 1, sharex=True, sharey=True))
    for axes, chart in zip(panels, charts, strict=True):
        for mark in chart.marks:
            _draw_mark(axes, mark)
        axes.set(ylim=(0, chart.y_high), ylabel=chart.y_name)
        if len(charts) > 1:
            axes.set_title(_short(chart.title), loc="left", fontsize=9)
    panels[-1].set_xlabel(charts[0].x_name)
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
    x = np.stack([mark.x, mark.right], axis=1).reshape(-1) if len(mark.right) else mark.x
    if mark.shape == "band":
        low, high = np.repeat(mark.y, 2), np.repeat(mark.top, 2)
        axes.fill_between(x, low, high, color=color, alpha=0.25, linewidth=0)
    elif mark.shape == "dots":
        fill = "none" if "hollow" in mark.style else "full"
        axes.plot(x, mark.y, "o", color=color, markersize=4, fillstyle=fill)
    else:
        y = np.repeat(mark.y, 2) if mark.shape == "stairs" else mark.y
        axes.plot(x, y, dashes, color=color, linewidth=1.2)


def _entry(style: str, text: str) -> Artist:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    color, dashes = pen_of(style)
    label = _literal(shorten(text, _MOST_LEGEND))
    if style.startswith("bar"):
        return Patch(color=color, alpha=0.25, linewidth=0, label=label)
    return Line2D([], [], color=color, linestyle=dashes, linewidth=1.2, label=label)
