"""Who is there at each step, and how fast."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstride.core.fleet import FloatArray, IntArray
from evenstride.errors import ScenarioError
from evenstride.sim.scenario.recordings import load_recording
from evenstride.sim.scenario.scenario_file import changed
from evenstride.sim.scenario.scenario_model import Scenario
from evenstride.sim.scenario.timeline import Speeds, Timeline
from tests.messages import raises_message
from tests.unit.sim.clusters import FAST, SLOW, scenario, scenarios

STEPS = 12


def speeds(*events: dict[str, Any], worker: int = 0, seed: int = 0) -> list[float]:
    """Return a worker's speed at every step."""
    timeline = Timeline(scenario(steps=STEPS, events=list(events)), seed)
    return [float(timeline.speed(step)[worker]) for step in range(STEPS)]


def changes(*events: dict[str, Any]) -> tuple[int, ...]:
    return Timeline(scenario(steps=STEPS, events=list(events)), 0).changes


def test_without_events_everyone_is_there_and_as_fast_as_usual() -> None:
    timeline = Timeline(scenario(steps=STEPS), 0)

    assert speeds() == [1.0] * STEPS
    assert timeline.present(STEPS - 1).tolist() == [0, 1]
    assert (timeline.changes, timeline.moves) == ((), ())


def test_a_step_holds_from_its_first_step_until_it_ends() -> None:
    event = {"kind": "step", "at": 3, "until": 7, "workers": 0, "speed": 0.5}

    assert speeds(event) == [1.0] * 3 + [0.5] * 4 + [1.0] * 5
    assert speeds(event, worker=1) == [1.0] * STEPS
    assert changes(event) == (3, 7)
    assert speeds({**event, "until": 99}) == [1.0] * 3 + [0.5] * 9


def test_a_step_at_the_start_is_no_change() -> None:
    event = {"kind": "step", "at": 0, "workers": "all", "speed": 2.0}

    assert speeds(event) == [2.0] * STEPS
    assert changes(event) == ()


def test_speeds_of_several_events_multiply() -> None:
    slower = {"kind": "step", "at": 2, "workers": [0, 1], "speed": 0.5}
    faster = {"kind": "step", "at": 4, "workers": 0, "speed": 3.0}

    assert speeds(slower, faster)[1:5] == [1.0, 0.5, 0.5, 1.5]
    assert changes(slower, faster) == (2, 4)


def test_a_ramp_reaches_its_speed_after_its_steps_and_keeps_it() -> None:
    event = {"kind": "ramp", "at": 2, "workers": 0, "speed": 0.2, "steps": 4}

    assert speeds(event) == pytest.approx([1.0, 1.0, 0.8, 0.6, 0.4] + [0.2] * 7)
    assert changes(event) == (2, 3, 4, 5)


def test_a_periodic_event_is_slow_for_its_part_of_every_period() -> None:
    event = {"kind": "periodic", "at": 1, "workers": 0, "speed": 0.5, "period": 4, "duty": 0.25}

    assert speeds(event) == [1.0, 0.5, 1.0, 1.0] * 3
    assert changes(event) == (1, 2, 5, 6, 9, 10)


def test_a_periodic_event_ends_with_its_last_step() -> None:
    event = {"kind": "periodic", "at": 0, "workers": 0, "speed": 0.5, "period": 4, "until": 5}

    assert speeds(event) == [0.5, 0.5, 1.0, 1.0, 0.5] + [1.0] * 7


def test_separate_periods_have_the_same_length_and_begin_anywhere() -> None:
    event = {"kind": "periodic", "at": 2, "workers": "all", "speed": 0.5, "period": 4,
             "phases": "separate"}  # fmt: skip

    seen = {tuple(speeds(event, worker=w, seed=seed)[2:]) for w in (0, 1) for seed in range(20)}

    pattern = [0.5, 0.5, 1.0, 1.0] * 4
    assert seen == {tuple(pattern[begin : begin + 10]) for begin in range(4)}
    assert speeds(event, seed=3)[:2] == [1.0, 1.0]


