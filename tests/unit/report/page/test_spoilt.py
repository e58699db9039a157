"""Traces with lost lines, and ranks without reports, still have a page."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from benchmarks.report_runs import STARTED_UNIX_S, Made, make

from evenstride.report.page.html_page import page_of, run_data
from evenstride.report.page.page_runs import read_run
from tests.messages import check_message, lines_with

SLOW = (1.0, 0.5, 0.1)


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The trace of two processes, the second with another worker."""
    path = tmp_path_factory.mktemp("spoilt") / "trace.jsonl"
    make(Made(90, changes=((40, SLOW),), evaluated=20), path)
    make(Made(40, speeds=(1.0, 0.5, 0.3, 0.7)), path, started_unix_s=STARTED_UNIX_S + 100.0)
    return path.read_text().splitlines()


@pytest.mark.parametrize("seed", range(8))
def test_a_damaged_trace_still_has_a_page(lines: list[str], tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    left = [_spoilt(line, rng) for line in lines if rng.random() > 0.08]
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join([lines[0], *left]) + "\n")

    run = read_run(path, "spoilt")
    page = page_of([run, run])
    # Without a line that says which workers there are, no step can be shown.
    shown = any("FleetFormed" in line and line.endswith("}}") for line in left)
    assert shown == (run.totals.steps > 0)
    assert 'class="notice"' in page
    json.dumps(run_data(run), allow_nan=False)


def _spoilt(line: str, rng: random.Random) -> str:
    if rng.random() < 0.05:
        return line[: rng.randrange(len(line))]
    record: dict[str, Any] = json.loads(line)
    event = record.get("event", {})
    text = event.get("observations", [])
    for one in text:
        if rng.random() < 0.1:
            one["busy_s"] = [rng.choice([0.0, None, 1e300])] * len(one["busy_s"])
        if rng.random() < 0.05:
            one["share"] = 0
    if text:
        event["observations"] = [one for one in text if rng.random() > 0.2]
    if record["kind"] == "metric" and rng.random() < 0.3:
        record |= {"value": 1e308, "step": -(10**15)}
    if record["kind"] == "header" and rng.random() < 0.3:
        record["started_unix_s"] = rng.choice([-1e300, 1e300, "x"])
    return json.dumps(record)


@pytest.mark.parametrize("steps", [0, 1, 2, 3])
@pytest.mark.parametrize("workers", [1, 2])
def test_the_shortest_runs_have_a_page(tmp_path: Path, steps: int, workers: int) -> None:
    path = make(Made(steps, speeds=(1.0, 0.5)[:workers]), tmp_path / "trace.jsonl")

    run = read_run(path, "short")
    assert "Summary" in page_of([run])
    assert "Facts of the run" in page_of([run, run])


def test_an_unreadable_run_is_shown_with_the_others(tmp_path: Path) -> None:
    path = make(Made(40), tmp_path / "good.jsonl")
    (tmp_path / "empty.jsonl").write_text("")
    runs = [read_run(path, "good"), read_run(tmp_path / "empty.jsonl", "empty")]

    page = page_of(runs)
    check_message(lines_with(page, "recorded steps"))
    assert "nothing was written yet" in page
    assert "Where each worker" in page
