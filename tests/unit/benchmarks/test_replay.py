"""The replay of a recorded trace without ranks: its options, kills, figures and output."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
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

from evenstride.core.sampling.permutation import Permutation
from evenstride.sim.scenario.recordings import Machines, SpotTrace, machines
from evenstride.testing import FakeClock
from evenstride.testing.faults.fault_injection import FaultJournal, ProgressFile
from tests.messages import check_message, raises_message

UPS = st.lists(st.integers(0, 4), min_size=1, max_size=30).filter(any)
SCRATCH, SLOWEST, ELASTIC = replay.ways_of(replay.WAYS, 2.0)


def window(*up: int, gap_s: float = 10.0) -> Machines:
    return machines([SpotTrace("group/zone", gap_s, np.array(up, dtype=np.int64))])


def segment(first: int, last: int, number: int = 0, restart_s: float | None = 1.0) -> Segment:
    return Segment(number, ("m0", "m1"), restart_s, first, last, "loss")


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> SpotTrace:
    """Return the only recording, which has up to two machines."""
    trace = SpotTrace("group/zone", 300.0, np.array([0, 0, 2, 1, 2, 2], dtype=np.int64))
    monkeypatch.setattr(replay, "spot_traces", lambda _: (trace,))
    monkeypatch.setattr(replay, "usable_cpus", lambda: 1)
    return trace


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--part", "4:9"], ("0:6",)),
        (["--part", "0:2"], ()),
        (["--part", "all"], ("FIRST", "LAST")),
        (["--every", "0"], ()),
        (["--every", "30s"], ()),
        (["--ways", "scratch,luck"], ("'luck'",)),
        (["--tick", "0"], ()),
        (["--steps", "-1"], ()),
        (["--speeds", "1"], ()),
        (["--speeds", "1,2"], ()),
        (["--speeds", "1,0.5"], ("1.5",)),
    ],
)
def test_recordings_that_cannot_be_replayed_are_refused(
    arguments: list[str],
    problem: tuple[str, ...],
    recorded: SpotTrace,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as end:
        replay.parse(["--part", "0:6", *arguments])

    assert end.value.code == 2
    check_message(" ".join(capsys.readouterr().err.split()), *problem)


def test_fixed_ways_train_on_all_machines_or_none_and_the_elastic_one_on_those_present() -> None:
    trace = window(2, 1, 0)

    assert [script.members_of(trace, tick, SLOWEST) for tick in range(4)] == [[0, 1], [], [], []]
    assert [script.members_of(trace, tick, ELASTIC) for tick in range(3)] == [[0, 1], [1], []]


@given(UPS, st.sampled_from([SLOWEST, ELASTIC]), st.integers(1, 40))
def test_machine_seconds_are_counted_as_simulated(up: list[int], way: Way, steps: int) -> None:
    trace = window(*up)
    slots = trace.who.shape[1]
    job = SpotJob(steps * 8, 8, (0.5,) * slots, (0.2,) * slots, slots, 0.1, 1.0)

    (outcome,) = simulated(trace, job, [way])

    assert script.held_s(trace, outcome.total_s) == pytest.approx(outcome.machine_s)


def outcome(way: str = "slowest", *, finished: bool = True, train_s: float = 80.0) -> SpotOutcome:
    return SpotOutcome(way, finished, 480, 96, 0, 0, 2, 5, 3, train_s, 5.0, 5.0, 10.0, 400.0)


def note(folder: Path, number: int, first: int, last: int, *, skip: int = 0) -> Segment:
    """Record the steps of a segment as two ranks would."""
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
    ("first", "last", "skip"),
    [(9, 10, 0), (5, 10, 1), (8, 9, 0)],
)
def test_gaps_are_found(first: int, last: int, skip: int, tmp_path: Path) -> None:
    begun = [note(tmp_path, 0, 0, 8), note(tmp_path, 1, first, last, skip=skip)]

    with raises_message(AssertionError):
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
    """Stands for processes that start in 2 s, commit a step per second, and save every 5 steps."""

    def __init__(self, trace: Machines, folder: Path, clock: Clock, steps: int) -> None:
        self.window, self.folder, self.work = trace, folder, dict[str, int]()
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
        meddle(running, step)  # the job is finished, so later events do not count

    def save(self, kept: Path, notes: Path) -> None:
        with notes.open("a") as file:
            print(json.dumps({"copied_s": 0.001, "blocked_s": 0.0}), file=file)
        kept.mkdir(parents=True)
        (kept / "manifest.json").touch()
        os.utime(kept / "manifest.json", (self._clock.now_s, self._clock.now_s))


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that replays a trace on stand-ins for processes."""
    clock = Clock(1000.0)
    monkeypatch.setattr(replay, "time", clock)
    monkeypatch.setattr(script, "audit", lambda *_: None)
    monkeypatch.setattr(script, "error_of", lambda *_: 1e-15)

    def replayed(trace: Machines, way: Way, steps: int) -> tuple[replay.Replay, SpotOutcome, Lab]:
        lab: Any = Lab(trace, tmp_path, clock, steps)
        monkeypatch.setattr("os.kill", lambda pid, number: lab.killed.append((pid, number)))
        one = replay.Replay(lab, way, steps, 5)
        return one, one.run(), lab

    return replayed


def courses(one: replay.Replay) -> list[tuple[int, int, str]]:
    return [(s.first_step, s.last_step, s.ended_by) for s in one.segments]


def test_survivors_continue_and_a_returning_machine_joins_after_a_save(run: Any) -> None:
    one, result, lab = run(window(2, 1, 2, 2, 2, 2), ELASTIC, 30)

    assert courses(one) == [(0, 7, "loss"), (5, 15, "join"), (15, 30, "end")]
    assert [s.members for s in one.segments] == [("m0", "m1"), ("m1",), ("m0", "m1")]
    assert lab.killed == [(100, signal.SIGKILL)]
    assert result.finished
    assert (result.recomputed, result.restarts, result.losses) == (2 * BATCH, 3, 1)
    assert result.saves == 6
    assert result.wait_s == 0.0
    assert result.total_s == 10.0 + 13.0 + 17.0
    assert result.restart_s == pytest.approx(3 * 2.0)


def test_the_fixed_way_waits_for_all_and_continues_from_its_checkpoint(run: Any) -> None:
    one, result, _ = run(window(2, 1, 2, 2, 2), SLOWEST, 20)

    assert courses(one) == [(0, 7, "loss"), (5, 20, "end")]
    assert result.wait_s == pytest.approx(10.0, abs=0.1)
    assert result.total_s == pytest.approx(20.0 + 17.0, abs=0.1)
    assert result.machine_s == pytest.approx(2 * 10.0 + 10.0 + 2 * 17.0, abs=0.2)


def test_an_unfinished_job_is_reported_with_its_progress(run: Any) -> None:
    one, result, _ = run(window(2, 1, 2), SCRATCH, 20)

    assert courses(one) == [(0, 7, "loss"), (0, 7, "window")]
    assert not result.finished
    assert result.total_s == 30.0
    assert result.committed == 7 * BATCH
    assert result.recomputed == 7 * BATCH
    assert result.saves == 0
    assert one.error is None


def test_weights_that_are_off_end_the_run(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script, "error_of", lambda *_: 1.1e-9)

    with pytest.raises(AssertionError, match=r"off by 1\.1e-09"):
        run(window(1), ELASTIC, 5)
