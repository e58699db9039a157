"""Traces that were changed: impossible records are left out and reported."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from evenstride.core.time_model.observation import PeakMemory
from evenstride.report.analysis.attribution import totals_of
from evenstride.report.analysis.run_generation import spans_s
from evenstride.report.analysis.run_timeline import RunTimeline
from tests.messages import check_message
from tests.unit.report.virtual import VirtualRun


@pytest.fixture
def run(tmp_path: Path) -> VirtualRun:
    run = VirtualRun(tmp_path / "trace.jsonl", lambda _: (1.0, 1.0, 0.5), noise=0.02)
    run.begin()
    run.run(120)
    return run


def damaged(path: Path, number: int, line: str) -> None:
    lines = path.read_text().splitlines()
    lines[number] = line
    path.write_text("\n".join(lines) + "\n")


@pytest.mark.parametrize(
    "line",
    [
        "not json",
        '{"kind": "event", "at_s": 1, "event": {"type": "Exchanged"}}',
        '{"kind": "event", "at_s": 1, "event": {"type": "Weather"}}',
        '{"kind": "event", "at_s": "x", "event": 5}',
        '{"kind": "instructions", "instructions": 7}',
        '{"kind": "metric", "name": "loss", "value": 1.0}',
        '{"kind": 5}',
        "[]",
    ],
)
def test_a_damaged_line_is_reported_and_the_rest_is_shown(run: VirtualRun, line: str) -> None:
    run.end()
    damaged(run.writer.path, 8, line)
    story = RunTimeline(run.writer.path)
    story.read()

    assert story.generations[0].steps == 120
    assert story.ended
    assert any("line 9 is not a trace record" in s or "damaged" in s for s in story.unread), (
        story.unread
    )


def test_an_event_that_cannot_be_takes_the_curves_away_and_nothing_else(run: VirtualRun) -> None:
    run.end()
    lines = run.writer.path.read_text().splitlines()
    record = json.loads(lines[1])
    record["event"]["workers"][0]["min_share"] = 500
    damaged(run.writer.path, 1, json.dumps(record))
    story = RunTimeline(run.writer.path)
    story.read()

    assert story.generations[0].steps == 120
    assert totals_of(story.generations).efficiency_model is None
    assert any("cannot replay the decisions" in sentence for sentence in story.unread)


ESCAPE = "\x1b]0;pwned\x07\x1b[31mRED"


def test_reported_names_contain_no_control_characters(tmp_path: Path) -> None:
    """Workers of the same name are ambiguous, and the error quotes the name."""
    run = VirtualRun(tmp_path / "t.jsonl", lambda _: (1.0, 0.5), workers=2, names="host/{}".format)
    run.begin()
    run.run(20)
    run.end()
    text = run.writer.path.read_text().replace("host/0", "RED").replace("host/1", "RED")
    run.writer.path.write_text(text.replace("RED", json.dumps(ESCAPE)[1:-1]))
    story = RunTimeline(run.writer.path)
    story.read()

    assert any(
        "cannot replay the decisions" in sentence and "pwned" in sentence
        for sentence in story.unread
    )
    assert not any(mark in sentence for sentence in story.unread for mark in "\x1b\x07")


@pytest.mark.parametrize(
    ("changed", "value"),
    [
        ("share", 1 << 40),
        ("share", 97),
        ("share", -1),
    ],
)
def test_more_samples_than_the_batch_has_are_reported(
    run: VirtualRun, changed: str, value: int
) -> None:
    run.end()
    lines = run.writer.path.read_text().splitlines()
    record = json.loads(lines[9])
    record["event"]["observations"][0][changed] = value
    damaged(run.writer.path, 9, json.dumps(record))
    story = RunTimeline(run.writer.path)
    story.read()

    check_message(story.unread)
    assert totals_of(story.generations).samples < 120 * 96


def test_a_process_whose_workers_are_not_reported_leaves_the_one_before_alone(
    run: VirtualRun,
) -> None:
    before = RunTimeline(run.writer.path)
    before.read()
    times_s = before.generations[0].table.busy_s.copy()
    decided = list(before.generations[0].decisions)
    again = VirtualRun(run.writer.path, lambda _: (0.1, 0.1, 0.1))
    again.begin()
    again.run(200)
    again.end(step=200)
    lines = run.writer.path.read_text().splitlines()
    damaged(run.writer.path, [n for n, one in enumerate(lines) if "FleetFormed" in one][1], "{")
    story = RunTimeline(run.writer.path)
    story.read()

    (generation,) = story.generations
    np.testing.assert_array_equal(generation.table.busy_s, times_s)
    assert generation.decisions == decided
    assert len(story.lives) == 2
    check_message(story.unread)
    assert not any("after the last exchange" in sentence for sentence in story.unread)
    assert not any("replayed" in sentence for sentence in story.unread)


def test_a_group_that_cannot_be_is_left_out(run: VirtualRun) -> None:
    run.end()
    lines = run.writer.path.read_text().splitlines()
    record = json.loads(lines[1])
    record["event"]["workers"] = []
    damaged(run.writer.path, 1, json.dumps(record))
    story = RunTimeline(run.writer.path)
    story.read()

    assert story.generations == []
    assert any("damaged" in sentence for sentence in story.unread)


def test_endless_nesting_is_cut(run: VirtualRun) -> None:
    deep = "[" * 900 + "]" * 900
    with run.writer.path.open("a") as file:
        file.write('{"kind":"header","format":1,"policy":"uniform","deep":' + deep + "}\n")
        file.write('{"kind":"alert","reason":' + deep + "}\n")
        file.write('{"kind":"ended","summary":{"deep":' + deep + "}}\n")
    story = RunTimeline(run.writer.path)
    story.read()
    life = story.lives[-1]

    for output in (life.header["deep"], life.notes[0]["reason"], life.summary):
        text = json.dumps(output, ensure_ascii=False)
        assert "…" in text and text.count("[") < 40


def test_a_step_far_beyond_the_others_is_not_believed(run: VirtualRun) -> None:
    run.end()
    lines = run.writer.path.read_text().splitlines()
    record = json.loads(lines[9])
    assert record["event"]["observations"]
    record["event"]["observations"][0]["first_step"] = 10**15
    damaged(run.writer.path, 9, json.dumps(record))
    story = RunTimeline(run.writer.path)
    story.read()

    assert story.generations[0].steps == 120
    assert any("damaged" in sentence for sentence in story.unread)


@pytest.mark.parametrize("bad", ["null", "-1.0", "1e300"])
def test_a_report_that_cannot_be_is_reported(run: VirtualRun, bad: str) -> None:
    run.end()
    lines = run.writer.path.read_text().splitlines()
    record = json.loads(lines[9])
    record["event"]["observations"][0]["busy_s"][0] = json.loads(bad)
    damaged(run.writer.path, 9, json.dumps(record))
    story = RunTimeline(run.writer.path)
    story.read()

    assert any("1 report(s) of impossible times" in sentence for sentence in story.unread)


def test_a_step_count_far_beyond_what_was_reported_moves_no_clock(run: VirtualRun) -> None:
    run.end()
    lines = run.writer.path.read_text().splitlines()
    record = json.loads(lines[9])
    record["event"]["step"] = 10**18
    damaged(run.writer.path, 9, json.dumps(record))
    story = RunTimeline(run.writer.path)
    story.read()

    assert max(step for _, step in story.generations[0].anchors) == 120


@pytest.mark.parametrize("value", ["x", -1, 1 << 80, True])
@pytest.mark.parametrize("field", ["worker", "samples", "peak_bytes", "limit_bytes"])
def test_memory_that_cannot_be_is_left_out(run: VirtualRun, field: str, value: object) -> None:
    run.end()
    lines = run.writer.path.read_text().splitlines()
    last = max(n for n, one in enumerate(lines) if '"Exchanged"' in one)
    record = json.loads(lines[last])
    record["event"]["memory"][0][field] = value
    damaged(run.writer.path, last, json.dumps(record))
    story = RunTimeline(run.writer.path)
    story.read()

    assert story.generations[0].held == {
        rank: PeakMemory(rank, 32, 1 << 30, 4 << 30) for rank in range(3)
    }
    assert any("1 damaged record(s) were left out" in sentence for sentence in story.unread)


@pytest.mark.parametrize("step", ["x", None, -1, int("9" * 400)])
def test_an_event_at_no_step_is_left_out(run: VirtualRun, step: object) -> None:
    run.end()
    lines = run.writer.path.read_text().splitlines()
    record = json.loads(lines[9])
    record["event"]["step"] = step
    damaged(run.writer.path, 9, json.dumps(record))
    story = RunTimeline(run.writer.path)
    story.read()

    assert any("1 damaged record(s) were left out" in sentence for sentence in story.unread)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("global_batch", 0), ("global_batch", "x"), ("global_batch", 1 << 80)),
        *(("effective", None), ("effective", -5), ("effective", 1 << 80)),
    ],
)
def test_another_batch_that_cannot_be_is_left_out(
    run: VirtualRun, field: str, value: object
) -> None:
    output = {"type": "SetBatch", "effective": 120, "global_batch": 48, "reason": "it is faster"}
    run.writer.record("instructions", instructions=[{**output, field: value}])
    run.end()
    story = RunTimeline(run.writer.path)
    story.read()

    assert len(story.generations) == 1
    assert any("1 damaged record(s) were left out" in sentence for sentence in story.unread)


def test_a_moment_that_cannot_be_moves_no_clock(run: VirtualRun) -> None:
    run.end()
    lines = run.writer.path.read_text().splitlines()
    record = json.loads(lines[9])
    record["at_s"] = record["committed_at_s"] = 1e300
    damaged(run.writer.path, 9, json.dumps(record))
    story = RunTimeline(run.writer.path)
    story.read()

    assert spans_s(story.generations[0])[1][-1] == pytest.approx(run.clock_s, abs=0.1)
