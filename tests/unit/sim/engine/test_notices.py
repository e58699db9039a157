"""Workers with a notice get no samples in the simulator either, by the same controller."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from evenstride.core.policies import policy_from_spec
from evenstride.sim.engine.lockstep import SimulatedSteps, Simulation
from evenstride.sim.scenario.scenario_model import Scenario
from evenstride.sim.scenario.timeline import Timeline
from evenstride.sim.scoring.oracle import Informed, reference_times
from tests.contract.fleets import SPECS
from tests.messages import raises_message
from tests.unit.sim.clusters import scenario

POLICIES = [spec for spec in SPECS if "GIVEN" not in spec]
GROUP = {"name": "w", "samples_per_s": 500.0, "fixed_s": 0.005, "cores": 2, "flops_per_s": 1e9}


def _reported(kind: str, at: int, workers: int | list[int] = 1) -> dict[str, Any]:
    return {"kind": kind, "at": at, "workers": workers}


def _scenario(*events: dict[str, Any], count: int = 3, **values: Any) -> Scenario:
    groups = [{**GROUP, "count": count}]
    return scenario(workers=groups, global_batch=60, steps=60, events=list(events), **values)


def _split(track: SimulatedSteps, step: int) -> list[int]:
    return [int(share) for share in track.splits[track.shares[step]]]


@pytest.mark.parametrize("spec", POLICIES)
def test_every_policy_gives_a_leaver_nothing_and_the_others_everything(spec: str) -> None:
    events = [
        _reported("notice", 20),
        _reported("withdrawn", 30),
        _reported("notice", 40),
        _reported("leave", 50),
    ]
    made = _scenario(*events, exchange={"lag": 2})

    track = Simulation(made, policy_from_spec(spec), 1).run()

    for step in range(60):
        split = _split(track, step)
        assert sum(split) == 60
        away = 22 <= step < 32 or step >= 42
        assert (split[1] == 0) == away, step


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["notice", "withdrawn", "leave", "lost", "join"]),
            st.integers(1, 55),
            st.integers(0, 2),
        ),
        max_size=8,
    ),
    st.sampled_from(POLICIES),
    st.integers(1, 5),
)
def test_the_global_batch_is_always_split_over_the_serving_workers(
    reported: list[tuple[str, int, int]], spec: str, lag: int
) -> None:
    try:
        made = _scenario(*(_reported(*one) for one in reported), exchange={"lag": lag})
    except ValidationError:
        return
    simulation = Simulation(made, policy_from_spec(spec), 1)
    track, timeline = simulation.run(), Timeline(made, 1)
    for step in range(60):
        split = np.array(_split(track, step))
        there = np.isin(np.arange(3), timeline.group(step))
        assert split.sum() == 60
        assert (split[~there] == 0).all()
        serving = np.isin(np.arange(3), timeline.present(step))
        settled = all(abs(step - at) > lag and at != step for _, at, _ in reported if at <= step)
        if settled:
            assert ((split > 0) == serving).all()


def test_the_standing_and_the_reason_are_those_of_the_table() -> None:
    made = _scenario(_reported("notice", 20), _reported("lost", 30), _reported("join", 40))
    simulation = Simulation(made, policy_from_spec("adaptive"), 1)
    reasons = " | ".join(decided.reason for decided in simulation.run().decisions)
    assert "w/1 will leave" in reasons


def test_the_informed_controller_and_the_oracle_know_the_serving_workers() -> None:
    made = _scenario(_reported("notice", 20), exchange={"lag": 1})
    track = Simulation(made, Informed(), 1).run()
    assert _split(track, 30) == [30, 0, 30]
    oracle = reference_times(made, 1).oracle_mean_s
    np.testing.assert_allclose(oracle[30:], track.mean_s[30:])


@pytest.mark.parametrize(
    ("events", "text"),
    [
        ([_reported("withdrawn", 5)], ("worker 1", "step 5")),
        ([_reported("notice", 5), _reported("notice", 6)], ("worker 1", "step 6")),
        ([_reported("leave", 5), _reported("notice", 6)], ("worker 1", "step 6")),
    ],
)
def test_impossible_events_are_refused(events: list[dict[str, Any]], text: tuple[str, ...]) -> None:
    with raises_message(ValidationError, *text):
        _scenario(*events)


def test_a_notice_that_the_others_cannot_make_up_for_is_refused() -> None:
    groups = [{**GROUP, "count": 3, "max_share": 25}]
    with raises_message(ValidationError, "2 workers"):
        scenario(workers=groups, global_batch=60, steps=60, events=[_reported("notice", 5)])
