"""What the replay of a recorded trace is asked, does to processes, computes and prints; no rank."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from benchmarks import replay
from benchmarks import replay_script as script
from benchmarks.replay_script import BATCH, PER_EPOCH, SAMPLES, Segment
from benchmarks.spot_replay import SpotJob, SpotOutcome, Way
from benchmarks.spot_replay import replay as simulated
from hypothesis import given
from hypothesis import strategies as st

from evenstride.core.reliability.checkpoint_interval import Saving
from evenstride.core.sampling.permutation import Permutation
from evenstride.errors import ConfigError, LaunchError, LimitError
from evenstride.sim.scenario.spot_traces import Machines, SpotTrace, machines
from evenstride.testing import FakeClock
from evenstride.testing.faults.fault_journal import FaultJournal, ProgressFile

UPS = st.lists(st.integers(0, 4), min_size=1, max_size=30).filter(any)
SCRATCH, SLOWEST, ELASTIC = replay.ways_of(replay.WAYS, 2.0)


def window(*up: int, gap_s: float = 10.0) -> Machines:
    return machines([SpotTrace("group/zone", gap_s, np.array(up, dtype=np.int64))])


def segment(first: int, last: int, number: int = 0, restart_s: float | None = 1.0) -> Segment:
    return Segment(number, ("m0", "m1"), restart_s, first, last, "loss")


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> SpotTrace:
    """Return a recording of up to two machines, which is the only one there is."""
    trace = SpotTrace("group/zone", 300.0, np.array([0, 0, 2, 1, 2, 2], dtype=np.int64))
    monkeypatch.setattr(replay, "spot_traces", lambda _: (trace,))
    monkeypatch.setattr(replay, "usable_cpus", lambda: 1)
    return trace


def test_a_part_of_a_recording_is_cut_out_and_compressed(recorded: SpotTrace) -> None:
    given_ = replay.parse(
        ["--part", "2:5", "--tick", "1.5", "--every", "7", "--speeds", "0.5,0.25,1"]
    )

    assert given_.cut.up.tolist() == [2, 1, 2]
    assert given_.cut.gap_s == 300.0
    assert given_.window.gap_s == 1.5
    assert given_.window.who.shape == (3, 2)
    assert given_.every == 7
    assert given_.speeds == (0.5, 0.25)
    assert given_.ways == ["scratch", "slowest", "evenstride"]


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--part", "4:9"], "within 0:6"),
        (["--part", "0:2"], "machines are up"),
        (["--part", "all"], "give FIRST:LAST"),
        (["--every", "0"], "give a number of steps, or auto"),
        (["--every", "30s"], "give a number of steps, or auto"),
        (["--ways", "scratch,luck"], "no way is called 'luck'"),
        (["--tick", "0"], "must be above 0"),
        (["--steps", "-1"], "at least 0"),
        (["--speeds", "1"], "add some"),
        (["--speeds", "1,2"], "a speed of 2 cannot be"),
        (["--speeds", "1,0.5"], "sum to 1.5 cores"),
    ],
)
def test_what_cannot_be_replayed_is_refused(
    arguments: list[str], problem: str, recorded: SpotTrace, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        replay.parse(["--part", "0:6", *arguments])

    assert end.value.code == 2
    assert problem in " ".join(capsys.readouterr().err.split())


def test_several_recordings_are_refused(recorded: SpotTrace, monkeypatch: Any) -> None:
    monkeypatch.setattr(replay, "spot_traces", lambda _: (recorded, recorded))
    with pytest.raises(ConfigError, match="2 recordings; name one: group/zone"):
        replay.window_of("group", "0:6", 1.0)


def test_fixed_ways_train_on_all_machines_or_none_and_the_elastic_one_on_whoever_is_there() -> None:
    told = window(2, 1, 0)

    assert [script.members_of(told, tick, SLOWEST) for tick in range(4)] == [[0, 1], [], [], []]
    assert [script.members_of(told, tick, ELASTIC) for tick in range(3)] == [[0, 1], [1], []]


@given(UPS, st.sampled_from([SLOWEST, ELASTIC]), st.integers(1, 40))
def test_machine_seconds_are_counted_as_simulated(up: list[int], way: Way, steps: int) -> None:
    told = window(*up)
    slots = told.who.shape[1]
    job = SpotJob(steps * 8, 8, (0.5,) * slots, (0.2,) * slots, slots, 0.1, 1.0)

    (outcome,) = simulated(told, job, [way])

    assert script.held_s(told, outcome.total_s) == pytest.approx(outcome.machine_s)


def test_steps_that_a_later_segment_begins_before_were_trained_again() -> None:
    assert script.steps_again([segment(0, 17), segment(10, 10), segment(10, 30)]) == 7
    assert script.steps_again([segment(0, 17), segment(17, 30)]) == 0
    assert script.begun([segment(0, 0, restart_s=None), segment(1, 9)]) == [segment(1, 9)]


def test_the_leader_s_notes_tell_what_each_save_took(tmp_path: Path) -> None:
    notes = [{"copied_s": 0.1, "blocked_s": 0.0}, {"copied_s": 0.3, "blocked_s": 0.5}]
    (tmp_path / "saves-3-0.jsonl").write_text("".join(json.dumps(n) + "\n" for n in notes))

    assert script.saves_s_of(tmp_path, 3) == pytest.approx([0.1, 0.7])
    assert script.saves_s_of(tmp_path, 4) == []


def found(fixed_s: float, per_sample_s: float, **changed: float) -> dict[str, Any]:
    """Return what a machine finds in a calibration."""
    curve = [(size, fixed_s + per_sample_s * size) for size in script.SIZES]
    times = {"step_s": 0.5, "saving_step_s": 0.52, "saves": 4, "copied_s": 0.04}
    return {"curve": curve, **times, **changed}


def test_a_machine_s_times_are_the_line_through_what_it_took() -> None:
    fixed_s, per_sample_s = script.costs_of(
        [found(0.1, 0.02)["curve"], found(-0.01, 0.05)["curve"]]
    )

    assert fixed_s == pytest.approx([0.1, 0.0])
    assert per_sample_s == pytest.approx([0.02, 0.05])


def test_a_save_takes_what_steps_lose_by_it_and_at_least_the_copy() -> None:
    assert script.save_of([found(0, 1), found(0, 1)]) == pytest.approx(0.02 * script.STRETCH / 4)
    assert script.save_of([found(0, 1, saving_step_s=0.4)]) == pytest.approx(0.01)
    assert script.save_of([found(0, 1, saves=0)]) == 0.0


def test_the_simulated_step_of_all_machines_takes_what_was_measured() -> None:
    job = script.job_of([found(0.01, 0.004), found(0.01, 0.008)])

    assert job.step_s(np.arange(2)) == pytest.approx(0.5)
    assert job.per_sample_s == pytest.approx((0.004, 0.008))
    assert job.size == 2


def test_the_simulator_knows_the_ways() -> None:
    assert (SCRATCH.elastic, SCRATCH.saving) == (False, None)
    assert (SLOWEST.elastic, SLOWEST.memory, SLOWEST.saving) == (False, False, 2.0)
    assert (ELASTIC.elastic, ELASTIC.live, ELASTIC.saving) == (True, False, 2.0)
    assert isinstance(replay.ways_of(["evenstride"], None)[0].saving, Saving)


def outcome(way: str = "slowest", *, finished: bool = True, train_s: float = 80.0) -> SpotOutcome:
    return SpotOutcome(way, finished, 480, 96, 0, 0, 2, 5, 3, train_s, 5.0, 5.0, 10.0, 400.0)


def test_deviations_are_real_over_simulated() -> None:
    both = replay.compared(outcome(train_s=90.0), outcome())
    assert both["real"]["total_s"] == 110.0
    assert both["deviation"]["total_s"] == pytest.approx(0.1)
    assert both["deviation"]["machine_s"] == 0.0


@pytest.mark.parametrize(
    ("finished", "told"),
    [(True, "slowest    110.0, 100.0 (+10.0%)"), (False, "slowest    never (50% there), 100.0 |")],
)
def test_a_way_is_told_with_its_deviation_or_how_far_it_came(finished: bool, told: str) -> None:
    both = replay.compared(outcome(finished=finished, train_s=90.0), outcome())
    ways = [{**both, "error": 1e-12 if finished else None}]
    figures: dict[str, Any] = dict.fromkeys(("step_s", "save_s", "restart_s", "window_s"), 0.5)
    figures |= {"trace": "t", "part": "0:6", "factor": 100.0, "steps": 20, "speeds": (1, 0.5)}
    figures |= {"limits": "cgroup v1", "ways": ways}

    lines = replay.lines(figures)
    assert lines[0] == "t, ticks 0:6: 1 h in 36 s (factor 100), 0 s in all"
    assert lines[-1].startswith(told)
    assert lines[-1].endswith("weights off by 1.0e-12") == finished
    assert "96, 96 | 400, 400 | 3, 3 | 5, 5" in lines[-1]


def note(folder: Path, number: int, first: int, last: int, *, skip: int = 0) -> Segment:
    """Write down that a segment trained some steps, as two ranks would."""
    for step in range(first + 1, last + 1):
        epoch, place = divmod(step - 1, PER_EPOCH)
        ids = (
            Permutation(SAMPLES, 0, epoch)
            .at(np.arange(place * BATCH, (place + 1) * BATCH))
            .tolist()
        )
        for rank, mine in enumerate((ids[:13], ids[13 : BATCH - skip])):
            with (folder / f"audit-{number}-{rank}.jsonl").open("a") as file:
                print(json.dumps([step, mine]), file=file)
    return segment(first, last, number)


def test_each_sample_of_the_trajectory_is_trained_once_whatever_was_lost(tmp_path: Path) -> None:
    begun = [note(tmp_path, 0, 0, 8), note(tmp_path, 2, 5, 2 * PER_EPOCH)]

    script.audit(tmp_path, begun, 2 * PER_EPOCH)


@pytest.mark.parametrize(
    ("first", "last", "skip", "problem"),
    [(9, 10, 0, "not in the trajectory"), (5, 10, 1, "lacks samples"), (8, 9, 0, "trajectory")],
)
def test_gaps_are_found(first: int, last: int, skip: int, problem: str, tmp_path: Path) -> None:
    begun = [note(tmp_path, 0, 0, 8), note(tmp_path, 1, first, last, skip=skip)]

    with pytest.raises(AssertionError, match=problem):
        script.audit(tmp_path, begun, PER_EPOCH)


def test_samples_that_are_trained_twice_are_found(tmp_path: Path) -> None:
    begun = [note(tmp_path, 0, 0, PER_EPOCH)]
    note(tmp_path, 0, 3, 4)
    with pytest.raises(AssertionError, match="twice"):
        script.audit(tmp_path, begun, PER_EPOCH)


def test_a_step_left_out_shows_in_the_weights() -> None:
    assert script.error_of(script.alone(2), 2) == 0.0
    assert script.error_of(script.alone(1), 2) > 1e3 * replay.MOST_ERROR


class Clock(FakeClock):
    """Stands for the module `time`."""

    monotonic = time = FakeClock.__call__
    sleep = FakeClock.spend


class Lab:
    """Stands for processes that start in 2 s, commit a step per second, and save every five."""

    def __init__(self, told: Machines, folder: Path, clock: Clock, steps: int) -> None:
        self.window, self.folder, self.work = told, folder, dict[str, int]()
        self._clock, self._steps = clock, steps
        self.saved, self.killed = 0, list[tuple[int, int]]()

    def let_go(self, *_: object) -> bool:
        return self._clock.now_s >= self._start_s + 2.0

    def live(self, folder: Path, number: int, names: Any, meddle: Callable[..., Any]) -> None:
        self._start_s = self._clock.now_s
        journal = FaultJournal(folder / f"segment-{number}" / "journal")
        running = {name: 100 + int(name[1:]) for name in names}
        step = self.saved
        files = [ProgressFile(journal, 0, name) for name in names]
        while step < self._steps:
            self._clock.now_s += 1.0
            meddle(running, step)
            if self._clock.now_s <= self._start_s + 2.0:
                for file in files:
                    file.note(step)
                continue
            step += 1
            for file in files:
                file.note(step)
            if step % 5 == 0 and json.loads((folder / "asked.json").read_text())["every"]:
                self.saved = step
                self.save(folder / "kept" / f"step-{step}", folder / f"saves-{number}-0.jsonl")
        end = {"weights": [], "ended_s": self._clock.now_s}
        (folder / "end.json").write_text(json.dumps(end))
        self._clock.now_s += 1000.0
        meddle(running, step)  # whatever comes now, the job is done

    def save(self, kept: Path, notes: Path) -> None:
        with notes.open("a") as file:
            print(json.dumps({"copied_s": 0.001, "blocked_s": 0.0}), file=file)
        kept.mkdir(parents=True)
        (kept / "manifest.json").touch()
        os.utime(kept / "manifest.json", (self._clock.now_s, self._clock.now_s))


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return what replays a trace on stand-ins for processes."""
    clock = Clock(1000.0)
    monkeypatch.setattr(replay, "time", clock)
    monkeypatch.setattr(script, "audit", lambda *_: None)
    monkeypatch.setattr(script, "error_of", lambda *_: 1e-15)

    def replayed(told: Machines, way: Way, steps: int) -> tuple[replay.Replay, SpotOutcome, Lab]:
        lab: Any = Lab(told, tmp_path, clock, steps)
        monkeypatch.setattr("os.kill", lambda pid, number: lab.killed.append((pid, number)))
        one = replay.Replay(lab, way, steps, 5)
        return one, one.run(), lab

    return replayed


