"""FSDP2 on virtual devices: stalls of the compute stream are waiting, and busy times are work."""

from __future__ import annotations

import pytest
from torch.distributed.fsdp import FSDPModule

from evenstride.testing import RankPool
from tests.virtual_device import sharded_device

FORWARD_MS, BACKWARD_MS = [8.0, 24.0], [12.0, 36.0]

HOWS = (
    "plain",
    "kept gathered",
    "mixed precision",
    "parameters on the host",
    "checkpointed",
    "prefetched",
    "gathered ahead",
    "gathered by hand",
    "micro-batches",
    "compiled blocks",
    pytest.param(
        "ended by hand",
        marks=pytest.mark.skipif(
            not hasattr(FSDPModule, "set_manual_backward_finalization"), reason="before torch 2.15"
        ),
    ),
)


@pytest.mark.parametrize("world_size", [2, 3])
def test_gradients_are_those_of_gloo(virtual_ranks: RankPool, world_size: int) -> None:
    on_device = virtual_ranks.run(sharded_device.gradients, world_size, True)
    on_cpu = virtual_ranks.run(sharded_device.gradients, world_size, False)

    for device, cpu in zip(on_device, on_cpu, strict=True):
        assert len(cpu) == 12
        for one, other in zip(device, cpu, strict=True):
            assert one == pytest.approx(other, rel=1e-12)


@pytest.mark.parametrize("how", HOWS)
def test_work_is_read_back_and_the_rest_is_waiting(virtual_ranks: RankPool, how: str) -> None:
    everywhere = virtual_ranks.run(sharded_device.timed, 2, how, FORWARD_MS, BACKWARD_MS)

    steps = []
    for rank, records in enumerate(everywhere):
        again = FORWARD_MS[rank] if how == "checkpointed" else 0.0
        work_ms = FORWARD_MS[rank] + BACKWARD_MS[rank] + again
        assert len(records) >= 5
        for busy_ms, _ in records:
            assert busy_ms == pytest.approx(work_ms, rel=0.02)
        steps.append([sum(record) for record in records])
    assert steps[0] == pytest.approx(steps[1], rel=0.01), "both ranks' steps take equally long"


def test_ranks_of_an_island_and_of_several_are_told_apart(virtual_ranks: RankPool) -> None:
    forward_ms, backward_ms = [8.0, 9.0, 20.0, 24.0], [12.0, 13.0, 30.0, 36.0]
    everywhere = virtual_ranks.run(sharded_device.timed, 4, "HSDP", forward_ms, backward_ms)

    for rank, records in enumerate(everywhere):
        assert len(records) >= 5
        for busy_ms, _ in records:
            assert busy_ms == pytest.approx(forward_ms[rank] + backward_ms[rank], rel=0.02)


def test_without_marks_the_ranks_look_alike(virtual_ranks: RankPool) -> None:
    fast, slow = virtual_ranks.run(sharded_device.timed, 2, "plain", FORWARD_MS, BACKWARD_MS, False)

    assert fast[-1][0] > 2 * (FORWARD_MS[0] + BACKWARD_MS[0])
    assert slow[-1][0] == pytest.approx(FORWARD_MS[1] + BACKWARD_MS[1], rel=0.05)


@pytest.mark.parametrize("speeds", [[1.0, 0.25], [1.0, 1.0], [1.0, 1.0, 0.5, 0.25]])
def test_the_split_is_the_best(virtual_ranks: RankPool, speeds: list[float]) -> None:
    batch = 240
    everywhere = virtual_ranks.run(sharded_device.balanced, len(speeds), speeds, batch, 40)

    for split in list(zip(*everywhere, strict=True))[-20:]:
        assert sum(split) == batch
        slowest = max(share / speed for share, speed in zip(split, speeds, strict=True))
        # Whole samples may make the best split worse by one sample of the slowest rank.
        assert slowest <= 1.02 * batch / sum(speeds) + 1 / min(speeds), split
