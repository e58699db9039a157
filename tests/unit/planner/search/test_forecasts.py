"""A run's own time is forecast from its trace: skewed steps, waits, and the time between steps."""

from __future__ import annotations

from datetime import date
from pathlib import Path

import numpy as np
import pytest

from evenstride.core.fleet import FloatArray
from evenstride.planner.catalogue.offers import Offer
from evenstride.planner.search.candidates import rentable
from evenstride.planner.search.training_forecast import (
    ClusterChoice,
    TrainingForecast,
    TrainingTask,
    outlook,
)
from evenstride.planner.workload.epochs_to_target import KnownEpochs
from evenstride.planner.workload.from_trace import profile_of_run
from tests.unit.planner.recordings import recorded

STEPS, EACH, SHARE = 4_000, 100, 64


def skewed(usual_s: FloatArray, seed: int, *, wanders: float = 0.0) -> FloatArray:
    """Return steps of workers: one in thirty takes ten times as long, and machines wander."""
    draw = np.random.default_rng(seed)
    shape = (len(usual_s), STEPS)
    steps = usual_s[:, None] * draw.lognormal(-0.02, 0.2, shape)
    steps *= np.where(draw.random(shape) < 1 / 30, 10.0, 1.0)
    slow = np.repeat(draw.lognormal(0.0, wanders, (len(usual_s), STEPS // 200)), 200, axis=1)
    found: FloatArray = steps * slow
    return found


def forecast(folder: Path, workers: int, epochs: float) -> TrainingForecast:
    """Return what the plan says of the very configuration that was recorded."""
    profile = profile_of_run(folder / "trace.jsonl", ["box"])
    offers = [Offer(instance_type="box", usd_per_h=1.0)]
    (kind,) = rentable(offers, profile.devices, date(2026, 5, 1)).kinds
    batch = profile.global_batch
    task = TrainingTask(
        *(profile.samples, KnownEpochs(epochs, batch), profile.model.gradient_bytes, profile.links),
        beside_s=profile.beside_s or 0.0,
    )
    found = outlook(ClusterChoice((kind,), (workers,), batch), task)
    assert found is not None
    return found


@pytest.mark.parametrize("workers", [1, 2, 4])
@pytest.mark.parametrize("seed", [0, 1])
def test_the_time_of_a_recorded_run_is_forecast(tmp_path: Path, workers: int, seed: int) -> None:
    """Usual steps alone come to two thirds of it."""
    busy_s = skewed(np.full(workers, 0.01), seed)
    draw = np.random.default_rng(10 + seed)
    communication_s = 0.008 * draw.lognormal(0.0, 1.0, STEPS) if workers > 1 else 0.0
    took_s = recorded(
        *(tmp_path, busy_s, [SHARE] * workers),
        communication_s=communication_s,
        outside_s=0.001,
        steps_each=EACH,
        evaluation_s=0.3,
    )

    reported = forecast(tmp_path, workers, STEPS / EACH)

    assert reported.time_s.value == pytest.approx(took_s, rel=0.05)
    assert reported.time_s.low < took_s < reported.time_s.high
    usual_s = float(np.median(busy_s.max(axis=0) + communication_s)) * STEPS
    assert usual_s < 0.75 * took_s


def test_time_outside_of_the_steps_of_a_run_is_part_of_each_epoch(tmp_path: Path) -> None:
    busy_s = np.full((1, STEPS), 0.01)
    took_s = recorded(tmp_path, busy_s, [SHARE], steps_each=EACH, evaluation_s=0.5)

    reported = forecast(tmp_path, 1, STEPS / EACH)

    assert profile_of_run(tmp_path / "trace.jsonl", ["box"]).beside_s == pytest.approx(0.5)
    assert reported.time_s.value == pytest.approx(took_s, rel=1e-3)
    assert took_s > 1.4 * STEPS * 0.01


def test_intervals_hold_what_comes_after_a_part_of_a_run(tmp_path: Path) -> None:
    """From a fifth of it, of machines that are slower for a while and quicker for another."""
    held = 0
    for seed in range(20):
        busy_s, folder = skewed(np.full(1, 0.01), seed, wanders=0.3), tmp_path / str(seed)
        folder.mkdir()
        recorded(folder, busy_s[:, : STEPS // 5], [SHARE], steps_each=EACH)
        reported = forecast(folder, 1, 0.8 * STEPS / EACH).time_s
        held += reported.low < busy_s[:, STEPS // 5 :].sum() < reported.high

    assert held >= 18
