"""A run as trace events: steps, waiting and decisions are where and as long as they were."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from evenstride.core.control.events import Exchanged, FleetFormed
from evenstride.core.fleet import Worker
from evenstride.core.time_model.observation import Measurements, Observation
from evenstride.errors import ConfigError, TraceError
from evenstride.report.analysis.run_generation import waits_of
from evenstride.report.analysis.run_timeline import RunTimeline
from evenstride.report.perfetto.chrome_trace import Steps, export
from evenstride.report.perfetto.event_writer import EventFile, ThreadTrack
from evenstride.report.perfetto.run_events import BASE_S
from evenstride.trace.codec import TraceWriter
from tests.messages import check_message, raises_message
from tests.unit.report.perfetto.events import Events, read_events
from tests.unit.report.virtual import COMMUNICATION_S, VirtualRun

STARTED_S = 1.7e9
BASE_US = STARTED_S // BASE_S * BASE_S * 1e6
LEADER = "evenstride: the leader"


def slowing(step: int) -> tuple[float, ...]:
    """The last worker has half its speed from step 60 on."""
    return (1.0, 1.0, 0.5 if step >= 60 else 1.0)


def made(tmp_path: Path, **options: Any) -> VirtualRun:
    return VirtualRun(tmp_path / "trace.jsonl", slowing, **{"noise": 0.02, **options})


@pytest.fixture
def run(tmp_path: Path) -> VirtualRun:
    run = made(tmp_path)
    run.begin()
    run.run(120)
    return run


def exported(run: VirtualRun, **options: Any) -> Events:
    path = run.writer.path.with_name("out.json")
    export(run.writer.path, path, **options)
    return read_events(path)


def ends_s(run: VirtualRun) -> np.ndarray:
    """Return when steps ended, on the run's clock."""
    took_s = np.array(run.busy_s).max(axis=1) + COMMUNICATION_S
    return np.asarray(0.5 + np.cumsum(took_s))


def test_each_worker_has_its_tracks_below_the_leader(run: VirtualRun) -> None:
    events = exported(run)

    workers = [f"worker {rank} (host/{rank})" for rank in range(3)]
    assert list(events.groups) == [LEADER, *workers]
    for worker in workers:
        assert {track for group, track in events.tracks if group == worker} == {
            "step",
            "work",
            "waiting",
        }


def test_steps_are_where_they_were_on_the_clock_of_the_profiler(run: VirtualRun) -> None:
    events = exported(run)
    truth_us = (STARTED_S + ends_s(run)) * 1e6 - BASE_US

    assert events.head["baseTimeNanoseconds"] == BASE_US * 1000
    for rank in range(3):
        steps = events.slices(f"worker {rank} (host/{rank})", "step")
        assert [e["name"] for e in steps] == [f"step {n}" for n in range(120)]
        assert [e["args"]["samples"] for e in steps] == [
            run.shares_at(step)[rank] for step in range(120)
        ]
        np.testing.assert_allclose([e["ts"] + e["dur"] for e in steps], truth_us, rtol=0, atol=60)


def test_a_header_that_was_written_later_than_the_clock_began_says_so(tmp_path: Path) -> None:
    late = made(tmp_path, header={"at_s": 7.25})
    late.begin()
    late.run(20)
    (first, *_) = exported(late).slices("worker 0 (host/0)", "step")

    ended_s = (first["ts"] + first["dur"] + BASE_US) / 1e6
    assert ended_s == pytest.approx(STARTED_S - 7.25 + ends_s(late)[0], abs=1e-3)


def test_work_and_waiting_are_as_long_as_they_were(run: VirtualRun) -> None:
    events = exported(run)
    story = RunTimeline(run.writer.path)
    story.read()
    waits = waits_of(story.generations[0])
    busy_s = np.array(run.busy_s)

    for rank in range(3):
        name = f"worker {rank} (host/{rank})"
        worked_s = events.lasted_s(name, "work", "compute") + events.lasted_s(name, "work", "data")
        assert worked_s == pytest.approx(busy_s[:, rank].sum(), rel=1e-3)
        waited_s = sum(
            events.lasted_s(name, "waiting", f"for worker {other}") for other in range(3)
        )
        assert waited_s == pytest.approx(waits.waited_s[:, rank].sum(), rel=2e-3)
        assert events.lasted_s(name, "waiting", f"for worker {rank}") == 0
        sent_s = events.lasted_s(name, "waiting", "communication")
        assert sent_s == pytest.approx(120 * COMMUNICATION_S, rel=0.01)


