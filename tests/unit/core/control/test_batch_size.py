"""The next epoch's batch: the quickest at the worse end of the noise, step by step."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from math import inf

import numpy as np
import pytest

from evenstride.core.control.advance import advance
from evenstride.core.control.batch_size import sizes
from evenstride.core.control.events import (
    EpochEnded,
    Exchanged,
    FleetFormed,
    Instruction,
    KeepShares,
    SetBatch,
    SetShares,
)
from evenstride.core.control.state import Control
from evenstride.core.fleet import Worker
from evenstride.core.policies import policy_from_spec
from evenstride.core.time_model.observation import Measurements, Observation, PeakMemory
from evenstride.errors import InfeasibleShares
from tests.messages import check_message

FIXED_S, PER_SAMPLE_S = 0.010, (0.0002, 0.0004)
LOW, HIGH = 32, 2048


class Run:
    """Two workers, measured at whatever shares they are given."""

    def __init__(
        self,
        policy: str = "adaptive",
        batch: int = LOW,
        workers: tuple[Worker, ...] = (Worker("a/0"), Worker("b/1")),
    ) -> None:
        self.control, self.step = Control(policy_from_spec(policy)), 0
        self.control, _ = advance(self.control, FleetFormed(0, 0, batch, workers))

    @property
    def batch(self) -> int:
        assert self.control.fleet is not None
        return self.control.fleet.global_batch

    def train(self, exchanges: int = 6, held: tuple[PeakMemory, ...] = ()) -> None:
        for _ in range(exchanges):
            seen = [
                Observation(
                    k, share, self.step + i, (FIXED_S + PER_SAMPLE_S[k] * max(share, 1),), (0.0,)
                )
                for k, share in enumerate(self.control.shares)
                for i in range(4)
            ]
            self.step += 4
            event = Exchanged(self.step, self.step + 1, Measurements.of(seen), held)
            self.control, _ = advance(self.control, event)

    def end_epoch(
        self, scale: float | None, low: float | None, high: float | None, bounds: tuple[int, int]
    ) -> tuple[Instruction, ...]:
        event = EpochEnded(self.step, self.step, *bounds, scale, low, high)
        self.control, instructions = advance(self.control, event)
        return tuple(instructions)


def _time(batch: int, phi: float) -> float:
    """Return the time to the same result, up to a factor, under the best real-valued split."""
    step_s = FIXED_S + batch / sum(1 / slope for slope in PER_SAMPLE_S)
    return step_s * (phi + batch) / batch


@pytest.mark.parametrize("phi", [20.0, 150.0, 1500.0, 100_000.0])
@pytest.mark.parametrize("first", [LOW, 300, HIGH])
def test_epoch_by_epoch_it_comes_near_the_quickest(phi: float, first: int) -> None:
    run, way = Run(batch=first), [first]
    for _ in range(12):
        run.train()
        run.end_epoch(phi, 0.97 * phi, 1.03 * phi, (LOW, HIGH))
        way.append(run.batch)

    best = min(range(LOW, HIGH + 1), key=lambda batch: _time(batch, phi))
    assert _time(run.batch, phi) <= 1.06 * _time(best, phi), (way, best)
    assert all(a / 2 <= b <= 2 * a for a, b in pairwise(way))
    assert way[-1] == way[-2] == way[-3], "it does not go to and fro"
    assert sum(run.control.shares) == run.batch


def test_a_change_says_why_and_keeps_all_that_was_learned() -> None:
    run = Run()
    run.train()
    before = run.control.estimate

    batch, shares, _, _ = run.end_epoch(1000.0, 900.0, 1100.0, (LOW, HIGH))

    assert isinstance(batch, SetBatch) and isinstance(shares, SetShares)
    assert (batch.effective, batch.global_batch) == (run.step, 64)
    check_message(batch.reason, "32", "64", "1000 samples")
    assert shares.effective == run.step and sum(shares.shares) == 64
    assert before is not None and run.control.estimate is not None
    assert (run.control.estimate.steps == before.steps).all()


@pytest.mark.parametrize(
    ("scale", "low", "high", "words"),
    [
        (None, None, None, ()),
        (5000.0, 0.0, None, ("5%",)),
        (None, 2.0, None, ("95", "2 samples")),
    ],
)
def test_uncertain_noise_changes_nothing(
    scale: float | None, low: float | None, high: float | None, words: tuple[str, ...]
) -> None:
    run = Run(batch=256)
    run.train()
    before = run.control

    kept, *_ = run.end_epoch(scale, low, high, (LOW, HIGH))

    assert isinstance(kept, KeepShares)
    check_message(kept.reason, *words)
    assert run.control is before


def test_before_all_workers_were_measured_nothing_changes() -> None:
    run = Run()

    kept, *_ = run.end_epoch(1000.0, 900.0, 1100.0, (LOW, HIGH))

    assert isinstance(kept, KeepShares)
    check_message(kept.reason)


def test_bounds_are_kept_and_reached() -> None:
    run = Run(batch=64)
    run.train()
    run.end_epoch(1e6, 9e5, inf, (LOW, 100))
    assert run.batch == 100

    run.train()
    kept, *_ = run.end_epoch(1e6, 9e5, inf, (100, 100))
    assert isinstance(kept, KeepShares) and "no other size is possible" in kept.reason


def test_a_batch_that_was_restored_is_taken_up_whatever_it_is_worth() -> None:
    run = Run()

    batch, shares, *_ = run.end_epoch(None, None, None, (700, 700))

    assert isinstance(batch, SetBatch) and batch.global_batch == 700 == run.batch
    assert isinstance(shares, SetShares) and sum(shares.shares) == 700


def test_one_that_cannot_be_served_is_refused() -> None:
    run = Run(workers=(Worker("a/0", max_share=50), Worker("b/1", max_share=50)))

    with pytest.raises(InfeasibleShares):
        run.end_epoch(None, None, None, (700, 700))


def test_what_workers_can_hold_bounds_the_batch() -> None:
    run = Run(workers=(Worker("a/0", max_share=30), Worker("b/1", max_share=20)))
    run.train()

    run.end_epoch(1e6, 9e5, None, (LOW, HIGH))

    assert LOW < run.batch <= 50


def test_memory_as_it_was_seen_bounds_the_batch_and_is_not_raised_for_it() -> None:
    run = Run(batch=64)
    mb = 1_000_000
    held = tuple(
        PeakMemory(k, samples, samples * mb, 40 * mb) for k in (0, 1) for samples in (10, 20, 32)
    )
    run.train(held=held)
    caps = [cap for cap in run.control.memory.caps if cap is not None]
    assert len(caps) == 2 and sum(caps) < 128

    run.end_epoch(1e6, 9e5, None, (LOW, HIGH))

    assert run.batch <= sum(caps)
    assert all(share <= cap for share, cap in zip(run.control.shares, caps, strict=True))


@pytest.mark.parametrize("policy", ["uniform", "dynamic-batching", "lb-bsp-gpu", "dbs"])
def test_any_policy_goes_on_with_the_new_batch(policy: str) -> None:
    run = Run(policy)
    run.train(12)
    parts = [share / run.batch for share in run.control.shares]

    run.end_epoch(1e6, 9e5, None, (LOW, HIGH))

    assert run.batch == 64
    assert sum(run.control.shares) == 64
    for share, part in zip(run.control.shares, parts, strict=True):
        assert share == pytest.approx(64 * part, abs=2), "what it had found is kept"


def test_equal_shares_stay_as_equal_as_can_be() -> None:
    workers = tuple(Worker(f"w/{k}") for k in range(3))
    control, _ = advance(Control(policy_from_spec("uniform")), FleetFormed(0, 0, 10, workers))
    assert control.shares == (4, 3, 3)

    control, _ = advance(control, EpochEnded(0, 0, 20, 20))

    assert control.shares == (7, 7, 6)


def test_shares_that_were_given_stay_and_so_does_the_batch() -> None:
    run = Run("static:12,20")
    run.train()

    kept, *_ = run.end_epoch(1e6, 9e5, None, (LOW, HIGH))

    assert isinstance(kept, KeepShares)
    assert run.control.shares == (12, 20)


def test_steps_that_are_hardly_known_do_not_lead_to_another_batch() -> None:
    """The same means, but curves of which one cannot be sure."""
    run = Run(batch=64)
    run.train()
    sure, now = run.control, run.control.estimate
    assert now is not None
    run.end_epoch(400.0, 390.0, 410.0, (LOW, HIGH))
    assert run.batch > 64

    vague = replace(now, now=now.now.times(1.0, np.full(2, 0.5**2)))
    run.control = replace(sure, estimate=vague)
    run.end_epoch(400.0, 390.0, 410.0, (LOW, HIGH))
    assert run.batch == 64


def test_sizes_are_multiples_of_the_largest_quantum() -> None:
    found = sizes(64, 1024, 256, quantum=32)

    assert all(size % 32 == 0 for size in found)
    assert min(found) >= 128 and max(found) <= 512 and 256 not in found
