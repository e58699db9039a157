"""A run put together from its trace: against what was really run, and against its own summary."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from evenstride.core.time_model.observation import PeakMemory
from evenstride.errors import TraceError
from evenstride.report.analysis.attribution import totals_of
from evenstride.report.analysis.run_generation import spans_s
from evenstride.report.analysis.run_timeline import RunTimeline
from tests.messages import check_message, raises_message
from tests.unit.report.virtual import COMMUNICATION_S, VirtualRun


def slowing(step: int) -> tuple[float, ...]:
    """The last worker has half its speed from step 60 on."""
    return (1.0, 1.0, 0.5 if step >= 60 else 1.0)


@pytest.fixture
def run(tmp_path: Path) -> VirtualRun:
    run = VirtualRun(tmp_path / "trace.jsonl", slowing, noise=0.02)
    run.begin()
    run.run(120)
    return run


def test_times_and_shares_of_all_steps_are_those_that_were_measured(run: VirtualRun) -> None:
    run.end()
    story = RunTimeline(run.writer.path)

    assert story.read()
    assert not story.read()
    (generation,) = story.generations
    np.testing.assert_allclose(generation.table.busy_s, run.busy_s, atol=1e-7)
    shares = [run.shares_at(step) for step in range(120)]
    assert generation.table.share.tolist() == [list(split) for split in shares]
    assert generation.table.whole.all()
    assert story.ended
    assert story.unread == ()


def test_a_growing_trace_is_read_on_from_where_it_was(run: VirtualRun) -> None:
    story = RunTimeline(run.writer.path)
    story.read()
    before = story.ended, story.generations[0].steps
    run.run(50)
    run.end()

    assert story.read()
    after = story.ended, story.generations[0].steps
    assert (before, after) == ((False, 120), (True, 170))

    whole = RunTimeline(run.writer.path)
    whole.read()
    assert totals_of(whole.generations) == totals_of(story.generations)
    assert whole.generations[0].decisions == story.generations[0].decisions


def test_what_other_splits_would_have_taken_is_reported(run: VirtualRun) -> None:
    """Equal speeds up to step 60; then the equal split takes twice as long as before."""
    run.end()
    story = RunTimeline(run.writer.path)
    story.read()
    totals = totals_of(story.generations)
    busy_s = np.array(run.busy_s)
    took_s = float(busy_s.max(axis=1).sum()) + 120 * COMMUNICATION_S

    assert totals.took_s == pytest.approx(took_s, rel=1e-4)
    assert totals.judged_steps > 110
    assert totals.speedup_model is not None
    assert totals.efficiency_model is not None
    assert 1.1 < totals.speedup_model < 1.4
    assert 0.9 < totals.efficiency_model <= 1.0
    assert totals.saved_s == pytest.approx(totals.judged_s * (totals.speedup_model - 1.0))
    assert totals.communication_s == pytest.approx(120 * COMMUNICATION_S, rel=1e-3)


def test_steps_lie_on_the_clock_where_they_were(run: VirtualRun) -> None:
    run.run(60, apart_s=30.0)
    run.end()
    story = RunTimeline(run.writer.path)
    story.read()
    begins_s, ends_s = spans_s(story.generations[0])
    truth_s = np.array(run.busy_s).max(axis=1) + COMMUNICATION_S
    truth_ends_s = 0.5 + np.cumsum(truth_s) + np.where(np.arange(180) >= 120, 30.0, 0.0)

    np.testing.assert_allclose(ends_s, truth_ends_s, atol=1e-4)
    np.testing.assert_allclose(ends_s - begins_s, truth_s, atol=1e-4)
    assert (begins_s[1:] >= ends_s[:-1]).all()


def test_a_run_that_was_continued_has_a_life_for_each_process(run: VirtualRun) -> None:
    with run.writer.path.open("ab") as file:
        file.write(b'{"kind":"event","at_s":1.0,"eve')
    again = VirtualRun(run.writer.path, lambda _: (1.0, 0.5), workers=2)
    again.begin()
    again.run(20)
    again.end()
    story = RunTimeline(run.writer.path)
    story.read()

    assert [one.steps for one in story.generations] == [120, 20]
    assert [len(one.workers) for one in story.generations] == [3, 2]
    assert [life.summary is None for life in story.lives] == [True, False]
    (sentence,) = story.unread
    check_message(sentence)


def test_a_run_behind_much_that_is_not_read_is_found(run: VirtualRun) -> None:
    """A run of a later version may have filled the file for longer than one look."""
    whole = run.writer.path.read_text()
    lines = '{"kind":"event","x":"' + "y" * (1 << 20) + '"}\n'
    run.writer.path.write_text('{"kind":"header","format":99}\n' + 17 * lines + whole)
    story = RunTimeline(run.writer.path)
    story.read()

    assert [one.steps for one in story.generations] == [120]


def test_a_trace_that_is_gone_is_an_error_and_what_was_read_stays(run: VirtualRun) -> None:
    story = RunTimeline(run.writer.path)
    story.read()
    text = run.writer.path.read_text()
    run.writer.path.unlink()
    with raises_message(TraceError):
        story.read()
    assert story.generations[0].steps == 120
    run.writer.path.write_text(text)
    story.read()

    assert [one.steps for one in story.generations] == [120]


def test_a_file_that_is_overwritten_by_a_longer_one_is_another_run(
    run: VirtualRun, tmp_path: Path
) -> None:
    story = RunTimeline(run.writer.path)
    story.read()
    other = VirtualRun(tmp_path / "other.jsonl", lambda _: (1.0, 0.5), workers=2)
    other.begin()
    other.run(500)
    longer = other.writer.path.read_bytes()
    assert len(longer) > run.writer.path.stat().st_size
    with run.writer.path.open("r+b") as file:
        file.write(longer)
    story.read()

    assert [(len(one.workers), one.steps) for one in story.generations] == [(2, 500)]
    assert story.unread == ()


def test_steps_after_the_last_exchange_are_reported(run: VirtualRun) -> None:
    run.end(step=124)
    story = RunTimeline(run.writer.path)
    story.read()

    check_message(story.unread)


def test_a_summary_of_fewer_steps_than_were_reported_lacks_none(run: VirtualRun) -> None:
    run.end(step=117)
    story = RunTimeline(run.writer.path)
    story.read()

    assert story.unread == ()


def test_steps_are_counted_from_where_the_latest_group_formed(run: VirtualRun) -> None:
    run.begin(1)
    run.run(30)
    run.end(step=151)
    story = RunTimeline(run.writer.path)
    story.read()

    assert [one.first for one in story.generations] == [0, 120]
    check_message(story.unread)


def test_workers_that_do_not_keep_step_have_no_last_step_in_common(tmp_path: Path) -> None:
    run = VirtualRun(tmp_path / "trace.jsonl", slowing, header={"sync": "asp"})
    run.begin()
    run.run(20)
    run.end(step=70)
    story = RunTimeline(run.writer.path)
    story.read()

    assert story.unread == ()


def test_a_file_that_was_replaced_is_another_run(run: VirtualRun, tmp_path: Path) -> None:
    story = RunTimeline(run.writer.path)
    story.read()
    other = VirtualRun(tmp_path / "other.jsonl", lambda _: (1.0, 0.5), workers=2)
    other.begin()
    other.run(200)
    other.writer.path.replace(run.writer.path)
    story.read()

    assert [len(one.workers) for one in story.generations] == [2]
    assert len(story.lives) == 1


def test_a_file_that_was_emptied_is_no_run_any_more(run: VirtualRun) -> None:
    run.end()
    story = RunTimeline(run.writer.path)
    story.read()
    run.writer.path.write_text("")
    story.read()

    assert story.generations == []
    assert not story.ended


def test_there_must_be_a_file(tmp_path: Path) -> None:
    with raises_message(TraceError):
        RunTimeline(tmp_path)


def test_a_notice_is_reported_with_its_reason_and_ends_comparisons(run: VirtualRun) -> None:
    """Who leaves gets no samples, so that the split of all says nothing of those who stay."""
    happening = {"worker": "host/1", "change": "notice", "why": "its host is taken away"}
    output = {"step": 120, "effective": 121, "happenings": [happening], "save_s": None}
    run.writer.record("event", at_s=run.clock_s, event={"type": "MembersChanged", **output})
    run.run(40)
    run.end()
    story = RunTimeline(run.writer.path)
    story.read()
    (generation,) = story.generations

    check_message([one.text for one in generation.incidents])
    assert story.unread == ()
    assert generation.standing == ("serving", "leaving", "serving")
    assert generation.judged[60:120].all()
    assert not generation.judged[120:].any()


def test_another_batch_is_a_part_of_its_own_with_the_same_workers(run: VirtualRun) -> None:
    run.turn(48)
    run.run(60)
    run.end()
    story = RunTimeline(run.writer.path)
    story.read()

    before, after = story.generations
    assert (before.global_batch, after.global_batch) == (96, 48)
    assert (before.met, after.met) == (True, False)
    assert before.workers == after.workers and before.number == after.number
    assert (before.steps, after.first, after.steps) == (120, 120, 60)
    np.testing.assert_allclose(after.table.busy_s, run.busy_s[120:], atol=1e-7)
    assert (after.table.share.sum(axis=1) == 48).all()
    assert after.judged[5:].all(), "steps are compared with other splits of their own batch"
    assert "global batch 96 -> 48" in after.incidents[0].text
    assert totals_of(story.generations).steps == 180


def test_the_equal_split_is_that_of_the_forming_whatever_memory_shows_later(
    tmp_path: Path,
) -> None:
    """Caps that are learned bound the best split, as in the run itself, and not the equal one."""
    fraction = {"memory_fraction": 0.9}
    run = VirtualRun(tmp_path / "trace.jsonl", lambda _: (1.0, 0.2), workers=2, header=fraction)
    run.begin()
    run.held = (
        PeakMemory(0, 32, 4 << 30, 4 << 30),
        PeakMemory(1, 32, 1 << 30, 64 << 30),
    )  # room for 28
    run.run(120)
    run.end()
    story = RunTimeline(run.writer.path)
    story.read()

    (generation,) = story.generations
    equal_s = np.nanmedian(generation.equal_s)
    assert equal_s == pytest.approx((0.002 + 0.001 * 48) / 0.2, rel=0.05)
