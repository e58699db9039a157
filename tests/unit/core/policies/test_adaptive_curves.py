"""Adaptive on curves that are no straight lines: stairs and cliffs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from evenstride.core.control.advance import advance
from evenstride.core.control.events import FleetFormed, Recalled
from evenstride.core.control.state import Control
from evenstride.core.fleet import Worker
from evenstride.core.membership.worker_profiles import WorkerProfile
from evenstride.core.policies.adaptive import Adaptive
from evenstride.sim.scoring.suite import ScoredScenario
from tests.unit.sim.clusters import scenario

NEAR = [0.97, 0.985, 1.0, 1.0, 1.0, 1.01, 1.02, 1.03]
UNEQUAL = [2.0, 1.5, 1.0]


def _efficiency(speeds: list[float], share: int, lag: int, **kind: Any) -> float:
    made = scenario(
        global_batch=share * len(speeds),
        steps=150,
        workers=[
            {"name": f"w{k}", "samples_per_s": 1000.0 * speed, "noise": 0.02, **kind}
            for k, speed in enumerate(speeds)
        ],
        exchange={"lag": lag},
    )
    return ScoredScenario.of(made, 0).run("adaptive")[0].efficiency_mean


@pytest.mark.parametrize("lag", [1, 3])
@pytest.mark.parametrize("waves", [1, 2, 8])
@pytest.mark.parametrize("speeds", [NEAR, UNEQUAL], ids=["near", "unequal"])
def test_unknown_waves_cost_little(speeds: list[float], waves: int, lag: int) -> None:
    assert _efficiency(speeds, 32 * waves, lag, wave=32, fixed_s=0.0) > 0.965


@pytest.mark.parametrize("wave", [16, 48])
def test_waves_of_other_sizes_cost_little(wave: int) -> None:
    assert _efficiency(2 * UNEQUAL, 2 * wave, 1, wave=wave, fixed_s=0.0) > 0.965


def test_a_declared_quantum_of_one_finds_no_waves() -> None:
    """It is what the run above would be without the search."""
    assert _efficiency(UNEQUAL, 64, 1, wave=32, fixed_s=0.0, quantum=1) < 0.96


@pytest.mark.parametrize("lag", [1, 3])
def test_a_cliff_is_met_seldom(lag: int) -> None:
    cliff = {"cliff_at": 40, "cliff_factor": 5.0, "fixed_s": 0.005}

    assert _efficiency([2.0, 1.0, 1.0, 1.0], 32, lag, **cliff) > 0.8


def test_waves_and_cliffs_are_known_after_a_restart() -> None:
    curve = (0.0, 0.001, 1e-8, 0.0, 1e-10)
    cliff = (160.0, 200.0, 9.0)
    known = [
        WorkerProfile("h", "gpu", k, f"h/{k}", curve, 1e-4, 50, 32, cliff if k else (0.0,) * 3)
        for k in range(3)
    ]
    workers = tuple(Worker(f"h/{k}", device="gpu", slot=k) for k in range(3))
    control, _ = advance(Control(Adaptive()), FleetFormed(0, 0, 224, workers))

    after, _ = advance(control, Recalled(0, 1, tuple(known)))

    assert after.believed.seen.quantum.tolist() == [32] * 3
    assert after.believed.model.at(np.array([33] * 3)) == pytest.approx([0.064] * 3)
    assert after.believed.model.at(np.array([170] * 3)) == pytest.approx([0.192, 7.65, 7.65])
    again = {one.slot: one for one in after.known}
    assert [again[k].quantum for k in range(3)] == [32] * 3
    assert again[1].cliff == pytest.approx(cliff)
    assert again[0].cliff == (0.0, 0.0, 0.0)
    assert WorkerProfile.from_plain(again[1].to_plain()) == again[1]


def test_a_declared_quantum_of_one_ignores_waves_of_a_checkpoint() -> None:
    curve = (0.0, 0.001, 1e-8, 0.0, 1e-10)
    known = (WorkerProfile("h", "gpu", 0, "h/0", curve, 1e-4, 50, 32),)
    workers = tuple(Worker(f"h/{k}", device="gpu", slot=k, quantum=1) for k in range(2))
    control, _ = advance(Control(Adaptive()), FleetFormed(0, 0, 224, workers))

    after, _ = advance(control, Recalled(0, 1, known))

    assert not after.believed.seen.has_waves
