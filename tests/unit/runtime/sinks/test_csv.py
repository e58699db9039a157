"""The CSV file: one header whatever happens, and rows that any reader takes."""

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

    told = {(r["metric"], r["label"]): r for r in rows(tmp_path / "new" / "metrics.csv")}

    assert told["step_seconds", ""]["value"] == "0.3"
    assert told["worker_busy_seconds", "b"] == {
        "unix_s": "1000000000.000",
        "step": "40",
        "epochs": "1.5",
        "metric": "worker_busy_seconds",
        "label": "b",
        "value": "0.25",
        "text": "",
    }
    assert (told["step", ""]["value"], told["epochs", ""]["value"]) == ("40", "1.5")
    # A mean has its own step, and comes once.
    assert (told["metric", "loss"]["step"], told["metric", "loss"]["value"]) == ("38", "0.75")
    assert told["alert", "b/1"]["text"].startswith("slow: worker b/1 runs at 0.40")


def test_no_spreadsheet_takes_a_name_for_a_formula(tmp_path: Path) -> None:
    sink = CsvSink(tmp_path / "metrics.csv")
    sink.write(with_news())
    sink.write(snapshot(workers="@-"))
    sink.close()

    labels = {row["label"] for row in rows(tmp_path / "metrics.csv")}

    assert "'=1+1" in labels
    assert {"'@", "'-"} <= labels


def test_a_run_that_is_continued_goes_on_in_the_same_file(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    for step in (40, 80):
        sink = CsvSink(path)
        sink.write(snapshot(step))
        sink.close()

    assert path.read_text().count(",".join(COLUMNS)) == 1
    assert [row["step"] for row in rows(path) if row["metric"] == "step"] == ["40", "80"]


@pytest.mark.parametrize("torn", [1, 20, 9000])
def test_a_row_that_a_crash_left_half_written_is_dropped(tmp_path: Path, torn: int) -> None:
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
def test_a_file_of_something_else_is_left_alone(tmp_path: Path, before: str) -> None:
    path = tmp_path / "theirs.csv"
    path.write_text(before)

    with raises_message(ConfigError, "unix_s"):
        CsvSink(path)

    assert path.read_text() == before


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    with raises_message(ConfigError):
        CsvSink(tmp_path)


def test_what_is_not_known_is_empty(tmp_path: Path) -> None:
    sink = CsvSink(tmp_path / "metrics.csv")
    sink.write(replace(snapshot(), epochs=None))
    sink.close()

    assert {row["epochs"] for row in rows(tmp_path / "metrics.csv")} == {""}
    assert "epochs" not in {row["metric"] for row in rows(tmp_path / "metrics.csv")}
