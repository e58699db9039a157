"""The simulator runs the controller itself: its lag, its cadence, its fleets."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstride.core.fleet import Fleet, Shares
from evenstride.core.policies import policy_from_spec
from evenstride.core.policies.static import Uniform
from evenstride.core.policy import Decision, Keep, Move, Situation
from evenstride.sim.engine.lockstep import SimulatedSteps, Simulation
from evenstride.sim.engine.virtual_workers import Cluster, TrueTimes
from evenstride.sim.scenario.scenario_file import changed
from evenstride.sim.scenario.scenario_model import Scenario
from evenstride.sim.scenario.timeline import Timeline
from evenstride.sim.scoring.suite import ScoredScenario
from tests.effort import expensive
from tests.unit.sim.clusters import FAST, scenario, scenarios
from tests.unit.sim.recording import Recording

POLICIES = ["adaptive", "dynamic-batching", "uniform"]


@dataclass(frozen=True)
class Alternating:
    """Moves a sample to and fro at every exchange, and keeps the reports in its state."""

    opening_steps: int = 0

    def init(self, fleet: Fleet) -> tuple[tuple[Situation, ...], Move]:
        return (), Move(Uniform().init(fleet)[1].shares, "opening")

    def decide(
        self, state: tuple[Situation, ...], situation: Situation
    ) -> tuple[tuple[Situation, ...], Decision]:
        first, second, *rest = situation.shares
        away = 1 if len(state) % 2 == 0 else -1
        return (*state, situation), Move((first + away, second - away, *rest), "to and fro")


class Opening(Alternating):
    """The same, but it never says that its opening is over."""

    def decide(
        self, state: tuple[Situation, ...], situation: Situation
    ) -> tuple[tuple[Situation, ...], Decision]:
        after, decision = super().decide(state, situation)
        return after, replace(decision, settled=False)


@dataclass(frozen=True)
class Once:
    """Moves to a split at its first exchange."""

    shares: Shares
    opening_steps: int = 1

    def init(self, fleet: Fleet) -> tuple[int, Move]:
        return 0, Move(Uniform().init(fleet)[1].shares, "opening", settled=False)

    def decide(self, state: int, situation: Situation) -> tuple[int, Decision]:
        del situation
        return state + 1, Keep("there") if state else Move(self.shares, "once")


def split_at(track: SimulatedSteps, step: int) -> list[int]:
    return [int(share) for share in track.splits[track.shares[step]]]


def moved_at(track: SimulatedSteps) -> list[int]:
    return [move.step for move in track.decisions]


@given(scenarios(every=st.integers(1, 5) | st.just("leader")), st.sampled_from(POLICIES))
def test_every_step_splits_the_global_batch_over_the_present_workers(
    made: Scenario, policy: str
) -> None:
    track = Simulation(made, policy_from_spec(policy), 1).run()

    lower = np.array([worker.min_share for worker in Cluster(made, 1).workers])
    timeline = Timeline(made, 1)
    for step in range(made.steps):
        there = np.isin(np.arange(made.size), timeline.present(step))
        split = track.splits[track.shares[step]]
        assert split.sum() == made.global_batch
        assert (split[~there] == 0).all()
        assert (split[there] >= lower[there]).all()


@expensive
@given(scenarios(), st.sampled_from(POLICIES))
def test_the_same_seed_gives_the_same_run(made: Scenario, policy: str) -> None:
    one, same = (Simulation(made, policy_from_spec(policy), 4).run() for _ in range(2))

    np.testing.assert_array_equal(one.real_s, same.real_s)
    np.testing.assert_array_equal(one.mean_s, same.mean_s)
    np.testing.assert_array_equal(one.splits, same.splits)


@expensive
@given(scenarios())
def test_the_same_seed_gives_every_policy_the_same_noise(made: Scenario) -> None:
    # A policy with the same split has the same step, whatever happened before; except for the cost
    # of first steps, which is therefore left out.
    groups = [group.model_copy(update={"new_share_s": 0.0}) for group in made.workers]
    same = made.model_copy(update={"workers": groups})
    tracks = [Simulation(same, policy_from_spec(policy), 2).run() for policy in POLICIES]

    for step in range(made.steps):
        seen = {(*split_at(track, step),): track.real_s[step] for track in tracks}
        for track in tracks:
            assert seen[(*split_at(track, step),)] == track.real_s[step]


@pytest.mark.parametrize("lag", [1, 2, 7])
def test_a_decision_takes_effect_the_lag_after_what_it_was_measured_at(lag: int) -> None:
    made = scenario(exchange={"lag": lag})

    track = Simulation(made, Once((40, 10))).run()

    assert moved_at(track) == [lag]
    assert split_at(track, lag - 1) == [25, 25]
    assert split_at(track, lag) == [40, 10]


def test_the_opening_phase_has_a_lag_of_its_own() -> None:
    cold = scenario(exchange={"lag": 9, "cold_lag": 2})

    opening = Simulation(cold, Once((40, 10))).run()

    assert moved_at(opening) == [2]


@pytest.mark.parametrize(
    ("policy", "seen"),
    [
        (Alternating(), [3, 10, 11, 12]),
        (Opening(1), [3, 10, 11, 12]),
        (Opening(3), [3, 4, 5, 12]),
    ],
)
def test_the_first_exchange_is_a_cold_one_for_every_policy_and_others_while_it_opens(
    policy: Alternating, seen: list[int]
) -> None:
    cold = scenario(exchange={"lag": 9, "cold_lag": 3}, steps=13)

    track = Simulation(cold, policy).run()

    assert moved_at(track) == seen


def test_every_fleet_begins_with_a_cold_exchange() -> None:
    cold = scenario(
        workers=[FAST, FAST, FAST],
        global_batch=60,
        exchange={"lag": 9, "cold_lag": 2, "every": 5},
        events=[{"kind": "leave", "at": 20, "workers": 2}],
    )

    track = Simulation(cold, Alternating()).run()

    assert moved_at(track)[:2] == [6, 18]
    assert [step for step in moved_at(track) if step >= 20] == [26, 38]


@pytest.mark.parametrize("policy", ["uniform", "dynamic-batching", "dbs", "adaptive"])
def test_all_rows_of_a_table_pay_the_lag_that_informed_pays(policy: str) -> None:
    """A policy that finds the best split with the first exchange is not ahead of informed."""
    slow_at = {"kind": "step", "at": 20, "workers": 0, "speed": 0.25}
    made = scenario(events=[slow_at], exchange={"lag": 9, "cold_lag": 2})

    track = Simulation(made, policy_from_spec(policy)).run()

    first = moved_at(track)[:1]
    assert first in ([], [2]) or policy == "dbs"  # it waits for the end of its first epoch
    assert (
        ScoredScenario.of(made, 0).informed
        >= ScoredScenario.of(made, 0).row(policy, track).efficiency_mean
    )


@pytest.mark.parametrize(("every", "first"), [(1, 1), (4, 4), (10, 10)])
def test_exchanges_come_at_their_cadence(every: int, first: int) -> None:
    made = scenario(exchange={"every": every, "lag": 1})

    track = Simulation(made, Alternating()).run()

    assert moved_at(track) == list(range(first, made.steps, every))
    assert len(track.decide_s) == made.steps // every


@pytest.mark.parametrize("epoch_steps", [20, 1000])
def test_dbs_decides_at_each_end_of_an_epoch_whatever_the_cadence(epoch_steps: int) -> None:
    made = scenario(
        steps=3 * epoch_steps + 1,
        events=[{"kind": "step", "at": epoch_steps, "workers": 0, "speed": 0.25}],
        exchange={"every": 90, "lag": 9},
        epoch_samples=epoch_steps * 50,
    )

    track = Simulation(made, policy_from_spec("dbs")).run()

    assert moved_at(track)[:2] == [epoch_steps, 2 * epoch_steps]
    assert all(step % epoch_steps == 0 for step in moved_at(track))


def test_an_exchange_tells_all_steps_since_the_one_before() -> None:
    made = scenario(exchange={"every": 5, "lag": 3}, steps=22)
    policy = Recording(Alternating())

    track = Simulation(made, policy).run()

    reported = [seen for situation in policy.situations for seen in situation.observations]
    for worker in (0, 1):
        steps = [
            (seen.first_step + offset, seen.share)
            for seen in reported
            if seen.worker == worker
            for offset in range(seen.steps)
        ]
        assert steps == [(step, split_at(track, step)[worker]) for step in range(20)]


def test_a_step_lasts_as_long_as_its_slowest_worker_and_the_communication() -> None:
    made = scenario(
        workers=[{**FAST, "samples_per_s": 100.0}, {**FAST, "samples_per_s": 50.0}],
        communication={"latency_s": 0.05},
    )

    track = Simulation(made, policy_from_spec("static:30,20")).run()

    # 20 samples at 50 per second, 10 ms fixed; two messages of 50 ms.
    np.testing.assert_allclose(track.mean_s, 0.4 + 0.01 + 0.1)
    np.testing.assert_allclose(track.real_s, track.mean_s)


def test_the_wait_of_the_slowest_worker_is_the_communication() -> None:
    made = scenario(communication={"latency_s": 0.05})
    policy = Recording(Alternating())

    Simulation(made, policy).run()

    fast, slow = policy.situations[0].observations

    assert slow.wait_s == pytest.approx((0.1,))
    assert fast.busy_s[0] + fast.wait_s[0] == pytest.approx(slow.busy_s[0] + slow.wait_s[0])


def test_a_change_of_membership_forms_a_new_fleet_of_equal_shares() -> None:
    events: list[dict[str, Any]] = [
        {"kind": "leave", "at": 10, "workers": 0},
        {"kind": "join", "at": 20, "workers": 0},
    ]
    made = scenario(workers=[{**FAST, "count": 2}, FAST], events=events, global_batch=60)

    track = Simulation(made, policy_from_spec("uniform")).run()

    assert split_at(track, 9) == [20, 20, 20]
    assert split_at(track, 10) == [0, 30, 30]
    assert split_at(track, 20) == [20, 20, 20]
    assert track.decisions == []


def test_a_decision_that_is_under_way_when_the_fleet_changes_is_dropped() -> None:
    made = scenario(
        workers=[FAST, FAST, FAST],
        global_batch=60,
        exchange={"lag": 8, "every": 6},
        events=[{"kind": "leave", "at": 10, "workers": 2}],
    )

    track = Simulation(made, Alternating()).run()

    assert [step for step in moved_at(track) if step < 19] == []
    assert split_at(track, 18)[2] == 0
    assert split_at(track, 19) != split_at(track, 18)
    assert all(sum(split) == 60 for split in track.splits)


class TestLeaderCadence:
    """Exchanges come when the leader wants them, and when a worker asks."""

    def exchanges(self, spec: str = "adaptive", **values: Any) -> list[int]:
        made = scenario(steps=300, exchange={"every": "leader"}, **values)
        policy = Recording(policy_from_spec(spec))
        Simulation(made, policy).run()
        return policy.steps

    def test_they_grow_rare_while_nothing_changes(self) -> None:
        steps = self.exchanges()

        gaps = np.diff(steps)
        assert gaps[0] == 1
        assert gaps[-1] > 16
        assert len(steps) < 30

    @pytest.mark.parametrize(
        "spec", ["dynamic-batching", "lb-bsp-cpu:predictor=last", "lb-bsp-gpu:version=2018"]
    )
    def test_every_step_waits_for_its_decision_where_the_policy_is_set_so(self, spec: str) -> None:
        every = spec + (",every=1" if ":" in spec else ":every=1")

        assert self.exchanges(every) == list(range(300))
        assert len(self.exchanges(spec)) < 150

    def test_a_worker_that_leaves_its_band_asks_for_one_at_once(self) -> None:
        slower = [{"kind": "step", "at": 200, "workers": 0, "speed": 0.3}]
        faster = [{"kind": "step", "at": 200, "workers": 1, "speed": 3.0}]

        usual = self.exchanges()

        assert not {200, 201} & set(usual)
        assert 201 in self.exchanges(events=slower)  # the second slow step asks
        assert 200 in self.exchanges(events=faster)  # the first fast one


def test_true_curves_are_worked_out_only_where_they_change(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    steps: list[int] = []
    curves_at = Simulation.curves_at

    def noted(simulation: Simulation, step: int) -> TrueTimes:
        steps.append(step)
        return curves_at(simulation, step)

    monkeypatch.setattr(Simulation, "curves_at", noted)
    slower = {"kind": "step", "at": 9, "workers": 0, "speed": 0.5}
    away = {"kind": "leave", "at": 20, "workers": 1}

    Simulation(scenario(events=[slower, away]), Uniform()).run()

    assert steps == [0, 9, 20]


def test_the_gain_of_a_decision_is_the_true_one_at_its_step() -> None:
    made = scenario(
        workers=[{**FAST, "fixed_s": 0.0}, {**FAST, "fixed_s": 0.0}],
        events=[{"kind": "step", "at": 1, "workers": 0, "speed": 4.0}],
    )

    better, worse = (Simulation(made, Once(shares)).run() for shares in ((40, 10), (20, 30)))

    assert better.decisions[0].gain == pytest.approx(1 - 10 / 25)
    assert worse.decisions[0].gain == pytest.approx(1 - 30 / 25)
    assert better.decisions[0].reason == "once"


EVENTS: list[dict[str, Any]] = [
    {"kind": "step", "at": 3, "workers": 0, "speed": 0.5, "until": 33},
    {"kind": "step", "at": 39, "workers": 0, "speed": 0.1},
    {"kind": "ramp", "at": 15, "workers": 1, "speed": 0.4, "steps": 20},
    {"kind": "periodic", "at": 6, "workers": 2, "speed": 0.5, "period": 9},
    {"kind": "join", "at": 30, "workers": 3},
    {"kind": "bursty", "at": 2, "workers": "all", "speed": 0.5, "mean_steps": 4, "mean_gap": 6},
    {"kind": "leave", "at": 12, "workers": 0},
    {"kind": "join", "at": 31, "workers": 0},
]
REPLAYS: list[dict[str, Any]] = [
    {"kind": "replay", "at": 35, "workers": 2},
    {"kind": "replay", "at": 5, "workers": [1, 2, 3], "steps_per_sample": 2},
]


def check_beginning(made: Scenario, policy: str, steps: int) -> None:
    whole = Simulation(made, policy_from_spec(policy), 3).run()
    part = Simulation(changed(made, {"steps": steps}), policy_from_spec(policy), 3).run()

    np.testing.assert_array_equal(part.mean_s, whole.mean_s[:steps])
    np.testing.assert_array_equal(part.real_s, whole.real_s[:steps])
    np.testing.assert_array_equal(part.splits, whole.splits[: len(part.splits)])


@pytest.mark.parametrize("steps", [1, 11, 12, 13, 25, 30, 31, 39])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_run_of_fewer_steps_is_the_beginning_of_the_whole_one(policy: str, steps: int) -> None:
    workers = [{**FAST, "count": 2, "noise": 0.1, "spike_rate": 0.1}, {**FAST, "count": 2}]

    check_beginning(scenario(workers=workers, events=EVENTS, exchange={"lag": 2}), policy, steps)


@pytest.mark.parametrize("steps", [5, 6, 34, 36])
def test_recorded_load_is_that_of_the_same_machines_in_a_run_of_fewer_steps(
    data_root: Path, monkeypatch: pytest.MonkeyPatch, steps: int
) -> None:
    monkeypatch.setenv("EVENSTRIDE_DATA", str(data_root))

    check_beginning(scenario(workers=[{**FAST, "count": 4}], events=REPLAYS), "adaptive", steps)
