"""Step times and shares, drawn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from evenstride.errors import ConfigError
from evenstride.report.suite_figures import (
    MOST_LINES,
    Panel,
    ShareBand,
    bands,
    check_plotting,
    check_writable,
    draw,
)
from evenstride.sim.engine.lockstep import SimulatedSteps
from evenstride.sim.engine.virtual_workers import Cluster
from evenstride.sim.scenario.scenario_model import Scenario
from evenstride.sim.scoring.suite import ScoredScenario
from tests.messages import raises_message


def made(*counts: int) -> Scenario:
    workers: list[dict[str, Any]] = [
        {"name": f"kind-{number}", "count": count, "samples_per_s": 100.0 * (number + 1)}
        for number, count in enumerate(counts)
    ]
    values = {"name": "made", "global_batch": 2000, "steps": 6, "workers": workers}
    return Scenario.model_validate(values)


def track(splits: list[list[int]], at: list[int]) -> SimulatedSteps:
    steps = len(at)
    return SimulatedSteps(
        np.ones(steps), np.ones(steps), np.array(at), [np.array(split) for split in splits]
    )


def test_few_workers_are_a_line_each() -> None:
    lines = bands(track([[3, 4, 5], [1, 0, 11]], [0, 0, 1]), made(2, 1))

    assert [line.name for line in lines] == ["kind-0/0", "kind-0/1", "kind-1"]
    np.testing.assert_array_equal(lines[0].mean, [3, 3, 1])
    np.testing.assert_array_equal(lines[1].mean, [4, 4, np.nan])  # it is absent
    np.testing.assert_array_equal(lines[2].least, [5, 5, 11])


def workers_named(*names: str, count: int = 1) -> Scenario:
    workers = [{"name": name, "count": count, "samples_per_s": 100.0} for name in names]
    values = {"name": "made", "global_batch": 2000, "steps": 2, "workers": workers}
    return Scenario.model_validate(values)


@pytest.mark.parametrize(
    ("names", "count", "output"),
    [
        ("ab", 1, ["a", "b"]),
        ("aa", 1, ["a/0", "a/1"]),
        ("aba", 2, ["a/0", "a/1", "b/0", "b/1", "a/2", "a/3"]),
        ("aba", 9, ["a/0-8", "b", "a/9-17"]),
    ],
)
def test_workers_of_several_kinds_with_one_name_are_numbered_as_in_their_cluster(
    names: str, count: int, output: list[str]
) -> None:
    kinds = workers_named(*names, count=count)

    lines = bands(track([[1] * kinds.size], [0, 0]), kinds)

    assert [line.name for line in lines] == output
    if kinds.size <= MOST_LINES and len(set(output)) > len(set(names)):
        assert output == [worker.name for worker in Cluster(kinds, 0).workers]


def test_many_workers_are_a_line_for_each_kind_from_the_least_to_the_most() -> None:
    split = [*range(1, 11), *([7] * 10)]

    first, second = bands(track([split], [0, 0]), made(10, 10))

    assert (first.name, second.name) == ("kind-0", "kind-1")
    assert (first.mean[0], first.least[0], first.most[0]) == (5.5, 1, 10)
    assert (second.mean[0], second.least[0], second.most[0]) == (7, 7, 7)


def test_of_very_many_kinds_the_first_dozen_are_drawn() -> None:
    lines = bands(track([[1] * 30], [0]), made(*[2] * 15))

    assert len(lines) == MOST_LINES


def test_a_panel_holds_the_run_the_best_split_and_the_equal_one() -> None:
    stage = ScoredScenario.of(made(1, 1), 0)
    _, ran = stage.run("uniform")

    panel = Panel.of("uniform", ran, stage)

    assert list(panel.steps_s) == ["this policy", "best split", "equal split"]
    np.testing.assert_array_equal(panel.steps_s["this policy"], panel.steps_s["equal split"])
    assert (panel.steps_s["best split"] < panel.steps_s["equal split"]).all()
    assert panel.noisy_s is None  # the run has no noise
    assert panel.scenario == "made"


@pytest.mark.parametrize("suffix", [".png", ".svg", ".PNG"])
def test_a_figure_is_the_same_whenever_it_is_drawn(tmp_path: Path, suffix: str) -> None:
    stage = ScoredScenario.of(made(1, 1), 0)
    panels = [Panel.of(policy, stage.run(policy)[1], stage) for policy in ("uniform", "adaptive")]
    one, again = tmp_path / f"one{suffix}", tmp_path / "deep" / "er" / f"again{suffix}"

    draw(panels, "seed 0", one)
    draw(panels, "seed 0", again)

    assert one.read_bytes() == again.read_bytes()
    assert len(one.read_bytes()) > 5000


def test_a_figure_names_policies_workers_and_lines(tmp_path: Path) -> None:
    stage = ScoredScenario.of(made(1, 2), 0)
    panels = [Panel.of(name, stage.run("uniform")[1], stage) for name in ("first", "second")]

    draw(panels, "a title", tmp_path / "a.svg")

    text = (tmp_path / "a.svg").read_text()
    for word in ("a title", "first", "second", "kind-0", "kind-1/1", "best split", "step in ms"):
        assert f"<!-- {word} -->" in text
    for word in ("with noise", "speed changes", "worker joins or leaves", "step in ms (log scale)"):
        assert f"<!-- {word} -->" not in text


def test_steps_that_were_not_measured_are_left_blank(tmp_path: Path) -> None:
    steps_s = np.array([np.nan, 1.0, 9.0, np.nan])

    draw([Panel("real", {"step": steps_s}, [])], "real", tmp_path / "a.svg")

    assert (tmp_path / "a.svg").exists()


@pytest.mark.parametrize("name", ["$\\foo$", "$", "a $5 b $6", "\\$x$", "$\\frac{1}{2}$"])
def test_a_name_is_drawn_as_it_is_and_never_as_a_formula(tmp_path: Path, name: str) -> None:
    step_s = np.ones(2)
    panel = Panel(
        f"{name} panel", {f"{name} time": step_s}, [ShareBand(f"{name} band", *[step_s] * 3)]
    )

    draw([panel], f"{name} title", tmp_path / "a.svg")

    text = (tmp_path / "a.svg").read_text()
    for kind in ("panel", "time", "band", "title"):
        assert f"<!-- {name} {kind} -->" in text


@pytest.mark.parametrize("name", ["a.gif", "a", "a.png.txt", "a.pdf"])
def test_other_kinds_of_files_are_refused(name: str) -> None:
    with raises_message(ConfigError):
        check_plotting(Path(name))


@pytest.mark.parametrize(
    "name",
    [
        "file/a.png",
        "folder",
        f"{'x' * 300}.png",
    ],
)
def test_an_unwritable_file_is_refused_before_anything_is_drawn(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("kept")
    (tmp_path / "folder").mkdir()

    with raises_message(ConfigError):
        check_writable(tmp_path / name)
    check_writable(tmp_path / "deep" / "er" / "a.png")
    check_writable(tmp_path / "file")

    assert list((tmp_path / "deep" / "er").iterdir()) == []
    assert (tmp_path / "file").read_text() == "kept"


def test_a_file_that_cannot_be_written_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    with raises_message(ConfigError, "a.png"):
        draw([Panel("real", {"step": np.ones(2)}, [])], "", tmp_path / "file" / "a.png")
