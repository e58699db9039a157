"""If work cannot be distinguished from waiting, nothing is decided, and everything says so."""

from __future__ import annotations

import io
import json
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from evenstride.cli.commands.top import dashboard
from evenstride.report.analysis.live_view import view_of
from evenstride.report.analysis.run_timeline import RunTimeline
from evenstride.report.page.html_page import page_of, run_data
from evenstride.report.page.page_runs import read_run
from evenstride.testing import RankPool
from evenstride.trace.decision_replay import replay
from evenstride.trace.read import read_records
from tests.multiproc.sharded import needs_shards_on_cpu, uncounted

pytestmark = needs_shards_on_cpu

WHY = "Not measured: as on CUDA."
FINDING = "The steps were not measured: as on CUDA."


@pytest.mark.parametrize(
    ("asked", "share"),
    [({}, (4, 4)), ({"policy": "static:1,7"}, (1, 7)), ({"policy": "uniform"}, (4, 4))],
)
def test_shares_stay_and_no_time_is_reported(
    ranks: RankPool, tmp_path: Path, asked: dict[str, Any], share: tuple[int, ...]
) -> None:
    lead, follower = ranks.run(uncounted, 2, str(tmp_path), asked)

    for reported in (lead, follower):
        assert set(reported["shares"]) == {share}
        assert WHY in reported["text"]
        assert "wait" not in reported["text"].partition(WHY)[2]
    assert lead["summary"]["step_s"] is None
    assert lead["summary"]["speedup_model"] is None
    events = [one["event"] for one in read_records(tmp_path) if one["kind"] == "event"]
    assert [one["reason"] for one in events if one["type"] == "NotMeasured"] == ["as on CUDA"]
    assert not any(one.get("observations") for one in events)
    assert replay(tmp_path).identical


def test_top_and_report_say_so(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(uncounted, 2, str(tmp_path), {})
    story = RunTimeline(tmp_path)
    story.read()
    view = view_of(story, time.time())
    assert view is not None
    console = Console(width=100, record=True, file=io.StringIO())

    console.print(dashboard(view, console, live=False))
    run = read_run(tmp_path, "run", 1)
    shown, page = " ".join(console.export_text().split()), page_of([run])

    assert FINDING in shown
    assert "others waited" not in shown
    assert "efficiency" not in shown
    assert view.to_dict()["totals"]["waiting_part"] is None
    assert FINDING in page
    assert "No worker made the others wait" not in page
    assert json.dumps(run_data(run))
    assert run_data(run)["not_measured"] == "as on CUDA"


@pytest.mark.parametrize("policy", ["adaptive", "dynamic-batching"])
def test_a_policy_that_is_asked_for_and_needs_times_is_refused(
    ranks: RankPool, tmp_path: Path, policy: str
) -> None:
    for reported in ranks.run(uncounted, 2, str(tmp_path), {"policy": policy}):
        assert f"policy '{policy}' needs measured times" in reported["error"]
        assert "Leave the policy out" in reported["error"]