def test_a_wave_goes_to_its_speed_and_back() -> None:
    event = {"kind": "wave", "at": 1, "workers": 0, "speed": 0.5, "period": 4, "until": 10}

    assert speeds(event) == pytest.approx([1.0] + [1.0, 0.75, 0.5, 0.75] * 2 + [1.0] * 3)
    separate = {tuple(speeds({**event, "phases": "separate"}, seed=seed)) for seed in range(20)}
    assert {wave[1] for wave in separate} == {0.5, 0.75, 1.0}


def test_a_walk_stays_within_its_bounds_and_returns_in_the_end() -> None:
    event = {"kind": "walk", "at": 2, "workers": "all", "spread": 0.5, "least_speed": 0.8,
             "most_speed": 1.5, "until": 10}  # fmt: skip

    one, other = (speeds(event, worker=worker, seed=3) for worker in (0, 1))

    assert one[:2] == one[10:] == [1.0, 1.0]
    assert one != other
    assert {0.8, 1.5} <= {round(speed, 9) for speed in (*one, *other)}
    assert 0.8 - 1e-9 <= min(*one, *other) < max(*one, *other) <= 1.5 + 1e-9


def test_a_walk_changes_by_its_spread() -> None:
    event = {"kind": "walk", "at": 0, "workers": "all", "spread": 0.02}
    made = scenario(steps=200, workers=[{**FAST, "count": 40}], events=[event])
    timeline = Timeline(made, 1)

    logs = np.log([timeline.speed(step) for step in range(200)])

    assert np.diff(logs, axis=0).std() == pytest.approx(0.02, rel=0.05)


@pytest.mark.parametrize(
    "event",
    [
        {"kind": "periodic", "speed": 0.5, "period": 5},
        {"kind": "wave", "speed": 0.5, "period": 5},
        {"kind": "walk", "spread": 0.1},
        {"kind": "bursty", "speed": 0.5, "mean_steps": 2, "mean_gap": 2},
    ],
    ids=lambda event: event["kind"],
)
def test_common_phases_are_those_of_all_workers(event: dict[str, Any]) -> None:
    both = {"at": 1, "workers": "all"} | event

    common, separate = both | {"phases": "common"}, both | {"phases": "separate"}

    assert all(speeds(common, seed=s) == speeds(common, worker=1, seed=s) for s in range(5))
    assert any(speeds(separate, seed=s) != speeds(separate, worker=1, seed=s) for s in range(5))
    assert len(set(speeds(common, seed=1))) > 1


def test_bursts_are_each_workers_own_and_their_seeds() -> None:
    event = {"kind": "bursty", "at": 2, "workers": "all", "speed": 0.5, "mean_steps": 2,
             "mean_gap": 2, "until": 10}  # fmt: skip

    one, other = (speeds(event, worker=worker, seed=3) for worker in (0, 1))

    assert one == speeds(event, worker=0, seed=3)
    assert one != other
    assert {*one, *other} == {0.5, 1.0}
    assert one[:2] == [1.0, 1.0]
    assert one[10:] == [1.0, 1.0]
    assert len({tuple(speeds(event, seed=seed)) for seed in range(9)}) > 1


def test_bursts_last_as_long_as_they_should_on_average() -> None:
    event = {"kind": "bursty", "at": 0, "workers": "all", "speed": 0.5, "mean_steps": 6,
             "mean_gap": 18}  # fmt: skip
    made = scenario(steps=4000, workers=[{**FAST, "count": 10}], events=[event])
    timeline = Timeline(made, 1)

    slow = np.stack([timeline.speed(step) for step in range(4000)]) < 1

    assert slow.mean() == pytest.approx(6 / 24, abs=0.03)
    begins = (slow[1:] & ~slow[:-1]).sum()
    assert slow.sum() / begins == pytest.approx(6, rel=0.15)


def test_workers_leave_and_come_back() -> None:
    away = [{"kind": "leave", "at": 3, "workers": 1}, {"kind": "join", "at": 6, "workers": [1]}]
    timeline = Timeline(scenario(steps=STEPS, events=away), 0)

    there = [timeline.present(step).tolist() for step in (0, 2, 3, 5, 6, 11)]

    assert there == [[0, 1], [0, 1], [0], [0], [0, 1], [0, 1]]
    assert timeline.moves == timeline.changes == (3, 6)