def courses(one: replay.Replay) -> list[tuple[int, int, str]]:
    return [(s.first_step, s.last_step, s.ended_by) for s in one.segments]


def test_survivors_go_on_and_who_comes_back_takes_part_after_a_save(run: Any) -> None:
    one, told, lab = run(window(2, 1, 2, 2, 2, 2), ELASTIC, 30)

    assert courses(one) == [(0, 7, "loss"), (5, 15, "join"), (15, 30, "end")]
    assert [s.members for s in one.segments] == [("m0", "m1"), ("m1",), ("m0", "m1")]
    assert lab.killed == [(100, signal.SIGKILL)]
    assert told.finished
    assert (told.recomputed, told.restarts, told.losses) == (2 * BATCH, 3, 1)
    assert told.saves == 6
    assert told.wait_s == 0.0
    assert told.total_s == 10.0 + 13.0 + 17.0
    assert told.restart_s == pytest.approx(3 * 2.0)


def test_the_slowest_waits_for_all_and_goes_on_from_its_checkpoint(run: Any) -> None:
    one, told, _ = run(window(2, 1, 2, 2, 2), SLOWEST, 20)

    assert courses(one) == [(0, 7, "loss"), (5, 20, "end")]
    assert told.wait_s == pytest.approx(10.0, abs=0.1)
    assert told.total_s == pytest.approx(20.0 + 17.0, abs=0.1)
    assert told.machine_s == pytest.approx(2 * 10.0 + 10.0 + 2 * 17.0, abs=0.2)


