"""Recorded spot machines: read, turned into lives, and trained on, to the second."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from dataclasses import replace
from math import isclose
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from benchmarks.spot_replay import (
    ELASTIC,
    FIXED,
    LIVE,
    SCRATCH,
    WAIT,
    SpotJob,
    SpotOutcome,
    Way,
    replay,
)

from evenstride.core.reliability.checkpoint_interval import Observed, Saving, next_save_in_s
from evenstride.core.reliability.lifetimes import Exponential
from evenstride.errors import ConfigError, ScenarioError
from evenstride.sim.scenario.recordings import SpotTrace, load_spot_traces, machines, spot_traces
from evenstride.sim.scenario.scenario_model import Communication
from tests.messages import raises_message


def trace(up: list[int], gap_s: float = 100.0, name: str = "made/up") -> SpotTrace:
    return SpotTrace(name, gap_s, np.array(up, dtype=np.int64))


def packed(recorded: Any) -> bytes:
    """Return recordings as they would be on disk."""
    return gzip.compress(json.dumps(recorded).encode())


SOUND = {"group/b": {"metadata": {"gap_seconds": 60}, "data": [0, 2, 1], "prices": [1.0]}}


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where the recordings are looked for."""
    monkeypatch.setenv("EVENSTRIDE_DATA", str(tmp_path))
    load_spot_traces.cache_clear()
    (tmp_path / "traces").mkdir()
    yield tmp_path / "traces" / "spot-traces.json.gz"
    load_spot_traces.cache_clear()


def test_sound_recordings_are_read_in_order(path: Path) -> None:
    path.write_bytes(packed({**SOUND, "group/a": SOUND["group/b"]}))

    first, second = load_spot_traces()

    assert [first.name, second.name] == ["group/a", "group/b"]
    assert second.group == "group"
    assert second.gap_s == 60.0
    assert second.up.tolist() == [0, 2, 1]
    assert spot_traces("b") == (second,)
    assert spot_traces("group") == (first, second)


def test_an_unknown_name_is_refused_with_the_available_ones(path: Path) -> None:
    path.write_bytes(packed(SOUND))

    with raises_message(ScenarioError, "'x'"):
        spot_traces("x")


def test_missing_recordings_are_refused_with_the_remedy(path: Path) -> None:
    with raises_message(ScenarioError, "EVENSTRIDE_DATA"):
        load_spot_traces()


BAD: dict[str, Any] = {
    "no object": [1, 2],
    "no gap": {"a/b": {"metadata": {}, "data": [1]}},
    "no data": {"a/b": {"metadata": {"gap_seconds": 60}}},
    "an empty one": {"a/b": {"metadata": {"gap_seconds": 60}, "data": []}},
    "a gap of nothing": {"a/b": {"metadata": {"gap_seconds": 0}, "data": [1]}},
    "fewer than none": {"a/b": {"metadata": {"gap_seconds": 60}, "data": [1, -1]}},
    "halves": {"a/b": {"metadata": {"gap_seconds": 60}, "data": [0.5]}},
    "words": {"a/b": {"metadata": {"gap_seconds": 60}, "data": ["up"]}},
    "nested": {"a/b": {"metadata": {"gap_seconds": 60}, "data": [[1]]}},
}


@pytest.mark.parametrize("name", BAD)
def test_a_file_that_is_no_recording_is_refused_as_damaged(path: Path, name: str) -> None:
    path.write_bytes(packed(BAD[name]))

    with raises_message(ScenarioError):
        load_spot_traces()


@pytest.mark.parametrize(
    "raw",
    [b"", b"no archive", packed(SOUND)[:-9], packed(SOUND)[:12] + bytes(4) + packed(SOUND)[16:]],
    ids=["empty", "another thing", "cut", "garbled"],
)
def test_a_damaged_file_is_refused(path: Path, raw: bytes) -> None:
    path.write_bytes(raw)

    with raises_message(ScenarioError):
        load_spot_traces()


@pytest.mark.data
def test_all_that_was_recorded_is_there(data_root: Path) -> None:
    if not (data_root / "traces" / "spot-traces.json.gz").is_file():
        pytest.skip("no spot traces")
    load_spot_traces.cache_clear()

    traces = load_spot_traces()

    assert len(traces) == 31
    assert sum(len(one.up) for one in traces) == 376_526
    lost = machines(spot_traces("preemption/4-node/aws-08-03-2023/us-west-2c_v100_1")).lives()
    assert lost.deaths == 326
    load_spot_traces.cache_clear()


def test_lives_are_counted_from_the_first_look() -> None:
    recorded = machines([trace([0, 1, 1, 0, 1, 1, 1])])

    lives = recorded.lives()

    assert lives.age_s.tolist() == [150.0, 200.0]
    assert lives.lost.tolist() == [True, False]
    assert lives.resolution_s == 100.0
    assert recorded.events() == ((100.0, 0, True), (300.0, 0, False), (400.0, 1, True))


