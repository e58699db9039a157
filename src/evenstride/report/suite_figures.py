"""Step time and shares over the steps, one panel per policy. Needs matplotlib."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from evenstride.core.fleet import FloatArray, IntArray
from evenstride.errors import ConfigError
from evenstride.report.plotting import literal, repeatable, save
from evenstride.sim.engine.lockstep import SimulatedSteps
from evenstride.sim.scenario.scenario_model import Scenario

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from evenstride.sim.engine.lockstep import SimulatedSteps
    from evenstride.sim.scoring.suite import ScoredScenario


SUFFIXES = (".png", ".svg")
MOST_PANELS = 24
_WIDTH, _HEIGHT = 11.0, 2.4  # inches, of a row
_SPREAD = 5.0
"""Largest ratio of step times on a linear scale; larger ones use a logarithmic scale."""
_MOST_EVENTS = 60
"""Largest number of events that are drawn; more would fill the area."""


@dataclass(frozen=True, slots=True, eq=False)
class Panel:
    """One run to draw."""

    title: str
    # Step times in seconds by the name of the line; the first line is the run's own
    steps_s: dict[str, FloatArray]
    shares: list[ShareBand]  # samples of workers over the steps
    # Step times of the run with noise, if the others are without
    noisy_s: FloatArray | None = None
    scenario: str = ""  # panels of one scenario share their axes and workers
    # Steps of events, by kind of event
    events: Mapping[str, Sequence[int]] = field(default_factory=dict)

    @property
    def wide(self) -> bool:
        """Whether the step times need a logarithmic scale."""
        values = np.concatenate(list(self.steps_s.values()))
        return bool(np.nanmax(values) > _SPREAD * np.nanmin(values))

    @classmethod
    def of(cls, title: str, track: SimulatedSteps, stage: ScoredScenario) -> Panel:
        """Return the panel of a simulated run."""
        best = stage.references
        steps_s = {
            "this policy": track.mean_s,
            "best split": best.oracle_mean_s,
            "equal split": best.equal_mean_s,
        }
        noisy_s = None if np.allclose(track.real_s, track.mean_s, atol=0.0) else track.real_s
        moves, changes = stage.timeline.moves, stage.timeline.changes
        events = {
            "speed changes": [step for step in changes if step not in moves],
            "worker joins or leaves": moves,
        }
        lines = bands(track, stage.scenario)
        return cls(title, steps_s, lines, noisy_s, stage.scenario.name, events)


def check_plotting(path: Path | None = None) -> None:
    """Raise `ConfigError` unless matplotlib is installed and the file name has a valid suffix."""
    if path is not None and path.suffix.lower() not in SUFFIXES:
        raise ConfigError(
            f"cannot write a plot to {path}: expected a name that ends in {' or '.join(SUFFIXES)}"
        )
    if find_spec("matplotlib") is None:
        raise ConfigError(
            "plots need matplotlib, which is not installed; run pip install 'evenstride[report]'"
        )


def check_writable(path: Path) -> None:
    """Raise `ConfigError` unless the file can be written; create its folder."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        new = not path.exists()
        with path.open("ab"):
            pass
        if new:
            path.unlink()
    except OSError as error:
        raise ConfigError(f"cannot write {path} ({error.strerror})") from None


def draw(panels: Sequence[Panel], title: str, path: Path) -> None:
    """Write a figure with one row for each panel: its step times and its shares."""
    from matplotlib.figure import Figure

    with repeatable():
        figure = Figure(figsize=(_WIDTH, _HEIGHT * len(panels) + 0.8), layout="constrained")
        figure.suptitle(literal(title))
        rows = list(zip(panels, figure.subplots(len(panels), 2, squeeze=False), strict=True))
        scenarios = dict.fromkeys(panel.scenario for panel in panels)
        for scenario in scenarios:
            mine = [row for row in rows if row[0].scenario == scenario]
            _draw_scenario(mine, legend=len(scenarios) > 1)
        _draw_legends(figure, rows, workers=len(scenarios) == 1)
        save(figure, path, dpi=120)


def _draw_scenario(rows: Sequence[tuple[Panel, Sequence[Axes]]], *, legend: bool) -> None:
    """Draw the panels of one scenario, which share their axes."""
    (_, first), wide = rows[0], any(panel.wide for panel, _ in rows)
    for number, (panel, (times, shares)) in enumerate(rows):
        if number:
            times.sharey(first[0])
            shares.sharey(first[1])
            times.sharex(first[0])
        shares.sharex(times)
        _draw_times(times, panel, logarithmic=wide)
        _draw_shares(shares, panel)
        for axes in (times, shares):
            if number < len(rows) - 1:
                axes.tick_params(labelbottom=False)
            else:
                axes.set_xlabel("step")
    first[1].set_ylim(bottom=0)
    if legend:
        first[1].legend(fontsize="x-small", loc="upper left", bbox_to_anchor=(1.0, 1.0))


