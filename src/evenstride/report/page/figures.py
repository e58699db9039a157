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
from evenstride.report.page.closeup import Window, last_window, usual_span_s, windows_of
from evenstride.report.page.curves import fitted_of
from evenstride.report.page.palette import APART, BUSY, COLORS, COMMUNICATION, WAITING, dash
from evenstride.report.page.runs import Run
from evenstride.report.page.shares import share_of
from evenstride.report.page.steptime import step_times, top_s
from evenstride.report.page.times import parts_of
from evenstride.report.tables import shorten

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_WIDTH = 7.0  # inches
_DASHES = ("-", "--", ":", "-.")
_DPI = 200
_LONGEST = 120
_LOOKS = {"busy": (BUSY, ""), "waiting": (WAITING, "////"), "communication": (COMMUNICATION, "")}


def figures_of(runs: Sequence[Run], folder: Path) -> list[Path]:
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
            "steptime": (2.8, partial(_steptime, run)),
            "shares": (2.8, partial(_shares, run)),
        }
        if fitted_of(run):
            charts["curves"] = (3.2, partial(_curves, run))
        windows = windows_of(run) if run.lockstep else []
        if windows:
            charts["closeup"] = (_tall(windows), partial(_closeup, windows))
        for chart, (height, draw) in charts.items():
            found += _saved(draw, height, folder / f"{name}-{chart}")
    close = [run for run in told if run.lockstep]
    if len(close) > 1:
        windows = [last_window(run, usual_span_s(close)) for run in close]
        found += _saved(partial(_closeup, windows), _tall(windows), folder / "compared-closeup")
        found += _saved(
            partial(_steptimes, close), 2.1 * len(close) + 0.6, folder / "compared-steptime"
        )
    return found


def _names(runs: Sequence[Run]) -> list[str]:
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


def _edges(run: Run) -> tuple[FloatArray, FloatArray]:
    return run.column(lambda leg: leg.left_s), run.column(lambda leg: leg.right_s)


def _stairs(run: Run, values: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Return the points of a line that is level within each bucket."""
    left, right = _edges(run)
    return np.stack([left, right], axis=1).reshape(-1), np.repeat(values, 2)


def _times(run: Run, figure: Figure) -> None:
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


def _steptime(run: Run, figure: Figure) -> None:
    axes = figure.subplots()
    _draw_steptime(axes, run, top_s([run]))
    axes.set_xlabel("time in s")
    axes.legend(loc="upper right", fontsize=8)


def _steptimes(runs: Sequence[Run], figure: Figure) -> None:
    panels = figure.subplots(len(runs), 1, sharex=True, sharey=True)
    high_s = top_s(runs)
    for axes, run in zip(panels, runs, strict=True):
        _draw_steptime(axes, run, high_s)
        axes.set_title(_short(run.name), loc="left", fontsize=9)
    panels[0].legend(loc="upper right", fontsize=8)
    panels[-1].set_xlabel("time in s")


def _draw_steptime(axes: Axes, run: Run, high_s: float) -> None:
    found = step_times(run)
    x, least = _stairs(run, found.least)
    _, most = _stairs(run, found.most)
    axes.fill_between(x, 1e3 * least, 1e3 * most, color=COLORS[0], alpha=0.25, linewidth=0)
    lines = (
        ("this run", found.mean, "-"),
        ("equal split", found.equal, ":"),
        ("best split", found.best, "--"),
    )
    for number, (name, values, dashes) in enumerate(lines):
        axes.plot(
            x,
            1e3 * _stairs(run, values)[1],
            dashes,
            color=COLORS[number],
            linewidth=1.2,
            label=name,
        )
    axes.set(ylim=(0, 1e3 * high_s), ylabel="step in ms")


def _shares(run: Run, figure: Figure) -> None:
    axes = figure.subplots()
    for lane in run.drawn:
        mean = run.of_lane(lane, lambda leg, rank: leg.thin(share_of(leg, rank)).mean)
        (line,) = axes.plot(*_stairs(run, mean), _DASHES[dash(lane)], linewidth=1.2)
        line.set(color=COLORS[lane % len(COLORS)], label=_short(run.lanes[lane]))
    axes.set(ylabel="samples per step", xlabel="time in s")
    axes.set_ylim(bottom=0)
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=8)


def _curves(run: Run, figure: Figure) -> None:
    axes = figure.subplots()
    for one in fitted_of(run):
        color, dashes = COLORS[one.lane % len(COLORS)], _DASHES[dash(one.lane)]
        ends = np.array([0.0, 1.1 * float(np.max(np.append(one.shares, one.before), initial=1.0))])
        times_s = one.fixed_s + one.per_sample_s * ends
        name = _short(run.lanes[one.lane])
        axes.plot(ends, 1e3 * times_s, dashes, color=color, linewidth=1.2, label=name)
        axes.plot(one.shares, 1e3 * one.busy_s, "o", color=color, markersize=4)
        axes.plot(one.before, 1e3 * one.before_s, "o", color=color, markersize=4, fillstyle="none")
    axes.set(xlabel="samples in a step", ylabel="own work in ms")
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=8)
