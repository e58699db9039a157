"""Modes simulated against real: links are fitted to equal shares, and the rest is predicted."""

from __future__ import annotations

import pytest
from benchmarks.modes_fidelity import FITTED, MODES, POLICIES, cluster, pairs, simulated

from evenstride.cli.modes import read_modes
from evenstride.lab.modes import Cost, ModesComparison
from evenstride.lab.rates import Rates, WorkerRates
from evenstride.lab.workload import SAMPLES
from evenstride.sim.scenario import Communication, Exchange, Scenario, WorkerGroup

COSTS = (Cost(0.01, 0.0002), Cost(0.02, 0.0004), Cost(0.05, 0.001))
LATENCY_S, UPDATE_S, BATCH, STEPS = 0.004, 0.007, 1024, 60


def _told(factor: float = 1.0) -> ModesComparison:
    """Return real runs that are what the simulator says, some of them so many times as fast."""
    scenario = Scenario(
        name="true",
        global_batch=BATCH,
        steps=STEPS,
        workers=[
            WorkerGroup(name=f"w{k}", samples_per_s=1 / cost.per_sample_s, fixed_s=cost.fixed_s)
            for k, cost in enumerate(COSTS)
        ],
        communication=Communication(latency_s=LATENCY_S, update_s=UPDATE_S),
        epoch_samples=SAMPLES,
        exchange=Exchange(every="leader"),
    )
    runs = []
    for mode in read_modes(MODES):
        for policy in POLICIES:
            per_s, outcome = simulated(scenario, mode, policy)
            per_s *= 1.0 if (str(mode), policy) in FITTED else factor
            stale = None if mode.lockstep else (outcome.staleness.mean, outcome.staleness.maximum)
            workers = (WorkerRates(1.0, 1.0, 0.0),)
            runs.append(Rates(str(mode), policy, BATCH, per_s, 0.0, workers, stale, (1,), 0))
    return ModesComparison(
        3, (1.0, 0.5, 0.2), (), COSTS, False, 0.0, "numbers", BATCH, tuple(runs), "nowhere"
    )


def test_a_cluster_that_is_as_simulated_is_found_and_predicted() -> None:
    told = _told()

    scenario = cluster(told, STEPS)

    links = scenario.communication
    assert (links.latency_s, links.update_s) == pytest.approx((LATENCY_S, UPDATE_S))
    found = pairs(told, scenario, read_modes(MODES))
    assert len(found) == 12
    assert max(abs(pair.error) for pair in found) < 1e-9
    assert all(p.real_staleness == p.simulated_staleness for p in found)
    assert any(pair.real_staleness > 1 for pair in found)


def test_what_is_not_as_simulated_is_told() -> None:
    told = _told(factor=1.25)

    found = pairs(told, cluster(told, STEPS), read_modes(MODES))

    wrong = [pair for pair in found if (pair.sync, pair.policy) not in FITTED]
    assert [pair.error for pair in wrong] == pytest.approx([-0.2] * 10)
    assert "fitted" in found[0].line() and "fitted" not in wrong[0].line()
