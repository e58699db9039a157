"""The charts of the page as files for papers."""

from __future__ import annotations

from pathlib import Path

import pytest

from evenstride.errors import ConfigError
from evenstride.report.page.paper_figures import figures_of
from tests.messages import raises_message
from tests.unit.report.conftest import Making

pytest.importorskip("matplotlib")
CHARTS = ("closeup", "curves", "shares", "steptime", "times")


def test_every_chart_is_written_as_png_and_svg(made: Making, tmp_path: Path) -> None:
    runs = [made(name, steps=60, policy=name) for name in ("uniform", "adaptive")]

    found = figures_of(runs, tmp_path / "figures")
    names = {f"{run}-{chart}" for run in ("uniform", "adaptive") for chart in CHARTS}
    names |= {"compared-closeup", "compared-steptime"}
    assert sorted(path.name for path in found) == sorted(
        name + suffix for name in names for suffix in (".png", ".svg")
    )
    assert all(path.stat().st_size > 5000 for path in found)


def test_the_same_run_gives_the_same_svg_and_hostile_names_are_text(
    made: Making, tmp_path: Path
) -> None:
    name = "../$x^2$<b>"
    run = made(steps=40, names=("$a$", "<i>", "c" * 90))
    object.__setattr__(run, "name", name)

    first, second = (figures_of([run], tmp_path / folder) for folder in ("a", "b"))
    svg = [path for path in first if path.suffix == ".svg"]
    assert [p.read_bytes() for p in svg] == [p.read_bytes() for p in second if p.suffix == ".svg"]
    assert {path.parent for path in first} == {tmp_path / "a"}


def test_a_folder_that_cannot_be_made_is_reported(made: Making, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    with raises_message(ConfigError):
        figures_of([made(steps=20)], tmp_path / "file")
