"""How a run stands, as `evenstride top` shows it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from evenstride.report.analysis.live_view import View, view_of
from evenstride.report.analysis.run_timeline import RunTimeline
from tests.messages import check_message
from tests.unit.report.virtual import COMMUNICATION_S, FIXED_S, PER_SAMPLE_S, VirtualRun


def viewed(run: VirtualRun, now_unix_s: float = 1.7e9 + 100.0) -> View:
    story = RunTimeline(run.writer.path)
    story.read()
    view = view_of(story, now_unix_s)
    assert view is not None
    return view


@pytest.fixture
def uniform(tmp_path: Path) -> VirtualRun:
    run = VirtualRun(
        tmp_path / "u.jsonl",
        lambda step: (1.0, 0.4 if step >= 100 else 1.0),
        workers=2,
        policy="uniform",
        batch=100,
    )
    run.begin()
    run.run(160)
    return run


def test_each_worker_has_its_times_and_its_speed(uniform: VirtualRun) -> None:
    view = viewed(uniform)
    fast, slow = view.workers
    alone_s = FIXED_S + 50 * PER_SAMPLE_S

    assert (fast.share, slow.share) == (50, 50)
    assert fast.busy_s == pytest.approx(alone_s, abs=1e-6)
    assert slow.busy_s == pytest.approx(alone_s / 0.4, abs=1e-6)
    assert fast.wait_s == pytest.approx(1.5 * alone_s + COMMUNICATION_S, abs=1e-6)
    assert (fast.speed, fast.since) == (1.0, None)
    assert slow.speed == pytest.approx(0.4, rel=0.01)
    assert slow.since == 100
    assert slow.caused_s == pytest.approx(60 * 1.5 * alone_s, rel=1e-3)
    assert (slow.peak_bytes, slow.limit_bytes) == (1 << 30, 4 << 30)
    assert "since step 100" in view.blames[0]


@pytest.mark.parametrize(("sync", "text"), [("bsp", 1), ("asp", 0)])
def test_a_slow_worker_is_named_even_if_balancing_hides_it(
    tmp_path: Path, sync: str, text: int
) -> None:
    run = VirtualRun(
        tmp_path / "a.jsonl",
        lambda step: (1.0, 0.4 if step >= 200 else 1.0, 1.0),
        header={"sync": sync},
    )
    run.begin()
    run.run(1000)
    blames = viewed(run).blames

    assert len(blames) == text
    check_message(blames, *(["worker 1", "0.40"] if text else []))


def test_it_says_when_it_was_heard_of_and_whether_it_ended(uniform: VirtualRun) -> None:
    assert viewed(uniform, 1.7e9 + uniform.clock_s + 7.0).heard_s == pytest.approx(7.0, abs=1e-3)
    assert not viewed(uniform).ended
    uniform.end()
    assert viewed(uniform).ended


def test_a_process_whose_workers_have_not_met_was_heard_of_with_its_header(
    uniform: VirtualRun,
) -> None:
    """Its clock is not that of the process before, which had run for some time."""
    again = VirtualRun(
        uniform.writer.path,
        lambda _: (1.0, 1.0),
        workers=2,
        header={"started_unix_s": 1.7e9 + 5000.0, "at_s": 3.0},
    )
    again.writer.close()

    assert uniform.clock_s > 1.0
    assert viewed(uniform, 1.7e9 + 5020.0).heard_s == pytest.approx(20.0, abs=1e-6)


@pytest.mark.parametrize(("field", "value"), [("step", float("inf")), ("epochs", 10**400)])
def test_a_pass_that_cannot_be_has_no_epoch(uniform: VirtualRun, field: str, value: float) -> None:
    text = {"step": 0, "epochs": 0.0, "samples": 12_000, field: value}
    with uniform.writer.path.open("a") as file:
        file.write(json.dumps({"kind": "pass", "at_s": 1.0, **text}) + "\n")

    assert viewed(uniform).epoch is None


def test_it_counts_epochs_from_the_latest_pass(uniform: VirtualRun) -> None:
    uniform.writer.record("pass", at_s=1.0, step=0, epochs=0.0, samples=12_000)
    assert viewed(uniform).epoch == 1.0
    uniform.writer.record("pass", at_s=2.0, step=120, epochs=1.0, samples=12_000)
    assert viewed(uniform).epoch == pytest.approx(1.0 + 40 * 100 / 12_000)
    assert viewed(uniform).step == 160


def test_a_pass_that_has_begun_beyond_what_was_reported_does_not_count_yet(
    uniform: VirtualRun,
) -> None:
    uniform.writer.record("pass", at_s=1.0, step=100, epochs=3.0, samples=6_000)
    uniform.writer.record("pass", at_s=2.0, step=170, epochs=4.0, samples=6_000)

    assert viewed(uniform).epoch == 4.0


def test_an_epoch_that_was_begun_before_ends_where_it_should(uniform: VirtualRun) -> None:
    uniform.writer.record("pass", at_s=1.0, step=150, epochs=2.3, samples=1_200)
    assert viewed(uniform).epoch == 3.0


def test_epochs_are_of_the_batch_of_their_pass(uniform: VirtualRun) -> None:
    batch = {"global_batch": 50}
    uniform.writer.record("pass", at_s=1.0, step=120, epochs=1.0, samples=12_000, **batch)
    assert viewed(uniform).epoch == pytest.approx(1.0 + 40 * 50 / 12_000)


def test_a_batch_decided_at_the_last_step_hides_no_worker(uniform: VirtualRun) -> None:
    before = viewed(uniform)
    uniform.turn(200)
    after = viewed(uniform)

    assert (before.global_batch, after.global_batch) == (100, 200)
    assert [one.caused_s for one in after.workers] == [one.caused_s for one in before.workers]
    assert [one.busy_s for one in after.workers] == [one.busy_s for one in before.workers]
    assert after.step_s == before.step_s
    assert after.blames == before.blames


def test_waits_count_since_the_workers_met_whatever_the_batch(uniform: VirtualRun) -> None:
    before = viewed(uniform).workers[1].caused_s
    uniform.turn(200)
    uniform.run(20)
    alone_s = FIXED_S + 100 * PER_SAMPLE_S

    assert viewed(uniform).workers[1].caused_s == pytest.approx(before + 20 * 1.5 * alone_s)
    assert [one.share for one in viewed(uniform).workers] == [100, 100]


def test_no_view_exists_before_the_first_group(tmp_path: Path) -> None:
    run = VirtualRun(tmp_path / "trace.jsonl", lambda _: (1.0,), workers=1)
    story = RunTimeline(run.writer.path)
    story.read()

    assert view_of(story, 0.0) is None


def test_names_and_notes_cannot_steer_a_terminal(tmp_path: Path) -> None:
    evil = "\x1b[2Jhost\u202e/{}"
    run = VirtualRun(tmp_path / "t.jsonl", lambda _: (1.0, 0.5), workers=2, names=evil.format)
    run.begin()
    run.run(30)
    run.writer.record("alert", at_s=1.0, reason="look\x07 here\x9b31m")
    text = json.dumps(viewed(run).to_dict(), ensure_ascii=False)

    assert not any(bad in text for bad in ("\x1b", "\u202e", "\x07", "\x9b", "\\u001b"))
    assert "look\ufffd here" in text
