"""DistributedDataParallel on virtual devices: Gloo's gradients, at times calculated by hand."""

from __future__ import annotations

import pytest

from evenstride.testing import RankPool
from tests.virtual_device import averaged


@pytest.mark.parametrize("world_size", [2, 4])
def test_gradients_are_those_of_gloo(virtual_ranks: RankPool, world_size: int) -> None:
    everywhere = virtual_ranks.run(averaged.gradients, world_size)

    for on_cpu, on_device in everywhere:
        assert len(on_cpu) == 3 * 50
        assert on_device == pytest.approx(on_cpu, rel=1e-12)
        assert on_device == everywhere[0][1]


def test_autocast_computes_in_bfloat16_and_averages_in_float32(virtual_ranks: RankPool) -> None:
    on_device = virtual_ranks.run(averaged.autocast, 2, True)
    on_cpu = virtual_ranks.run(averaged.autocast, 2, False)

    for (types, gradients), (_, expected) in zip(on_device, on_cpu, strict=True):
        assert types == ["torch.bfloat16", *["torch.float32"] * 5]
        assert len(gradients) == 50
        assert gradients == pytest.approx(expected, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize(
    ("backward_ms", "latency_ms", "buckets", "step_ms"),
    [
        # The reduction begins when the slowest rank's gradients are ready.
        ([20.0, 20.0], 1.0, 1, 10.0 + 20.0 + 1.0),
        ([20.0, 50.0], 1.0, 1, 10.0 + 50.0 + 1.0),
        ([5.0, 10.0, 80.0, 20.0], 7.0, 1, 10.0 + 80.0 + 7.0),
        # The first bucket is reduced during the work.
        ([20.0, 50.0], 15.0, 2, 10.0 + 50.0 + 15.0),
        # The first bucket's reduction ends after the work, at 70 ms, and the second's follows.
        ([20.0, 50.0], 60.0, 2, 10.0 + 60.0 + 60.0),
    ],
)
def test_a_step_takes_as_long_as_calculated(
    virtual_ranks: RankPool,
    backward_ms: list[float],
    latency_ms: float,
    buckets: int,
    step_ms: float,
) -> None:
    everywhere = virtual_ranks.run(
        averaged.times, len(backward_ms), backward_ms, latency_ms, buckets
    )

    assert everywhere == [[step_ms, step_ms]] * len(backward_ms), "the host waits for nothing"
