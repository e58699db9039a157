"""What panels of simulated runs show: noise, events, scales, and whose workers they are."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from evenstride.report.suite_figures import Panel, ShareBand, draw
from evenstride.sim.scenario.scenario_model import Scenario
from evenstride.sim.scoring.suite import ScoredScenario
from tests.messages import check_message


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Draw panels and return the figure."""
    figures: list[Figure] = []
    save = Figure.savefig

    def keep(figure: Figure, *args: Any, **more: Any) -> None:
        figures.append(figure)
        save(figure, *args, **more)

    monkeypatch.setattr(Figure, "savefig", keep)

    def call(*panels: Panel) -> Figure:
        draw(panels, "title", tmp_path / "a.svg")
        return figures[-1]

    return call


def made(*events: dict[str, Any], noise: float = 0.0, fast: float = 200.0) -> Panel:
    workers = [
        {"name": "fast", "samples_per_s": fast, "noise": noise},
        {"name": "slow", "samples_per_s": 100.0, "noise": noise},
    ]
    values = {"name": "made", "global_batch": 60, "steps": 20, "workers": workers}
    stage = ScoredScenario.of(Scenario.model_validate({**values, "events": list(events)}), 0)
    return Panel.of("uniform", stage.run("uniform")[1], stage)


def panel(scenario: str, step_s: float, worker: str, share: float) -> Panel:
    band = ShareBand(worker, *[np.full(4, share)] * 3)
    return Panel("a policy", {"this policy": np.full(4, step_s)}, [band], None, scenario)


def labels(figure: Figure) -> list[list[str]]:
    """Return what each legend below the panels names."""
    return [[text.get_text() for text in legend.get_texts()] for legend in figure.legends]


def across(one: Axes, other: Axes) -> bool:
    """Return whether two axes have the same steps."""
    return one.get_shared_x_axes().joined(one, other)


def named(figure: Figure) -> list[str]:
    """Return the workers in the legend of each row's shares; empty without a legend."""
    legends = [axes.get_legend() for axes in figure.axes[1::2]]
    return ["" if legend is None else legend.get_texts()[0].get_text() for legend in legends]


def test_noise_is_drawn_only_if_it_was_measured(drawn: Any) -> None:
    assert made().noisy_s is None
    assert made(noise=0.05).noisy_s is not None
    # The name is there whichever of the panels has it.
    assert labels(drawn(made(noise=0.05), made()))[0].count("with noise") == 1
    assert "with noise" not in labels(drawn(made()))[0]


def test_changes_of_speed_and_of_workers_are_marked_and_named_once(drawn: Any) -> None:
    changes = [
        {"kind": "step", "at": at, "workers": 0, "speed": speed} for at, speed in ((4, 0.5), (9, 2))
    ]

    shown = made(*changes, {"kind": "leave", "at": 15, "workers": 1})

    assert {name: list(steps) for name, steps in shown.events.items()} == {
        "speed changes": [4, 9],
        "worker joins or leaves": [15],
    }
    figure = drawn(shown)
    upright = [line.get_xdata()[0] for line in figure.axes[0].lines if len(line.get_xdata()) == 2]
    assert upright == [4, 9, 15]
    assert labels(figure)[0][:2] == ["speed changes", "worker joins or leaves"]
    assert labels(drawn(made()))[0][0] == "this policy"


def test_more_events_than_can_be_distinguished_are_left_out(drawn: Any) -> None:
    def marks(events: Sequence[int]) -> int:
        ones = {"this policy": np.ones(99)}
        return len(drawn(Panel("a", ones, [], events={"speed changes": events})).axes[0].lines) - 1

    assert marks(range(60)) == 60
    assert marks(range(61)) == 0


def test_a_logarithmic_scale_says_so(drawn: Any) -> None:
    check_message(drawn(made(fast=2000.0)).axes[0].get_ylabel())
    assert drawn(made()).axes[0].get_ylabel() == "step in ms"


def test_every_scenario_has_its_own_axes_and_names_its_own_workers(drawn: Any) -> None:
    runs = [
        panel("a", 1.0, "old", 10.0),
        panel("a", 2.0, "old", 30.0),
        panel("b", 99.0, "new", 7e3),
    ]

    figure = drawn(*runs)
    times, shares = figure.axes[::2], figure.axes[1::2]

    assert named(figure) == ["old", "", "new"]
    assert labels(figure) == [["this policy"]]
    for column, low, high in ((times, 2e3, 9e4), (shares, 30, 6e3)):
        tops = [axes.get_ylim()[1] for axes in column]
        assert tops[0] == tops[1] < 1.1 * low
        assert tops[2] > high
    assert [bool(axes.get_xlabel()) for axes in times] == [False, True, True]
    assert [across(times[0], axes) for axes in figure.axes] == [True] * 4 + [False] * 2


def test_the_workers_of_a_single_scenario_are_named_below(drawn: Any) -> None:
    figure = drawn(panel("a", 1.0, "old", 10.0), panel("a", 2.0, "old", 30.0))

    assert labels(figure) == [["this policy"], ["old"]]
    assert named(figure) == ["", ""]
