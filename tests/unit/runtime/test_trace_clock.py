"""Times of a trace are calendar times, those of the commits of their steps."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

import evenstride
from evenstride.trace.read import read_records
from tests.unit.runtime.solo import Trainer, numbered

_SLACK_S = 0.05  # of two clocks that are read one after the other, on a busy machine


def test_a_commit_is_recorded_in_calendar_time(tmp_path: Path) -> None:
    began_s = time.time()
    stride = evenstride.Stride(global_batch=4, trace=tmp_path)
    made_s = time.time()
    trainer, marks = Trainer(stride), []
    for batch in stride.loader(numbered(80)):
        before_s = time.time()
        trainer.backward(batch)
        marks.append((before_s, time.time()))
        trainer.update()
    stride.close()

    header, *records = read_records(tmp_path)
    assert began_s <= header["started_unix_s"] <= made_s
    assert 0.0 <= header["at_s"] <= made_s - began_s
    zero_s = header["started_unix_s"] - header["at_s"]
    commits = [record for record in records if "committed_at_s" in record]
    assert len(commits) >= 2
    for record in commits:
        before_s, after_s = marks[record["event"]["step"] - 1]
        assert before_s - _SLACK_S <= zero_s + record["committed_at_s"] <= after_s + _SLACK_S
        assert record["committed_at_s"] < record["at_s"]


def test_only_an_exchange_records_a_commit(tmp_path: Path) -> None:
    evenstride.Stride(global_batch=4, trace=tmp_path).close()

    (formed, *_) = [record for record in read_records(tmp_path) if record["kind"] == "event"]
    assert formed["event"]["type"] == "FleetFormed"
    assert "committed_at_s" not in formed
    assert formed["at_s"] == pytest.approx(0.0, abs=5.0)