def _draw_legends(
    figure: Figure, rows: Sequence[tuple[Panel, Sequence[Axes]]], *, workers: bool
) -> None:
    """Draw the legends below all panels; that of workers only if all panels have the same."""
    left, right = zip(*(axes for _, axes in rows), strict=True)
    figure.legend(*_named(left), fontsize="small", loc="outside lower left", ncols=4)
    if workers:
        figure.legend(*_named(right), fontsize="small", loc="outside lower right", ncols=4)


def _named(column: Sequence[Axes]) -> tuple[list[Artist], list[str]]:
    """Return the lines of some axes with distinct names."""
    found: dict[str, Artist] = {}
    for axes in column:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    return list(found.values()), list(found)


def _draw_times(axes: Axes, panel: Panel, *, logarithmic: bool) -> None:
    from matplotlib.ticker import LogLocator

    _draw_events(axes, panel)
    if panel.noisy_s is not None:
        axes.plot(panel.noisy_s * 1e3, color="0.8", linewidth=0.6, label="with noise")
    styles = (("C0", "-"), ("C2", "--"), ("C3", ":"))
    for (name, steps_s), (color, dashes) in zip(panel.steps_s.items(), styles, strict=False):
        axes.plot(steps_s * 1e3, color=color, linestyle=dashes, linewidth=1.2, label=literal(name))
    if logarithmic:
        axes.set_yscale("log", subs=())
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.yaxis.set_major_formatter("{x:g}")
    axes.set_title(literal(panel.title), loc="left", fontsize="medium")
    axes.set_ylabel("step in ms (log scale)" if logarithmic else "step in ms")


def _draw_events(axes: Axes, panel: Panel) -> None:
    for (name, steps), dashes in zip(panel.events.items(), (":", "--"), strict=False):
        for step in steps if len(steps) <= _MOST_EVENTS else ():
            axes.axvline(step, color="C4", linestyle=dashes, linewidth=0.8, label=name)


def _draw_shares(axes: Axes, panel: Panel) -> None:
    for number, band in enumerate(panel.shares):
        color = f"C{number % 10}"
        steps = np.arange(len(band.mean))
        axes.plot(steps, band.mean, linewidth=1.1, color=color, label=literal(band.name))
        if (band.most > band.least).any():
            axes.fill_between(steps, band.least, band.most, color=color, alpha=0.2, linewidth=0)
    axes.set_ylabel("samples")


MOST_LINES = 12


@dataclass(frozen=True, slots=True, eq=False)
class ShareBand:
    """The shares of a worker, or of several of one kind, over the steps."""

    name: str
    mean: FloatArray  # over the workers of a step; NaN in a step without any
    least: FloatArray
    most: FloatArray


def bands(track: SimulatedSteps, scenario: Scenario) -> list[ShareBand]:
    """Return a line for each worker, or for each kind if there are more than 12 workers.

    Only the first 12 kinds have a line.
    """
    alone = scenario.size <= MOST_LINES
    counts = [1] * scenario.size if alone else [group.count for group in scenario.workers]
    names = _names([group.name for group in scenario.workers for _ in range(group.count)], counts)
    ends = np.cumsum(counts)[:MOST_LINES]
    starts = ends - counts[:MOST_LINES]
    return [
        _band(name, [split[start:end] for split in track.splits], track.shares)
        for name, start, end in zip(names, starts, ends, strict=False)
    ]


def _names(names: list[str], counts: list[int]) -> list[str]:
    """Return the names of lines, given the name of each worker and the workers of each line.

    Lines that share a name get the numbers of their workers within the cluster.
    """
    found, known, first = [], dict[str, int](), 0
    lines = Counter(names[begin] for begin in accumulate(counts[:-1], initial=0))
    for count in counts:
        name = names[first]
        begin = known.get(name, 0)
        first, known[name] = first + count, begin + count
        numbers = f"{begin}" if count == 1 else f"{begin}-{begin + count - 1}"
        found.append(name if lines[name] == 1 else f"{name}/{numbers}")
    return found


def _band(name: str, splits: list[IntArray], at: IntArray) -> ShareBand:
    """Return the band of one kind, given its shares in every split and the split of every step."""
    figures = np.full((3, len(splits)), np.nan)
    for number, split in enumerate(splits):
        present = split[split > 0]
        if len(present):
            figures[:, number] = present.mean(), present.min(), present.max()
    return ShareBand(name, *figures[:, at])
