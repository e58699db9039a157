"""The oracle, the equal split and the controller that knows the truth."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given, reject
from hypothesis import strategies as st
from pydantic import ValidationError

from evenstride.core.allocation.speedup import equal_split
from evenstride.core.fleet import Fleet, Shares
from evenstride.core.policies import policy_from_spec
from evenstride.sim.engine.lockstep import Simulation
from evenstride.sim.engine.virtual_workers import Cluster, TrueTimes
from evenstride.sim.scenario.scenario_file import changed, load_scenario
from evenstride.sim.scenario.scenario_model import Scenario
from evenstride.sim.scenario.timeline import Timeline
from evenstride.sim.scoring.oracle import (
    Alike,
    Informed,
    InformedRun,
    best_split,
    kinds_of,
    reference_times,
)
from evenstride.sim.scoring.suite import ScoredScenario
from tests.effort import expensive
from tests.unit.sim.clusters import FAST, REFERENCE, SLOW, groups, scenario, scenarios

POLICIES = ["adaptive", "dynamic-batching", "dbs", "uniform"]


@expensive
@given(scenarios(every=st.integers(1, 5) | st.just("leader")), st.sampled_from(POLICIES))
def test_without_noise_no_policy_is_ever_faster_than_the_oracle(
    made: Scenario, policy: str
) -> None:
    sticks = reference_times(made, 3)

    track = Simulation(made, policy_from_spec(policy), 3).run()

    assert (track.mean_s >= sticks.oracle_mean_s * (1 - 1e-12)).all()
    row = ScoredScenario.of(made, 3).row(policy, track)
    assert row.efficiency_mean <= 1 + 1e-12
    assert row.informed <= 1 + 1e-12


@st.composite
def small_fleets(draw: st.DrawFn) -> tuple[TrueTimes, Fleet]:
    """Draw two or three workers with few enough splits to try them all, and their curves."""
    kinds = draw(st.lists(groups(), min_size=2, max_size=3))
    small = [kind | {"count": 1, "max_share": draw(st.integers(5, 30))} for kind in kinds]
    batch = draw(st.integers(3, 30))
    try:
        made = scenario(workers=small, global_batch=batch)
    except ValidationError:
        reject()
    cluster = Cluster(made, 0)
    return cluster.usual, Fleet(cluster.workers, batch)


@expensive
@given(small_fleets())
def test_the_oracle_is_the_best_of_all_splits(made: tuple[TrueTimes, Fleet]) -> None:
    """Of all splits in multiples of the quanta, except for one worker with a remainder."""
    times, fleet = made
    ranges = [range(w.min_share, (w.max_share or 0) + 1) for w in fleet.workers]
    least = fleet.lower + -fleet.lower % fleet.quanta

    splits = np.array([s for s in product(*ranges) if sum(s) == fleet.global_batch])
    allowed = (splits % fleet.quanta > 0).sum(axis=1) <= 1
    allowed &= (splits >= least).all(axis=1)
    whole = (splits % fleet.quanta == 0).all(axis=1) & allowed
    fit = splits[whole if whole.any() else allowed]

    best = best_split(times, fleet)

    least_s = min(float(times.at(split).max()) for split in fit)
    assert float(times.at(best).max()) == pytest.approx(least_s, rel=1e-12)
    assert best.sum() == fleet.global_batch


@given(scenarios())
def test_noise_is_the_same_for_oracle_equal_split_and_policies(made: Scenario) -> None:
    sticks = reference_times(made, 5)

    equal = Simulation(made, policy_from_spec("uniform"), 5).run()

    np.testing.assert_allclose(sticks.equal_s, equal.real_s, rtol=1e-12)
    np.testing.assert_allclose(sticks.equal_mean_s, equal.mean_s, rtol=1e-12)
    assert (sticks.oracle_s > 0).all()


@expensive
@given(scenarios(every=st.integers(1, 5) | st.just("leader")))
def test_the_informed_controller_takes_what_the_simulator_says_after_every_step(
    made: Scenario,
) -> None:
    track = Simulation(changed(made, {"exchange.every": 1}), Informed(), 2).run()

    mean_s, real_s = InformedRun(made, 2).run()

    np.testing.assert_array_equal(mean_s, track.mean_s)
    np.testing.assert_array_equal(real_s, track.real_s)


@pytest.mark.parametrize("cold_lag", [1, 6])
def test_the_informed_controller_knows_no_worker_of_a_new_fleet(cold_lag: int) -> None:
    late = [{"kind": "join", "at": 9, "workers": [2, 3]}]
    gone = [{"kind": "leave", "at": 9, "workers": [0, 1]}]
    back = [{"kind": "join", "at": 20, "workers": 0}]
    made = scenario(
        workers=[FAST, SLOW, FAST, SLOW],
        events=[*late, *gone, *back],
        exchange={"lag": 1, "cold_lag": cold_lag},
    )

    slow = InformedRun(made, 0).run()[0] > reference_times(made, 0).oracle_mean_s * (1 + 1e-12)

    opening = [*range(cold_lag), *range(9, 9 + cold_lag)]
    assert np.flatnonzero(slow).tolist() == opening
    np.testing.assert_array_equal(
        InformedRun(made, 0).run()[0], Simulation(made, Informed(), 0).run().mean_s
    )


def test_the_informed_controller_pays_the_lag_after_each_change() -> None:
    made = scenario(
        events=[{"kind": "step", "at": 20, "workers": 0, "speed": 0.25}], exchange={"lag": 3}
    )

    slow = InformedRun(made, 0).run()[0] > reference_times(made, 0).oracle_mean_s * (1 + 1e-12)

    assert np.flatnonzero(slow).tolist() == [0, 1, 2, 20, 21, 22]


def test_changes_faster_than_the_lag_are_better_not_run_after() -> None:
    """Every phase is four steps long, and over when the decision on it takes effect."""
    there_and_back = {"kind": "periodic", "at": 0, "workers": 0, "speed": 0.5, "period": 8}
    made = scenario(
        workers=[FAST, FAST],
        global_batch=60,
        steps=200,
        events=[there_and_back],
        exchange={"lag": 4},
    )

    stage = ScoredScenario.of(made, 0)

    assert stage.informed < stage.run("static:20,40")[0].efficiency_mean - 0.1
    assert stage.informed < stage.run("uniform")[0].efficiency_mean


def test_the_equal_split_in_the_reference_scenario_has_its_published_efficiency() -> None:
    row, _ = ScoredScenario.of(load_scenario(REFERENCE), 0).run("uniform")

    assert row.efficiency_mean == pytest.approx(0.1400, abs=5e-5)
    assert 1 / row.bound == pytest.approx(0.1400, abs=5e-5)
    assert row.needless_changes == 0
    assert (row.steps_to_95_cold, row.steps_to_95_after_change) == (None, None)


@pytest.mark.parametrize(
    ("lag", "cold_lag", "published"),
    [(1, None, 0.985), (3, None, 0.956), (8, None, 0.890), (3, 1, 0.979), (8, 1, 0.964)],
)
def test_the_informed_controller_in_the_reference_scenario_has_its_published_efficiency(
    lag: int, cold_lag: int | None, published: float
) -> None:
    values = {"exchange.lag": lag, "exchange.cold_lag": cold_lag}
    made = changed(load_scenario(REFERENCE), values)

    assert ScoredScenario.of(made, 0).informed == pytest.approx(published, abs=6e-4)


def test_the_linear_bound_is_mean_over_slowest_speed() -> None:
    halved = [{"kind": "step", "at": 0, "workers": 0, "speed": 0.5}]

    assert reference_times(scenario(), 0).linear_bound == pytest.approx(625 / 250)
    assert reference_times(scenario(events=halved), 0).linear_bound == pytest.approx(375 / 250)


def test_the_linear_bound_is_time_over_time_as_the_bound_is() -> None:
    """Per sample: 1/500 and 1/1250 s at first; then 1/500 and 1/750, or 1/1000 for both."""
    halved = {"kind": "step", "at": 30, "workers": 0, "speed": 0.5}
    alone = {"kind": "leave", "at": 30, "workers": 1}

    later = reference_times(scenario(steps=40, events=[halved]), 0).linear_bound
    left = reference_times(scenario(steps=40, events=[alone]), 0).linear_bound

    assert later == pytest.approx((40 / 500) / (30 / 1250 + 10 / 750))
    assert left == pytest.approx((30 / 500 + 10 / 1000) / (30 / 1250 + 10 / 1000))


def test_times_in_proportion_to_the_share_meet_the_linear_bound_whatever_happens() -> None:
    groups = [{"samples_per_s": 3.0}, {"samples_per_s": 2.0, "count": 2}, {"samples_per_s": 1.0}]
    events = [
        {"kind": "step", "at": 10, "workers": 0, "speed": 0.02},
        {"kind": "ramp", "at": 15, "workers": 1, "speed": 3.0, "steps": 9},
        {"kind": "leave", "at": 20, "workers": 3},
    ]
    found = reference_times(scenario(workers=groups, events=events, global_batch=120_000_000), 0)

    bound = found.equal_mean_s.sum() / found.oracle_mean_s.sum()

    assert found.linear_bound == pytest.approx(bound, rel=1e-6)
    assert bound > 2


@given(scenarios(), st.integers(0, 29))
def test_among_many_alike_the_best_split_is_the_same_and_each_kind_is_looked_at_once(
    made: Scenario, step: int
) -> None:
    timeline, cluster = Timeline(made, 0), Cluster(made, 0)
    here = timeline.present(min(step, made.steps - 1))
    curves = cluster.usual.at_speed(timeline.speed(min(step, made.steps - 1))).of(here)
    fleet = Fleet(tuple(cluster.workers[k] for k in here), made.global_batch)

    alike = Alike.of(curves, kinds_of(made)[here])

    best = best_split(curves, fleet)
    before = best_split(curves.at_speed(curves.speed[::-1]), fleet)
    np.testing.assert_array_equal(best_split(alike, fleet), best)
    np.testing.assert_array_equal(best_split(alike, fleet, before), best)
    kinds = {(kind, speed) for kind, speed in zip(kinds_of(made)[here], curves.speed, strict=True)}
    assert len(alike.each.speed) == len(kinds)


def test_values_that_depend_only_on_the_present_workers_are_computed_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    formed: list[Fleet] = []

    def counted(fleet: Fleet) -> Shares:
        formed.append(fleet)
        return equal_split(fleet)

    monkeypatch.setattr("evenstride.sim.scoring.oracle.equal_split", counted)
    ramp = {"kind": "ramp", "at": 5, "workers": 0, "speed": 0.5, "steps": 20}
    away = {"kind": "leave", "at": 30, "workers": 1}

    reference_times(scenario(events=[ramp, away]), 0)

    assert [len(fleet) for fleet in formed] == [2, 1]