def test_a_worker_that_only_joins_is_absent_at_the_start() -> None:
    late = scenario(steps=STEPS, events=[{"kind": "join", "at": 4, "workers": 0}])

    timeline = Timeline(late, 0)

    assert [timeline.present(step).tolist() for step in (0, 3, 4)] == [[1], [1], [0, 1]]


def test_a_replay_takes_the_recorded_part_of_the_processor(
    data_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EVENSTRIDE_DATA", str(data_root))
    load_recording.cache_clear()
    recorded = load_recording("20110322")
    event = {"kind": "replay", "at": 2, "workers": [1, 0], "machines": [7, 9],
             "steps_per_sample": 3, "day": "20110322", "least_speed": 0.3}  # fmt: skip
    timeline = Timeline(scenario(steps=20, events=[event]), 0)

    for step in range(20):
        sample = (step - 2) // 3
        used = [recorded[9, sample], recorded[7, sample]] if step >= 2 else [0.0, 0.0]
        expected = np.maximum(1 - np.array(used) / 100, 0.3)
        np.testing.assert_allclose(timeline.speed(step), expected)


def test_a_missing_recording_is_refused_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EVENSTRIDE_DATA", str(tmp_path))
    load_recording.cache_clear()

    with raises_message(ScenarioError, "EVENSTRIDE_DATA"):
        load_recording("20110303")


@given(scenarios(), st.integers(0, 5))
def test_its_changes_are_the_steps_at_which_a_present_worker_changes(made: Any, seed: int) -> None:
    timeline = Timeline(made, seed)

    changes, moves = [], []
    for step in range(1, made.steps):
        here = timeline.present(step)
        same = (timeline.speed(step)[here] == timeline.speed(step - 1)[here]).all()
        stayed = np.array_equal(here, timeline.present(step - 1))
        moves += [] if stayed else [step]
        changes += [] if same and stayed else [step]
    assert timeline.changes == (*changes,)
    assert timeline.moves == (*moves,)


NOTHING_CHANGES: list[dict[str, Any]] = [
    {"kind": "step", "at": 5, "workers": 0, "speed": 1.0},
    {"kind": "ramp", "at": 5, "workers": "all", "speed": 1.0, "steps": 4},
    {"kind": "periodic", "at": 0, "workers": 0, "speed": 0.5, "period": 3, "duty": 1.0},
    {"kind": "periodic", "at": 3, "workers": 0, "speed": 1.0, "period": 3},
    {"kind": "bursty", "at": 0, "workers": 0, "speed": 1.0, "mean_steps": 1, "mean_gap": 1},
]


@pytest.mark.parametrize("event", NOTHING_CHANGES, ids=lambda event: event["kind"])
def test_what_leaves_the_speed_as_it_is_is_no_change(event: dict[str, Any]) -> None:
    assert changes(event) == ()


def test_an_event_of_absent_workers_is_not_a_change() -> None:
    away = [{"kind": "leave", "at": 2, "workers": 1}, {"kind": "join", "at": 9, "workers": 1}]
    slower = {"kind": "step", "at": 4, "workers": 1, "speed": 0.5, "until": 10}

    assert changes(*away, slower) == (2, 9, 10)


def test_a_change_that_another_one_undoes_at_once_does_not_count() -> None:
    slower = {"kind": "step", "at": 2, "workers": 0, "speed": 0.5, "until": 6}
    again = {"kind": "step", "at": 6, "workers": 0, "speed": 0.5}

    assert changes(slower, again) == (2,)
    assert speeds(slower, again)[5:7] == [0.5, 0.5]


def test_a_worker_that_leaves_and_joins_in_one_step_was_never_absent() -> None:
    again = [{"kind": "leave", "at": 5, "workers": 1}, {"kind": "join", "at": 5, "workers": 1}]
    timeline = Timeline(scenario(steps=STEPS, events=again), 0)

    assert (timeline.moves, timeline.changes) == ((), ())


def test_one_may_ask_for_its_steps_in_any_order() -> None:
    events = [
        {"kind": "ramp", "at": 2, "workers": 0, "speed": 0.2, "steps": 6},
        {"kind": "step", "at": 5, "workers": [0, 1], "speed": 0.5},
        {"kind": "leave", "at": 4, "workers": 1},
        {"kind": "join", "at": 8, "workers": 1},
    ]
    timeline = Timeline(scenario(steps=STEPS, events=events), 0)
    forwards = [(timeline.speed(s).tolist(), timeline.present(s).tolist()) for s in range(STEPS)]

    backwards = [(timeline.speed(s).tolist(), timeline.present(s).tolist())
                 for s in reversed(range(STEPS))]  # fmt: skip

    assert backwards[::-1] == forwards


@given(scenarios(), st.integers(0, 3), st.data())
def test_a_shorter_run_is_the_beginning_of_a_longer_one(
    made: Scenario, seed: int, data: st.DataObject
) -> None:
    steps = data.draw(st.integers(1, made.steps))
    whole, part = Timeline(made, seed), Timeline(changed(made, {"steps": steps}), seed)

    for step in range(steps):
        np.testing.assert_array_equal(part.speed(step), whole.speed(step))
        np.testing.assert_array_equal(part.present(step), whole.present(step))
    assert part.changes == tuple(step for step in whole.changes if step < steps)
    assert part.moves == tuple(step for step in whole.moves if step < steps)


def test_bursts_depend_neither_on_the_run_nor_on_other_workers() -> None:
    bursts = {"kind": "bursty", "at": 0, "speed": 0.5, "mean_steps": 3, "mean_gap": 3}
    both, alone = {**bursts, "workers": [0, 1]}, {**bursts, "workers": [1]}

    assert speeds(both, worker=1) == speeds(alone, worker=1)
    assert len({*map(tuple, (speeds(both, alone, worker=1), speeds(both, worker=1)))}) == 2


LONG = 10_000_000


@pytest.mark.parametrize(
    "event",
    [
        {"kind": "periodic", "at": 0, "speed": 0.5, "period": 2, "until": LONG},
        {"kind": "ramp", "at": 0, "speed": 0.5, "steps": LONG},
        {"kind": "bursty", "at": 0, "speed": 0.5, "mean_steps": 1, "mean_gap": 1, "until": LONG},
    ],
    ids=lambda event: event["kind"],
)
def test_what_lies_after_the_run_costs_nothing(event: dict[str, Any]) -> None:
    made = scenario(steps=STEPS, events=[{**event, "workers": 0}])
    tracemalloc.start()

    changes = Timeline(made, 0).changes

    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(changes) < STEPS
    assert most < 1_000_000


def test_the_cost_of_an_event_depends_only_on_its_own_workers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Counted, as times differ from machine to machine."""
    size, touched = 2_000, 0
    events = [{"kind": "step", "at": 1 + n % 900, "workers": n, "speed": 0.5} for n in range(size)]
    fleet = [{**FAST, "count": size}]
    made = scenario(steps=1000, global_batch=9 * size, workers=fleet, events=events)
    timeline = Timeline(made, 0)
    products = Speeds.products

    def counted(speeds: Speeds, workers: IntArray) -> FloatArray:
        nonlocal touched
        touched += len(workers)
        return products(speeds, workers)

    monkeypatch.setattr(Speeds, "products", counted)

    assert len(timeline.changes) == 900
    assert touched == size
    assert timeline.speed(999).tolist() == [0.5] * size
    assert timeline.speed(998) is timeline.speed(999)
    assert timeline.present(998) is timeline.present(999)


def test_of_many_workers_a_few_may_change() -> None:
    made = scenario(
        global_batch=500,
        workers=[{**FAST, "count": 200}, {**SLOW, "count": 200}],
        events=[{"kind": "step", "at": 5, "workers": [3, 399], "speed": 0.5}],
    )

    speed = Timeline(made, 0).speed(5)

    assert np.flatnonzero(speed != 1.0).tolist() == [3, 399]
