"""A rank that will be taken away gets no samples, by a decision that all ranks carry out alike."""

from __future__ import annotations

from typing import Any

import pytest

from evenstride.testing import RankPool
from tests.multiproc.noticed import given_notice
from tests.multiproc.training import alone_on, relative_error

BATCH, LENGTH = 24, 240


def _checked(everywhere: list[dict[str, Any]]) -> list[tuple[int, ...]]:
    """Return the shares of each step, once gradients and samples are proved right."""
    steps = len(everywhere[0]["seen"])
    union = [
        sorted(index for one in everywhere for index in one["seen"][step][0])
        for step in range(steps)
    ]
    for epoch in range(steps // 10):
        of_epoch = [index for step in union[10 * epoch : 10 * epoch + 10] for index in step]
        assert sorted(of_epoch) == list(range(LENGTH)), "each sample exactly once"
    gradients = alone_on(LENGTH, union)
    for one in everywhere:
        for (_, _, gradient), expected in zip(one["seen"], gradients, strict=True):
            assert relative_error(gradient, expected) <= 1e-12
        assert one["shares"] == everywhere[0]["shares"]
    for step, shares in enumerate(everywhere[0]["shares"]):
        assert sum(shares) == BATCH
        assert [one["seen"][step][1] for one in everywhere] == list(shares)
    return [tuple(shares) for shares in everywhere[0]["shares"]]


@pytest.mark.parametrize("who", [0, 2])
def test_a_notice_takes_the_share_and_withdrawing_it_gives_it_back(
    ranks: RankPool, who: int
) -> None:
    shares = _checked(ranks.run(given_notice, 3, who, True, False, 0))

    rest = tuple(0 if rank == who else 12 for rank in range(3))
    assert shares[0] == shares[-1] == (8, 8, 8)
    assert set(shares) == {(8, 8, 8), rest}


@pytest.mark.parametrize("workers", [0, 2])
def test_all_ranks_save_and_let_go_at_the_same_step(ranks: RankPool, workers: int) -> None:
    everywhere = ranks.run(given_notice, 3, 1, False, True, workers)

    shares = _checked(everywhere)

    assert shares[-1] == (12, 0, 12)
    first = shares.index((12, 0, 12))
    (step,) = everywhere[0]["due"]
    assert step == first + 1, "the state is saved after the first step without it"
    for one in everywhere:
        assert one["due"] == [step]
        assert one["going"] == [(step, (1,))]
