"""Simulated and real modes: two times are fitted to equal shares, and the rest is predicted."""

from __future__ import annotations

from dataclasses import replace

import pytest
from benchmarks.modes_fidelity import (
    FITTED,
    MODES,
    POLICIES,
    SEEDS,
    Measured,
    again,
    fitted_s,
    per_s,
    plain,
    row,
    simulated,
)

from evenstride.core.sync_modes.mode_specs import SyncMode
from evenstride.lab.comparison.trace_figures import Rates, WorkerRates
from evenstride.sim.scenario.scenario_model import WorkerGroup

COSTS = ((0.01, 0.0002), (0.02, 0.0004), (0.05, 0.001))
WORKERS = tuple(
    WorkerGroup(name=f"w{k}", fixed_s=fixed_s, samples_per_s=1 / sample_s)
    for k, (fixed_s, sample_s) in enumerate(COSTS)
)
REDUCE_S, SERVE_S, BATCH, STEPS = 0.008, 0.03, 1024, 60


def _real(mode: SyncMode, policy: str, factor: float = 1.0) -> Measured:
    """Return a real run that is ``factor`` times as fast as the simulator predicts."""
    wait_s = {"bsp": REDUCE_S, "bsp-ps": SERVE_S}.get(str(mode), 0.0)
    equal_s = [fixed_s + sample_s * BATCH / 3 for fixed_s, sample_s in COSTS]
    step_s = max(equal_s) + wait_s
    workers = tuple(WorkerRates(STEPS, step_s, 1 - busy_s / step_s) for busy_s in equal_s)
    rates = Rates(str(mode), policy, BATCH, 1.0, 0.0, workers, None, (342, 341, 341), 0, STEPS)
    run = Measured(str(mode), policy, rates, WORKERS, 0.01)
    outcomes = simulated(run, mode, STEPS, (REDUCE_S, SERVE_S))
    stale = outcomes[-1].staleness
    measured = replace(
        rates,
        samples_per_s=per_s(outcomes) * factor,
        staleness=None if mode.lockstep else (stale.mean, stale.maximum),
    )
    return replace(run, rates=measured)


def _all(factor: float = 1.0) -> list[Measured]:
    return [
        _real(mode, policy, 1.0 if (str(mode), policy) in FITTED else factor)
        for mode in MODES
        for policy in POLICIES
    ]


@pytest.mark.parametrize("factor", [1.0, 1.25])
def test_equal_runs_are_predicted_and_deviations_are_reported(factor: float) -> None:
    runs = _all(factor)

    fitted = fitted_s(runs)

    assert fitted == pytest.approx((REDUCE_S, SERVE_S))
    for number, run in enumerate(runs):
        mode, known = MODES[number // 2], (run.sync, run.policy) in FITTED
        found = row([run], mode, STEPS, fitted)
        assert found.error == pytest.approx(0.0 if known else 1 / factor - 1, abs=1e-6)
        assert found.real_staleness == pytest.approx(found.simulated_staleness)
        assert ("fitted" in found.line()) is known


def test_at_the_workers_own_speed_calibrations_do_not_matter() -> None:
    mode = MODES[0]
    run = _real(mode, "uniform")
    drifted = tuple(
        group.model_copy(
            update={"fixed_s": 2 * group.fixed_s, "samples_per_s": group.samples_per_s / 2}
        )
        for group in run.workers
    )

    found = row([replace(run, workers=drifted)], mode, STEPS, (REDUCE_S, SERVE_S))

    assert found.error < -0.4
    assert found.own_error == pytest.approx(0.0, abs=0.005)


def test_noise_is_simulated_with_several_seeds() -> None:
    run = _real(MODES[0], "uniform")
    noisy = tuple(group.model_copy(update={"noise": 0.1}) for group in run.workers)

    outcomes = simulated(replace(run, workers=noisy), MODES[0], STEPS, (REDUCE_S, SERVE_S))

    assert len({outcome.time_s for outcome in outcomes}) == 2 * SEEDS


def test_a_run_comes_back_from_its_file() -> None:
    run = _real(MODES[2], "uniform")

    assert again(plain(run)) == run
