"""Workers that got a notice: its record, and which steps are compared."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from evenstride.core.control.events import MembersChanged
from evenstride.core.membership.member_table import Happening, MembershipEvent
from evenstride.report.analysis.run_timeline import RunTimeline
from tests.messages import check_message
from tests.unit.report.virtual import VirtualRun


def test_steps_without_all_workers_are_compared_with_no_other_split(tmp_path: Path) -> None:
    """Such a split leaves a worker out, and the equal one does not."""
    run = VirtualRun(tmp_path / "trace.jsonl", lambda _: (1.0, 0.8, 0.5))
    run.begin()
    run.run(60)
    notice = Happening("host/2", MembershipEvent.NOTICE, left_s=0.5, why="a signal to this process")
    run.put(MembersChanged(run.step, run.step + 1, (notice,), 0.0))
    run.run(40)
    run.end()
    story = RunTimeline(run.writer.path)
    story.read()

    (generation,) = story.generations
    check_message([one.text for one in generation.incidents])
    without = np.flatnonzero((generation.table.share == 0).any(axis=1))
    assert len(without) > 20
    assert generation.standing[2] != "serving"
    assert generation.judged[10:60].all()
    assert not generation.judged[without].any()
    assert story.unread == ()