def test_evaluation_lies_before_the_step_that_came_after_it(run: VirtualRun) -> None:
    run.run(20, apart_s=30.0)
    events = exported(run)

    (apart,) = [
        e for e in events.slices("worker 1 (host/1)", "waiting") if e["name"].startswith("evalu")
    ]
    steps = events.slices("worker 1 (host/1)", "step")
    assert apart["dur"] == pytest.approx(30e6, rel=1e-3)
    assert apart["ts"] + apart["dur"] == pytest.approx(steps[120]["ts"], abs=1)


def test_time_between_two_passes_lies_before_the_first_step_of_the_second(tmp_path: Path) -> None:
    """No step's times hold it; an exchange tells only when all ten steps were done."""
    busy_s, wait_s = (0.9,) * 4, (0.1,) * 4
    passes = [Observation(0, 8, n, busy_s[:1], wait_s[:1], modelled=False) for n in (0, 5)]
    rests = [Observation(0, 8, n, busy_s, wait_s) for n in (1, 6)]
    with TraceWriter(
        tmp_path / "trace.jsonl", {"policy": "uniform", "started_unix_s": 0}
    ) as writer:
        writer.event(0.0, FleetFormed(0, 0, 8, (Worker("a"),)), ())
        writer.event(17.5, Exchanged(10, 11, Measurements.of([*passes, *rests])), (), 17.0)
    export(tmp_path, tmp_path / "out.json")
    events = read_events(tmp_path / "out.json")

    begins_s = [e["ts"] / 1e6 for e in events.slices("worker 0 (a)", "step")]
    assert begins_s == pytest.approx([3.5, 4.5, 5.5, 6.5, 7.5, 12.0, 13.0, 14.0, 15.0, 16.0])
    (apart,) = [e for e in events.slices("worker 0 (a)", "waiting") if e["name"].startswith("eva")]
    assert (apart["ts"], apart["dur"]) == (8.5e6, 3.5e6)


def test_counters_tell_shares_speed_and_memory(run: VirtualRun) -> None:
    events = exported(run)
    last = "worker 2 (host/2)"
    steps = events.slices(last, "step")

    at = {e["ts"]: e["args"]["samples"] for e in steps}
    shares = events.counter(last, "share (samples)")
    assert all(at[ts] == value for ts, value in shares)
    assert len(shares) == 1 + np.count_nonzero(np.diff([e["args"]["samples"] for e in steps]))
    speeds = events.counter(last, "speed (part of its best)")
    before = [value for ts, value in speeds if ts < steps[60]["ts"]]
    after = [value for ts, value in speeds if ts >= steps[60]["ts"]]
    assert np.median(before) == pytest.approx(1.0, abs=0.05)
    assert np.median(after) == pytest.approx(0.5, abs=0.05)
    assert {value for _, value in events.counter(last, "memory, peak (MiB)")} == {1024.0}


def test_decisions_have_their_reasons_and_alerts_are_reported(run: VirtualRun) -> None:
    note = {"alert": "slow", "worker": "host/2", "step": 90, "reason": "half its speed"}
    run.writer.record("alert", at_s=run.clock_s, **note)
    story = RunTimeline(run.writer.path)
    story.read()
    events = exported(run)
    output = events.instants(LEADER, "decisions")

    assert [e["args"]["reason"] for e in output] == [
        one.reason for one in story.generations[0].decisions
    ]
    changes = [e for e in output if e["name"] != "kept"]
    assert changes[0]["name"] == "shares 32/32/32"
    assert changes[-1]["args"]["shares"] == list(run.shares_at(119))
    (alert,) = events.instants(LEADER, "alerts and notes")
    assert (alert["name"], alert["args"]["reason"]) == ("alert: host/2", "half its speed")
    began_us = BASE_US - STARTED_S * 1e6
    assert alert["ts"] + began_us == pytest.approx(run.clock_s * 1e6, abs=10)


