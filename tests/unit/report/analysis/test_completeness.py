"""A run's own summary compared with its trace."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from evenstride.report.analysis.run_timeline import RunTimeline
from tests.messages import check_message
from tests.unit.report.virtual import VirtualRun

HOW = "records are missing or were changed"


def summary(run: VirtualRun) -> dict[str, Any]:
    """Return what a run's own summary has of its workers, from the times as they were made."""
    busy_s = np.array(run.busy_s)
    waits_s = busy_s.max(axis=1)[:, np.newaxis] - busy_s
    caused_s = np.zeros_like(busy_s)
    caused_s[np.arange(len(busy_s)), busy_s.argmax(axis=1)] = waits_s.sum(axis=1)
    sums = {"busy_s": busy_s, "waited_s": waits_s, "caused_s": caused_s}
    return {
        "step": len(busy_s),
        "workers": [
            {name: float(of[:, rank].sum()) for name, of in sums.items()}
            for rank in range(busy_s.shape[1])
        ],
    }


@pytest.fixture
def run(tmp_path: Path) -> VirtualRun:
    run = VirtualRun(tmp_path / "trace.jsonl", lambda _: (1.0, 0.5), workers=2, policy="uniform")
    run.begin()
    run.run(60)
    return run


def unread(run: VirtualRun) -> tuple[str, ...]:
    story = RunTimeline(run.writer.path)
    story.read()
    return story.unread


def test_a_complete_trace_has_no_remark(run: VirtualRun) -> None:
    run.end(**summary(run))

    assert unread(run) == ()


@pytest.mark.parametrize("name", ["busy_s", "waited_s", "caused_s"])
@pytest.mark.parametrize(("factor", "output"), [(1.04, False), (1.06, True), (0.94, True)])
def test_sums_that_differ_by_more_than_a_twentieth_are_reported(
    run: VirtualRun, name: str, factor: float, output: bool
) -> None:
    own = summary(run)
    rank = 0 if name == "waited_s" else 1
    own["workers"][rank][name] *= factor
    run.end(**own)

    assert [HOW in one for one in unread(run)] == [True] * output
    assert all(f"worker {rank} (host/{rank})" in one for one in unread(run))


def test_both_figures_and_the_number_of_others_are_reported(run: VirtualRun) -> None:
    """A slow step in the middle of a sound line, as no other check sees."""
    run.end(**summary(run))
    text = run.writer.path.read_text()
    slow_s = round(run.busy_s[30][1], 7)
    assert str(slow_s) in text
    run.writer.path.write_text(text.replace(f"{slow_s},", f"{slow_s / 2},"))

    check_message(unread(run), "worker 0", "3 s", "450 ms")


def test_a_difference_small_against_all_work_may_be_rounding(run: VirtualRun) -> None:
    own = summary(run)
    own["workers"][0]["caused_s"] = 1e-4
    run.end(**own)

    assert unread(run) == ()


def test_steps_that_not_all_have_reported_are_in_no_sum(run: VirtualRun) -> None:
    """As of ranks that were closed one after the other."""
    path, output = run.writer.path, summary(run)
    lines = path.read_text().splitlines()
    at, event = max((n, json.loads(line)) for n, line in enumerate(lines) if "Exchanged" in line)
    last = event["event"]["observations"][1]
    assert last["worker"] == 1
    del event["event"]["observations"][1]
    lines[at] = json.dumps(event)
    path.write_text("\n".join(lines) + "\n")
    run.busy_s = run.busy_s[: last["first_step"]]
    run.end(**{**summary(run), "step": output["step"]})

    assert len(run.busy_s) < 57
    assert unread(run) == ()


def test_workers_that_do_not_keep_step_have_own_work_to_compare_alone(tmp_path: Path) -> None:
    output = {}
    for factor in (1.0, 1.2):
        run = VirtualRun(
            tmp_path / f"{factor}.jsonl", lambda _: (1.0, 0.5), workers=2, header={"sync": "asp"}
        )
        run.begin()
        run.run(20)
        own = summary(run)
        own["workers"][1]["busy_s"] *= factor
        run.end(**own)
        output[factor] = unread(run)

    assert output[1.0] == ()
    check_message(output[1.2][0], "worker 1")
    assert len(output[1.2]) == 1


@pytest.mark.parametrize(
    "workers",
    [
        None,
        5,
        [],
        [{"busy_s": 1.0}],
        [{}, None],
        [{"busy_s": "x"}, {"busy_s": None}],
        [{"busy_s": 10**400}] * 2,
    ],
)
def test_a_summary_that_cannot_be_compared_is_left_alone(run: VirtualRun, workers: object) -> None:
    run.end(step=60, workers=workers)

    assert unread(run) == ()


def test_sums_are_over_all_batches_that_the_same_workers_trained(run: VirtualRun) -> None:
    run.turn(48)
    run.run(40)
    run.end(**summary(run))

    assert unread(run) == ()


def test_sums_are_those_of_the_last_workers_that_met(tmp_path: Path) -> None:
    """A leader restarts its sums for each group, so its summary has only those of the last."""
    run = VirtualRun(tmp_path / "trace.jsonl", lambda _: (1.0, 0.5), workers=2, policy="uniform")
    run.begin()
    run.run(60)
    run.begin(1)
    run.busy_s.clear()
    run.run(40)
    run.end(**{**summary(run), "step": 100})

    assert unread(run) == ()
