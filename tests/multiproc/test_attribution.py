"""Who made the others wait, since when and for how long: against the ranks' own moments."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from benchmarks.attribution import Case, caused_by, run

from evenstride.report.analysis.attribution import blames_of
from evenstride.report.analysis.run_timeline import RunTimeline


@pytest.mark.alone
@pytest.mark.timeout(360)  # eight times as long as it takes on a machine of its own
def test_a_worker_that_is_slowed_down_is_named_with_its_steps_and_seconds(tmp_path: Path) -> None:
    """Truth and report come from the same steps, so whatever else the machine does is in both."""
    case = Case((0.5, 0.5), rank=1, speed=0.15, first=20, last=59, steps=160)

    (row,) = run(case, ("uniform",), tmp_path)

    assert row.named == row.caused_most, "other processes may have slowed down the other worker"
    assert row.error < 0.15, "seconds by worker, as a part of all seconds"
    (trace,) = tmp_path.rglob("trace.jsonl")
    story = RunTimeline(trace.parent)
    story.read()
    (generation,) = story.generations
    longest = next(one for one in blames_of(generation) if one.rank == 1).stretches[0]
    inside = slice(longest.first, longest.last + 1)
    caused_s = caused_by(trace.parent, generation.steps)
    own_s = caused_s[:, 1]
    assert abs(own_s[inside].sum() - longest.caused_s) < 0.15 * caused_s.sum()
    assert own_s[inside].mean() > 2.0 * np.delete(own_s, inside).mean(), "the steps are apart"
    assert own_s[inside].sum() > own_s[case.first : case.last + 1].sum() / 3