def test_what_the_trace_leaves_no_time_for_is_told_as_far_as_it_came(run: Any) -> None:
    one, told, _ = run(window(2, 1, 2), SCRATCH, 20)

    assert courses(one) == [(0, 7, "loss"), (0, 7, "window")]
    assert not told.finished
    assert told.total_s == 30.0
    assert told.committed == 7 * BATCH
    assert told.recomputed == 7 * BATCH
    assert told.saves == 0
    assert one.error is None


def test_weights_that_are_off_end_the_run(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script, "error_of", lambda *_: 1.1e-9)

    with pytest.raises(AssertionError, match=r"off by 1\.1e-09"):
        run(window(1), ELASTIC, 5)


def test_workers_are_let_go_once_each_when_they_are_ready_and_limited(tmp_path: Path) -> None:
    joined: list[tuple[int, int]] = []
    limits: Any = SimpleNamespace(join=lambda slot, pid: joined.append((slot, pid)))
    starter: Any = None
    lab = replay.Lab(window(2), starter, limits, {}, tmp_path, 0.0)
    running = {"m0": 7, "m1": 8}
    (tmp_path / "ready-3-m1").touch()
    assert not lab.let_go(tmp_path, 3, running)
    assert joined == [(1, 8)]
    assert (tmp_path / "go-3-m1").exists()
    (tmp_path / "ready-3-m0").touch()
    assert lab.let_go(tmp_path, 3, running)
    assert lab.let_go(tmp_path, 3, running)
    assert joined == [(1, 8), (0, 7)]


def test_without_the_right_to_limit_slow_machines_work_more(monkeypatch: Any) -> None:
    def refuse(*_: object) -> None:
        raise LimitError("no right")

    monkeypatch.setattr(script, "cgroup_candidates", lambda: ["some files"])
    monkeypatch.setattr(script, "CgroupLimits", refuse)

    assert script.limits_of((0.4, 0.2, 0.1)) == (None, {"m0": 1, "m1": 2, "m2": 4})


@pytest.mark.usefixtures("recorded")
@pytest.mark.parametrize("error", [AssertionError("off"), LaunchError("too late")])
def test_a_run_that_fails_says_why_and_closes_what_it_opened(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    closed: list[str] = []

    def fail(*_: object) -> None:
        raise error

    def closes(name: str) -> Any:
        return SimpleNamespace(close=lambda: closed.append(name))

    monkeypatch.setattr(script, "limits_of", lambda _: (closes("limits"), {}))
    monkeypatch.setattr(replay, "FromZygote", lambda _: closes("starter"))
    monkeypatch.setattr(replay, "performed", fail)

    assert replay.main(["--part", "0:6"]) == 1

    assert capsys.readouterr().err == f"{type(error).__name__}: {error}\n"
    assert closed == ["starter", "limits"]
