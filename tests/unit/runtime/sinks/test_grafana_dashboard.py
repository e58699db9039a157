"""The dashboard asks for metrics that exist, and shows all of them."""

from __future__ import annotations

import json
import re
from itertools import combinations
from pathlib import Path

from typer.testing import CliRunner

from evenstride.cli.main import app
from evenstride.errors import ConfigError
from evenstride.runtime.sinks.grafana_dashboard import dashboard
from evenstride.runtime.sinks.snapshot import METRICS, PREFIX
from tests.messages import check_message, raises_message

PANELS = dashboard()["panels"]
QUERY = re.compile(rf'{PREFIX}(\w+){{instance="\$run"}}')


def test_every_metric_is_shown_and_no_other() -> None:
    asked = [QUERY.fullmatch(target["expr"]) for panel in PANELS for target in panel["targets"]]

    assert all(asked)
    assert {one[1] for one in asked if one} == {metric.name for metric in METRICS}


def test_the_table_has_what_top_shows_of_a_worker() -> None:
    (table,) = (panel for panel in PANELS if panel["type"] == "table")
    merge, organize = table["transformations"]

    assert merge["id"] == "merge"
    columns = organize["options"]["renameByName"]
    for heading in ("share", "busy", "waits", "own speed", "memory", "others waited"):
        assert heading in columns.values()
    assert columns.keys() == {f"Value #{target['refId']}" for target in table["targets"]}


def test_panels_do_not_overlap_and_stay_in_the_grid() -> None:
    places = [panel["gridPos"] for panel in PANELS]

    assert all(one["x"] >= 0 and one["x"] + one["w"] <= 24 for one in places)
    for one, other in combinations(places, 2):
        side_by_side = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        below = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        assert side_by_side or below


def test_the_command_writes_or_prints_the_dashboard(tmp_path: Path) -> None:
    path = tmp_path / "ours.json"

    written = CliRunner().invoke(app, ["grafana", "-o", str(path)])
    printed = CliRunner().invoke(app, ["grafana", "--json"])

    check_message(written.stdout, "ours.json")
    assert json.loads(path.read_text()) == json.loads(printed.stdout) == dashboard()


def test_a_path_that_cannot_be_written_is_refused() -> None:
    with raises_message(ConfigError, "/proc/nowhere/a.json"):
        CliRunner().invoke(app, ["grafana", "-o", "/proc/nowhere/a.json"], catch_exceptions=False)
