"""A batch for which a device has no memory comes again in smaller ones."""

from __future__ import annotations

import pytest

from evenstride.testing import RankPool
from tests.multiproc.scarce import alone
from tests.multiproc.training import relative_error
from tests.virtual_device import scarce_device
from tests.virtual_device.scarce_device import BATCH, SHARES, SHORT_FROM, STEPS


def test_memory_that_ends_changes_no_gradient(virtual_ranks: RankPool) -> None:
    everywhere = virtual_ranks.run(scarce_device.train, 2)

    plenty, short = (rank["sizes"] for rank in everywhere)
    assert [sum(sizes) for sizes in plenty] == [SHARES[0]] * STEPS
    assert [sum(sizes) for sizes in short] == [SHARES[1]] * STEPS
    repeated = [step for step, sizes in enumerate(short) if 0 in sizes]
    assert repeated == [SHORT_FROM], "memory ended once, and the size was learned"
    assert max(max(sizes) for sizes in short[SHORT_FROM:]) <= SHARES[1] // 2
    assert not any(0 in sizes for sizes in plenty), "the other rank did not notice"
    assert SHORT_FROM not in everywhere[1]["modelled"]
    truth = alone(BATCH, STEPS)
    for rank in everywhere:
        for actual, expected in zip(rank["gradients"], truth, strict=True):
            assert relative_error(actual, expected) <= 1e-9


def test_ranks_on_one_card_are_not_both_promised_what_is_free(virtual_ranks: RankPool) -> None:
    for cards, free_mb in ((["a", "a"], 500.0), (["a", "b"], 1000.0), (["", ""], 1000.0)):
        for room_mb in virtual_ranks.run(scarce_device.room_mb, 2, cards):
            assert room_mb == pytest.approx(free_mb, abs=1.0)