def test_a_machine_up_from_the_start_has_no_age() -> None:
    recorded = machines([trace([1, 0, 1, 0])])

    assert recorded.lives().age_s.tolist() == [50.0]
    assert recorded.events()[0] == (100.0, 0, False)
    with raises_message(ConfigError):
        machines([trace([1, 1])]).lives()


def test_of_several_the_oldest_or_the_youngest_goes() -> None:
    up = trace([0, 1, 2, 2, 1, 1, 0])

    oldest, youngest = machines([up], "oldest"), machines([up], "youngest")

    assert oldest.lives().age_s.tolist() == [250.0, 350.0]
    assert youngest.lives().age_s.tolist() == [150.0, 450.0]
    assert (oldest.who >= 0).sum(axis=1).tolist() == up.up.tolist()
    assert (youngest.who >= 0).sum(axis=1).tolist() == up.up.tolist()


def test_zones_side_by_side_are_one_fleet() -> None:
    recorded = machines([trace([1, 1, 0, 0]), trace([0, 1, 1])])

    assert recorded.who.tolist() == [[0, -1], [0, 1], [-1, 1]]


def test_recordings_of_different_gaps_are_not_mixed() -> None:
    with raises_message(ScenarioError, "30 s", "100 s"):
        machines([trace([1]), trace([1], 30.0)])
    with raises_message(ScenarioError):
        machines([])


def test_a_part_of_a_recording_is_one() -> None:
    assert trace([0, 1, 2, 3]).part(0.5, 1.0).up.tolist() == [2, 3]


# One of two machines goes after 500 s and another comes after 800 s; nothing for 2000 s more.
UP = [2] * 5 + [1] * 3 + [2] * 12
JOB = SpotJob(
    samples=20_000,  # 2000 steps, of 0.5 s on both machines and 1 s on one
    global_batch=10,
    fixed_s=(0.0, 0.0),
    per_sample_s=(0.1, 0.1),
    size=2,
    save_s=5.0,
    restart_s=10.2,
    regroup_s=2.0,
)


def outcome(way: Way, up: list[int] = UP, job: SpotJob = JOB) -> SpotOutcome:
    (found,) = replay(machines([trace(up)]), job, [way])
    assert found.lost == 0
    assert isclose(found.total_s, found.train_s + found.save_s + found.restart_s + found.wait_s)
    return found


def test_from_scratch_all_is_done_again() -> None:
    found = outcome(SCRATCH)

    assert found.finished
    assert isclose(found.total_s, 800 + 10.2 + 1000)
    assert (found.committed, found.recomputed, found.interrupted) == (20_000, 9790, 10)
    assert (found.losses, found.restarts, found.saves) == (1, 2, 0)
    assert isclose(found.wait_s, 300.0)
    assert isclose(found.machine_s, 500 * 2 + 300 + 1010.2 * 2)


def test_a_job_that_waits_loses_the_wait_and_a_step() -> None:
    found = outcome(WAIT)

    assert isclose(found.total_s, 800 + 10.2 + (2000 - 979) * 0.5)
    assert (found.recomputed, found.interrupted, found.restarts) == (0, 10, 2)


def test_a_job_that_waits_without_a_survivor_begins_again() -> None:
    found = outcome(WAIT, [2] * 5 + [0] + [2] * 14)

    assert found.recomputed == 9790
    assert isclose(found.total_s, 600 + 10.2 + 1000)


def test_a_job_that_saves_falls_back_to_the_last_save() -> None:
    found = outcome(replace(FIXED, saving=100.0))

    assert isclose(found.total_s, 800 + 10.2 + 600 + 5 * 5)
    assert (found.recomputed, found.saves, found.restarts) == (1390, 9, 2)
    assert isclose(found.save_s, 9 * 5.0)


def test_survivors_take_over_and_newcomers_join_after_a_save() -> None:
    found = outcome(replace(ELASTIC, saving=100.0))

    assert isclose(found.total_s, 835.4 + 450 + 4 * 5)
    assert (found.recomputed, found.saves, found.restarts, found.losses) == (1390, 11, 3, 1)
    assert found.wait_s == 0.0


def test_live_survivors_lose_a_step_and_take_newcomers_at_once() -> None:
    found = outcome(replace(LIVE, saving=100.0))

    assert isclose(found.total_s, 1211.0)
    assert (found.recomputed, found.interrupted, found.saves) == (0, 10, 11)
    assert isclose(found.restart_s, 10.2 + 2 + 2)


def test_live_without_a_survivor_falls_back_to_the_last_save() -> None:
    found = outcome(replace(LIVE, saving=100.0), [2] * 5 + [0] + [2] * 14)

    assert (found.recomputed, found.restarts, found.losses) == (1390, 2, 2)
    assert isclose(found.wait_s, 100.0)


