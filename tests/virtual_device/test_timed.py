"""evenstride on virtual devices: work is read back, waits are waits, and the split is the best."""

from __future__ import annotations

import pytest

from evenstride.testing import RankPool
from tests.virtual_device import timed
from tests.virtual_device.timed import HOST_MS, Fault

FORWARD_MS, BACKWARD_MS = [8.0, 24.0], [12.0, 36.0]

HOWS = (
    "plain",
    "static_graph",
    "find_unused_parameters",
    "gradient_as_bucket_view",
    "a bucket for each layer",
    "micro-batches",
    "checkpointed work",
    "all checkpointed",
    "noise",
    "evaluation",
    "copies on a side stream",
    "a host that waits",
    "a short queue",
    "a slow host",
    "a gradient scaler",
    "compiled inside DDP",
    "compiled around DDP",
    "compiled blocks inside DDP",
    "blocks compiled after DDP",
)


def _work_ms(how: str, rank: int) -> float:
    """Return what a step of a rank takes without the other."""
    again = FORWARD_MS[rank] if "checkpointed" in how else 0.0
    work_ms = FORWARD_MS[rank] + BACKWARD_MS[rank] + again
    # A device idles while its host does not launch anything.
    return max(work_ms, HOST_MS) if how == "a slow host" and rank == 1 else work_ms


@pytest.mark.parametrize("how", HOWS)
def test_work_is_read_back_and_the_rest_is_waiting(virtual_ranks: RankPool, how: str) -> None:
    everywhere = virtual_ranks.run(timed.timed, 2, how, FORWARD_MS, BACKWARD_MS)

    expected = [_work_ms(how, rank) for rank in range(2)]
    for records, work_ms in zip(everywhere, expected, strict=True):
        assert len(records) >= 5
        for busy_ms, wait_ms in records:
            assert busy_ms == pytest.approx(work_ms, rel=0.01)
            assert wait_ms == pytest.approx(max(expected) - work_ms, abs=0.01 * max(expected))


@pytest.mark.parametrize("fault", ["wrong stream", "wait as work", "early mark"])
def test_a_fault_of_the_timing_is_seen(virtual_ranks: RankPool, fault: Fault) -> None:
    everywhere = virtual_ranks.run(timed.timed, 2, "plain", FORWARD_MS, BACKWARD_MS, fault)

    for busy_ms, _ in everywhere[0]:
        assert busy_ms != pytest.approx(_work_ms("plain", 0), rel=0.1)


@pytest.mark.parametrize(
    ("how", "facts"),
    [
        ("no times", ["'virtual'", "at the same time"]),
        ("mixed", ["rank 0 (cpu) waits in gloo and rank 1 (virtual) waits in vccl"]),
    ],
)
def test_a_device_that_cannot_be_used_is_refused(
    virtual_ranks: RankPool, how: str, facts: list[str]
) -> None:
    everywhere = virtual_ranks.run(timed.refused, 2, how)

    assert [fact for fact in facts if fact not in everywhere[0]] == []
    assert everywhere[0] == everywhere[1]


def test_a_rank_is_on_its_device_if_it_has_used_it(virtual_ranks: RankPool) -> None:
    for used in (True, False):
        everywhere = virtual_ranks.run(timed.assumed, 2, used)

        assert everywhere[0] == everywhere[1]
        devices, waited, refused = everywhere[0]
        assert ("virtual virtual" in devices) == used
        assert waited == used, "the host ran ahead of the kernels that it timed"
        assert ("torch.virtual.set_device" in refused) != used


SPEEDS = [1.0, 1.0, 0.5, 0.25]


def _step_ms(shares: tuple[int, ...]) -> float:
    return max(0.3 * share / speed for share, speed in zip(shares, SPEEDS, strict=True))


def test_the_split_is_the_best(virtual_ranks: RankPool) -> None:
    everywhere = virtual_ranks.run(timed.balanced, 4, SPEEDS, 256, 40)

    splits = list(zip(*everywhere, strict=True))
    assert all(sum(split) == 256 for split in splits)
    assert splits[0] == (64, 64, 64, 64)
    # The best of all splits, whole samples included: 256 / 2.75 samples for each unit of speed.
    best_ms = min(
        _step_ms((a, b, c, 256 - a - b - c))
        for a in range(88, 98)
        for b in range(88, 98)
        for c in range(40, 54)
    )
    # In the opening every second step is the first one at its sizes, which says nothing.
    assert splits[2] == splits[3]
    for split in splits[4:]:
        assert _step_ms(split) <= 1.02 * best_ms, split