def test_the_epoch_is_reported_where_the_passes_are_known(run: VirtualRun) -> None:
    for step, trained in ((0, 2.0), (50, 2.9999999), (90, 4.0)):
        run.writer.record("pass", at_s=0.0, step=step, epochs=trained, samples=96 * 50)
    steps = exported(run).slices("worker 0 (host/0)", "step")

    epochs = [e["args"]["epoch"] for e in steps]
    assert epochs == [2] * 50 + [3] * 40 + [4] * 30


def continued(run: VirtualRun, started_s: float | None) -> VirtualRun:
    again = VirtualRun(
        run.writer.path, lambda _: (1.0, 0.5), workers=2, header={"started_unix_s": started_s}
    )
    again.begin()
    again.run(20)
    return again


def test_processes_follow_each_other_on_the_clock(run: VirtualRun) -> None:
    again = continued(run, STARTED_S + 1000.0)
    events = exported(run)
    steps = events.slices("worker 0 (host/0)", "step")

    assert [e["name"] for e in steps[118:122]] == ["step 118", "step 119", "step 0", "step 1"]
    ended_s = (steps[120]["ts"] + steps[120]["dur"] + BASE_US) / 1e6
    assert ended_s == pytest.approx(STARTED_S + 1000 + ends_s(again)[0], abs=1e-3)
    assert len(events.slices("worker 2 (host/2)", "step")) == 120


@pytest.mark.parametrize("started_s", [STARTED_S - 3600.0, None, 1e30])
def test_a_process_whose_clock_is_wrong_is_shown_behind_the_one_before(
    run: VirtualRun, started_s: float | None
) -> None:
    continued(run, started_s)
    path = run.writer.path.with_name("out.json")
    output = export(run.writer.path, path)
    steps = read_events(path).slices("worker 0 (host/0)", "step")

    assert len(steps) == 140
    assert steps[120]["ts"] == pytest.approx(steps[119]["ts"] + steps[119]["dur"], abs=1)
    (sentence,) = output.remarks
    check_message(sentence, "process 2")


def test_groups_that_formed_again_follow_each_other_and_notes_are_reported_once(
    run: VirtualRun,
) -> None:
    run.writer.record("alert", at_s=1.0, worker="host/2")
    run.clock_s -= 2.0  # the last exchange of a group that broke up may be recorded late
    run.begin(generation=1)
    run.run(20)
    events = exported(run)

    steps = events.slices("worker 0 (host/0)", "step")
    assert [e["args"]["step"] for e in steps] == list(range(140))
    assert steps[120]["ts"] >= steps[119]["ts"] + steps[119]["dur"]
    assert len(events.instants(LEADER, "alerts and notes")) == 1


def test_workers_that_do_not_keep_step_wait_for_no_other(tmp_path: Path) -> None:
    free = made(tmp_path, header={"sync": "asp"})
    free.begin()
    free.run(30)
    events = exported(free)

    names = {e["name"] for e in events.slices("worker 0 (host/0)", "waiting")}
    assert names == {"waiting"}


def test_a_worker_that_has_not_reported_a_step_has_none(run: VirtualRun) -> None:
    """The others' waits have no known cause then."""
    lines = run.writer.path.read_text().splitlines()
    at = max(n for n, line in enumerate(lines) if '"Exchanged"' in line)
    record = json.loads(lines[at])
    output = record["event"]["observations"]
    record["event"]["observations"] = [one for one in output if one["worker"] != 2]
    run.writer.path.write_text("\n".join([*lines[:at], json.dumps(record)]) + "\n")
    events = exported(run)

    missing = sum(len(one["busy_s"]) for one in output if one["worker"] == 2)
    assert missing > 0
    assert len(events.slices("worker 2 (host/2)", "step")) == 120 - missing
    assert len(events.slices("worker 0 (host/0)", "step")) == 120
    waits = [e["name"] for e in events.slices("worker 0 (host/0)", "waiting")]
    assert waits[-missing:] == ["waiting"] * missing


def test_only_the_steps_that_were_asked_for_are_shown(run: VirtualRun) -> None:
    whole, cut = exported(run), exported(run, steps=Steps(50, 70))
    name = "worker 2 (host/2)"

    assert cut.slices(name, "step") == whole.slices(name, "step")[50:70]
    begin, end = cut.slices(name, "step")[0], cut.slices(name, "step")[-1]
    for event in cut.all:
        if event["ph"] != "M":
            assert begin["ts"] <= event["ts"] <= end["ts"] + end["dur"], event
    assert cut.instants(LEADER, "decisions")


