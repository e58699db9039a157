"""The split in force, where an epoch's last step has fewer samples."""

from __future__ import annotations

import json
import re
from html import unescape
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstride.core.fleet import Shares
from evenstride.core.time_model.observation import Measurements, Observation
from evenstride.report.analysis.attribution import Study, slowed_of
from evenstride.report.analysis.run_generation import (
    RecordedGeneration,
    StepTable,
    split_rows,
    split_share,
)
from evenstride.report.page.findings import figures_of
from evenstride.report.page.html_page import page_of, run_data
from evenstride.report.page.page_runs import read_run
from evenstride.report.perfetto.chrome_trace import export
from tests.messages import check_message, lines_with
from tests.unit.report.virtual import VirtualRun

EPOCH, LEFT = 20, 32


class Epochs(VirtualRun):
    """Every so many steps one has a third of the samples."""

    def shares_at(self, step: int) -> Shares:
        shares = super().shares_at(step)
        return tuple(one // 3 for one in shares) if step % EPOCH == EPOCH - 1 else shares


@pytest.fixture
def run(tmp_path: Path) -> VirtualRun:
    def speeds(step: int) -> tuple[float, ...]:
        return (1.0, 0.8 if step < 200 else 1.0, 1.0)

    made = Epochs(tmp_path / "trace.jsonl", speeds, policy="uniform")
    made.begin()
    made.run(400)  # the last step is a short one
    made.end()
    return made


def test_a_fixed_split_is_not_reported_to_change(run: VirtualRun) -> None:
    text = read_run(run.writer.path, "a")
    study = Study(text.legs[0].generation)

    assert text.legs[0].generation.table.share[-1].tolist() == [10, 10, 10]
    assert {figures_of(text, lane).share for lane in range(3)} == {32}
    assert [one.rank for one in slowed_of(study, range(3))] == []
    assert (study.share(1) == LEFT).all()


def test_json_has_the_columns_of_the_table(run: VirtualRun) -> None:
    text = run_data(read_run(run.writer.path, "a"))["workers"]

    assert [one["worker"] for one in text] == ["host/0", "host/1", "host/2"]
    assert {one["share"] for one in text} == {32}
    assert {(one["rank"], one["state"]) for one in text} == {(n, "serving") for n in range(3)}
    assert text[1]["slowest_steps"] >= 200
    assert text[1]["caused_s"] > text[0]["caused_s"]


def test_the_chart_draws_the_split_and_says_so(run: VirtualRun) -> None:
    page = unescape(page_of([read_run(run.writer.path, "a")]))

    check_message(lines_with(page, "an epoch's last"))
    assert re.search(r"host/1 from 32 to 32", page)


def test_the_counter_of_shares_has_no_spikes(run: VirtualRun, tmp_path: Path) -> None:
    export(run.writer.path, tmp_path / "t.json", (), None)
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    values = [e["args"]["value"] for e in events if e["name"] == "share (samples)"]
    steps = {e["args"]["samples"] for e in events if e["name"] == "step 19" and e["ph"] == "X"}

    assert set(values) == {32}
    assert steps == {10}


def of(shares: list[tuple[int, int]], batch: int, *, lockstep: bool = True) -> RecordedGeneration:
    table = StepTable(0, 2)
    table.add(
        Measurements.of(
            [
                Observation(worker, share[worker], step, (0.1,), (0.0,))
                for step, share in enumerate(shares)
                for worker in range(2)
            ]
        )
    )
    return RecordedGeneration(0, 0, batch, ("a", "b"), table, lockstep)


@given(st.lists(st.sampled_from([(6, 4), (5, 5), (3, 2), (0, 1)]), min_size=1, max_size=30))
def test_each_step_has_the_latest_whole_split(shares: list[tuple[int, int]]) -> None:
    rows = split_rows(of(shares, 10))
    whole = [n for n, share in enumerate(shares) if sum(share) == 10]

    for step, row in enumerate(rows.tolist()):
        before = [n for n in whole if n <= step]
        assert row == (before[-1] if before else whole[0] if whole else step)


def test_where_each_goes_its_own_way_each_step_has_its_own() -> None:
    generation = of([(6, 4), (3, 2)], 10, lockstep=False)

    np.testing.assert_array_equal(split_rows(generation), [0, 1])
    np.testing.assert_array_equal(split_share(generation, 0, np.array([0, 1])), [6, 3])
