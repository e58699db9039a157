"""Ranks on the CPU and on a device train together: exact gradients, and the times of each."""

from __future__ import annotations

import pytest

from evenstride.testing import RankPool
from tests.multiproc.exactness import alone
from tests.multiproc.training import Loop, relative_error
from tests.virtual_device import mixed_ranks
from tests.virtual_device.mixed_ranks import BACKWARD_MS, BATCH, FORWARD_MS, STEPS


@pytest.mark.parametrize("shares", [(7, 23), (20, 10)])
def test_a_cpu_and_a_device_train_together(
    virtual_ranks: RankPool, shares: tuple[int, int]
) -> None:
    policy = f"static:{shares[0]},{shares[1]}"
    everywhere = virtual_ranks.run(mixed_ranks.train, 2, policy)

    truth = alone(Loop(BATCH, BATCH * STEPS, policy, steps=STEPS))
    work_ms = [
        share * (forward_ms + backward_ms)
        for share, forward_ms, backward_ms in zip(shares, FORWARD_MS, BACKWARD_MS, strict=True)
    ]
    for rank, reported in enumerate(everywhere):
        assert len(reported["gradients"]) == STEPS
        for actual, expected in zip(reported["gradients"], truth, strict=True):
            assert relative_error(actual, expected) <= 1e-12
        assert len(reported["times"]) >= 5
        for busy_ms, wait_ms in reported["times"]:
            assert busy_ms == pytest.approx(work_ms[rank], rel=0.01)
            idle_ms = max(work_ms) - work_ms[rank]
            assert wait_ms == pytest.approx(idle_ms, abs=0.01 * max(work_ms))


def test_gloo_itself_refuses_the_device(virtual_ranks: RankPool) -> None:
    (error,) = virtual_ranks.run(mixed_ranks.refused_by_gloo, 1)

    assert "unsupported device type virtual" in error
