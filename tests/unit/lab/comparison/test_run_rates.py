"""Rates by time from traces of workers that keep step, and of workers that do not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from evenstride.core.control.events import (
    Exchanged,
    FleetFormed,
    Instruction,
    KeepShares,
    SetBatch,
    SetShares,
)
from evenstride.core.fleet import Shares, Worker
from evenstride.core.time_model.observation import Measurements, Observation
from evenstride.errors import TraceError
from evenstride.lab.comparison.trace_figures import rates, run_figures
from evenstride.trace.codec import TraceWriter
from tests.messages import raises_message

BATCH = 12
STALE = {"count": 5, "mean": 1.5, "maximum": 4}


def _write(
    path: Path,
    shares: Shares,
    steps: list[list[tuple[float, float, int]]],
    *,
    then: Instruction | None = None,
    **ended: Any,
) -> Path:
    """Write the trace of workers that took ``(busy_s, wait_s, samples)`` in each of their steps."""
    fleet = tuple(Worker(f"here-{rank}") for rank in range(len(shares)))
    with TraceWriter(path, {"policy": "adaptive"}) as trace:
        trace.event(0.0, FleetFormed(0, 0, BATCH, fleet), (SetShares(0, shares, "opening"),))
        seen = [
            Observation(worker, samples, step, (busy_s,), (wait_s,))
            for worker, mine in enumerate(steps)
            for step, (busy_s, wait_s, samples) in enumerate(mine)
        ]
        trace.event(
            9.0, Exchanged(9, 9, Measurements.of(reversed(seen))), (then or KeepShares("good"),)
        )
        if ended:
            trace.record("ended", at_s=9.0, summary=ended)
    return path


def test_in_lockstep_it_is_the_global_batch_over_the_time_of_a_step(tmp_path: Path) -> None:
    cold, warm = [(1.0, 1.0, 8)] * 40, [(0.1, 0.1, 8)] * 40
    other = [(2.0, 0.0, 4)] * 40 + [(0.2, 0.0, 4)] * 40

    found = rates(_write(tmp_path / "t", (8, 4), [cold + warm, other], sync="bsp", staleness=None))

    assert found.samples_per_s == pytest.approx(BATCH / 0.2)
    assert [one.updates for one in found.workers] == pytest.approx([40, 40])
    assert [one.period_s for one in found.workers] == pytest.approx([0.2, 0.2])
    assert [one.waiting for one in found.workers] == pytest.approx([0.5, 0.0])
    assert found.waiting == pytest.approx(0.25)
    assert found.blocks_per_s == pytest.approx([BATCH / 0.2] * 4)
    assert (found.sync, found.policy, found.staleness) == ("bsp", "adaptive", None)
    assert (found.shares, found.changes, found.global_batch) == ((8, 4), 0, BATCH)


def test_after_a_change_the_batch_is_still_the_one_that_the_run_began_with(tmp_path: Path) -> None:
    steps = [(1.0, 0.0, 12)] * 9

    found = rates(_write(tmp_path / "t", (12,), [steps], then=SetBatch(9, 48, "more")))
    figures = run_figures(tmp_path / "t")

    assert (found.global_batch, figures.global_batch) == (BATCH, BATCH)
    assert found.steps == pytest.approx(9)
    assert found.workers[0].updates == pytest.approx(4.5), "half of nine is warm"


def test_workers_that_do_not_keep_step_have_periods_of_their_own(tmp_path: Path) -> None:
    fast, slow = [(0.1, 0.0, 6)] * 400, [(0.3, 0.1, 6)] * 100  # both for 40 s

    found = rates(_write(tmp_path / "t", (6, 6), [fast, slow], sync="asp", staleness=STALE))

    assert found.samples_per_s == pytest.approx(6 / 0.1 + 6 / 0.4, rel=0.01)
    assert [one.period_s for one in found.workers] == pytest.approx([0.1, 0.4], rel=0.02)
    assert [one.waiting for one in found.workers] == pytest.approx([0.0, 0.25], abs=0.01)
    assert found.staleness == (1.5, 4)


def test_what_comes_after_the_first_to_end_does_not_count(tmp_path: Path) -> None:
    fast, slow = [(0.1, 0.0, 6)] * 200, [(0.4, 0.0, 6)] * 100  # 20 s and 40 s

    found = rates(_write(tmp_path / "t", (6, 6), [fast, slow], sync="asp", staleness=STALE))

    assert found.samples_per_s == pytest.approx(6 / 0.1 + 6 / 0.4, rel=0.02)


def test_a_short_run_is_warm_after_half_of_it(tmp_path: Path) -> None:
    steps = [(1.0, 0.0, 12)] * 3 + [(0.5, 0.0, 12)] * 6

    found = rates(_write(tmp_path / "t", (12,), [steps], sync="bsp"))

    assert found.samples_per_s == pytest.approx(24.0)
    assert found.workers[0].updates == pytest.approx(4.5)


def test_a_worker_without_samples_makes_no_update(tmp_path: Path) -> None:
    ghost, other = [(0.0, 1.0, 0)] * 9, [(1.0, 0.0, 12)] * 9

    found = rates(_write(tmp_path / "t", (0, 12), [ghost, other], sync="bsp"))

    assert (found.workers[0].updates, found.workers[0].period_s) == (0, 0.0)
    assert found.workers[0].waiting == pytest.approx(1.0)


def test_a_run_that_did_not_end_in_order_tells_no_mode(tmp_path: Path) -> None:
    found = rates(_write(tmp_path / "t", (12,), [[(1.0, 0.0, 12)] * 9]))

    assert (found.sync, found.staleness) == ("", None)


SHORT = [(0.1, 0.0, 6)], [(1.0, 0.0, 6)] * 9
"""One has no further step before all are warm."""


@pytest.mark.parametrize("steps", [[], [[]], [*SHORT]], ids=["no worker", "none", "one ends"])
def test_too_few_steps_are_refused(
    tmp_path: Path, steps: list[list[tuple[float, float, int]]]
) -> None:
    with raises_message(TraceError):
        rates(_write(tmp_path / "t", (6,) * max(len(steps), 1), steps, sync="bsp"))
