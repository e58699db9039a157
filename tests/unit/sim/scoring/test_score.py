"""What a run is worth, by runs made of numbers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstride.core.fleet import FloatArray
from evenstride.sim.engine.lockstep import Decided, SimulatedSteps
from evenstride.sim.scoring.oracle import ReferenceTimes
from evenstride.sim.scoring.suite import FIELDS, ScoredScenario, ScoreRow, steps_to_find
from tests.unit.sim.clusters import scenario

STEPS = 100


def row(
    mean_s: FloatArray,
    *,
    real_s: FloatArray | None = None,
    decisions: list[Decided] | None = None,
    decide_s: list[float] | None = None,
    lag: int = 1,
    events: list[dict[str, Any]] | None = None,
    every: int | str = 1,
    exchanges: list[int] | None = None,
) -> ScoreRow:
    """Return the row of a run whose oracle takes a second for each step, and the equal split 4."""
    made = scenario(steps=STEPS, events=events or [], exchange={"lag": lag, "every": every})
    ones = np.ones(STEPS)
    sticks = ReferenceTimes(ones, 2 * ones, 4 * ones, 6 * ones, 2.5, np.array([40, 10]))
    track = SimulatedSteps(
        mean_s, mean_s if real_s is None else real_s, np.zeros(STEPS, dtype=np.int64), [],
        decisions or [], decide_s or [], exchanges or [],
    )  # fmt: skip
    return replace(ScoredScenario.of(made, 7), references=sticks).row("made-up", track)


def slow(*stretches: tuple[int, int]) -> FloatArray:
    """Return a run that takes 2 s from one step up to another, and 1 s elsewhere."""
    mean_s = np.ones(STEPS)
    for begin, end in stretches:
        mean_s[begin:end] = 2.0
    return mean_s


def step_event(at: int) -> dict[str, Any]:
    return {"kind": "step", "at": at, "workers": 0, "speed": 0.9}


def test_a_perfect_run_is_worth_one() -> None:
    perfect = row(np.ones(STEPS), real_s=2 * np.ones(STEPS))

    assert (perfect.efficiency, perfect.efficiency_mean, perfect.efficiency_settled) == (1, 1, 1)
    assert (perfect.steps_to_95_cold, perfect.steps_to_95_after_change) == (0, None)
    assert (perfect.needless_changes, perfect.decide_s) == (0, None)
    assert (perfect.speedup, perfect.bound, perfect.linear_bound) == (3.0, 4.0, 2.5)
    assert (perfect.scenario, perfect.policy, perfect.seed, perfect.lag) == (
        "made",
        "made-up",
        7,
        1,
    )


def test_efficiency_is_time_over_time_and_no_mean_of_parts() -> None:
    uneven = np.where(np.arange(STEPS) < 50, 3.0, 1.0)

    half = row(uneven, real_s=4 * uneven)

    assert half.efficiency_mean == pytest.approx(100 / 200)
    assert half.efficiency == pytest.approx(200 / 800)
    assert half.speedup == pytest.approx(600 / 800)


def test_the_fields_of_a_row_are_those_that_are_promised() -> None:
    assert (
        *("scenario", "policy", "lag", "seed", "efficiency", "efficiency_mean", "informed"),
        *("informed_real", "efficiency_settled", "speedup", "bound", "linear_bound"),
        *("steps_to_95_cold", "steps_to_95_after_change", "needless_changes", "decide_s"),
    ) == FIELDS


@pytest.mark.parametrize(
    ("stretches", "found"),
    [
        ([], 0),
        ([(0, 1)], 0),  # nine of ten good steps and one of a half are 0.95
        ([(0, 2)], 1),
        ([(0, 5)], 4),
        ([(0, 5), (13, 14)], 5),  # from 4 on there are two bad steps in ten
        ([(0, 5), (12, 14)], 13),
        ([(0, 91)], 90),
        ([(0, 92)], None),  # what is good for fewer than ten steps is not found
        ([(0, 99)], None),
        ([(0, 100)], None),
    ],
)
def test_the_split_is_found_at_the_first_step_from_which_ten_are_good(
    stretches: list[tuple[int, int]], found: int | None
) -> None:
    assert row(slow(*stretches)).steps_to_95_cold == found


@pytest.mark.parametrize(
    ("events", "stretches", "found"),
    [
        ([40], [(40, 46)], 5),
        ([40], [(0, 9), (41, 46)], 5),
        ([40], [(0, 9)], 0),
        ([20, 60], [(20, 24), (60, 69)], 8),
        ([20, 60], [(20, 29), (60, 64)], 8),
        ([20, 60], [(20, 29), (60, 100)], None),
    ],
)
def test_after_a_change_it_is_counted_from_there_and_the_worst_counts(
    events: list[int], stretches: list[tuple[int, int]], found: int | None
) -> None:
    seen = row(slow(*stretches), events=[step_event(at) for at in events])

    assert seen.steps_to_95_after_change == found


@pytest.mark.parametrize(
    ("at", "lag", "stretch", "found"),
    [
        (79, 1, (79, 84), 4),
        (79, 1, (79, 91), 11),
        (80, 1, (80, 100), None),
        (72, 8, (72, 91), 18),
        (73, 8, (73, 100), None),
    ],
)
def test_an_event_that_leaves_no_time_for_an_answer_does_not_count(
    at: int, lag: int, stretch: tuple[int, int], found: int | None
) -> None:
    """Another one is answered at once."""
    late = [step_event(at)]

    alone = row(slow(stretch), lag=lag, events=late)
    second = row(slow(stretch), lag=lag, events=[step_event(30), *late])

    assert alone.steps_to_95_after_change == found
    assert second.steps_to_95_after_change == (0 if found is None else found)


def test_a_stage_tells_never_found_from_nothing_to_find() -> None:
    stages = [
        ScoredScenario.of(scenario(steps=STEPS, events=events, exchange={"lag": 5}), 0)
        for events in ([], [step_event(76)], [step_event(75)], [step_event(0)])
    ]

    assert [stage.judged for stage in stages] == [(), (), (75,), ()]


@pytest.mark.parametrize("lag", [1, 3, 8])
def test_an_answer_ten_steps_after_the_lag_is_found_even_to_the_last_judged_event(lag: int) -> None:
    last = STEPS - (lag + 20)
    events = [step_event(last)]

    answered = row(slow((last, last + lag + 11)), lag=lag, events=events)
    later = row(slow((last, last + lag + 12)), lag=lag, events=events)

    assert answered.steps_to_95_after_change == lag + 10
    assert later.steps_to_95_after_change is None


@pytest.mark.parametrize("steps", [1, 9, 10])
def test_a_run_of_fewer_than_ten_steps_finds_nothing(steps: int) -> None:
    seen, _ = ScoredScenario.of(scenario(steps=steps), 0).run("uniform")
    (found,) = steps_to_find(np.ones(steps), (0,))

    assert found == (0 if steps >= 10 else None)
    assert seen.steps_to_95_cold is None


@pytest.mark.parametrize(("part", "found"), [(0.95, 0), (0.9501, 0), (0.9499, None)])
def test_a_split_is_good_from_95_percent_on(part: float, found: int | None) -> None:
    events = range(0, 291, 7)

    assert steps_to_find(np.full(300, part), events) == [found] * len(events)


@given(st.lists(st.floats(0.1, 1.0), min_size=1, max_size=40), st.integers(0, 39))
def test_the_steps_to_find_are_those_of_the_definition(parts: list[float], event: int) -> None:
    event = min(event, len(parts) - 1)
    by_definition = [
        step - event
        for step in range(event, len(parts) - 9)
        if np.mean(parts[step : step + 10]) >= 0.95 - 1e-9
    ]

    (found,) = steps_to_find(np.array(parts), (event,))

    assert found == (by_definition[0] if by_definition else None)


@pytest.mark.parametrize("lag", [1, 3, 8])
def test_settled_are_the_steps_later_than_twice_the_lag_and_three_after_any_event(lag: int) -> None:
    last = 2 * (lag + 3)
    events = [step_event(50)]

    before = row(slow((0, last + 1), (50, 50 + last + 1)), lag=lag, events=events)
    begun = row(slow((last + 1, last + 2)), lag=lag, events=events)
    after = row(slow((50 + last + 1, 50 + last + 2)), lag=lag, events=events)

    assert before.efficiency_settled == 1.0
    settled = STEPS - 2 * (last + 1)
    assert begun.efficiency_settled == pytest.approx(settled / (settled + 1))
    assert after.efficiency_settled == begun.efficiency_settled


def test_steps_before_a_response_is_possible_are_not_settled() -> None:
    """With an exchange after every 20th step: at the start, and after the event at 50."""
    last = 2 * (1 + 3)
    events, ends = [step_event(50)], (19 + last + 1, 59 + last + 1)

    before = row(slow((0, ends[0]), (50, ends[1])), events=events, every=20)
    begun = row(slow((ends[0], ends[0] + 1)), events=events, every=20)
    after = row(slow((ends[1], ends[1] + 1)), events=events, every=20)

    assert before.efficiency_settled == 1.0
    assert begun.efficiency_settled == after.efficiency_settled
    assert after.efficiency_settled is not None and after.efficiency_settled < 1.0


def test_with_the_leaders_cadence_settled_counts_from_the_first_exchange_of_the_run() -> None:
    last = 2 * (1 + 3)

    waits = row(slow((0, 30 + last + 1)), every="leader", exchanges=[30, 40])
    quick = row(slow((0, 30 + last + 1)), every="leader", exchanges=[3, 40])

    assert waits.efficiency_settled == 1.0
    assert quick.efficiency_settled is not None and quick.efficiency_settled < 1.0
    assert row(np.ones(STEPS), every="leader").efficiency_settled is None


def test_a_run_that_is_never_settled_has_no_such_figure() -> None:
    restless = [step_event(at) for at in range(5, STEPS, 8)]

    assert row(np.ones(STEPS), events=restless).efficiency_settled is None


def test_changes_that_gained_nearly_nothing_are_needless() -> None:
    gains = [0.5, 0.0051, 0.0049, 0.0, -0.3]

    seen = row(np.ones(STEPS), decisions=[Decided(n, gain, "") for n, gain in enumerate(gains)])

    assert seen.needless_changes == 3


def test_the_time_of_a_decision_is_the_median() -> None:
    assert row(np.ones(STEPS), decide_s=[0.001, 0.002, 0.9]).decide_s == 0.002


def test_a_stage_serves_any_number_of_policies_alike() -> None:
    made = scenario(
        workers=[
            {"samples_per_s": 1000.0, "noise": 0.1, "spike_rate": 0.1},
            {"samples_per_s": 300.0, "noise": 0.1},
        ],
        events=[step_event(20)],
    )
    stage = ScoredScenario.of(made, 3)

    first, _ = stage.run("adaptive")
    other, _ = stage.run("uniform")
    again, _ = stage.run("adaptive")

    assert replace(again, decide_s=0.0) == replace(first, decide_s=0.0)
    assert first.informed == other.informed
    assert first.bound == other.bound
    assert other.speedup == pytest.approx(1.0)
    assert first.efficiency_mean > other.efficiency_mean
    assert (first.policy, first.seed, first.scenario) == ("adaptive", 3, "made")