def test_a_newcomer_in_mid_step_waits_for_its_end() -> None:
    job = replace(JOB, per_sample_s=(7.0, 7.0), samples=100)

    found = outcome(replace(LIVE, saving=None), [1, 2] + [2] * 8, job)

    # One step on one machine from 10.2 s on, of 70 s; the next one ends at 150.2 s; 8 of 35 s.
    assert isclose(found.total_s, 150.2 + 2.0 + 8 * 35.0)
    assert found.interrupted == 0
    last = outcome(replace(LIVE, saving=None), [1, 2] + [2] * 8, replace(job, samples=20))
    assert isclose(last.total_s, 150.2)
    assert last.restarts == 1


def test_a_loss_while_a_newcomer_waits_cuts_the_step_off() -> None:
    job = replace(JOB, per_sample_s=(20.0, 20.0), samples=20, restart_s=1.0)

    found = outcome(replace(LIVE, saving=None), [1, 2, 1, 1, 1, 1, 1, 1, 1], job)

    assert found.interrupted == 10  # from 1 s to 200 s, where the only member goes
    assert found.losses == 1


def test_a_loss_in_a_restart_or_a_save_is_one_too() -> None:
    slow = replace(JOB, restart_s=150.0, save_s=90.0)

    found = outcome(replace(ELASTIC, saving=100.0), [2, 1] + [1] * 4 + [0] + [2] * 13, slow)

    # Begun at 0 and at 100 s, trained 250 to 350, saved 440, trained 540, lost in a save at 600.
    assert found.losses == 2
    assert found.saves >= 1
    assert found.recomputed == 1000
    assert isclose(found.wait_s, 100.0)


def test_what_the_recording_is_too_short_for_is_not_finished() -> None:
    found = outcome(WAIT, job=replace(JOB, samples=10**6))

    assert not found.finished
    assert isclose(found.total_s, 2000.0)
    assert found.committed == (979 + 2379) * 10


def test_without_enough_machines_all_time_is_waiting() -> None:
    found = outcome(SCRATCH, [1] * 5 + [2] + [1] * 4, replace(JOB, size=2, restart_s=200.0))

    assert not found.finished
    assert (found.committed, found.restarts) == (0, 1)
    assert isclose(found.wait_s, 900.0)


def test_the_saves_are_those_that_the_rule_decides() -> None:
    rule = Saving(Exponential(2000.0), longest_s=1e5, most_part=0.5)
    up, job = [2] * 20, replace(JOB, samples=40_000)

    found = outcome(replace(ELASTIC, saving=rule), up, job)

    now_s, left_s, expected, saves = 10.2, 2000.0, 10.2 * 2 / 2000.0, 0
    while True:
        seen = Observed(0, expected)
        train_s = next_save_in_s(5.0, np.zeros(2), seen, rule).in_s // 0.5 * 0.5
        if now_s + train_s + 5.0 >= 2000.0:
            break
        left_s -= train_s
        now_s += train_s + 5.0
        expected += (train_s + 5.0) * 2 / 2000.0
        saves += 1
    assert found.saves == saves > 5
    assert not found.finished


def test_a_loss_makes_saves_more_frequent() -> None:
    rule = Saving(Exponential(1e5), prior_failures=0.1, longest_s=1000.0)
    often = replace(ELASTIC, saving=rule)

    calm = outcome(often, [2] * 30)
    hit = outcome(often, [2] * 5 + [1] + [2] * 24)

    assert calm.saves == 1
    assert hit.saves == 4


def test_a_job_on_one_machine_pays_for_one() -> None:
    found = outcome(SCRATCH, [2] * 30, replace(JOB, size=1))

    assert found.total_s == pytest.approx(10.2 + 2000)
    assert found.machine_s == pytest.approx(found.total_s)
    everyone = outcome(ELASTIC, [2] * 30)
    assert everyone.machine_s == pytest.approx(2 * everyone.total_s)


def test_machines_of_unequal_speed_take_unequal_shares() -> None:
    job = replace(JOB, global_batch=8, per_sample_s=(0.1, 0.3))

    assert isclose(job.step_s(np.array([0, 1])), 0.6)
    assert isclose(job.step_s(np.array([1])), 2.4)
    slow = replace(job, communication=Communication(latency_s=0.01))
    assert isclose(slow.step_s(np.array([0, 1])), 0.62)


def test_more_machines_than_samples_leave_some_out() -> None:
    job = replace(JOB, global_batch=1, fixed_s=(1.0, 1.0))

    assert isclose(job.step_s(np.array([0, 1])), 1.1)


@pytest.mark.parametrize(
    ("change", "reported"),
    [
        ({"size": 3}, ()),
        ({"size": 0}, ()),
        ({"fixed_s": (0.0,)}, ()),
        ({"samples": 0}, ("0 samples",)),
        ({"global_batch": 0}, ("20000 samples",)),
        ({"per_sample_s": (0.1, 0.0)}, ()),
    ],
)
def test_a_job_that_does_not_fit_is_refused(
    change: dict[str, Any], reported: tuple[str, ...]
) -> None:
    with raises_message(ScenarioError, *reported):
        outcome(SCRATCH, job=replace(JOB, **change))
