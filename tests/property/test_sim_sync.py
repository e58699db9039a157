"""After any faults of virtual workers, in no mode is a sample left out or a bound exceeded."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, reject
from hypothesis import strategies as st
from pydantic import ValidationError

from evenstride.core.policies import policy_from_spec
from evenstride.core.sync_modes.mode_specs import StaleSynchronous, sync_from_spec
from evenstride.sim.engine.lockstep import Simulation
from evenstride.sim.engine.mode_result import Applied, Begun, Entry, Gone
from evenstride.sim.engine.mode_runs import simulate_sync
from evenstride.sim.scenario.scenario_model import Scenario, epochs_of
from evenstride.sim.scenario.timeline import Timeline
from tests.unit.sim.clusters import groups, scenario, scenarios, speed_events

POLICIES = st.sampled_from(["uniform", "adaptive", "dynamic-batching", "lb-bsp-gpu", "dbs"])
LOCKSTEP = [
    "bsp",
    "bsp-ps(servers=2)",
    "local-sgd(every=4)",
    "local-sgd(every=3,after=5)",
    "delayed",
]
FREE = ["asp", "asp(servers=3)", "ssp(staleness=0)", "ssp(staleness=2)"]
MODES = st.sampled_from([*LOCKSTEP, *FREE])
LINKS = st.fixed_dictionaries(
    {
        "latency_s": st.sampled_from([0.0, 0.003]),
        "bytes_per_s": st.none() | st.floats(1e6, 1e9),
        "gradient_bytes": st.sampled_from([0.0, 1e5]),
        "update_s": st.sampled_from([0.0, 0.01]),
    }
)


@st.composite
def lossy(draw: st.DrawFn) -> Scenario:
    """Draw a scenario in which workers are lost, and in which some come back."""
    steps = draw(st.integers(4, 20))
    kinds = [
        {**kind, "max_share": None} for kind in draw(st.lists(groups(), min_size=1, max_size=2))
    ]
    size = sum(kind["count"] for kind in kinds)
    events: list[dict[str, Any]] = draw(st.lists(speed_events(steps, size), max_size=2))
    for worker in range(1, size):
        if draw(st.booleans()):
            at = draw(st.integers(0, steps - 1))
            kind = draw(st.sampled_from(["lost", "lost", "leave", "notice"]))
            events.append({"kind": kind, "at": at, "workers": worker})
            back = draw(st.none() | st.integers(at + 1, at + 5))
            if back is not None and back < steps:
                again = "withdrawn" if kind == "notice" else "join"
                events.append({"kind": again, "at": back, "workers": worker})
    values = {
        "steps": steps,
        "global_batch": draw(st.integers(20, 40)),
        "workers": kinds,
        "events": events,
        "communication": draw(LINKS),
        "epoch_samples": draw(st.none() | st.integers(1, 150)),
        "exchange": {
            "every": draw(st.sampled_from([1, 3, "leader"])),
            "lag": draw(st.integers(1, 4)),
        },
    }
    try:
        return scenario(**values)
    except ValidationError:  # the workers cannot share the global batch
        reject()


@given(lossy(), MODES, POLICIES)
def test_every_sample_is_trained_once_in_its_epoch_after_any_loss(
    made: Scenario, mode: str, policy: str
) -> None:
    record = list[Entry]()

    outcome = simulate_sync(made, policy, sync_from_spec(mode), 1, record=record)

    trained = [Counter[int]() for _ in range(outcome.epochs)]
    for entry in record:
        if isinstance(entry, Applied):
            trained[entry.epoch].update(p for stretch in entry.positions for p in stretch)
    sizes = epochs_of(made)
    assert trained == [Counter(range(size)) for size in sizes]
    assert sum(sizes) == made.steps * made.global_batch == outcome.samples
    assert sum(worker.samples for worker in outcome.workers) == outcome.samples


@given(lossy(), MODES, POLICIES)
def test_the_same_seed_gives_the_same_run_in_every_mode(
    made: Scenario, mode: str, policy: str
) -> None:
    records = [list[Entry](), list[Entry]()]

    one, same = (
        simulate_sync(made, policy, sync_from_spec(mode), 3, record=record) for record in records
    )

    assert one == same
    assert records[0] == records[1]


@given(lossy(), st.integers(0, 3), POLICIES)
def test_no_worker_begins_further_ahead_of_the_slowest_than_the_bound(
    made: Scenario, bound: int, policy: str
) -> None:
    assume(all(event.kind not in ("join", "notice", "leave") for event in made.events))
    record, sizes = list[Entry](), iter(epochs_of(made))
    there = set(Timeline(made, 1).group(0).tolist())

    outcome = simulate_sync(made, policy, StaleSynchronous(bound), 1, record=record)

    left = next(sizes)
    clocks = Counter[int]()
    for entry in record:
        match entry:
            case Gone():
                there.discard(entry.worker)
            case Begun():
                assert clocks[entry.worker] - min(clocks[k] for k in there) <= bound
            case Applied():
                clocks[entry.worker] += 1
                left -= sum(map(len, entry.positions))
                if not left:
                    clocks, left = Counter(), next(sizes, 0)
    assert outcome.staleness.maximum <= (made.size - 1) * (2 * bound + 1)


@given(scenarios(), POLICIES)
def test_bsp_is_the_simulator_of_steps(made: Scenario, policy: str) -> None:
    record = list[Entry]()
    track = Simulation(made, policy_from_spec(policy), 2).run()

    outcome = simulate_sync(made, policy, sync_from_spec("bsp"), 2, record=record)

    assert outcome.time_s == pytest.approx(track.real_s.sum(), rel=1e-9)
    shares, step = np.zeros((made.steps, made.size), dtype=np.int64), -1
    ends = dict[float, int]()
    for entry in record:
        if isinstance(entry, Applied):
            step = ends.setdefault(entry.at_s, len(ends))
            shares[step, entry.worker] = sum(map(len, entry.positions))
    np.testing.assert_array_equal(shares, [track.splits[index] for index in track.shares])


@given(scenarios(), POLICIES)
def test_an_average_after_every_step_takes_the_time_of_bsp(made: Scenario, policy: str) -> None:
    bsp, always, later = (
        simulate_sync(made, policy, sync_from_spec(mode), 2)
        for mode in ("bsp", "local-sgd(every=1)", f"local-sgd(every=9,after={made.steps})")
    )

    assert always.time_s == bsp.time_s
    assert later.time_s == bsp.time_s
    assert always.workers == bsp.workers


@given(scenarios())
def test_fewer_averages_never_take_longer(made: Scenario) -> None:
    """With the same shares and the same noise; adaptive ones depend on what was waited."""
    bsp, seldom, behind = (
        simulate_sync(made, "uniform", sync_from_spec(mode), 2).time_s
        for mode in ("bsp", "local-sgd(every=4)", "delayed")
    )

    assert seldom <= bsp * (1 + 1e-12)
    assert behind <= bsp * (1 + 1e-12)


@given(st.integers(1, 30), st.integers(1, 40), st.floats(0, 0.3), st.none() | st.integers(7, 90))
def test_one_worker_alone_is_never_stale_and_takes_the_time_of_one_process(
    steps: int, batch: int, noise: float, epoch: int | None
) -> None:
    lonely = {"samples_per_s": 100.0, "fixed_s": 0.02, "noise": noise}
    made = scenario(workers=[lonely], steps=steps, global_batch=batch, epoch_samples=epoch)
    sequential = simulate_sync(made, "uniform", sync_from_spec("bsp"), 5)

    for mode in FREE:
        alone = simulate_sync(made, "uniform", sync_from_spec(mode), 5)

        assert alone.time_s == pytest.approx(sequential.time_s, rel=1e-9)
        assert alone.updates == sequential.updates
        assert alone.staleness.maximum == 0


@given(lossy(), POLICIES)
def test_a_bound_that_no_worker_reaches_changes_nothing(made: Scenario, policy: str) -> None:
    free, bounded = (
        simulate_sync(made, policy, sync_from_spec(mode), 1)
        for mode in ("asp", "ssp(staleness=100000)")
    )

    assert free.to_dict() == {**bounded.to_dict(), "sync": "asp"}
