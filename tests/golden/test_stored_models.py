"""Recorded profiles: what the model of a similar job misses, and what the universal model does."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.stored_models import rows

from evenstride.planner.workload.model_store import read_store

RECORDED = Path(__file__).parents[2] / "benchmarks" / "profiles"


def test_the_epochs_of_a_similar_job_are_nearer_than_those_of_all_jobs() -> None:
    """Six jobs, each left out in turn; docs/records/benchmarks.md has these figures."""
    store = read_store(RECORDED, "", "", force=True)

    steps, epochs = rows(store)

    assert (len(store.models), store.skipped) == (12, ())
    assert (steps.jobs, epochs.jobs) == (6, 6)
    assert (epochs.similar, epochs.universal) == pytest.approx((0.062, 0.238), abs=5e-4)
    assert (steps.similar, steps.universal) == pytest.approx((0.154, 0.148), abs=5e-4)
