"""What a run came to, against what was made up."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from evenstride.core.allocation.speedup import SplitReference
from evenstride.core.fleet import Fleet, Worker
from evenstride.core.time_model.estimates import TimeModel
from evenstride.core.time_model.observation import Measurements, Observation
from evenstride.report.analysis.attribution import totals_of
from evenstride.report.analysis.run_generation import RecordedGeneration, StepTable
from evenstride.report.analysis.run_timeline import RunTimeline
from tests.unit.report.virtual import VirtualRun


@pytest.fixture
def run(tmp_path: Path) -> VirtualRun:
    run = VirtualRun(tmp_path / "trace.jsonl", lambda _: (1.0, 0.8, 0.5), policy="uniform")
    run.begin()
    run.run(40)
    return run


def read(run: VirtualRun) -> RunTimeline:
    story = RunTimeline(run.writer.path)
    story.read()
    return story


def test_an_evaluation_that_all_wait_for_counts_once(run: VirtualRun) -> None:
    run.run(20, apart_s=30.0)
    run.end()

    assert totals_of(read(run).generations).apart_s == pytest.approx(30.0)


def test_samples_of_steps_that_not_all_have_reported_count_as_far_as_they_did(
    run: VirtualRun,
) -> None:
    run.end()
    lines = run.writer.path.read_text().splitlines()
    place = max(n for n, line in enumerate(lines) if '"observations"' in line)
    record = json.loads(lines[place])
    withheld = record["event"]["observations"].pop()
    lines[place] = json.dumps(record)
    run.writer.path.write_text("\n".join(lines) + "\n")

    totals = totals_of(read(run).generations)

    missing = len(withheld["busy_s"]) * withheld["share"]
    assert missing > 0
    assert totals.samples == 40 * 96 - missing


def test_steps_that_a_worker_tells_of_late_are_compared_then() -> None:
    slopes = (0.001, 0.002)
    times = TimeModel.affine([0.0, 0.0], list(slopes))
    fleet = Fleet((Worker("a/0"), Worker("a/1")), 12)
    comparison = SplitReference.of(times, fleet, (6, 6))
    one = RecordedGeneration(0, 0, 12, ("a/0", "a/1"), StepTable(0, 2))

    for rank, judged in ((0, 0), (1, 50)):
        busy_s = (6 * slopes[rank],) * 50
        one.table.add(Measurements.of([Observation(rank, 6, 0, busy_s, (0.0,) * 50)]))
        one.judge(comparison)
        assert one.judged.sum() == judged

    np.testing.assert_allclose(one.best_s, 0.008)
    np.testing.assert_allclose(one.equal_s, 0.012)