def test_missing_steps_are_refused_with_the_available_ones(run: VirtualRun) -> None:
    with raises_message(ConfigError, "500:600", "0:120"):
        exported(run, steps=Steps(500, 600))


HOSTILE = '"><script>alert(1)</script>\x1b[31m\u202e\n{0}/'


def test_hostile_names_are_only_text(tmp_path: Path) -> None:
    bad = made(tmp_path, names=lambda rank: HOSTILE + str(rank))
    bad.begin()
    bad.run(20)
    note = {"kind": "alert\x07", "at_s": 1.0, "worker": HOSTILE, "deep": [{HOSTILE: HOSTILE}]}
    with bad.writer.path.open("a") as file:
        file.write(json.dumps(note)[:-1] + ', "more": 1e999, "no": NaN}\n')
    events = exported(bad)

    text = bad.writer.path.with_name("out.json").read_text()
    assert "\x1b" not in text and "\\u001b" not in text and "\u202e" not in text
    assert not any(ord(c) < 32 and c != "\n" for c in text)
    assert [name for name in events.groups if "<script>" in name] == list(events.groups)[1:]


def test_a_torn_trace_is_exported_as_far_as_it_goes(run: VirtualRun) -> None:
    data = run.writer.path.read_bytes()
    run.writer.path.write_bytes(data[: len(data) // 2])
    path = run.writer.path.with_name("out.json")
    output = export(run.writer.path, path)

    assert 10 < len(read_events(path).slices("worker 0 (host/0)", "step")) < 110
    assert any("incomplete" in remark for remark in output.remarks)


def test_what_a_later_version_wrote_is_reported_and_left_out(run: VirtualRun) -> None:
    run.writer.record("header", format=99)
    run.writer.record("event", at_s=1.0, event={"type": "Weather"})
    path = run.writer.path.with_name("out.json")
    output = export(run.writer.path, path)

    assert output.steps == 120
    assert any("format '99'" in remark for remark in output.remarks)


@pytest.mark.parametrize("content", ["", "hello\nworld\n", '{"kind":"header","format":99}\n'])
def test_a_file_without_a_run_is_refused_and_nothing_is_written(
    tmp_path: Path, content: str
) -> None:
    (tmp_path / "trace.jsonl").write_text(content)

    with raises_message(TraceError):
        export(tmp_path, tmp_path / "out.json")
    assert [one.name for one in tmp_path.iterdir()] == ["trace.jsonl"]


def test_an_input_file_is_not_overwritten(run: VirtualRun) -> None:
    before = run.writer.path.read_bytes()

    with raises_message(ConfigError):
        export(run.writer.path.parent, run.writer.path)
    assert run.writer.path.read_bytes() == before


def test_a_file_that_cannot_be_written_is_reported(run: VirtualRun, tmp_path: Path) -> None:
    with raises_message(ConfigError):
        export(run.writer.path, tmp_path / "nowhere" / "out.json")


def test_compressed_is_the_same(run: VirtualRun, tmp_path: Path) -> None:
    export(run.writer.path, tmp_path / "a.json")
    export(run.writer.path, tmp_path / "a.json.gz")

    assert read_events(tmp_path / "a.json").all == read_events(tmp_path / "a.json.gz").all
    size = (tmp_path / "a.json").stat().st_size
    assert (tmp_path / "a.json.gz").stat().st_size < 0.3 * size


def test_an_error_leaves_the_file_that_was_there(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    path.write_text("before")
    file = EventFile(path, 0, {})
    file.counter(1, "x", 0, 1.0)
    file.__exit__(RuntimeError, RuntimeError(), None)

    assert path.read_text() == "before"
    assert [one.name for one in tmp_path.iterdir()] == ["out.json"]


def test_nothing_that_was_written_is_kept(tmp_path: Path) -> None:
    with EventFile(tmp_path / "out.json", 0, {}) as file:
        tracemalloc.start()
        try:
            for number in range(50_000):
                at_ns = number * 1000
                file.slice(
                    ThreadTrack(1, 1), f"step {number}", at_ns, at_ns + 1000, {"step": number}
                )
            most = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    assert (tmp_path / "out.json").stat().st_size > 4_000_000
    assert most < 1_000_000
