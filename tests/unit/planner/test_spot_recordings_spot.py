"""Forecasts from one half of each recording of spot machines, against runs on the other half."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from benchmarks.spot_replay import SpotJob, Way, replay

from evenstride.core.reliability.checkpoint_interval import Saving
from evenstride.planner.spot_losses import WAITS_DRIFT, SaveCosts, slowdown
from evenstride.planner.spot_recordings import from_recorded, waits_s
from evenstride.sim.scenario.recordings import Machines, SpotTrace, load_spot_traces, machines

STEP_S, SAVE_S, RESTART_S, RUNS = 1.044, 10.0, 60.0, 8
WAY = Way("restart from the last save", elastic=False, memory=False, saving=Saving())


@pytest.fixture
def recordings(data_root: Path) -> Iterator[list[tuple[SpotTrace, SpotTrace]]]:
    """Both halves of those in which machines were lost: all but Google's."""
    if not (data_root / "traces" / "spot-traces.json.gz").is_file():
        pytest.skip("no spot traces")
    load_spot_traces.cache_clear()
    halves = [(one.part(0.0, 0.5), one.part(0.5, 1.0)) for one in load_spot_traces()]
    yield [(a, b) for a, b in halves if "gcp" not in a.name and a.up.any() and b.up.any()]
    load_spot_traces.cache_clear()


def _job(hours: float, slots: int) -> tuple[SpotJob, float]:
    """Return a job for one machine, and what it takes without saves and losses."""
    steps = int(hours * 3600.0 / STEP_S)
    times = (0.02,) * slots, (0.002,) * slots
    job = SpotJob(512 * steps, 512, *times, 1, save_s=SAVE_S, restart_s=RESTART_S)
    return job, steps * job.step_s(np.zeros(1, dtype=np.int64))


def _taken(half: SpotTrace, hours: float, most: float) -> list[float]:
    """Return how many times as long runs took that began at some ticks with a machine.

    There is time for ``most`` after each: who is not done by the end took longer.
    """
    needed = int(most * hours * 3600.0 / half.gap_s)
    starts = np.flatnonzero(half.up[: max(len(half.up) - needed, 0)])
    found = []
    for tick in starts[np.linspace(0, len(starts) - 1, RUNS).astype(int)] if len(starts) else []:
        recorded: Machines = machines([replace(half, up=half.up[tick:])])
        job, useful_s = _job(hours, recorded.who.shape[1])
        (outcome,) = replay(recorded, job, [WAY])
        taken = (outcome.total_s - RESTART_S) / useful_s
        found.append(taken if outcome.finished else np.inf)
    return found


@pytest.mark.data
def test_most_runs_end_within_the_interval(
    recordings: list[tuple[SpotTrace, SpotTrace]],
) -> None:
    inside, hours = [], 8.0
    for before, after in recordings:
        recorded = machines([before])
        waits = tuple(RESTART_S + wait for wait in waits_s(recorded, 1))
        transience = from_recorded(recorded, 2.0 * hours * 3600.0)
        found = slowdown(transience, 1, hours * 3600.0, SaveCosts(SAVE_S, waits, drift=WAITS_DRIFT))
        taken = _taken(after, hours, found.high)
        inside.append([0.999 * found.low <= one <= 1.001 * found.high for one in taken])

    used = [runs for runs in inside if runs]
    assert len(used) >= 15
    assert np.mean([np.mean(runs) for runs in used]) >= 0.8
