"""The CSV file always has one header, and its rows suit any reader."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path

import pytest

from evenstride.errors import ConfigError
from evenstride.runtime.sinks.csv_sink import COLUMNS, CsvSink
from tests.messages import raises_message
from tests.unit.runtime.sinks.made import snapshot, with_news


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_every_number_is_a_row(tmp_path: Path) -> None:
    sink = CsvSink(tmp_path / "new" / "metrics.csv")
    sink.write(with_news())
    sink.close()
    sink.close()

    found = {(r["metric"], r["label"]): r for r in rows(tmp_path / "new" / "metrics.csv")}

    assert found["step_seconds", ""]["value"] == "0.3"
    assert found["worker_busy_seconds", "b"] == {
        "unix_s": "1000000000.000",
        "step": "40",
        "epochs": "1.5",
        "metric": "worker_busy_seconds",
        "label": "b",
        "value": "0.25",
        "text": "",
    }
    assert (found["step", ""]["value"], found["epochs", ""]["value"]) == ("40", "1.5")
    # A mean has its own step and is written once.
    assert (found["metric", "loss"]["step"], found["metric", "loss"]["value"]) == ("38", "0.75")
    assert found["alert", "b/1"]["text"].startswith("slow: worker b/1 runs at 0.40")


def test_a_name_never_becomes_a_formula_in_a_spreadsheet(tmp_path: Path) -> None:
    sink = CsvSink(tmp_path / "metrics.csv")
    sink.write(with_news())
    sink.write(snapshot(workers="@-"))
    sink.close()

    labels = {row["label"] for row in rows(tmp_path / "metrics.csv")}

    assert "'=1+1" in labels
    assert {"'@", "'-"} <= labels


def test_a_continued_run_appends_to_the_same_file(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    for step in (40, 80):
        sink = CsvSink(path)
        sink.write(snapshot(step))
        sink.close()

    assert path.read_text().count(",".join(COLUMNS)) == 1
    assert [row["step"] for row in rows(path) if row["metric"] == "step"] == ["40", "80"]


@pytest.mark.parametrize("torn", [1, 20, 9000])
def test_a_row_that_a_crash_left_incomplete_is_dropped(tmp_path: Path, torn: int) -> None:
    path = tmp_path / "metrics.csv"
    sink = CsvSink(path)
    sink.write(snapshot())
    sink.close()
    whole = path.read_text()
    path.write_text(whole + '"' + "9" * torn)

    sink = CsvSink(path)
    sink.write(snapshot(80))
    sink.close()

    assert path.read_text().startswith(whole)
    assert {row["step"] for row in rows(path)} == {"40", "80"}


@pytest.mark.parametrize("before", ["a,b\n1,2\n", "unix_s", ",".join(COLUMNS)])
def test_a_file_with_other_content_is_not_changed(tmp_path: Path, before: str) -> None:
    path = tmp_path / "theirs.csv"
    path.write_text(before)

    with raises_message(ConfigError, "unix_s"):
        CsvSink(path)

    assert path.read_text() == before


def test_a_folder_is_refused_as_a_file(tmp_path: Path) -> None:
    with raises_message(ConfigError):
        CsvSink(tmp_path)


def test_unknown_values_are_empty(tmp_path: Path) -> None:
    sink = CsvSink(tmp_path / "metrics.csv")
    sink.write(replace(snapshot(), epochs=None))
    sink.close()

    assert {row["epochs"] for row in rows(tmp_path / "metrics.csv")} == {""}
    assert "epochs" not in {row["metric"] for row in rows(tmp_path / "metrics.csv")}
