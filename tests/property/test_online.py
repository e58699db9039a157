"""An online search never makes worse what it knows of, and never looks around when it is late."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from evenstride.planner.online_forecast import Configuration, TrainingJob
from evenstride.planner.online_policy import OnlineStanding, choices, decide
from evenstride.planner.search.selection import Objective
from evenstride.planner.workload.workload_profile import Noise
from tests.unit.planner.searching import Truth

speeds = st.lists(st.floats(1e-5, 1e-3), min_size=4, max_size=4)
truths = st.builds(
    Truth,
    speeds,
    fixed_samples=st.floats(0.0, 200.0),
    latency_s=st.floats(0.0, 0.01),
    beside=st.floats(0.9, 1.5),
)
noises = st.floats(1.0, 1e6).map(lambda phi: Noise(scale=phi, low=0.8 * phi, high=1.2 * phi))
BATCHES = (64, 256, 1024)
POSSIBLE = choices((1, 2, 4), BATCHES)


@given(
    truth=truths,
    noise=noises,
    epochs=st.floats(0.01, 1e4),
    objective=st.sampled_from([Objective.TIME, Objective.COST]),
    switch_s=st.floats(0.01, 100.0),
    present=st.sampled_from(POSSIBLE),
)
def test_a_switch_is_foreseen_to_bring_more_than_it_costs(
    truth: Truth,
    noise: Noise,
    epochs: float,
    objective: Objective,
    switch_s: float,
    present: Configuration,
) -> None:
    seen = [choice for choice in (min(POSSIBLE), max(POSSIBLE)) if choice != present]
    probes = [truth.probe(choice) for choice in (*seen, present)]
    job = TrainingJob(60_000, epochs, 64, truth.gradient_bytes, objective, 1.0, noise, len(BATCHES))

    decision = decide(job, POSSIBLE, probes, OnlineStanding(present, {}, switch_s, 2))

    found = {one.choice: one for one in decision.foreseen}
    if decision.to is None or decision.probe:
        return
    here, there = found[present], found[decision.to]
    if objective is Objective.TIME:
        assert there.time_s.value + switch_s < here.time_s.value
    else:
        cost = job.cost_usd(decision.to.workers, switch_s)
        assert there.cost_usd.value + cost < here.cost_usd.value


@given(truth=truths, epochs=st.floats(0.001, 1e3), switch_s=st.floats(0.01, 100.0))
def test_nothing_is_tried_that_could_not_pay(truth: Truth, epochs: float, switch_s: float) -> None:
    first, far = min(POSSIBLE), max(POSSIBLE)
    probe = truth.probe(first)
    job = TrainingJob(60_000, epochs, 64, truth.gradient_bytes, batches=len(BATCHES))

    decision = decide(job, POSSIBLE, [probe], OnlineStanding(first, {}, switch_s))

    left_s = epochs * 60_000 / 64 * probe.step_s
    if decision.to is not None:
        assert decision.to == far
        assert decision.probe
        assert 2 * switch_s < 0.1 * left_s / 4
    else:
        assert 2 * switch_s + 20 * probe.step_s > 0.0999 * left_s / 4
